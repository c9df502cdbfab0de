"""Flash Attention 4 as PyTorch operators, so that a compiled model can call it."""

from __future__ import annotations

from typing import Any

import torch

from primus.turbo.optimizations import CALLS

__all__ = ["FlashAttention4", "flash_attention_4"]


@torch.library.custom_op("primus::fa4_forward", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    CALLS["fa4_forward"] += 1
    found = _flash_attn_fwd(q, k, v, softmax_scale=scale, return_lse=True, **_mask(window))
    return found[0], found[1]


@_forward.register_fake
def _(q: Any, k: Any, v: Any, scale: float, window: int) -> Any:  # noqa: ARG001 - the operator's arguments
    batch, length, heads, _ = q.shape
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        (batch, heads, length), dtype=torch.float32
    )


@torch.library.custom_op("primus::fa4_backward", mutates_args=())
def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, grad: torch.Tensor, lse: torch.Tensor,
    scale: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    CALLS["fa4_backward"] += 1
    found = _flash_attn_bwd(q, k, v, out, grad, lse, softmax_scale=scale, **_mask(window))
    return found[0], found[1], found[2]


@_backward.register_fake
def _(q: Any, k: Any, v: Any, out: Any, grad: Any, lse: Any, scale: float, window: int) -> Any:  # noqa: ARG001
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _mask(window: int) -> dict[str, Any]:
    if window:
        return {"causal": True, "window_size_left": window - 1, "window_size_right": 0}
    return {"causal": True}


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    q, k, v, out, lse = ctx.saved_tensors
    return *_backward(q, k, v, out, grad.contiguous(), lse, ctx.scale, ctx.window), None, None


_forward.register_autograd(_gradients, setup_context=_save)


def flash_attention_4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int = 0) -> torch.Tensor:
    """Causal attention of ``q`` [batch, tokens, heads, size] over ``k`` and ``v``, which may have fewer heads.

    ``window``: how many tokens each one sees, itself included; 0 for all before it. BF16 or FP16, NVIDIA sm_90 and
    later.
    """
    out: torch.Tensor = _forward(q, k, v, q.shape[-1] ** -0.5, window)[0]
    return out


class FlashAttention4(torch.nn.Module):
    """In place of torchtitan's wrapper around PyTorch's attention: tensors are [batch, heads, tokens, size]."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        """Causal attention over all tokens before."""
        return flash_attention_4(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
