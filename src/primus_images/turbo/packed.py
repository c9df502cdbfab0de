"""Attention of packed documents, each of which sees itself alone.

Where several documents share a sample, transformers masks all pairs of tokens of different
documents, and PyTorch then computes every pair. Flash Attention for sequences of varying lengths
computes the pairs inside of documents only. Two of its versions are wrapped as operators that a
compiled model can call, and that count their calls: Flash Attention 4, and the one that is part of
PyTorch, for any GPU.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from primus_images.turbo.optimizations import CALLS

# Versions of Flash Attention. PyTorch has its own copy of version 2.
OF_PYTORCH = 2
FLASH_4 = 4
VERSIONS: Mapping[str, int] = {"packed-attention-4": FLASH_4, "packed-attention": OF_PYTORCH}
"""Optimization → version, in the order of preference."""


@torch.library.custom_op("primus::packed_forward", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    version: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS[f"packed_forward_{version}"] += 1
    if version == FLASH_4:
        from flash_attn.cute.interface import _flash_attn_fwd

        results = _flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            return_lse=True,
            **_window(window),
        )
        return results[0], results[1]
    output, sums, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        0.0,  # no dropout
        True,  # causal
        False,  # no debug mask
        scale=scale,
        **_window(window),
    )
    return output, sums


@_forward.register_fake
def _(q: Any, _k: Any, _v: Any, bounds: Any, longest: int, *_: Any) -> Any:
    tokens, heads, _size = q.shape
    shape: tuple[int, ...] = (heads, tokens)
    if torch.version.hip:
        shape = (len(bounds) - 1, heads, longest)
    sums = q.new_empty(shape, dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), sums


@torch.library.custom_op("primus::packed_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    version: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    CALLS[f"packed_backward_{version}"] += 1
    if version == FLASH_4:
        from flash_attn.cute.interface import _flash_attn_bwd

        results = _flash_attn_bwd(
            q,
            k,
            v,
            output,
            grad,
            sums,
            softmax_scale=scale,
            causal=True,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_window(window),
        )
        return results[0], results[1], results[2]
    # The states of the random numbers that dropout would use.
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        torch.ops.aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            output,
            sums,
            bounds,
            bounds,
            longest,
            longest,
            0.0,
            True,
            random_state,
            unused,
            scale=scale,
            **_window(window),
        )
    )
    return gradients


@_backward.register_fake
def _(_grad: Any, *tensors: Any) -> Any:
    q, k, v = tensors[:3]
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _window(window: int) -> dict[str, int]:
    if not window:
        return {}
    return {"window_size_left": window - 1, "window_size_right": 0}


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, bounds, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)


def _gradients(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    q, k, v, output, sums, bounds = ctx.saved_tensors
    gradients = _backward(grad.contiguous(), q, k, v, output, sums, bounds, *ctx.settings)
    return *gradients, *(None for _ in (bounds, *ctx.settings))


_forward.register_autograd(_gradients, setup_context=_save)


def bounds_of(ends: torch.Tensor, length: int) -> torch.Tensor:
    """Return where documents begin and end in the concatenated samples: int32 [documents + 1].

    ``ends`` [samples, documents] are the ends of each sample's documents, in tokens from the
    beginning of the sample; the last ones of a sample of ``length`` tokens may repeat.
    """
    samples, _ = ends.shape
    first_tokens = torch.arange(samples, device=ends.device, dtype=torch.int32) * length
    absolute = (ends + first_tokens[:, None]).flatten()
    return functional.pad(absolute, (1, 0))


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    *,
    version: int = OF_PYTORCH,
    scale: float | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Return causal attention inside of each document, by a version of Flash Attention.

    ``q`` is [tokens, heads, size]; ``k`` and ``v`` may have fewer heads. ``bounds`` are those of
    :func:`bounds_of`, and no document has more than ``longest`` tokens. ``scale`` multiplies the
    logits (default: size ** -0.5). ``window`` is the number of tokens that each token sees,
    including itself; 0 for all before it. On a CPU, it is computed with a mask of all pairs.
    """
    if scale is None:
        scale = float(q.shape[-1] ** -0.5)
    if q.is_cuda:
        output, _ = _forward(q, k, v, bounds, longest, scale, window, version)
        return output
    CALLS[f"packed_forward_{version}"] += 1
    CALLS[f"packed_backward_{version}"] += 1
    return _masked(q, k, v, bounds, scale, window)


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    places = torch.arange(len(q), device=q.device)
    documents = torch.searchsorted(bounds, places.int(), right=True)
    distance = places[:, None] - places
    mask = (documents[:, None] == documents) & (distance >= 0)
    if window:
        mask &= distance < window
    heads_first = tuple(part.transpose(0, 1)[None] for part in (q, k, v))
    output = functional.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def attend_in_transformers(version: int) -> str:
    """Register :func:`packed_attention` with Hugging Face's models.

    Returns the name for ``attn_implementation``. A model gets the bounds of its documents as the
    argument ``document_bounds``.
    """
    from transformers import AttentionInterface

    def attend(
        _module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        document_bounds: torch.Tensor | None = None,
        sliding_window: int | None = None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None or document_bounds is None:
            raise RuntimeError("packed-attention takes the bounds of documents, and no mask")
        samples, heads, length, size = query.shape
        window = 0
        if sliding_window and sliding_window < length:
            window = sliding_window
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
        output = packed_attention(
            q, k, v, document_bounds, length, version=version, scale=scaling, window=window
        )
        return output.view(samples, length, heads, size), None

    AttentionInterface.register("primus_packed", attend)
    return "primus_packed"
