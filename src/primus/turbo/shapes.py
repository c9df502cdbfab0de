"""The sizes with which the self-test calls the kernels of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primus.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of one rank. ``tokens`` is those of a micro batch of ``batch`` sequences; ``shards`` is the number of ranks
    that share a weight; ``rotated`` is the part of a head that gets rotary positions; ``window`` 0: no window.
    """

    batch: int
    seq_len: int
    tokens: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    rotated: int
    vocabulary: int
    window: int
    causal: bool
    experts: int
    top_k: int
    expert_ffn: int
    shards: int


def shapes_of(recipe: Recipe) -> Shapes:
    """Return the sizes of ``recipe``'s micro batch on one rank."""
    model, tensor_ranks = recipe.architecture, recipe.degree("tp")
    length = recipe.seq_len
    if model.family == "flux":
        # Latents of one sixteenth of the image's side, after the tokens of its text.
        length = (model.dit.image_size // 16) ** 2 + model.dit.text_tokens
    latent = model.mla.kv_lora_rank > 0
    head_dim = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim if latent else model.head_size
    heads = max(1, model.heads // tensor_ranks)
    return Shapes(
        batch=recipe.local_batch,
        seq_len=length,
        tokens=recipe.local_batch * length,
        hidden=model.hidden_size or model.heads * model.head_size,
        ffn=model.ffn_size or 4 * model.heads * model.head_size,
        heads=heads,
        kv_heads=heads if latent or not model.kv_heads else max(1, model.kv_heads // tensor_ranks),
        head_dim=head_dim,
        v_dim=model.mla.v_head_dim if latent else head_dim,
        rotated=model.mla.qk_rope_head_dim if latent else head_dim,
        vocabulary=model.vocab_size or 1024,
        window=model.window,
        causal=model.family != "flux",
        experts=model.moe.experts,
        top_k=model.moe.top_k,
        expert_ffn=model.moe.ffn_size,
        shards=max(1, recipe.data_parallel // recipe.degree("replicas")),
    )
