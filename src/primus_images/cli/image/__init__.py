"""Verbs that also run inside the image, such as list, show and train."""
