"""An independent check of a training run, which repeats every step from its definition."""
