"""Llama and its relatives in plain PyTorch."""

import math
from dataclasses import dataclass
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
    """The settings of plain FSDP training.

    The loss is computed for ``loss_chunk`` tokens at a time.
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
        angles = _angles(model, seq_len)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        mask = None
        if 0 < model.window < seq_len and attend == "torch":
            pairs = torch.ones(seq_len, seq_len, dtype=torch.bool)
            mask = pairs.tril().triu(1 - model.window)
        self.register_buffer("mask", mask, persistent=False)

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
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if model.qk_norm:
            self.query_norm = nn.RMSNorm(self.size, eps=model.norm_eps)
            self.key_norm = nn.RMSNorm(self.size, eps=model.norm_eps)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, mask: Any) -> Tensor:
        length = states.shape[1]
        query = self.query_norm(self.query(states).unflatten(-1, (-1, self.size)))
        key = self.key_norm(self.key(states).unflatten(-1, (-1, self.size)))
        value = self.value(states).unflatten(-1, (-1, self.size))
        query = _turned(query, cosine[:length, None], sine[:length, None])
        key = _turned(key, cosine[:length, None], sine[:length, None])
        flash = attention.FLASH.get(self._attend)
        if flash:
            window = self._window if self._window < length else 0
            mixed = flash(query, key, value, window=window)
        else:
            mixed = _attended(query, key, value, mask)
        return self.out(mixed.flatten(-2))


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    query = query.transpose(1, 2)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    if mask is not None:
        # No fused kernel supports both a mask and grouped heads.
        groups = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    mixed = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return mixed.transpose(1, 2)


def _turned(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    wide = states.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(states.dtype)


def _angles(model: Architecture, seq_len: int) -> Tensor:
    """Return the angles [seq_len, size of heads] by which positions rotate queries and keys."""
    exponents = torch.arange(0, model.head_size, 2, dtype=torch.float32) / model.head_size
    frequencies = _scaled(1.0 / model.rope_theta**exponents, model.rope_scaling)
    positions = torch.arange(seq_len, dtype=torch.float32)
    return torch.outer(positions, frequencies).repeat(1, 2)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "none":
        return frequencies
    waves = 2 * math.pi / frequencies
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    part = ((scaling.original_max_position / waves - low) / (high - low)).clamp(0, 1)
    return part * frequencies + (1 - part) * frequencies / scaling.factor
