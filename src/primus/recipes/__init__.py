"""What to train: load, overlay, resolve, refuse."""
