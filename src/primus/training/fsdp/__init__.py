"""The plain FSDP benchmark (``train_fsdp`` of the PyTorch training container v25.2): a Llama in pure PyTorch.

``config`` is pure and needs no torch. The rest runs inside the ranks only.
"""
