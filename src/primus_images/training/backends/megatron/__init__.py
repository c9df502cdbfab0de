"""The Megatron backend (megatron-core 0.16.1). Only ``render`` does not need torch."""
