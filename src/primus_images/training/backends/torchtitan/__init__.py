"""The torchtitan backend (0.2.2). Only ``render`` does not need torch."""
