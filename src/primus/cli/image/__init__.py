"""Verbs of the end user, inside the image: train."""
