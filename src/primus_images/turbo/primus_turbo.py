"""Calls of Primus Turbo's public API, and modules that replace PyTorch's own.

The calls are those of Primus Turbo 0.4 (AMD-AGI/Primus-Turbo, the commit that versions.yaml pins).
Each is counted in :data:`primus_images.turbo.optimizations.CALLS`, with which a run proves what it
used.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from primus_images.turbo.experts import through_experts
from primus_images.turbo.optimizations import CALLS

# Its FP8 products support only sizes divisible by this number.
_FP8_MULTIPLE = 128


def _package() -> Any:
    import primus_turbo.pytorch
    import primus_turbo.pytorch.core.low_precision

    return primus_turbo.pytorch


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """Return causal attention of ``q`` [samples, tokens, heads, size] over ``k`` and ``v``, which
    may have fewer heads.

    ``scale`` and ``window`` are those of :func:`primus_images.turbo.attention.flash_attention_4`.
    """
    CALLS["turbo_attention"] += 1
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    if window:
        seen = (window - 1, 0)
    else:
        seen = (-1, -1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    out: Tensor = _package().ops.flash_attn_func(
        q, k, v, softmax_scale=scale, causal=True, window_size=seen, deterministic=deterministic
    )
    return out


def convert_linears(model: torch.nn.Module, filtered: Iterable[str]) -> None:
    """Compute every linear layer in FP8, scaled by tensor, except those whose names contain one of
    ``filtered``.

    Raises SystemExit for a layer with unsupported sizes, which would silently train in BF16.
    """
    turbo = _package()
    left_out = tuple(filtered)
    low = turbo.core.low_precision
    config = low.Float8QuantConfig(granularity=low.ScalingGranularity.TENSORWISE)
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or any(word in name for word in left_out):
            continue
        if any(size % _FP8_MULTIPLE for size in module.weight.shape):
            raise SystemExit(
                f"turbo-fp8-linear: {name} has {' × '.join(map(str, module.weight.shape))} "
                "weights, and its products "
                f"take multiples of {_FP8_MULTIPLE}; name it in quantize.linear.float8.filter_fqns"
            )
        turbo.modules.Float8Linear.from_float(module, config)
        module.register_forward_hook(lambda *_: CALLS.update(["turbo_fp8_linear"]))


def grouped_experts(
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    x: Tensor,
    num_tokens_per_expert: Tensor,
) -> Tensor:
    """Replaces torchtitan's ``_run_experts_grouped_mm``."""
    product: Callable[..., Tensor] = _package().ops.grouped_gemm
    CALLS["turbo_grouped_gemm"] += 1
    lengths = num_tokens_per_expert.to(device=x.device, dtype=torch.int64)
    return through_experts(partial(product, group_lens=lengths, trans_b=True), w1, w2, w3, x)
