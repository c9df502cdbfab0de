"""How many floating-point operations training takes: parameters, FLOPs per token (or image), TFLOP/s.

Per token: 6 · (N − N_embedding) for the products with weights (forward 2, backward 4; the output head counts, the
input embedding does not, a routed expert only as often as it is chosen), plus attention's own 12 · L · heads ·
head_dim · span. *span* is the sequence length when counted non-causally (as torchtitan, PaLM appendix B,
arXiv:2204.02311), and what a token really sees when counted causally: half of it, or less under a sliding window (as
Megatron-LM). What is computed again in the backward pass never counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from primus.recipes.architecture import Architecture

__all__ = ["Flops", "Parameters", "of_recipe_unit", "parameters"]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Counts of weights: all of them, those that one token passes, the input embedding, the output head."""

    total: int
    active: int
    embedding: int
    head: int


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one token (of one image for a diffusion model) in both conventions."""

    causal: float
    non_causal: float


def parameters(model: Architecture) -> Parameters:
    """The weights of ``model``, norms and biases included."""
    if model.family == "flux":
        total = _diffusion_weights(model)
        return Parameters(total=total, active=total, embedding=0, head=0)
    hidden, norm = model.hidden_size, model.hidden_size
    dense = 3 * hidden * model.ffn_size
    expert = 3 * hidden * model.moe.ffn_size
    router = hidden * model.moe.experts
    shared = model.moe.shared_experts * expert
    sparse_layers = max(0, model.layers - model.moe.dense_layers) if model.moe.experts else 0
    common = model.layers * (_attention_weights(model) + 2 * norm) + (model.layers - sparse_layers) * dense + norm
    embedding = model.vocab_size * hidden
    head = 0 if model.tied_embeddings else embedding
    experts = sparse_layers * (router + shared + model.moe.experts * expert)
    chosen = sparse_layers * (router + shared + model.moe.top_k * expert)
    return Parameters(
        total=common + experts + embedding + head,
        active=common + chosen + embedding + head,
        embedding=embedding,
        head=head or embedding,
    )


def _attention_weights(model: Architecture) -> int:
    hidden, mla = model.hidden_size, model.mla
    if not mla.kv_lora_rank:
        size = model.head_size
        biases = (model.heads + 2 * model.kv_heads) * size if model.qkv_bias else 0
        return hidden * size * (2 * model.heads + 2 * model.kv_heads) + biases
    query_size = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    query = (
        hidden * mla.q_lora_rank + mla.q_lora_rank + mla.q_lora_rank * query_size
        if mla.q_lora_rank
        else hidden * query_size
    )
    down = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
    up = mla.kv_lora_rank * model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query + down + up + model.heads * mla.v_head_dim * hidden


def _diffusion_weights(model: Architecture) -> int:
    """FLUX.1: a block of two streams has 24 h² and its modulation 12 h², one of one stream 12 h² and 3 h²."""
    dit, hidden = model.dit, model.hidden_size
    blocks = dit.double_layers * 36 * hidden**2 + dit.single_layers * 15 * hidden**2
    ends = hidden * (2 * dit.in_channels + dit.text_dim + dit.pooled_dim) + 2 * hidden**2
    return blocks + ends


def of_recipe_unit(model: Architecture, seq_len: int, *, adapters: int | None = None) -> Flops:
    """FLOPs to train on one token of a sequence of ``seq_len`` (for FLUX: on one image).

    ``adapters`` is the number of weights that LoRA trains; then the others take 4 operations each instead of 6, for
    no gradient of theirs is computed.
    """
    if model.family == "flux":
        return _diffusion(model)
    count = parameters(model)
    # A tied head multiplies with the embedding's weights, so these count once all the same.
    products = count.active - count.embedding + (count.head if model.tied_embeddings else 0)
    linear = 6 * products if adapters is None else 4 * products + 6 * adapters
    window = min(model.window or seq_len, seq_len)
    seen = window - window**2 / (2 * seq_len)
    width = _attention_width(model)
    return Flops(causal=linear + model.layers * width * seen, non_causal=linear + model.layers * width * window)


def _attention_width(model: Architecture) -> int:
    """12 · heads · head_dim, where query·key and weight·value may differ in width (latent attention)."""
    mla = model.mla
    if mla.kv_lora_rank:
        return 6 * model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    return 12 * model.heads * model.head_size


def _diffusion(model: Architecture) -> Flops:
    """Attention there is never causal, so both conventions agree. Tokens: 16 × 16 pixels each, plus the text's."""
    dit, hidden = model.dit, model.hidden_size
    layers, tokens = dit.double_layers + dit.single_layers, (dit.image_size // 16) ** 2 + dit.text_tokens
    flops = 6.0 * 12 * hidden**2 * layers * tokens + 12.0 * layers * hidden * tokens**2
    return Flops(causal=flops, non_causal=flops)
