"""The Megatron backend (megatron-core 0.16.1).

``render`` does not need torch. The other modules run only inside the ranks.
"""
