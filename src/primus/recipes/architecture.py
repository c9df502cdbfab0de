"""What a model is made of, in words of no backend: each backend turns them into its own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, cast

from primus.recipes.model import Value

__all__ = [
    "Architecture",
    "DiffusionTransformer",
    "LatentAttention",
    "MixtureOfExperts",
    "RopeScaling",
    "architecture",
    "built",
    "rebuilt",
]

Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary positions are stretched beyond ``original_max_position`` tokens; kind "none": not at all."""

    kind: Literal["none", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Routed experts; ``experts`` 0: a dense model. The first ``dense_layers`` layers are dense in any case.

    ``ffn_size`` is the width of one expert, ``shared_experts`` see every token, ``groups`` and ``top_groups`` limit
    which experts a token may choose from. ``auxiliary_loss`` is the coefficient of the balancing loss, 0: none.
    """

    experts: int = 0
    top_k: int = 0
    ffn_size: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = False
    route_scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    auxiliary_loss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); ``kv_lora_rank`` 0: ordinary attention."""

    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0


@dataclass(frozen=True, kw_only=True)
class DiffusionTransformer:
    """FLUX's transformer: ``double_layers`` blocks with two streams, ``single_layers`` with one."""

    double_layers: int = 0
    single_layers: int = 0
    in_channels: int = 0
    text_dim: int = 0
    pooled_dim: int = 0
    image_size: int = 0
    text_tokens: int = 0
    guidance: bool = False


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of one model.

    ``head_dim`` 0 means hidden_size ÷ heads; ``window`` 0 means full causal attention; ``vocab_size`` is what the
    embedding holds. Sizes count elements, ``max_seq_len`` tokens.
    """

    family: Literal["llama2", "llama3", "mistral", "mixtral", "qwen2", "deepseek_v2", "deepseek_v3", "flux"]
    hf_repo: str = ""
    layers: int = 0
    hidden_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn_size: int = 0
    vocab_size: int = 0
    max_seq_len: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    qkv_bias: bool = False
    window: int = 0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    moe: MixtureOfExperts = field(default_factory=MixtureOfExperts)
    mla: LatentAttention = field(default_factory=LatentAttention)
    dit: DiffusionTransformer = field(default_factory=DiffusionTransformer)

    def objection(self) -> tuple[str, str] | None:
        """Key and reason of the first size that no model can have; None when all can."""
        if self.family == "flux":
            return None
        for key, size in (("layers", self.layers), ("hidden_size", self.hidden_size), ("heads", self.heads)):
            if size < 1:
                return key, "must be at least 1"
        if not self.head_dim and self.hidden_size % self.heads:
            return "hidden_size", f"{self.hidden_size} does not divide by {self.heads} heads"
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            return "heads", f"{self.heads} does not divide by {self.kv_heads} heads of keys and values"
        return None

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.head_dim or self.hidden_size // max(1, self.heads)


def architecture(section: Mapping[str, Value]) -> Architecture:
    """From the dotted keys of a recipe's ``model`` section, which were checked before."""
    return built(Architecture, section)


def rebuilt(tree: Mapping[str, Any]) -> Architecture:
    """From the ``model`` of a job file: :func:`dataclasses.asdict` of an architecture."""
    return cast(Architecture, _nested(Architecture, tree))


def _nested(cls: type[Any], tree: Mapping[str, Any]) -> object:
    inner = {e.name: type(e.default_factory()) for e in fields(cls) if callable(e.default_factory)}
    return cls(**{key: _nested(inner[key], value) if key in inner else value for key, value in tree.items()})


def built(cls: type[Kind], section: Mapping[str, Value]) -> Kind:
    """A dataclass from dotted keys that were checked before; fields not named keep their defaults."""
    given: dict[str, object] = {}
    for entry in fields(cls):  # type: ignore[arg-type]
        default = entry.default_factory() if callable(entry.default_factory) else None
        if is_dataclass(default):
            head = entry.name + "."
            inner = {key.removeprefix(head): value for key, value in section.items() if key.startswith(head)}
            given[entry.name] = built(type(default), inner)
        elif entry.name in section:
            given[entry.name] = section[entry.name]
    return cls(**given)
