"""Attention and rotary positions.

Flash Attention 4 is wrapped as PyTorch operators that a compiled model can call.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from primus_images.patch import replace
from primus_images.turbo.optimizations import CALLS

_EVERYTHING = -1


@torch.library.custom_op("primus::fa4_forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    CALLS["fa4_forward"] += 1
    results = _flash_attn_fwd(q, k, v, softmax_scale=scale, return_lse=True, **_mask(window))
    return results[0], results[1]


@_forward.register_fake
def _(q: Any, *_: Any) -> Any:
    sums = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), sums


@torch.library.custom_op("primus::fa4_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    CALLS["fa4_backward"] += 1
    results = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad,
        lse,
        softmax_scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_mask(window),
    )
    return results[0], results[1], results[2]


@_backward.register_fake
def _(*tensors: Any) -> Any:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors[:3])


def _mask(window: int) -> dict[str, Any]:
    if window == _EVERYTHING:
        return {"causal": False}
    if window:
        return {"causal": True, "window_size_left": window - 1, "window_size_right": 0}
    return {"causal": True}


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
    q, k, v, out, lse = ctx.saved_tensors
    return *_backward(q, k, v, out, grad.contiguous(), lse, ctx.scale, ctx.window), None, None


_forward.register_autograd(_gradients, setup_context=_save)


def flash_attention_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    causal: bool = True,
) -> Tensor:
    """Return attention of ``q`` [batch, tokens, heads, size] over ``k`` and ``v``, which may have
    fewer heads.

    ``scale`` multiplies the logits (default: size ** -0.5). ``window`` is the number of tokens that
    each token sees, including itself; 0 for all before it. Without ``causal``, each token sees all
    tokens. Supports BF16 and FP16 on NVIDIA sm_90 and later.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    return _forward(q, k, v, scale, window if causal else _EVERYTHING)[0]


def flash_attention_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """Return causal attention as :func:`flash_attention_4` does, by Flash Attention 2, which runs
    on AMD GPUs.
    """
    from flash_attn import flash_attn_func

    CALLS["flash_attention_2"] += 1
    if window:
        seen = (window - 1, 0)
    else:
        seen = (-1, -1)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale=scale,
        causal=True,
        window_size=seen,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


FLASH: Mapping[str, Callable[..., Tensor]] = {
    "flash-attention-4": flash_attention_4,
    "flash-attention-2": flash_attention_2,
}
"""Attention without a mask, by the names of optimizations."""


def attend_in_diffusers() -> None:
    """Make the FLUX transformer of diffusers use Flash Attention 4. Its tensors are [batch, tokens,
    heads, size].
    """
    from diffusers.models.transformers import transformer_flux

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **_: Any
    ) -> Tensor:
        if attn_mask is not None:
            raise RuntimeError("flash-attention-4 supports no attention mask in FLUX")
        return flash_attention_4(query, key, value, causal=False)

    replace(transformer_flux, "dispatch_attention_fn", attend)


def attend_in_transformers(name: str) -> str:
    """Register one of :data:`FLASH` with Hugging Face's models. Returns the name for
    ``attn_implementation``.
    """
    from transformers import AttentionInterface

    def attend(
        _module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise RuntimeError(f"{name} takes no mask: these sequences are not packed")
        window = 0
        if sliding_window and sliding_window < query.shape[2]:
            window = sliding_window
        return FLASH[name](
            *(part.transpose(1, 2) for part in (query, key, value)), window=window
        ), None

    AttentionInterface.register("primus_attention", attend)
    return "primus_attention"


class Attention(torch.nn.Module):
    """Replaces torchtitan's wrapper of PyTorch's attention. Tensors are [batch, heads, tokens,
    size].

    ``attend`` is causal attention with tensors [batch, tokens, heads, size], and the ``scale`` of
    the logits.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Return causal attention."""
        return self._attend(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale
        ).transpose(1, 2)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate neighbors in the last dimension of ``x`` by ``turn`` [..., size ÷ 2, 2], cosine and
    sine, in float32.
    """
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = turn.unbind(-1)
    rotated = torch.stack(
        (real * cosine - imaginary * sine, real * sine + imaginary * cosine), dim=-1
    )
    return rotated.flatten(-2).type_as(x)
