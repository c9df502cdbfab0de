"""Stands in for Transformer Engine on a machine without a GPU, where its functions fail."""

raise RuntimeError("CUDA error: CUDA driver version is insufficient for CUDA runtime version")
