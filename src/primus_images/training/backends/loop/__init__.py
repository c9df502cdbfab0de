"""The training loop for backends whose library has none: Megatron, fine-tuning, FLUX and plain
FSDP.
"""
