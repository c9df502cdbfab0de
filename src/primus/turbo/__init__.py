"""Optimized kernels: what each is, needs and excludes; compiled ahead of time; proven to run as compiled."""
