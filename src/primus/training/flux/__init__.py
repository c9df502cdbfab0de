"""FLUX.1 on diffusers' transformer, with latents and text embeddings made beforehand, by flow matching.

``config`` is pure and needs no torch. The rest runs inside the ranks only.
"""
