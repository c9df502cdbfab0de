"""Pins in, trusted LLM-training container images out."""

__version__ = "0.1.0"
