"""The training loop of the backends megatron, finetune, flux and fsdp."""
