"""The model that an experiment trains, as fields of our ``model``.

Megatron's arguments describe it key by key; torchtitan's name a flavor of its own code.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from primus_images.errors import InputError, alike
from primus_images.recipes.architecture import Architecture
from primus_images.recipes.experiments.presets import Argument
from primus_images.recipes.experiments.translate import table
from primus_images.recipes.family import Family, family
from primus_images.recipes.schema import model_rules
from primus_images.recipes.setting import WORDS, Value, outside
from primus_images.yamlfile import flat, spell

Arguments = Mapping[str, Argument]
Kind = TypeVar("Kind", int, float, bool, str)

# A multiple to which Megatron rounds the width of SwiGLU layers that nobody names.
_ROUNDED = 64
# Llama 3.1's scaling of rotary positions, of which Megatron takes only the factor.
_LLAMA3: Mapping[str, Value] = {
    "rope_scaling.low_freq_factor": 1.0,
    "rope_scaling.high_freq_factor": 4.0,
    "rope_scaling.original_max_position": 8192,
}

# Fields of the model → the arguments of Megatron that alone determine them.
KEYS: Mapping[str, str] = {
    "layers": "num_layers",
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "ffn_size": "ffn_hidden_size",
    "rope_theta": "rotary_base",
    "norm_eps": "norm_epsilon",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "moe.experts": "num_experts",
    "moe.top_k": "moe_router_topk",
    "moe.ffn_size": "moe_ffn_hidden_size",
}


def strange(arguments: Arguments) -> tuple[str, str] | None:
    """Return which kind of model this is that no family here is, and its place; None if none."""
    for row in table("models")["strange"]:
        argument = arguments.get(row["key"])
        if argument is None or argument.value in (None, False, 0, ""):
            continue
        if "value" not in row or row["value"] == argument.value:
            return row["kind"], argument.where
    return None


def _take(arguments: Arguments, key: str, default: Kind) -> Kind:
    """Return the value of ``key``, whose type is that of ``default``.

    Raises InputError for another type. A null, or no value, is the default.
    """
    argument = arguments.get(key)
    if argument is None or argument.value is None:
        return default
    value = argument.value
    kind = type(default)
    if kind is float and type(value) is int:
        return kind(value)
    if type(value) is not kind:
        raise InputError(
            f"{key} must be {WORDS[kind.__name__]}, not {value!r}", where=argument.where
        )
    return value


def _where(arguments: Arguments, key: str) -> str | None:
    if key in arguments:
        return arguments[key].where
    return None


def of_megatron(arguments: Arguments) -> dict[str, Value]:
    """Return the fields of ``model``, without this prefix and without ``family``.

    Raises InputError, with the place, for a size that no field can express.
    """
    hidden = _take(arguments, "hidden_size", 0)
    heads = _take(arguments, "num_attention_heads", 0)
    width = 4 * hidden
    if _take(arguments, "swiglu", False):
        width = int(width * 2 / 3 / _ROUNDED) * _ROUNDED
    groups = heads
    if _take(arguments, "group_query_attention", False):
        groups = _take(arguments, "num_query_groups", 1)
    is_latent = _take(arguments, "multi_latent_attention", False)
    model: dict[str, Value] = {
        "layers": _take(arguments, "num_layers", 0),
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": groups,
        "head_dim": 0,
        "ffn_size": _take(arguments, "ffn_hidden_size", width),
        "rope_theta": _take(arguments, "rotary_base", 10000.0),
        "norm_eps": _take(arguments, "norm_epsilon", 1e-5),
        "tied_embeddings": not _take(arguments, "untie_embeddings_and_output_weights", False),
        "qkv_bias": _take(arguments, "add_qkv_bias", False),
    }
    head = _take(arguments, "kv_channels", 0)
    if is_latent:
        model |= _latent(arguments)
    else:
        model["qk_norm"] = _take(arguments, "qk_layernorm", False)
        model["sinks"] = _take(arguments, "use_sink_attention", False)
        if head * heads != hidden:
            model["head_dim"] = head
        model["rope_scaling.kind"] = "none"
        if _take(arguments, "use_rope_scaling", False):
            factor = _take(arguments, "rope_scaling_factor", 8.0)
            model |= {"rope_scaling.kind": "llama3", "rope_scaling.factor": factor, **_LLAMA3}
    if _take(arguments, "num_experts", 0):
        model |= _experts(arguments, model)
    return model


def _latent(arguments: Arguments) -> dict[str, Value]:
    if not _take(arguments, "qk_layernorm", False):
        raise InputError(
            "latent attention without qk_layernorm is no family here",
            where=_where(arguments, "multi_latent_attention"),
            hint="qk_layernorm: true, as DeepSeek has it",
        )
    model: dict[str, Value] = {
        "mla.q_lora_rank": _take(arguments, "q_lora_rank", 0),
        "mla.kv_lora_rank": _take(arguments, "kv_lora_rank", 32),
        "mla.qk_nope_head_dim": _take(arguments, "qk_head_dim", 128),
        "mla.qk_rope_head_dim": _take(arguments, "qk_pos_emb_head_dim", 64),
        "mla.v_head_dim": _take(arguments, "v_head_dim", 128),
    }
    model["rope_scaling.kind"] = "none"
    if _take(arguments, "rope_type", "yarn") == "yarn":
        scaling: dict[str, Value] = {
            "kind": "yarn",
            "factor": _take(arguments, "rotary_scaling_factor", 1.0),
            "original_max_position": _take(arguments, "original_max_position_embeddings", 4096),
            "beta_fast": _take(arguments, "beta_fast", 32.0),
            "beta_slow": _take(arguments, "beta_slow", 1.0),
            "mscale": _take(arguments, "mscale", 1.0),
            "mscale_all_dim": _take(arguments, "mscale_all_dim", 0.0),
        }
        model |= {f"rope_scaling.{name}": value for name, value in scaling.items()}
    return model


def _experts(arguments: Arguments, model: Mapping[str, Value]) -> dict[str, Value]:
    score = _take(arguments, "moe_router_score_function", "softmax")
    is_sigmoid = score == "sigmoid"
    width = _take(arguments, "moe_ffn_hidden_size", int(str(model["ffn_size"])))
    shared = _take(arguments, "moe_shared_expert_intermediate_size", 0)
    if shared % max(1, width):
        raise InputError(
            f"shared experts of {shared} are no multiple of experts of {width}",
            where=_where(arguments, "moe_shared_expert_intermediate_size"),
            hint=f"moe_shared_expert_intermediate_size: {width}",
        )
    if _take(arguments, "moe_router_enable_expert_bias", is_sigmoid) != is_sigmoid:
        raise InputError(
            f"a router with {score} scores {'has no' if not is_sigmoid else 'needs its'} bias here",
            where=_where(arguments, "moe_router_enable_expert_bias"),
            hint=f"moe_router_enable_expert_bias: {spell(is_sigmoid)}",
        )
    loss = _take(arguments, "moe_aux_loss_coeff", 0.0)
    if _take(arguments, "moe_router_load_balancing_type", "aux_loss") == "none":
        loss = 0.0
    return {
        "moe.experts": _take(arguments, "num_experts", 0),
        "moe.top_k": _take(arguments, "moe_router_topk", 2),
        "moe.ffn_size": width,
        "moe.shared_experts": shared // max(1, width),
        **_places_of_experts(arguments, int(str(model["layers"]))),
        "moe.score": score,
        # Megatron normalizes the chosen sigmoid scores. A softmax over the chosen experts is
        # normalized, too.
        "moe.normalize_top_k": is_sigmoid or not _take(arguments, "moe_router_pre_softmax", False),
        "moe.route_scale": _take(arguments, "moe_router_topk_scaling_factor", 1.0),
        "moe.groups": _take(arguments, "moe_router_num_groups", 1),
        "moe.top_groups": _take(arguments, "moe_router_group_topk", 1),
        "moe.auxiliary_loss": loss,
    }


def _places_of_experts(arguments: Arguments, layers: int) -> dict[str, Value]:
    """Return how many layers come before those with experts, and which of these have them."""
    argument = arguments.get("moe_layer_freq")
    if argument is None or argument.value in (None, 1, "1"):
        return {"moe.dense_layers": 0, "moe.every": 1}
    where = argument.where
    pattern = _pattern(argument)
    if len(pattern) == 1 and layers > 1 and not isinstance(argument.value, list):
        return {"moe.dense_layers": 0, "moe.every": pattern[0]}
    if len(pattern) != layers:
        raise InputError(
            f"moe_layer_freq is about {len(pattern)} layers, and the model has {layers}",
            where=where,
            hint="name both, as in num_layers: 4 and moe_layer_freq: ([0]*1+[1]*3)",
        )
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    rest = pattern[dense:]
    every = rest[1:].index(1) + 1 if 1 in rest[1:] else max(1, len(rest))
    if rest != [int(number % every == 0) for number in range(len(rest))]:
        raise InputError(
            f"moe_layer_freq: {argument.value} puts experts into layers at different distances, "
            "which no family here has",
            where=where,
            hint="moe_layer_freq: 1, a number, or dense layers at the beginning: ([0]*1+[1]*3)",
        )
    return {"moe.dense_layers": dense, "moe.every": every}


def _pattern(argument: Argument) -> list[int]:
    """Return Megatron's list of layers with (1) and without (0) experts; [N] for each N-th."""
    value = argument.value
    if isinstance(value, list):
        return [int(str(item)) for item in value if item in (0, 1)]
    text = str(value)
    if re.fullmatch(r"\d{1,4}", text):
        return [int(text)]
    try:
        pattern = _sum(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise InputError(
            f"moe_layer_freq must be a number or a list such as ([0]*1+[1]*26), not {text!r}",
            where=argument.where,
        ) from None
    return pattern


def _sum(node: ast.expr) -> list[int]:
    """Evaluate lists of 0 and 1, their sums, and their products with small numbers."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sum(node.left) + _sum(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factor = ast.literal_eval(node.right)
        if type(factor) is not int or not 0 <= factor <= 1024:
            raise ValueError(factor)
        return _sum(node.left) * factor
    items = ast.literal_eval(node)
    if not isinstance(items, list) or any(item not in (0, 1) for item in items):
        raise ValueError(items)
    return items


def of_architecture(model: Architecture) -> dict[str, Value]:
    """Return the arguments of Megatron that make ``model``: what :func:`of_megatron` reads."""
    scaling = model.rope_scaling
    values: dict[str, Value] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.heads,
        "group_query_attention": True,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_size,
        "ffn_hidden_size": model.ffn_size,
        "rotary_base": model.rope_theta,
        "norm_epsilon": model.norm_eps,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "use_sink_attention": model.sinks,
        "use_rope_scaling": scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor,
    }
    if model.mla.kv_lora_rank:
        values |= {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": model.mla.q_lora_rank,
            "kv_lora_rank": model.mla.kv_lora_rank,
            "qk_head_dim": model.mla.qk_nope_head_dim,
            "qk_pos_emb_head_dim": model.mla.qk_rope_head_dim,
            "v_head_dim": model.mla.v_head_dim,
            "rope_type": "yarn" if scaling.kind == "yarn" else "rope",
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    moe = model.moe
    if moe.experts:
        layers = [int(model.is_sparse(layer)) for layer in range(model.layers)]
        values |= {
            "num_experts": moe.experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn_size,
            "moe_shared_expert_intermediate_size": moe.shared_experts * moe.ffn_size,
            "moe_layer_freq": [*layers],
            "moe_router_score_function": moe.score,
            "moe_router_pre_softmax": not moe.normalize_top_k,
            "moe_router_topk_scaling_factor": moe.route_scale,
            "moe_router_num_groups": moe.groups,
            "moe_router_group_topk": moe.top_groups,
            "moe_aux_loss_coeff": moe.auxiliary_loss,
        }
    return values


def vocabulary(tokenizer: str) -> int | None:
    """Return the rows of the embedding of the model that has this tokenizer; None if unknown."""
    rows: int | None = table("models")["vocabularies"].get(tokenizer)
    return rows


def of_flavor(name: str, flavor: str, where: str) -> dict[str, Value]:
    """Return the fields of torchtitan's ``flavor`` of its model ``name``, without ``model.``.

    Raises InputError if no such flavor is here.
    """
    known = table("models")["flavors"]
    lacking = table("models")["lacking"].get(name)
    if lacking:
        message = f"torchtitan's {name} is not trained here: {lacking['why']}"
        raise InputError(message, where=where, hint=lacking["hint"])
    if name not in known:
        raise InputError(
            f"torchtitan's {name} is not computed here",
            where=where,
            hint=f"models of torchtitan: {', '.join(known)}",
        )
    if flavor not in known[name]:
        raise InputError(
            f"{name} has no flavor {flavor!r}{alike(flavor, known[name])}",
            where=where,
            hint=f"there are: {', '.join(known[name])}",
        )
    return dict(flat(_inherited(known[name], flavor)))


def _inherited(rows: Mapping[str, Any], flavor: str) -> dict[str, Any]:
    own = dict(rows[flavor])
    below = own.pop("like", None)
    if below is None:
        return own
    merged = _inherited(rows, below)
    for key, value in own.items():
        if isinstance(value, dict):
            merged[key] = {**merged.get(key, {}), **value}
        else:
            merged[key] = value
    return merged


def family_of(model: Mapping[str, Value], backend: str, first: str = "") -> Family | None:
    """Return a family whose models can have these fields with ``backend``; None if there is none.

    ``first`` is tried before the others.
    """
    names = [first] if first else []
    for name in (*names, *table("models")["families"]):
        known = family(name)
        if backend in known.backends and not any(_obstacles(known, model, backend)):
            return known
    return None


def obstacles(model: Mapping[str, Value], backend: str) -> list[str]:
    """Return which fields of ``model`` the nearest family lacks."""
    every = []
    for name in table("models")["families"]:
        known = family(name)
        if backend in known.backends:
            every.append(list(_obstacles(known, model, backend)))
    return min(every, key=len)


def _obstacles(known: Family, model: Mapping[str, Value], backend: str) -> Iterator[str]:
    for key, rule in model_rules().items():
        value = model.get(key, rule.default)
        if key in ("family", "hf_repo"):
            continue
        allowed = known.allowed(key, rule.default)  # type: ignore[arg-type]
        computed = value == rule.default or known.has(key, backend) or key == "head_dim"
        if (allowed and value not in allowed) or not computed:
            yield f"{key} {spell(value)}"
    for key, limits in known.limits.items():
        value = model.get(key, model_rules()[key].default)
        if isinstance(value, int | float) and outside(limits, value):
            yield f"{key} {spell(value)}"


def proxy(model: Mapping[str, Value]) -> dict[str, Value]:
    """Return the sizes of a small model with the same parts as ``model``."""
    heads = int(str(model["heads"]))
    kv_heads = int(str(model["kv_heads"]))
    group = max(1, heads // max(1, kv_heads))
    small_heads, small_kv = 2 * group, 2
    if group > 4:
        small_heads, small_kv = group, 1
    if group == 1:
        small_heads, small_kv = 8, 8
    sizes: dict[str, Value] = {
        "layers": 3,
        "hidden_size": 16 * small_heads,
        "heads": small_heads,
        "kv_heads": small_kv,
        "ffn_size": 256,
        "vocab_size": 1024,
    }
    if model.get("head_dim"):
        sizes["head_dim"] = 32
    if model.get("mla.kv_lora_rank"):
        sizes |= {
            "hidden_size": 64,
            "heads": 4,
            "kv_heads": 4,
            "mla.kv_lora_rank": 32,
            "mla.qk_nope_head_dim": 16,
            "mla.qk_rope_head_dim": 16,
            "mla.v_head_dim": 16,
        }
        if model.get("mla.q_lora_rank"):
            sizes["mla.q_lora_rank"] = 48
    experts = int(str(model.get("moe.experts", 0)))
    if experts:
        sizes |= {
            "moe.experts": 8,
            "moe.top_k": min(2, int(str(model["moe.top_k"]))),
            "moe.ffn_size": 64,
            "moe.dense_layers": min(1, int(str(model.get("moe.dense_layers", 0)))),
        }
        shared = int(str(model.get("moe.shared_experts", 0)))
        if model["ffn_size"] == _width_of_token(model, shared):
            sizes["ffn_size"] = _width_of_token(sizes, shared)
        if int(str(model.get("moe.groups", 1))) > 1:
            sizes |= {"moe.groups": 4, "moe.top_groups": 2}
    return sizes


def _width_of_token(model: Mapping[str, Value], shared: int) -> int:
    """Return the units of all experts of one token. Some models' dense layers have as many."""
    return int(str(model["moe.ffn_size"])) * (int(str(model["moe.top_k"])) + shared)
