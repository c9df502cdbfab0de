"""The keys of the ``flux`` section that other backends do not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from primus.recipes.bounds import bounded


@dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """The settings of FLUX training.

    ``weights`` are the initial weights: "random" (from the seed), or a folder with the safetensors files of diffusers'
    transformer. ``times`` is the distribution of the noise levels in 0 … 1. ``guidance`` is the scale passed to a model
    with guidance embeddings.
    """

    weights: str = "random"
    times: Literal["logit_normal", "uniform"] = "logit_normal"
    guidance: float = bounded(1.0, "[0, inf)")
