"""The sizes of a model, which each backend translates to its own arguments.

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
    """Routed experts.

    The first ``dense_layers`` layers are always dense. Of the others, each ``every``-th has
    experts, from the first on.
    """

    experts: int = bounded(0, "[0, 65536]")
    top_k: int = bounded(0, "[0, moe.experts]")
    ffn_size: int = bounded(0, "[0, inf)")
    shared_experts: int = bounded(0, "[0, 65536]")
    dense_layers: int = bounded(0, "[0, layers]")
    every: int = bounded(1, "[1, layers]")
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
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    With ``kv_lora_rank`` 0, attention is ordinary.
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
    """The sizes of one model. Those that a family has, with their values, are in ``families/``."""

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
        """Yield a recipe's key, the reason and a remedy of each size that does not fit.

        The first may cause more.
        """
        yield from self._missing_sizes()
        if not self.head_dim and self.hidden_size % self.heads:
            multiple = max(1, self.hidden_size // self.heads) * self.heads
            why = f"{self.hidden_size} is not divisible by {self.heads} heads"
            remedy = f"model.hidden_size={multiple}, or name model.head_dim"
            yield "model.hidden_size", why, remedy
        if self.of_images and self.hidden_size not in (0, self.heads * self.head_size):
            why = f"{self.hidden_size} is not {self.heads} heads of {self.head_size}"
            yield "model.hidden_size", why, f"model.hidden_size={self.heads * self.head_size}"
        if not self.of_images and self.heads % self.kv_heads:
            why = f"{self.heads} is not divisible by {self.kv_heads} heads of keys and values"
            yield "model.heads", why, f"model.kv_heads={math.gcd(self.heads, self.kv_heads)}"
        why = "a head's size must be even for rotary positions, not"
        if self.mla.kv_lora_rank:
            if self.mla.qk_rope_head_dim % 2:
                yield "model.mla.qk_rope_head_dim", f"{why} {self.mla.qk_rope_head_dim}", None
        elif self.head_size % 2:
            why = f"{why} {self.head_size} (model.hidden_size ÷ model.heads where it is 0)"
            yield "model.head_dim", why, None
        experts = self.moe.experts
        groups = self.moe.groups
        if experts % groups:
            why = f"{groups} groups do not divide model.moe.experts = {experts}"
            yield "model.moe.groups", why, f"model.moe.groups={math.gcd(groups, experts)}"

    def _missing_sizes(self) -> Iterator[tuple[str, str, None]]:
        for switch, keys in family(self.family).needed.items():
            where = ""
            if switch:
                value = attrgetter(switch)(self)
                if value in (0, "none", "linear"):
                    continue
                where = f", where model.{switch} is {value}"
            for key in keys:
                size = attrgetter(key)(self)
                if size < 1:
                    yield f"model.{key}", f"must be at least 1, not {size}{where}", None

    @property
    def of_images(self) -> bool:
        """Whether the model makes images, and is no language model."""
        return family(self.family).images

    @property
    def has_formula(self) -> bool:
        """Whether the model is described here, and not by transformers alone."""
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
        """Whether tokens of the layer, counted from 0, attend to the last ``window`` ones only."""
        is_full = self.window_pattern > 0 and (layer + 1) % self.window_pattern == 0
        return self.window > 0 and not is_full

    @property
    def sparse_layers(self) -> int:
        """The number of layers with experts."""
        return sum(self.is_sparse(layer) for layer in range(self.layers))

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer, counted from 0, has experts."""
        after = layer - self.moe.dense_layers
        return self.moe.experts > 0 and after >= 0 and after % self.moe.every == 0


def architecture(model: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a checked section ``model``, with dotted keys or mappings."""
    return built(Architecture, dict(flat(model)))


def built(cls: type[Kind], values: Mapping[str, Value]) -> Kind:
    """Build a dataclass from checked dotted keys. Other fields keep their defaults."""
    arguments: dict[str, object] = {}
    for entry in fields(cls):  # type: ignore[arg-type]
        part = entry.default_factory
        if isinstance(part, type) and is_dataclass(part):
            arguments[entry.name] = built(part, section(values, entry.name))
        elif entry.name in values:
            arguments[entry.name] = values[entry.name]
    return cls(**arguments)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The number of parameters of a model, and of those that process one token.

    ``embedding`` is the input embedding, which is part of both counts and multiplies nothing; 0 if
    it is tied to the output layer.
    """

    total: int
    active: int
    embedding: int


@cache
def size(model: Architecture) -> Size:
    """Count the parameters of ``model``; as in published totals, with routers' balancing biases."""
    if not model.has_formula:
        return Size(total=model.parameters, active=model.parameters, embedding=0)
    total = active = 0
    for part, count in _copies(model).items():
        if count == 0:
            continue
        for weight in weights_of(model, part):
            numbers = count * math.prod(weight.sizes(model))
            # The name of an expert's weight has a place for its number.
            is_expert = "{}" in weight.name
            total += numbers * (model.moe.experts if is_expert else 1)
            active += numbers * (model.moe.top_k if is_expert else 1)
    embedding = model.vocab_size * model.hidden_size
    if model.tied_embeddings:
        embedding = 0
    return Size(total=total, active=active, embedding=embedding)


def _copies(model: Architecture) -> dict[str, int]:
    if model.of_images:
        dit = model.dit
        return {"outer": 1, "double": dit.double_layers, "single": dit.single_layers}
    sparse = model.sparse_layers
    return {"outer": 1, "layer": model.layers, "dense": model.layers - sparse, "sparse": sparse}


def shapes(model: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by Hugging Face's name; balancing biases are none."""
    expected = {weight.name: weight.sizes(model) for weight in weights_of(model, "outer")}
    for block, parts in _blocks(model).items():
        for weight in weights_of(model, *parts):
            if weight.name.endswith(".e_score_correction_bias"):
                continue
            experts = model.moe.experts if "{}" in weight.name else 1
            for expert in range(experts):
                expected[f"{block}.{weight.name.format(expert)}"] = weight.sizes(model)
    return expected


def _blocks(model: Architecture) -> dict[str, tuple[str, ...]]:
    blocks: dict[str, tuple[str, ...]] = {}
    for number in range(model.dit.double_layers):
        blocks[f"transformer_blocks.{number}"] = ("double",)
    for number in range(model.dit.single_layers):
        blocks[f"single_transformer_blocks.{number}"] = ("single",)
    for number in range(model.layers):
        feed_forward = "sparse" if model.is_sparse(number) else "dense"
        blocks[f"model.layers.{number}"] = ("layer", feed_forward)
    return blocks


def readable(count: int) -> str:
    """Format a count with three digits and a unit: ``8.03 B``, ``0.52 M``."""
    value = count / 1e6
    unit = "M"
    if count >= 1e9:
        value = count / 1e9
        unit = "B"
    if value >= 100:
        return f"{value:.0f} {unit}"
    if value >= 10:
        return f"{value:.1f} {unit}"
    return f"{value:.2f} {unit}"


def arguments(source: Any, file: Path, *tables: str) -> dict[str, Any]:
    """Return a backend's arguments by name: the fields of ``source`` that its ``file`` names.

    ``tables`` are the sections of the file.
    """
    content = read_values(file).data
    values = {}
    for table in tables:
        for name, path in content[table].items():
            values[name] = attrgetter(path)(source)
    return values
