"""An independent check of a training run: it repeats every step from its definition, and compares."""
