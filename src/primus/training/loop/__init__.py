"""The training loop for backends whose library has none: Megatron, fine-tuning, FLUX and plain FSDP.

``config`` does not need torch. The other modules run only inside the ranks.
"""
