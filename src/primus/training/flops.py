"""The number of floating-point operations of training, per token or image.

Per token: 6 · (N − N_embedding) for the products with weights (2 forward, 4 backward), plus 12 · L · heads · head_dim ·
span for attention. N includes the output head, but not the input embedding; a routed expert counts only as often as it
is chosen. *span* is the sequence length in the non-causal convention (torchtitan; PaLM appendix B, arXiv:2204.02311).
In the causal convention (Megatron-LM) it is the number of tokens that a token sees: half of the sequence length, or
less with a sliding window. Recomputation in the backward pass never counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from primus.recipes.architecture import Architecture
from primus.recipes.size import size


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one token (for a diffusion model: of one image) in both conventions."""

    causal: float
    non_causal: float


def of_recipe_unit(model: Architecture, seq_len: int, *, adapters: int | None = None) -> Flops:
    """Return the FLOPs of training on one token of a sequence of ``seq_len`` (for FLUX: on one image).

    ``adapters`` is the number of weights that LoRA trains. The others then take 4 operations each instead of 6,
    because they have no gradient.
    """
    if model.family == "flux":
        return _diffusion(model)
    count = size(model)
    products = count.active - count.embedding
    linear = 6 * products if adapters is None else 4 * products + 6 * adapters
    window = min(model.window or seq_len, seq_len)
    seen = window - window**2 / (2 * seq_len)
    width = _attention_width(model)
    return Flops(causal=linear + model.layers * width * seen, non_causal=linear + model.layers * width * window)


def _attention_width(model: Architecture) -> int:
    """Return 12 · heads · head_dim; in latent attention, query·key and weight·value differ in width."""
    mla = model.mla
    if mla.kv_lora_rank:
        return 6 * model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    return 12 * model.heads * model.head_size


def _diffusion(model: Architecture) -> Flops:
    """Return the FLOPs of FLUX. Its attention is not causal, so both conventions agree. One token is 16 × 16 pixels."""
    dit, hidden = model.dit, model.hidden_size
    layers, tokens = dit.double_layers + dit.single_layers, (dit.image_size // 16) ** 2 + dit.text_tokens
    flops = 6.0 * 12 * hidden**2 * layers * tokens + 12.0 * layers * hidden * tokens**2
    return Flops(causal=flops, non_causal=flops)
