"""The plain FSDP benchmark, as ``train_fsdp`` of the PyTorch training container v25.2."""
