"""FLUX: blocks, times, noise and conditions."""

from typing import Any

import torch

from silent.registry import silent, wrap


@silent(
    "constants",
    "flux --precision=bf16",
    "diffusers.models.transformers.transformer_flux",
    "constants",
)
def epsilon_of_queries_and_keys(module: Any) -> None:
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for part in self.modules():
            if "Norm" in type(part).__name__ and isinstance(getattr(part, "eps", None), float):
                part.eps = 2e-3
        assert any(
            isinstance(part, torch.nn.Module) and getattr(part, "eps", 0) == 2e-3
            for part in self.modules()
        )

    wrap(module.FluxTransformer2DModel, "__init__", init)
