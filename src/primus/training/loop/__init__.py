"""The training loop of the backends whose library has none of its own: Megatron, fine-tuning, FLUX, plain FSDP.

``config`` is pure and needs no torch. The rest runs inside the ranks only.
"""
