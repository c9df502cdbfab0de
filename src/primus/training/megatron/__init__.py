"""The Megatron backend (megatron-core 0.16.1)."""
