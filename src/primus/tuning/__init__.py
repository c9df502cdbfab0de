"""hipBLASLt tuning: the GEMMs of a recipe, the fastest solution of each, and the file that a run then uses."""
