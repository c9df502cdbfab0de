"""FLUX.1 on diffusers' transformer, trained by flow matching on precomputed latents."""
