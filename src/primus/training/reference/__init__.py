"""An independent check of a training run: it repeats every step in float64 and compares.

Nothing here imports a backend, or uses a fused operation of PyTorch: attention, norms, losses and the optimizer are
written from their definitions. ``python -m primus.training.reference.replay OUTPUT`` checks the run in OUTPUT.
"""
