"""The keys of the ``finetune`` section that are its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["FinetuneConfig", "LoraConfig"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of rank ``rank``, scaled by ``alpha`` ÷ ``rank``, beside the linear layers named by ``targets``.

    Read in mode ``lora`` only.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What is trained.

    ``weights`` to start from: "random" (from the seed), a folder of safetensors files with Hugging Face's names, or
    ``hf:OWNER/NAME``. ``attention`` is Hugging Face's name of an implementation. The logits are made for
    ``loss_chunk`` tokens at a time. ``save_weights`` leaves the trained weights, or adapters, in a folder ``weights``
    that Hugging Face's libraries load.
    """

    weights: str = "random"
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    loss_chunk: int = 2048
    save_weights: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
