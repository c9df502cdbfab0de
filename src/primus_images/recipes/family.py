"""What is known about a family of models, from its file in ``families/``.

``decoder.yaml`` there explains its fields. Fields of a model and its ``config.json`` are translated
in both directions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from primus_images.errors import InputError, nearest
from primus_images.yamlfile import Scalar, read_values, spell

_FOLDER = Path(__file__).with_name("families")
_DECODER = "decoder"
FULL = "full_attention"
WINDOWED = "sliding_attention"
_LOCAL = (WINDOWED, "chunked_attention")
# Fields that config.json turns off by null.
_OFF_IF_NULL = ("head_dim", "window", "mla.q_lora_rank", "mla.kv_lora_rank")
# The family of the models that no other one computes, which transformers alone defines.
OTHER = "other"
# The way out for weights with settings that their family lacks.
AS_OTHER = f"model.family={OTHER} trains them as transformers computes them, not judged or packed"
# The width of a feed-forward part that a config.json omits, as a multiple of the model's.
_WIDER = 4
_COMMON: Mapping[str, Any] = read_values(_FOLDER / f"{_DECODER}.yaml").data
# What a family takes from all language models.
_INHERITED = ("fields", "config", "defaults", "computes", "ignored", "linears")
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
        shape = []
        for size in self.shape:
            products = str(size).split("+")
            shape.append(sum(_product(model, factors) for factors in products))
        return tuple(shape)


def _product(model: Any, factors: str) -> int:
    product = 1
    for factor in factors.split("*"):
        product *= int(factor) if factor.isdecimal() else attrgetter(factor)(model)
    return product


def _holds(model: Any, condition: str) -> bool:
    key, _, expected = condition.removeprefix("!").partition("=")
    actual = attrgetter(key)(model)
    holds = bool(actual)
    if expected:
        holds = str(actual) == expected
    return holds != condition.startswith("!")


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
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    linears: Sequence[str] = ()
    needed: Mapping[str, Sequence[str]] = field(default_factory=lambda: _COMMON["needed"])
    backends: Mapping[str, Support] = field(default_factory=dict)

    def has(self, key: str, backend: str = "") -> bool:
        """Whether the family has the field ``key`` of ``model.``, and ``backend`` computes it."""
        if backend and key in self.backends[backend].lacks:
            return False
        computed = [*_COMMON["fields"], *_COMMON["computed"].get(backend, ["*"])]
        return _matches(key, self.fields) and _matches(key, computed)

    def allowed(self, key: str, default: Scalar) -> Sequence[Scalar]:
        """Return the only values of the field ``key``; nothing if models may have any.

        ``default`` is the value of all models that lack the field.
        """
        if key not in self.values and not self.has(key):
            return (default,)
        return self.values.get(key, ())

    def needs(self, name: str) -> bool:
        """Whether a ``config.json`` has to have the key ``name``, which has no default."""
        if name in self.defaults:
            return False
        return any(config_key == name for config_key in self.names.values())

    @cached_property
    def names(self) -> dict[str, str]:
        """Field of ``model.`` → its key in ``config.json``, of the fields that models may set."""
        free = [key for key in self.config if self.has(key) and key not in self.values]
        return {key: self.config[key] for key in free if self.config[key] is not None}


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return key == "family" or any(fnmatchcase(key, pattern) for pattern in patterns)


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
    content = _read(name)
    content.pop("weights", None)
    backends = {}
    for backend, row in content.pop("backends", {}).items():
        if row is not None:
            backends[backend] = Support(**row)
    return Family(name=name, backends=backends, **content)


def families_of(kind: object) -> list[str]:
    """Return the families of transformers' ``model_type``."""
    rows = [family(name) for name in families()]
    return [row.name for row in rows if row.transformers == kind and not row.images]


def _read(name: str) -> dict[str, Any]:
    own = dict(read_values(_FOLDER / f"{name}.yaml").data)
    above = own.pop("like", None if own.get("images") else _DECODER)
    if above is None:
        return own
    if above == _DECODER:
        base = {key: _COMMON[key] for key in _INHERITED}
    else:
        base = _read(above)
    merged = base | own
    for key in base.keys() & own.keys():
        if isinstance(own[key], dict):
            merged[key] = base[key] | own[key]
    for key in ("fields", "ignored"):
        merged[key] = [*base[key], *own.get(key, ())]
    return merged


@cache
def _weights(part: str, images: str = "") -> tuple[Weight, ...]:
    table = _COMMON
    if images:
        table = _read(images)["weights"]
    rows = []
    for name, row in table[part].items():
        names = {key: [value] if isinstance(value, str) else value for key, value in row.items()}
        shape = names.pop("shape")
        when = names.pop("when", ())
        rows.append(Weight(name=name, shape=shape, when=when, names=names))
    return tuple(rows)


def weights_of(model: Any, *parts: str) -> Iterator[Weight]:
    """Yield the weights that ``model`` (an Architecture) has.

    ``parts`` are ``outer``, ``layer``, ``dense``, ``sparse``, ``double`` or ``single``.
    """
    images = ""
    if model.of_images:
        images = model.family
    for part in parts:
        for weight in _weights(part, images):
            if weight.belongs(model):
                yield weight


@cache
def renamed(model: Any, backend: str) -> Mapping[str, str]:
    """Return a backend's names of weights, within their layer, → transformers'.

    Weights that ``model`` lacks are there, too.
    """
    weights = [*_weights("outer"), *_weights("layer"), *_weights("dense"), *_weights("sparse")]
    # Of two weights with one name, the model's own counts.
    weights.sort(key=lambda weight: weight.belongs(model))
    names = {}
    for weight in weights:
        for name in weight.names.get(backend, ()):
            names[name] = weight.name
    return names


def usual_names(known: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config`` with sizes under their usual names, where it has them under another one.

    Of sizes that differ between layers, it is the largest. A list of kinds of layers counts them.
    """
    usual = dict(config)
    for name, others in known.aliases.items():
        found = [config.get(key) for key in (name, *others) if config.get(key) is not None]
        if not found:
            continue
        value = found[0]
        if isinstance(value, list) and value:
            sizes = [size for size in value if isinstance(size, int)]
            value = max(sizes, default=len(value))
        usual[name] = value
    width = usual.get("hidden_size")
    if known.aliases and usual.get("intermediate_size") is None and isinstance(width, int):
        usual["intermediate_size"] = _WIDER * width
    return usual


def described(
    known: Family, config: Mapping[str, Any], file: Path
) -> Iterator[tuple[str, str, Any]]:
    """Yield field of ``model.``, key and value of a ``config``, read from ``file``.

    Values may have any type. Raises InputError if rope scaling is no mapping.
    """
    part = "rope_scaling"
    if config.get("rope_parameters") is not None:
        part = "rope_parameters"
    rope = config.get(part) or {}
    if not isinstance(rope, dict):
        raise InputError(f"{part} is not a mapping", where=f"{file}: {part}")
    # Where layers with a window rotate in another way, each kind of layer has its own mapping.
    local_rope = rope.get(WINDOWED) or {}
    rope = rope.get(FULL, rope)
    values = {**known.defaults, **config}
    if "num_local_experts" in config and "num_experts" not in config:
        # transformers 5 writes it under another name.
        values["num_experts"] = config["num_local_experts"]
    _settle(values, known)
    if "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]
    if "rope_theta" in local_rope:
        values["rope_local_base_freq"] = local_rope["rope_theta"]
    for key, name in known.config.items():
        # A field that the family lacks is of interest if the file sets it.
        if name and (config.get(name) or (key in known.names and name in values)):
            yield key, name, values[name]
    if known.has("rope_scaling.kind"):
        yield from _described_rope(part, rope, values["max_position_embeddings"])


def _settle(values: dict[str, Any], known: Family) -> None:
    """Change the values of a ``config.json`` to those that a recipe has.

    0 stands for the size of a head that follows from the width, and for what is off.
    """
    heads = values["num_attention_heads"]
    head_dim = values.get("head_dim")
    if "num_key_value_heads" in values and values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if "query_pre_attn_scalar" in values and values["query_pre_attn_scalar"] == head_dim:
        values["query_pre_attn_scalar"] = 0
    if isinstance(heads, int) and head_dim and heads * head_dim == values.get("hidden_size"):
        values["head_dim"] = 0
    for key, name in known.config.items():
        if name in values and values[name] is None and key in _OFF_IF_NULL:
            values[name] = 0
    _settle_windows(values, known)


def _settle_windows(values: dict[str, Any], known: Family) -> None:
    # transformers gives the window to the layers from max_window_layers on.
    first = values.get("max_window_layers") or not values.get("use_sliding_window")
    if "use_sliding_window" in values and first:
        values["sliding_window"] = 0
    name = known.config.get("window_pattern")
    layers = values.get("layer_types")
    if name is None or not isinstance(layers, list):
        return
    pattern = values.get(name) or 0
    if FULL in layers:
        pattern = layers.index(FULL) + 1
    local = next((kind for kind in layers if kind in _LOCAL), None)
    values[name] = pattern
    for number, kind in enumerate(layers, 1):
        is_full = pattern and number % pattern == 0
        if kind != (FULL if is_full else local):
            values[name] = spell(layers)  # which no field accepts


def _described_rope(
    part: str, rope: Mapping[str, Any], longest: Any
) -> Iterator[tuple[str, str, Any]]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        kind = "none"
    yield "rope_scaling.kind", f"{part}.rope_type", kind
    if not isinstance(kind, str) or kind not in STRETCH:
        return
    if kind != "linear":
        name = "original_max_position_embeddings"
        yield "rope_scaling.original_max_position", f"{part}.{name}", rope.get(name, longest)
    for name, usual in {"factor": 1.0, **STRETCH[kind]}.items():
        yield f"rope_scaling.{name}", f"{part}.{name}", rope.get(name, usual)


def uncomputed(known: Family, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a ``config.json`` that make another model than the family's, and why."""
    for key, values in known.computes.items():
        value = config.get(key, values[0])
        kinds = value
        if isinstance(value, list):
            kinds = list(dict.fromkeys(value))
        if kinds not in values:
            computed = " or ".join(map(spell, values))
            yield key, f"{spell(value)}, and the family {known.name} is computed with {computed}"
    for name in known.config.values():
        if name and known.needs(name) and name not in config:
            yield name, "missing, and transformers has no value for it"
    explained = {*known.config.values(), *known.defaults, *known.computes, *known.ignored}
    unknown = sorted(config.keys() - explained)
    if unknown:
        yield (
            ", ".join(unknown),
            "unknown; what changes no result belongs to `ignored`, and the values that are "
            f"computed to `computes`, in families/{known.name}.yaml",
        )


def config_of(model: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a decoder (an Architecture): what :func:`described` reads."""
    known = family(model.family)
    config = {name: attrgetter(key)(model) for key, name in known.names.items()}
    if known.has("mla.q_lora_rank"):
        config["q_lora_rank"] = model.mla.q_lora_rank or None
    config["head_dim"] = model.mla.qk_rope_head_dim or model.head_size
    if known.has("query_scalar"):
        config["query_pre_attn_scalar"] = model.query_scalar or model.head_size
    if "topk_method" in known.defaults:
        config["topk_method"] = "group_limited_greedy" if model.moe.groups > 1 else "greedy"
    if known.has("window"):
        _add_window(config, model, known)
    rope = _rope(model, config.pop("rope_theta"))
    if known.has("local_rope_theta"):
        local = _plain_rope(config.pop("rope_local_base_freq"))
        rope = {FULL: rope, WINDOWED: local}
    config["rope_parameters"] = rope
    return config


def _add_window(config: dict[str, Any], model: Any, known: Family) -> None:
    config[known.config["window"]] = model.window or None
    if "use_sliding_window" in known.defaults:
        config["use_sliding_window"] = model.window > 0
        config["max_window_layers"] = 0 if model.window else model.layers
    if config.pop("sliding_window_pattern", None) is not None:
        config["layer_types"] = [
            WINDOWED if model.has_window(layer) else FULL for layer in range(model.layers)
        ]


def _plain_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": float(theta)}


def _rope(model: Any, theta: float) -> dict[str, Any]:
    scaling = model.rope_scaling
    rope = _plain_rope(theta)
    if scaling.kind == "none":
        return rope
    rope["rope_type"] = scaling.kind
    if scaling.original_max_position:
        rope["original_max_position_embeddings"] = scaling.original_max_position
    for key in ("factor", *STRETCH[scaling.kind]):
        value = getattr(scaling, key)
        # DeepSeek's models alone have both mscale.
        if model.mla.kv_lora_rank or not key.startswith("mscale"):
            rope[key] = value if isinstance(value, bool) else float(value)
    return rope
