"""What is known about a family of models, from its file in ``families/``; ``decoder.yaml`` there
explains the fields.

Fields of a model and its ``config.json`` are translated in both directions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from primus_images.errors import InputError, nearest
from primus_images.yamlfile import Scalar, read_values, spell

_FOLDER = Path(__file__).with_name("families")
_DECODER = "decoder"
FULL = "full_attention"
_NEAR = ("sliding_attention", "chunked_attention")
# The family of the models that no other one computes, which transformers alone defines.
OTHER = "other"
_COMMON = cast(Mapping[str, Any], read_values(_FOLDER / f"{_DECODER}.yaml").data)
# Keys of rope scaling in config.json, with transformers' values where one is omitted, by its kind.
STRETCH: Mapping[str, Mapping[str, float]] = _COMMON["stretch"]


@dataclass(frozen=True, kw_only=True)
class Support:
    """How one backend computes a family. Keys omit the prefix ``model.``."""

    model: str = ""
    lacks: Sequence[str] = ()
    values: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    whole: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight of a model. ``names``: backend → its names of the weight."""

    name: str
    shape: Sequence[str | int]
    when: Sequence[str]
    names: Mapping[str, Sequence[str]]

    def belongs(self, model: Any) -> bool:
        """Whether ``model`` (an Architecture) has the weight."""
        return all(_holds(model, condition) for condition in self.when)

    def sizes(self, model: Any) -> tuple[int, ...]:
        """Return the shape of the weight in ``model``."""

        def product(keys: str) -> int:
            return math.prod(
                int(key if key.isdecimal() else attrgetter(key)(model)) for key in keys.split("*")
            )

        return tuple(sum(map(product, str(size).split("+"))) for size in self.shape)


def _holds(model: Any, condition: str) -> bool:
    key, _, value = condition.removeprefix("!").partition("=")
    actual = attrgetter(key)(model)
    return (str(actual) == value if value else bool(actual)) != condition.startswith("!")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models."""

    name: str
    fields: Sequence[str]
    transformers: str = ""
    images: bool = False
    values: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Scalar] = field(default_factory=dict)
    computes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    linears: Sequence[str] = ()
    needed: Mapping[str, Sequence[str]] = field(default_factory=lambda: _COMMON["needed"])
    backends: Mapping[str, Support] = field(default_factory=dict)

    def has(self, key: str, backend: str = "") -> bool:
        """Whether the family has the field ``key`` of ``model.``, and ``backend`` computes it."""
        lacks = ()
        if backend:
            lacks = self.backends[backend].lacks
        computed = ("family", *_COMMON["fields"], *_COMMON["computed"].get(backend, ["*"]))
        both = (("family", *self.fields), computed)
        return key not in lacks and all(
            any(fnmatchcase(key, pattern) for pattern in fields) for fields in both
        )

    def allowed(self, key: str, default: Scalar) -> Sequence[Scalar]:
        """Return the only values of the field ``key`` that models have; nothing if it has any.
        ``default``: of all.
        """
        return self.values.get(key, () if self.has(key) else (default,))

    def needs(self, name: str) -> bool:
        """Whether a ``config.json`` has to have the key ``name``: that of a field without a
        default.
        """
        keys = [
            key
            for key, field in self.config.items()
            if field == name and self.has(key) and key not in self.values
        ]
        return bool(keys) and name not in self.defaults


@cache
def families() -> tuple[str, ...]:
    """Return the names of all families."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml") if path.stem != _DECODER))


@cache
def family(name: str) -> Family:
    """Return one family. Raises InputError if there is none of this name."""
    if name not in families():
        raise InputError(
            f"there is no family {name!r}" + nearest(name, families()), hint=", ".join(families())
        )
    content = {key: value for key, value in _read(name).items() if key != "weights"}
    backends = {
        key: Support(**row) for key, row in content.pop("backends", {}).items() if row is not None
    }
    return Family(name=name, backends=backends, **content)


def families_of(kind: object) -> list[str]:
    """Return the families of transformers' ``model_type``."""
    return [
        name for name in families() if not family(name).images and family(name).transformers == kind
    ]


def _read(name: str) -> dict[str, Any]:
    own = dict(cast(dict[str, Any], read_values(_FOLDER / f"{name}.yaml").data))
    above = own.pop("like", None if own.get("images") else _DECODER)
    if above is None:
        return own
    common = {
        key: _COMMON[key]
        for key in ("fields", "config", "defaults", "computes", "ignored", "linears")
    }
    if above == _DECODER:
        base = common
    else:
        base = _read(above)
    both = {
        key: {**base[key], **own[key]}
        for key in base.keys() & own.keys()
        if isinstance(own[key], dict)
    }
    longer = {key: [*base[key], *own.get(key, ())] for key in ("fields", "ignored")}
    return base | own | both | longer


@cache
def _weights(part: str, images: str = "") -> tuple[Weight, ...]:
    rows = []
    for name, row in (_read(images)["weights"] if images else _COMMON)[part].items():
        names = {key: [value] if isinstance(value, str) else value for key, value in row.items()}
        shape = names.pop("shape")
        when = names.pop("when", ())
        rows.append(Weight(name=name, shape=shape, when=when, names=names))
    return tuple(rows)


def weights_of(model: Any, *parts: str) -> Iterator[Weight]:
    """Yield the weights that ``model`` (an Architecture) has: outer, layer, dense, sparse, double
    or single ones.
    """
    images = ""
    if model.of_images:
        images = model.family
    yield from (
        weight for part in parts for weight in _weights(part, images) if weight.belongs(model)
    )


@cache
def renamed(model: Any, backend: str) -> Mapping[str, str]:
    """Return a backend's names of weights, within their layer, → transformers'. Weights of other
    models are there.
    """
    every = [weight for part in ("outer", "layer", "dense", "sparse") for weight in _weights(part)]
    every.sort(key=lambda weight: weight.belongs(model))
    return {name: weight.name for weight in every for name in weight.names.get(backend, ())}


def described(
    known: Family, config: Mapping[str, Any], file: Path
) -> Iterator[tuple[str, str, Any]]:
    """Yield field of ``model.``, key and value of a published ``config``, read from ``file``, of a
    model of a family.

    Values may have any type. Raises InputError if rope scaling is no mapping.
    """
    # transformers 5 writes it under another name.
    if "num_local_experts" in config:
        renamed = {"num_experts": config["num_local_experts"]}
    else:
        renamed = {}
    whole = {**known.defaults, **renamed, **config}
    heads = whole["num_attention_heads"]
    width = whole.get("hidden_size")
    part = "rope_scaling"
    if config.get("rope_parameters") is not None:
        part = "rope_parameters"
    if config.get(part) is None:
        rope = {}
    else:
        rope = config[part]
    if not isinstance(rope, dict):
        raise InputError(f"{part} is not a mapping", where=f"{file}: {part}")
    # Where layers with a window rotate in another way, each kind of layer has its own mapping.
    local = rope.get("sliding_attention") or {}
    rope = rope.get("full_attention", rope)
    for key, name in known.config.items():
        # A field that the family lacks is of interest if the file sets it.
        if name is None or not (
            config.get(name) if not known.has(key) or key in known.values else name in whole
        ):
            continue
        value = whole[name]
        if key == "kv_heads" and value is None:
            value = heads
        elif key == "head_dim" and (
            value is None or (isinstance(heads, int) and heads * value == width)
        ):
            value = 0
        elif key == "window" and (
            value is None
            or not whole.get("use_sliding_window", True)
            or ("use_sliding_window" in whole and whole["max_window_layers"])
        ):
            value = 0  # transformers gives the window to the layers from max_window_layers on
        elif key == "rope_theta":
            value = rope.get("rope_theta", value)
        elif key == "local_rope_theta":
            value = local.get("rope_theta", value)
        elif key == "window_pattern" and isinstance(layers := whole.get("layer_types"), list):
            if FULL in layers:
                value = layers.index(FULL) + 1
            else:
                value = value or 0
            near = next((kind for kind in layers if kind in _NEAR), None)
            if layers != [
                FULL if value and (n + 1) % value == 0 else near for n in range(len(layers))
            ]:
                value = spell(layers)
        elif (value is None and key.startswith("mla.")) or (
            key == "query_scalar" and value == whole["head_dim"]
        ):
            value = 0
        yield key, name, value
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not known.has("rope_scaling.kind"):
        return
    yield "rope_scaling.kind", f"{part}.rope_type", "none" if kind == "default" else kind
    if isinstance(kind, str) and kind in STRETCH:
        if kind != "linear":
            original = rope.get(
                "original_max_position_embeddings", whole["max_position_embeddings"]
            )
            yield (
                "rope_scaling.original_max_position",
                f"{part}.original_max_position_embeddings",
                original,
            )
        for name, usual in {"factor": 1.0, **STRETCH[kind]}.items():
            yield f"rope_scaling.{name}", f"{part}.{name}", rope.get(name, usual)


def uncomputed(known: Family, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a ``config.json`` that make another model than the family's, and the
    reason.
    """
    for key, values in known.computes.items():
        value = config.get(key, values[0])
        if (list(dict.fromkeys(value)) if isinstance(value, list) else value) not in values:
            yield (
                key,
                f"{spell(value)}, and the family {known.name} is computed with "
                f"{' or '.join(map(spell, values))}",
            )
    for name in known.config.values():
        if name and known.needs(name) and name not in config:
            yield name, "missing, and transformers has no value for it"
    described = {*known.config.values(), *known.defaults, *known.computes, *known.ignored}
    unknown = sorted(config.keys() - described)
    if unknown:
        why = (
            "unknown; what changes no result belongs to `ignored`, and the values that are "
            "computed to `computes`"
        )
        yield ", ".join(unknown), f"{why}, in families/{known.name}.yaml"


def config_of(model: Any) -> dict[str, Any]:
    """Return the keys of ``config.json`` of a decoder ``model`` (an Architecture): what
    :func:`described` reads.
    """
    known = family(model.family)
    scaling = model.rope_scaling
    config = {
        field: attrgetter(key)(model)
        for key, field in known.config.items()
        if field is not None and known.has(key) and key not in known.values
    }
    if known.has("mla.q_lora_rank"):
        config["q_lora_rank"] = model.mla.q_lora_rank or None
    config["head_dim"] = model.mla.qk_rope_head_dim or model.head_size
    if known.has("window"):
        config[known.config["window"] or "sliding_window"] = model.window or None
        if "use_sliding_window" in known.defaults:
            config |= {
                "use_sliding_window": model.window > 0,
                "max_window_layers": 0 if model.window else model.layers,
            }
    if "topk_method" in known.defaults:
        config["topk_method"] = "group_limited_greedy" if model.moe.groups > 1 else "greedy"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config.pop("rope_theta"))}
    if scaling.kind != "none":
        original = {"original_max_position_embeddings": scaling.original_max_position}
        rope |= {"rope_type": scaling.kind} | (original if scaling.original_max_position else {})
        stretch = {key: getattr(scaling, key) for key in ("factor", *STRETCH[scaling.kind])}
        stretch = {
            key: value if isinstance(value, bool) else float(value)
            for key, value in stretch.items()
        }
        # DeepSeek's models alone have both mscale.
        rope |= {
            k: v for k, v in stretch.items() if model.mla.kv_lora_rank or not k.startswith("mscale")
        }
    if config.pop("sliding_window_pattern", None) is not None:
        config["layer_types"] = [
            "sliding_attention" if model.has_window(n) else FULL for n in range(model.layers)
        ]
    if known.has("query_scalar"):
        config["query_pre_attn_scalar"] = model.query_scalar or model.head_size
    if known.has("local_rope_theta"):
        theta = config.pop("rope_local_base_freq")
        rope = {
            FULL: rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": float(theta)},
        }
    return config | {"rope_parameters": rope}
