"""Verbs of the end user, inside the image: list, show, train."""
