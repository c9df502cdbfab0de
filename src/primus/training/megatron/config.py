"""Keys of the ``megatron`` section that are none of Megatron's own classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """What Megatron's own configuration classes do not say.

    ``layers`` is whose layers the model is built from: Transformer Engine's or Megatron's own ("local"); "auto" takes
    Transformer Engine's on a GPU where it is installed. ``attention`` is that of the local layers: torch's fused
    kernels, or Megatron's unfused one, which holds all scores of a sequence at once. ``torch_fsdp2`` shares weights,
    gradients and optimizer states out over the data-parallel ranks, instead of optimizer states alone.
    """

    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    attention: Literal["torch", "unfused"] = "torch"
    torch_fsdp2: bool = False
