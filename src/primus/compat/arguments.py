"""A whole configuration of Primus → settings of a recipe, for settings that depend on several of its keys.

Megatron-LM derives some values from others before it trains. For example, the FFN width defaults to four times the
hidden size, and sequence parallelism is disabled without tensor parallelism. This module follows its ``validate_args``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from primus.recipes.setting import Value


@dataclass(kw_only=True)
class Derived:
    """The derived settings of a recipe.

    ``sources`` maps each setting to the key of Primus that it comes from, and ``choices`` holds command-line choices.
    ``taken`` are the keys of Primus that need no further translation (``*`` at the end matches any suffix). ``quiet``
    are keys that are ignored unless the user's own file sets them. ``refused`` maps keys that no recipe can express to
    the reason. ``says`` are sentences about other differences from Primus.
    """

    settings: dict[str, Value] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    quiet: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    says: list[str] = field(default_factory=list)

    def holds(self, key: str) -> bool:
        """Whether ``key`` needs no further translation."""
        return key in self.taken or any(one.endswith("*") and key.startswith(one[:-1]) for one in self.taken)


class _Arguments:
    """Reads arguments and marks each one as taken. A missing argument is null."""

    def __init__(self, given: Mapping[str, Value]) -> None:
        self.given, self.done = given, Derived()

    def __call__(self, key: str) -> Value:
        self.done.taken.add(key)
        return self.given.get(key)

    def number(self, key: str, default: int = 0) -> int:
        value = self(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def set(self, key: str, value: Value, source: str) -> None:
        self.done.settings[key] = value
        self.done.sources[key] = source

    def only(self, key: str, values: tuple[Value, ...], why: str) -> None:
        """Refuse a value of ``key`` that is not in ``values``. A missing key is accepted."""
        if key in self.given and self(key) not in values:
            self.done.refused[key] = why


def derived(backend: str, given: Mapping[str, Value]) -> Derived:
    """Derive the settings that depend on several keys of a whole configuration."""
    read = _Arguments(given)
    if backend == "torchtitan":
        _torchtitan(read)
        return read.done
    _shape(read)
    _positions(read)
    _latent(read)
    _experts(read)
    _precision(read)
    _layout(read)
    _training(read)
    return read.done


def _shape(read: _Arguments) -> None:
    hidden, heads = read.number("hidden_size"), max(1, read.number("num_attention_heads"))
    read.set("model.hidden_size", hidden, "hidden_size")
    read.set("model.heads", heads, "num_attention_heads")
    groups = read.number("num_query_groups") if read("group_query_attention") else 0
    read("num_query_groups")
    read.set("model.kv_heads", groups or heads, "num_query_groups")
    width = read.number("kv_channels")
    # Latent attention sets its widths with other keys.
    own = width and width * heads != hidden and not read("multi_latent_attention")
    read.set("model.head_dim", width if own else 0, "kv_channels")
    read.set("model.ffn_size", _width(read), "ffn_hidden_size")
    untied = "untie_embeddings_and_output_weights"
    read.set("model.tied_embeddings", not read(untied), untied)
    read.set("model.qkv_bias", bool(read("add_qkv_bias")), "add_qkv_bias")
    read.only("normalization", ("RMSNorm",), "every family here has RMSNorm")
    read.only("add_bias_linear", (False,), "no family here has biases in its linear layers")
    read.only("swiglu", (True,), "every family here has SwiGLU")
    for key in ("hidden_dropout", "attention_dropout"):
        read.only(key, (0, 0.0), "pre-training here has no dropout")
    if read("vocab_size") is not None:
        read.set("model.vocab_size", read("vocab_size"), "vocab_size")
    read.only("mtp_num_layers", (None, 0), "multi-token prediction is not implemented here")
    read("mtp_loss_scaling_factor")


def _width(read: _Arguments) -> int:
    """Return the width of a dense feed-forward layer, also the default of an expert's."""
    # SwiGLU has a third matrix, so Megatron-LM's default width is two thirds of 4 × hidden: the weights stay the same.
    return read.number("ffn_hidden_size") or int(4 * read.number("hidden_size") * 2 / 3) // 64 * 64


def _positions(read: _Arguments) -> None:
    for key in ("rotary_percent", "rotary_seq_len_interpolation_factor"):
        read.only(key, (None, 1, 1.0), "rotary embeddings here cover all channels, without interpolation")
    read.only("position_embedding_type", ("rope",), "every family here has rotary positions")
    for key in ("add_position_embedding", "use_rotary_position_embeddings", "max_position_embeddings"):
        read(key)
    kind, latent = read("rope_type"), bool(read("multi_latent_attention"))
    scaling = "model.rope_scaling"
    llama, factor = bool(read("use_rope_scaling")), read("rope_scaling_factor")
    stretch, scales = read("rotary_scaling_factor"), (read("mscale"), read("mscale_all_dim"))
    if latent and kind in (None, "yarn"):
        read.set(f"{scaling}.kind", "yarn", "rope_type")
        read.set(f"{scaling}.factor", stretch, "rotary_scaling_factor")
        read.set(f"{scaling}.original_max_position", 4096, "rope_type")
        read.set(f"{scaling}.beta_fast", 32.0, "rope_type")
        read.set(f"{scaling}.beta_slow", 1.0, "rope_type")
        read.set(f"{scaling}.mscale", scales[0], "mscale")
        read.set(f"{scaling}.mscale_all_dim", scales[1], "mscale_all_dim")
    elif kind == "yarn":
        read.done.refused["rope_type"] = "YaRN is supported with latent attention only"
    elif llama and not latent:
        read.set(f"{scaling}.kind", "llama3", "use_rope_scaling")
        read.set(f"{scaling}.factor", factor if factor is not None else 8.0, "rope_scaling_factor")
        read.set(f"{scaling}.original_max_position", 8192, "use_rope_scaling")
        read.set(f"{scaling}.low_freq_factor", 1.0, "use_rope_scaling")
        read.set(f"{scaling}.high_freq_factor", 4.0, "use_rope_scaling")
    else:
        read.set(f"{scaling}.kind", "none", "use_rope_scaling")


def _latent(read: _Arguments) -> None:
    sizes = {
        "kv_lora_rank": "kv_lora_rank", "qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim", "q_lora_rank": "q_lora_rank",
    }  # fmt: skip
    latent = bool(read("multi_latent_attention"))
    for key, name in sizes.items():
        value = read.number(key)
        if latent:
            read.set(f"model.mla.{name}", value, key)
    if latent:
        read.only("qk_layernorm", (True,), "latent attention here always has its norms")
    else:
        read.set("model.mla.kv_lora_rank", 0, "multi_latent_attention")


def _experts(read: _Arguments) -> None:
    experts = read.number("num_experts")
    if not experts:
        read.set("model.moe.experts", 0, "num_experts")
        read.set("megatron.model.expert_model_parallel_size", 1, "num_experts")
        # Without experts, these keys have no effect.
        read.done.taken |= {"moe_*", "expert_tensor_parallel_size", "expert_model_parallel_size"}
        return
    width = read.number("moe_ffn_hidden_size") or _width(read)
    shared = read.number("moe_shared_expert_intermediate_size")
    score, scale = read("moe_router_score_function"), read("moe_router_topk_scaling_factor")
    read.set("model.moe.experts", experts, "num_experts")
    read.set("model.moe.top_k", read.number("moe_router_topk", 2), "moe_router_topk")
    read.set("model.moe.ffn_size", width, "moe_ffn_hidden_size")
    if width < 1:
        read.done.refused["moe_ffn_hidden_size"] = f"an expert's width must be at least 1, not {width}"
    elif shared % width:
        read.done.refused["moe_shared_expert_intermediate_size"] = f"not a multiple of an expert's width, {width}"
    read.set("model.moe.shared_experts", shared // max(1, width), "moe_shared_expert_intermediate_size")
    dense = _dense_layers(read("moe_layer_freq"), read.number("num_layers"))
    if dense is None:
        read.done.refused["moe_layer_freq"] = "only the first layers can be dense"
    read.set("model.moe.dense_layers", dense or 0, "moe_layer_freq")
    read.set("model.moe.score", score, "moe_router_score_function")
    # Megatron always normalizes the chosen sigmoid scores.
    pre = read("moe_router_pre_softmax")
    read.set("model.moe.normalize_top_k", score == "sigmoid" or not pre, "moe_router_pre_softmax")
    read.set("model.moe.route_scale", 1.0 if scale is None else scale, "moe_router_topk_scaling_factor")
    groups, limit = read.number("moe_router_num_groups", 1), read.number("moe_router_group_topk", 1)
    read.set("model.moe.groups", groups, "moe_router_num_groups")
    read.set("model.moe.top_groups", limit, "moe_router_group_topk")
    coefficient = read("moe_aux_loss_coeff")
    read.set("model.moe.auxiliary_loss", 0.0 if coefficient is None else coefficient, "moe_aux_loss_coeff")
    bias = bool(read("moe_router_enable_expert_bias"))
    if bias != (score == "sigmoid"):
        read.set("megatron.model.moe_router_enable_expert_bias", bias, "moe_router_enable_expert_bias")


def _dense_layers(pattern: Value, layers: int) -> int | None:
    """Return the number of dense layers before the expert layers, or None if a dense layer follows an expert layer.

    ``pattern`` is ``moe_layer_freq``: 1 for expert layers only, N for one expert layer in N, or a list such as
    ``([0]*1+[1]*26)``, in which 1 is an expert layer.
    """
    if pattern in (None, 1, "1"):
        return 0
    if isinstance(pattern, str):
        parts = [(int(bit), int(times[:9] or 1)) for bit, times in re.findall(r"\[([01])\](?:\s*\*\s*(\d+))?", pattern)]
        kinds = [bit for bit, times in parts for _ in range(min(times, layers + 1))]
    elif isinstance(pattern, int) and pattern > 0:
        # One expert layer, then pattern − 1 dense ones, repeated.
        kinds = [1 if layer % pattern == 0 else 0 for layer in range(layers)]
    else:
        kinds = [int(bit) for bit in pattern if isinstance(bit, int)] if isinstance(pattern, list) else []
    dense = kinds.index(1) if 1 in kinds else len(kinds)
    return dense if kinds and all(kinds[dense:]) and dense < len(kinds) else None


def _precision(read: _Arguments) -> None:
    read.only("bf16", (True,), "training here uses BF16 or FP8")
    read.only("fp16", (False, None), "FP16 and its loss scale are not implemented here")
    read.only("fp4", (None, False), "FP4 is not implemented here")
    read.done.taken |= {
        "fp4_*",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale",
        "loss_scale_window",
        "hysteresis",
    }
    kind = read("fp8")
    if kind in (None, False, "none", "false"):
        read.done.choices["precision"] = "bf16"
        read.done.taken |= {"fp8_*", "first_last_layers_bf16", "num_layers_at_*", "no_fp8_*", "keep_fp8_*"}
    else:
        recipe = read("fp8_recipe")
        read.done.choices["precision"] = "mxfp8" if recipe == "mxfp8" else "fp8"
        read.set("megatron.model.fp8", "hybrid" if kind is True else kind, "fp8")
        read.set("megatron.model.fp8_recipe", recipe, "fp8_recipe")
    # With BF16, Megatron-LM sums gradients in float32 unless grad_reduce_in_bf16 is set. The other argument is ignored.
    read("accumulate_allreduce_grads_in_fp32")
    read.set("megatron.ddp.grad_reduce_in_fp32", not read("grad_reduce_in_bf16"), "grad_reduce_in_bf16")
    # Optimizer states are float32, except with the precision-aware optimizer.
    for key in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        read.only(key, ("fp32", None), "optimizer states are float32 here")


def _layout(read: _Arguments) -> None:
    tensor, stages = read.number("tensor_model_parallel_size", 1), read.number("pipeline_model_parallel_size", 1)
    read.set("megatron.model.tensor_model_parallel_size", tensor, "tensor_model_parallel_size")
    read.set("megatron.model.pipeline_model_parallel_size", stages, "pipeline_model_parallel_size")
    parallel = bool(read("sequence_parallel")) and tensor > 1
    read.set("megatron.model.sequence_parallel", parallel, "sequence_parallel")
    parts, each = (read.number(f"num_{what}") for what in (
        "virtual_stages_per_pipeline_rank", "layers_per_virtual_pipeline_stage"
    ))  # fmt: skip
    if each:
        parts = read.number("num_layers") // max(1, stages) // each
    virtual = parts if parts > 1 and stages > 1 else None
    read.set("megatron.model.virtual_pipeline_model_parallel_size", virtual, "num_virtual_stages_per_pipeline_rank")
    for place in ("first", "last"):
        key = f"decoder_{place}_pipeline_num_layers"
        read.set(f"megatron.model.num_layers_in_{place}_pipeline_stage", read(key), key)
    if stages == 1:
        read.done.taken |= {"overlap_p2p_comm", "account_for_*", "microbatch_group_size_per_vp_stage"}
    sharded = bool(read("use_torch_fsdp2"))
    read.set("megatron.torch_fsdp2", sharded, "use_torch_fsdp2")
    if sharded:
        # These keys concern Megatron's own buffers, which FSDP2 does not have.
        for key in ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"):
            if read(key):
                read.done.says.append(f"{key} is left out: torch's FSDP2 has no such buffers")
            read.set(f"megatron.ddp.{key}", False, key)
        read.done.taken.add("ddp_*")
    if read("recompute_activations"):
        read.set("megatron.model.recompute_granularity", "selective", "recompute_activations")
        read("recompute_granularity")
    elif read.given.get("recompute_method") == "block" and read.given.get("recompute_num_layers") == 0:
        # A block of 0 layers recomputes nothing.
        for key in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
            read(key)
            read.set(f"megatron.model.{key}", None, key)


def _training(read: _Arguments) -> None:
    if not read.given.get("enable_primus_turbo"):
        # Without Primus Turbo, its FP8 switches have no effect.
        read.done.taken.add("enable_turbo_*")
    last, steps = read.number("lr_decay_iters"), read.given.get("train_iters")
    read.set("megatron.training.decay_steps", last if last != steps else 0, "lr_decay_iters")
    if read("mock_data"):
        read.set("assets.corpus", "mock", "mock_data")
        read("train_data_path")
        # Mock tokens need no tokenizer.
        read.done.quiet.add("tokenizer_model")
    elif read("train_data_path") is None:
        read.done.says.append("no data is named: the recipe's corpus is used")


# Sections of torchtitan that have no effect unless one of these keys is true.
_SWITCHES = {
    "checkpoint": ("checkpoint.enable", "checkpoint.enable_checkpoint"),
    "fault_tolerance": ("fault_tolerance.enable",),
    "memory_estimation": ("memory_estimation.enable",),
    "profiling": ("profiling.enable_profiling", "profiling.enable_memory_snapshot"),
    "validation": ("validation.enable",),
}


def _torchtitan(read: _Arguments) -> None:
    for section, switches in _SWITCHES.items():
        if not any(read.given.get(switch) for switch in switches):
            read.done.taken.add(f"{section}.*")
    converters = read.given.get("model.converters")
    if not isinstance(converters, list) or not any("quantize" in str(one) or one == "float8" for one in converters):
        read.done.choices["precision"] = "bf16"
        read.done.taken |= {"quantize.*", "float8.*"}
    elif "quantize.grouped_mm.float8" in converters and "deepseek" in str(read.given.get("model.name")):
        read.done.says.append("quantize.grouped_mm.float8 is left out: experts are computed in BF16")
    if read.given.get("training.mock_data"):
        # Mock tokens need no tokenizer.
        read.done.quiet |= {"model.hf_assets_path", "model.tokenizer_path"}
    if "training.seed" in read.given and read("training.seed") is None:
        read.done.says.append("training.seed is null, so each run of Primus differs: the recipe's seed is used")
    elif "training.seed" in read.given:
        read.set("torchtitan.debug.seed", read("training.seed"), "training.seed")
    warm, steps = read.given.get("lr_scheduler.warmup_steps"), read.given.get("training.steps")
    if isinstance(warm, int) and isinstance(steps, int) and warm > steps:
        read("lr_scheduler.warmup_steps")
        read.set("torchtitan.lr_scheduler.warmup_steps", steps, "lr_scheduler.warmup_steps")
        read.done.says.append(f"lr_scheduler.warmup_steps is {warm} of {steps} steps: torchtitan uses {steps}")
