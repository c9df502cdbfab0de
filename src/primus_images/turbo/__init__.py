"""Optimizations that a run can enable: the catalogue, and our own kernels."""
