"""Primus Turbo's public API in plain PyTorch, with the parameters of 0.4: for machines without an
AMD GPU.
"""
