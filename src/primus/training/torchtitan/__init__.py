"""The torchtitan backend (0.2.2).

``render`` does not need torch. The other modules run only inside the ranks.
"""
