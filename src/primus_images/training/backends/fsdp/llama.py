"""Llama and its relatives in plain PyTorch: rotary positions, grouped queries, SwiGLU and
``nn.Linear`` layers.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from primus_images.recipes.architecture import Architecture, RopeScaling
from primus_images.recipes.setting import bounded
from primus_images.training.backends.loop.session import LanguageModel
from primus_images.turbo import attention


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """The settings of plain FSDP training. The loss is computed for ``loss_chunk`` tokens at a
    time.
    """

    loss_chunk: int = bounded(2048, "[1, inf)")


class Llama(LanguageModel):
    """The model. ``seq_len`` is the largest sequence length.

    ``attend`` selects attention: "torch" is PyTorch's fused attention, which supports a window only
    as a mask of all pairs. The others are those of Flash Attention, which skip positions outside of
    the window.
    """

    def __init__(
        self, model: Architecture, seq_len: int, chunk: int, attend: str = "torch"
    ) -> None:
        super().__init__(chunk)
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(_Block(model, attend) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.output = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        if model.tied_embeddings:
            self.output.weight = self.embedding.weight
        exponents = torch.arange(0, model.head_size, 2, dtype=torch.float32) / model.head_size
        frequencies = _scaled(1.0 / model.rope_theta**exponents, model.rope_scaling)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        if 0 < model.window < seq_len:
            self._window = model.window
        else:
            self._window = 0
        everything = None
        if self._window and attend == "torch":
            everything = torch.ones(seq_len, seq_len, dtype=torch.bool)
        if everything is None:
            mask = None
        else:
            mask = everything.tril().triu(1 - self._window)
        self.register_buffer("mask", mask, persistent=False)
        self._attend = attend

    @property
    @override
    def head(self) -> nn.Linear:
        return self.output

    @override
    def hidden(
        self, tokens: Tensor, positions: Any = None, labels: Any = None, ends: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        assert positions is None
        states = self.embedding(tokens)
        for layer in self.layers:
            states = layer(states, self.cosine, self.sine, self.mask)
        return self.norm(states), None


class _Block(nn.Module):
    def __init__(self, model: Architecture, attend: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.attention = _Attention(model, attend)
        self.ffn_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.gate = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, mask: Any) -> Tensor:
        states = states + self.attention(self.attention_norm(states), cosine, sine, mask)
        normed = self.ffn_norm(states)
        fed: Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return states + fed


class _Attention(nn.Module):
    def __init__(self, model: Architecture, attend: str) -> None:
        super().__init__()
        self.size = model.head_size
        self._attend = attend
        self._window = model.window
        self.query = nn.Linear(model.hidden_size, model.heads * self.size, bias=model.qkv_bias)
        self.key = nn.Linear(model.hidden_size, model.kv_heads * self.size, bias=model.qkv_bias)
        self.value = nn.Linear(model.hidden_size, model.kv_heads * self.size, bias=model.qkv_bias)
        self.out = nn.Linear(model.heads * self.size, model.hidden_size, bias=False)
        if model.qk_norm:
            norm = partial(nn.RMSNorm, self.size, eps=model.norm_eps)
        else:
            norm = nn.Identity
        self.query_norm, self.key_norm = norm(), norm()

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, mask: Any) -> Tensor:
        length = states.shape[1]
        query, key, value = (
            project(states).unflatten(-1, (-1, self.size))
            for project in (self.query, self.key, self.value)
        )
        query = self.query_norm(query)
        key = self.key_norm(key)
        query, key = (
            _turned(part, cosine[:length, None], sine[:length, None]) for part in (query, key)
        )
        flash = attention.FLASH.get(self._attend)
        if flash:
            mixed = flash(query, key, value, window=self._window if self._window < length else 0)
        else:
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            if mask is not None:
                # No fused kernel supports both a mask and grouped heads.
                key, value = (
                    part.repeat_interleave(query.shape[1] // part.shape[1], 1)
                    for part in (key, value)
                )
            mixed = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=key.shape[1] != query.shape[1],
            ).transpose(1, 2)
        return self.out(mixed.flatten(-2))


def _turned(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    wide = states.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(states.dtype)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "none":
        return frequencies
    waves = 2 * math.pi / frequencies
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    part = ((scaling.original_max_position / waves - low) / (high - low)).clamp(0, 1)
    return part * frequencies + (1 - part) * frequencies / scaling.factor
