"""The torchtitan backend (0.2.2).

``backend`` and ``render`` do not need torch. The other modules run only inside the ranks.
"""
