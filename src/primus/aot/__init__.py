"""Triton kernels compiled ahead of time: the catalogue, the compiler run, and the cache that an image carries."""
