"""The sizes of a model, which each backend translates to its own arguments, and its number of
parameters.

``meanings.yaml`` explains the fields. Sizes count elements, and lengths count tokens.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from primus_images.recipes.family import OTHER, families, family, weights_of
from primus_images.recipes.setting import Value, bounded
from primus_images.yamlfile import flat, read_values, section

Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary positions beyond the context of the first training."""

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = bounded(1.0, "[1, inf)")
    original_max_position: int = bounded(0, "[0, inf)")
    low_freq_factor: float = bounded(1.0, "(0, inf)")
    high_freq_factor: float = bounded(4.0, "[rope_scaling.low_freq_factor, inf)")
    beta_fast: float = bounded(32.0, "(rope_scaling.beta_slow, inf)")
    beta_slow: float = bounded(1.0, "(0, inf)")
    mscale: float = bounded(1.0, "(0, inf)")
    mscale_all_dim: float = bounded(0.0, "[0, inf)")
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Routed experts. The first ``dense_layers`` layers are always dense."""

    experts: int = bounded(0, "[0, 65536]")
    top_k: int = bounded(0, "[0, moe.experts]")
    ffn_size: int = bounded(0, "[0, inf)")
    shared_experts: int = bounded(0, "[0, 65536]")
    dense_layers: int = bounded(0, "[0, layers]")
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = False
    route_scale: float = bounded(1.0, "(0, inf)")
    groups: int = bounded(1, "[1, inf)")
    top_groups: int = bounded(1, "[1, moe.groups]")
    auxiliary_loss: float = bounded(0.0, "[0, inf)")
    bias: bool = False
    weighted_inputs: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); ``kv_lora_rank`` 0: ordinary
    attention.
    """

    q_lora_rank: int = bounded(0, "[0, inf)")
    kv_lora_rank: int = bounded(0, "[0, inf)")
    qk_nope_head_dim: int = bounded(0, "[0, inf)")
    qk_rope_head_dim: int = bounded(0, "[0, inf)")
    v_head_dim: int = bounded(0, "[0, inf)")


@dataclass(frozen=True, kw_only=True)
class DiffusionTransformer:
    """FLUX's transformer: ``double_layers`` blocks with two streams, ``single_layers`` with one."""

    double_layers: int = bounded(0, "[0, 10000]")
    single_layers: int = bounded(0, "[0, 10000]")
    in_channels: int = bounded(0, "[0, inf)")
    text_dim: int = bounded(0, "[0, inf)")
    pooled_dim: int = bounded(0, "[0, inf)")
    image_size: int = bounded(0, "[0, inf)")
    text_tokens: int = bounded(0, "[0, inf)")
    guidance: bool = False

    @property
    def image_tokens(self) -> int:
        """Tokens of one square image: one for 16 × 16 pixels, 2 × 2 latents of the VAE."""
        return (self.image_size // 16) ** 2


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of one model. Which of them a family has, and with which values, is in
    ``families/``.
    """

    family: str = field(metadata={"choices": families()})
    hf_repo: str = ""
    layers: int = bounded(0, "[1, 1048576]")
    hidden_size: int = bounded(0, "[1, 1048576]")
    heads: int = bounded(0, "[1, 65536]")
    kv_heads: int = bounded(0, "[1, heads]")
    head_dim: int = bounded(0, "[0, 65536]")
    ffn_size: int = bounded(0, "[1, inf)")
    vocab_size: int = bounded(0, "[1, 16777216]")
    max_seq_len: int = bounded(0, "[0, inf)")
    rope_theta: float = bounded(10000.0, "(0, inf)")
    norm_eps: float = bounded(1e-5, "(0, 1)")
    tied_embeddings: bool = False
    parameters: int = bounded(0, "[0, inf)")
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: bool = False
    scaled_embedding: bool = False
    out_bias: bool = False
    sinks: bool = False
    interleaved_rope: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    query_scalar: int = bounded(0, "[0, inf)")
    window: int = bounded(0, "[0, inf)")
    window_pattern: int = bounded(0, "[0, inf)")
    local_rope_theta: float = bounded(0.0, "[0, inf)")
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    moe: MixtureOfExperts = field(default_factory=MixtureOfExperts)
    mla: LatentAttention = field(default_factory=LatentAttention)
    dit: DiffusionTransformer = field(default_factory=DiffusionTransformer)

    def objections(self) -> Iterator[tuple[str, str, str | None]]:
        """Yield a recipe's key, the reason and a remedy of each size that does not fit; the first
        may cause more.
        """
        for switch, keys in family(self.family).needed.items():
            value = None
            if switch:
                value = attrgetter(switch)(self)
            where = ""
            if switch:
                where = f", where model.{switch} is {value}"
            for key in keys if value not in (0, "none", "linear") else ():
                size = attrgetter(key)(self)
                if size < 1:
                    yield f"model.{key}", f"must be at least 1, not {size}{where}", None
        if not self.head_dim and self.hidden_size % self.heads:
            size = max(1, self.hidden_size // self.heads) * self.heads
            hint = f"model.hidden_size={size}, or name model.head_dim"
            yield (
                "model.hidden_size",
                f"{self.hidden_size} is not divisible by {self.heads} heads",
                hint,
            )
        if self.of_images and self.hidden_size not in (0, self.heads * self.head_size):
            why = f"{self.hidden_size} is not {self.heads} heads of {self.head_size}"
            yield "model.hidden_size", why, f"model.hidden_size={self.heads * self.head_size}"
        if not self.of_images and self.heads % self.kv_heads:
            hint = f"model.kv_heads={math.gcd(self.heads, self.kv_heads)}"
            yield (
                "model.heads",
                f"{self.heads} is not divisible by {self.kv_heads} heads of keys and values",
                hint,
            )
        latent = self.mla.kv_lora_rank > 0
        if latent:
            rotated = self.mla.qk_rope_head_dim
        else:
            rotated = self.head_size
        if rotated % 2:
            why = f"a head's size must be even for rotary positions, not {rotated}"
            if latent:
                yield "model.mla.qk_rope_head_dim", why, None
            else:
                yield (
                    "model.head_dim",
                    f"{why} (model.hidden_size ÷ model.heads where it is 0)",
                    None,
                )
        if self.moe.experts and self.moe.experts % self.moe.groups:
            why = f"{self.moe.groups} groups do not divide model.moe.experts = {self.moe.experts}"
            yield (
                "model.moe.groups",
                why,
                f"model.moe.groups={math.gcd(self.moe.groups, self.moe.experts)}",
            )

    @property
    def of_images(self) -> bool:
        """Whether the model makes images, and is no language model."""
        return family(self.family).images

    @property
    def has_formula(self) -> bool:
        """Whether its weights and what it computes are described here, and not by transformers
        alone.
        """
        return self.family != OTHER

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.head_dim or self.hidden_size // max(1, self.heads)

    @property
    def query_size(self) -> int:
        """Elements of one head of queries."""
        if self.mla.kv_lora_rank:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        return self.head_size

    @property
    def value_size(self) -> int:
        """Elements of one head of values."""
        if self.mla.kv_lora_rank:
            return self.mla.v_head_dim
        return self.head_size

    def has_window(self, layer: int) -> bool:
        """Whether the tokens of the layer, counted from 0, attend to the last ``window`` ones only."""
        return self.window > 0 and not (
            self.window_pattern and (layer + 1) % self.window_pattern == 0
        )

    @property
    def sparse_layers(self) -> int:
        """The number of layers with experts."""
        if self.moe.experts:
            return self.layers - self.moe.dense_layers
        return 0


def architecture(model: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a ``model`` section that was checked before, with dotted keys or
    nested mappings.
    """
    return built(Architecture, dict(flat(model)))


def built(cls: type[Kind], values: Mapping[str, Value]) -> Kind:
    """Build a dataclass from dotted keys that were checked before. Other fields keep their
    defaults.
    """
    arguments: dict[str, object] = {}
    for entry in fields(cls):  # type: ignore[arg-type]
        if isinstance(part := entry.default_factory, type) and is_dataclass(part):
            arguments[entry.name] = built(part, section(values, entry.name))
        elif entry.name in values:
            arguments[entry.name] = values[entry.name]
    return cls(**arguments)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The number of parameters of a model, and of those, ``active``, that process one token.

    ``embedding`` is the input embedding, which is part of both counts and multiplies nothing; 0 if
    it is tied to the output layer.
    """

    total: int
    active: int
    embedding: int


@cache
def size(model: Architecture) -> Size:
    """Count the parameters of ``model``. Balancing biases of routers are included, as in published
    totals.
    """
    if not model.has_formula:
        return Size(total=model.parameters, active=model.parameters, embedding=0)
    sparse = model.sparse_layers
    moe = model.moe
    dit = model.dit
    copies = {"outer": 1, "layer": model.layers, "dense": model.layers - sparse, "sparse": sparse}
    if model.of_images:
        copies = {"outer": 1, "double": dit.double_layers, "single": dit.single_layers}
    total = active = 0
    for part, count in copies.items():
        for weight in weights_of(model, part) if count else ():
            every = count * math.prod(weight.sizes(model))
            total += every * (moe.experts if "{}" in weight.name else 1)
            active += every * (moe.top_k if "{}" in weight.name else 1)
    if model.tied_embeddings:
        embedding = 0
    else:
        embedding = model.vocab_size * model.hidden_size
    return Size(total=total, active=active, embedding=embedding)


def shapes(model: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the model, by Hugging Face's name; balancing biases
    are none.
    """
    dit = model.dit
    dense = model.layers - model.sparse_layers
    blocks: dict[str, tuple[str, ...]] = {
        f"transformer_blocks.{n}": ("double",) for n in range(dit.double_layers)
    }
    blocks |= {f"single_transformer_blocks.{n}": ("single",) for n in range(dit.single_layers)}
    blocks |= {
        f"model.layers.{n}": ("layer", "dense" if n < dense else "sparse")
        for n in range(model.layers)
    }
    expected = {weight.name: weight.sizes(model) for weight in weights_of(model, "outer")}
    for block, parts in blocks.items():
        for weight in weights_of(model, *parts):
            for expert in range(model.moe.experts if "{}" in weight.name else 1):
                expected[f"{block}.{weight.name.format(expert)}"] = weight.sizes(model)
    return {
        name: shape
        for name, shape in expected.items()
        if not name.endswith(".e_score_correction_bias")
    }


def readable(count: int) -> str:
    """Format a count with three digits and a unit: ``8.03 B``, ``0.52 M``."""
    unit, scale = ("B", 1e9) if count >= 1e9 else ("M", 1e6)
    value = count / scale
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def arguments(source: Any, file: Path, *tables: str) -> dict[str, Any]:
    """Return a backend's arguments by name: the fields of ``source`` that the ``tables`` of its
    ``file`` name.
    """
    content: Any = read_values(file).data
    return {
        name: attrgetter(field)(source)
        for table in tables
        for name, field in content[table].items()
    }
