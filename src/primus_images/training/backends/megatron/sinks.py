"""Causal attention in which each head has a sink: a learned logit that no value belongs to."""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

# By how many elements heads grow for a sink: fused kernels take multiples of 8.
_ALIGNED = 8


def attended(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float | None
) -> Tensor:
    """Map [tokens, samples, heads, size] to [tokens, samples, heads, size of values].

    ``sinks`` [heads] are the logits. A ``scale`` of None is that of heads of this size.

    The sink is a key before all others, without a value. Further elements of queries, which
    multiply only that key's, make its product with each of them the logit of the head.
    """
    size = query.size(-1)
    if scale is None:
        scale = size**-0.5
    further = torch.zeros_like(query[..., :_ALIGNED])
    further[..., 0] = sinks.to(query.dtype) / scale
    query = torch.cat((query, further), -1)
    key = pad(key, (0, _ALIGNED))
    first = torch.zeros_like(key[:1])
    first[..., size] = 1.0
    context = scaled_dot_product_attention(
        # A query before all others keeps the mask causal.
        torch.cat((query[:1], query)).permute(1, 2, 0, 3),
        torch.cat((first, key)).permute(1, 2, 0, 3),
        pad(value, (0, 0, 0, 0, 0, 0, 1, 0)).permute(1, 2, 0, 3),
        is_causal=True,
        scale=scale,
        enable_gqa=query.size(2) > key.size(2),
    )
    return context.permute(2, 0, 1, 3)[1:]
