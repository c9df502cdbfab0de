"""The number of parameters of a model, computed from its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from primus.recipes.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Size:
    """The number of parameters of a model, including biases and norms.

    ``active`` counts the parameters that process one token: of the routed experts, only the selected ones.
    ``embedding`` is the input embedding, which is part of both counts and multiplies nothing. It is 0 if the embedding
    is tied to the output layer.
    """

    total: int
    active: int
    embedding: int


def size(model: Architecture) -> Size:
    """Count the parameters of ``model``. Balancing biases of routers are included, as in published totals."""
    if model.family == "flux":
        count = _diffusion(model)
        return Size(total=count, active=count, embedding=0)
    width, moe = model.hidden_size, model.moe
    embedding = model.vocab_size * width
    ends = width + embedding * (1 if model.tied_embeddings else 2)
    every_layer = model.layers * (_attention(model) + 2 * width)
    sparse = model.layers - moe.dense_layers if moe.experts else 0
    dense = (model.layers - sparse) * 3 * width * model.ffn_size
    router = width * moe.experts + (moe.experts if moe.score == "sigmoid" else 0)
    expert = 3 * width * moe.ffn_size
    always = ends + every_layer + dense + sparse * (router + moe.shared_experts * expert)
    return Size(
        total=always + sparse * moe.experts * expert,
        active=always + sparse * moe.top_k * expert,
        embedding=0 if model.tied_embeddings else embedding,
    )


def readable(count: int) -> str:
    """Format a count with three digits and a unit: ``8.03 B``, ``0.52 M``."""
    unit, scale = ("B", 1e9) if count >= 1e9 else ("M", 1e6)
    value = count / scale
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def _attention(model: Architecture) -> int:
    width, heads, mla = model.hidden_size, model.heads, model.mla
    if mla.kv_lora_rank:
        query_dim = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        query = (width + 1 + query_dim) * mla.q_lora_rank if mla.q_lora_rank else width * query_dim
        key_value = width * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
        expanded = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return query + key_value + expanded + heads * mla.v_head_dim * width
    outer, inner = heads * model.head_size, model.kv_heads * model.head_size
    return 2 * width * (outer + inner) + ((outer + 2 * inner) if model.qkv_bias else 0)


def _diffusion(model: Architecture) -> int:
    """FLUX's transformer, layer by layer as in the published model."""
    width, dit = model.hidden_size, model.dit
    hidden = model.ffn_size or 4 * width

    def linear(into: int, out: int) -> int:
        return into * out + out

    vector = linear(256, width) + linear(width, width)
    ends = (
        linear(dit.in_channels, width)
        + linear(dit.text_dim, width)
        + vector * (2 if dit.guidance else 1)
        + linear(dit.pooled_dim, width)
        + linear(width, width)
        + linear(width, 2 * width)
        + linear(width, dit.in_channels)
    )
    norms = 2 * model.head_size
    stream = (
        linear(width, 6 * width)
        + linear(width, 3 * width)
        + norms
        + linear(width, width)
        + linear(width, hidden)
        + linear(hidden, width)
    )
    single = linear(width, 3 * width) + linear(width, 3 * width + hidden) + norms + linear(width + hidden, width)
    return ends + dit.double_layers * 2 * stream + dit.single_layers * single
