"""Training: running the job of a resolved recipe, reading its log, and checking the result."""
