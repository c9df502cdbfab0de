"""FLUX.1 on diffusers' transformer, trained by flow matching on precomputed latents and text embeddings.

``backend`` does not need torch. The other modules run only inside the ranks.
"""
