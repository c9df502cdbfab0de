"""The keys of the ``finetune`` section that other backends do not have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from primus.recipes.bounds import bounded


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of rank ``rank``, scaled by ``alpha`` ÷ ``rank``, for the linear layers in ``targets``.

    If ``targets`` is empty, all linear layers except the output layer get adapters. Used in mode ``lora`` only.
    """

    rank: int = bounded(16, "[1, 65536]")
    alpha: float = bounded(32.0, "(0, inf)")
    dropout: float = bounded(0.0, "[0, 1)")
    targets: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """The settings of fine-tuning.

    ``weights`` are the initial weights: "random" (from the seed), a folder of safetensors files with Hugging Face's
    names, or ``hf:OWNER/NAME``. ``attention`` is Hugging Face's name of an implementation. Logits are computed for
    ``loss_chunk`` tokens at a time. ``save_weights`` exports the trained weights, or adapters, to a folder ``weights``
    that Hugging Face's libraries can load.
    """

    weights: str = "random"
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    loss_chunk: int = bounded(2048, "[1, inf)")
    save_weights: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
