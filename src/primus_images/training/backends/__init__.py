"""The backends, one folder each, and what all of them need before their ranks start."""
