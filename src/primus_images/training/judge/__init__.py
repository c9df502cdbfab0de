"""Who judges a run: checks, the validation suite, and the reference that repeats its steps."""
