"""The keys of Megatron (megatron-core 0.16.1) that its own classes do not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Settings that Megatron's own configuration classes do not have.

    ``layers`` selects Transformer Engine's layers or Megatron's own ("local"); "auto" uses Transformer Engine's on
    a GPU if it is installed. ``attention`` selects that of the local layers: torch's fused kernels, or Megatron's
    unfused one, which stores all scores of a sequence. ``torch_fsdp2`` shards weights, gradients and optimizer
    states over the data-parallel ranks, instead of optimizer states alone.
    """

    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    attention: Literal["torch", "unfused"] = "torch"
    torch_fsdp2: bool = False
