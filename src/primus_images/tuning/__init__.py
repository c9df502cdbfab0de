"""Tuning: the fastest solution of each GEMM of a recipe, and the fastest settings of a recipe."""
