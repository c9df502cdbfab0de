"""The keys of the ``flux`` section that are its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from primus.recipes.bounds import bounded

__all__ = ["FluxConfig"]


@dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """What is trained.

    ``weights`` to start from: "random" (from the seed), or a folder with the safetensors files of diffusers'
    transformer. ``times`` is the distribution of the noise levels over 0 … 1. ``guidance`` is the scale that a model
    with guidance embeddings is told.
    """

    weights: str = "random"
    times: Literal["logit_normal", "uniform"] = "logit_normal"
    guidance: float = bounded(1.0, "[0, inf)")
