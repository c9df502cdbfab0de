"""Attention with torch's fused kernels, for Megatron's own layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention

from primus.turbo.primus_turbo import attention


class TorchAttention(MegatronModule):  # type: ignore[misc,unused-ignore]
    """Causal core attention by ``scaled_dot_product_attention``, with the arguments of Megatron's own class.

    Megatron's ``DotProductAttention`` stores the scores of all pairs of tokens: 64 GiB per layer for 32 heads and
    8192 tokens in float32 with its backward pass. Grouped queries, a sliding window and latent attention (values of
    another size than keys) are supported; dropout, packed sequences and context parallelism are not.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attention_dropout or config.attention_dropout or config.apply_query_key_layer_scaling:
            raise SystemExit("megatron: attention by torch has neither dropout nor scaling by layer")
        self.scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, max(1, layer_number))
        # Megatron's window size counts the tokens before the token itself.
        self.window = config.window_size[0] + 1 if windowed else 0

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Map [tokens, samples, heads, size] to [tokens, samples, heads × size of values]."""
        assert attention_bias is None
        assert packed_seq_params is None
        return self.attend(query, key, value).flatten(2)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Map [tokens, samples, heads, size] to [tokens, samples, heads, size of values]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        tokens, groups = query.size(2), query.size(1) // key.size(1)
        mask = None
        if self.window and tokens > self.window:
            place = torch.arange(tokens, device=query.device)
            before = place[:, None] - place[None, :]
            mask = (before >= 0) & (before < self.window)
            # With a mask, only the kernels without grouped queries avoid storing all scores.
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
            groups = 1
        context = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=groups > 1
        )
        return context.permute(2, 0, 1, 3)


class TurboAttention(TorchAttention):
    """The same with Primus Turbo's attention."""

    eight = False

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Map [tokens, samples, heads, size] to [tokens, samples, heads, size of values]."""
        query, key, value = (tensor.transpose(0, 1).contiguous() for tensor in (query, key, value))
        window = self.window if query.size(1) > self.window else 0
        context = attention(query, key, value, scale=self.scale, window=window, eight=self.eight)
        return context.transpose(0, 1)


class TurboAttentionFp8(TurboAttention):
    """The same in FP8."""

    eight = True
