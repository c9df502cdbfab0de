"""The Megatron backend (megatron-core 0.16.1).

``backend`` and ``render`` do not need torch. The other modules run only inside the ranks.
"""
