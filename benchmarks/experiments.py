"""Reads every experiment file of a checkout of AMD's Primus: ``python -m benchmarks.experiments
CHECKOUT``.

Each Megatron and torchtitan file below ``examples`` is resolved at full size for the GPU that its
folder names. What it becomes is compared with what Primus itself merges from the same files: this
program merges them with PyYAML, by Primus's public rules, and shares no code with the product.
``--proxies`` also trains proxies on the CPU: one of each backend and family, compared with the
reference, and five steps of each model. ``--models-left`` trains only the models that the result
does not show as trained, and writes the result after each. The result is
``benchmarks/results/experiments.json``; the checkout is not part of it.
"""

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from primus_images.compat.commands import requested
from primus_images.errors import PrimusError
from primus_images.recipes.experiments.source import import_experiment
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import gpu_bytes, predict
from primus_images.recipes.schema import backend_rules
from primus_images.recipes.setting import Choices
from primus_images.training.run.machine import check_prediction

_COMMANDS = Path("tests/fixtures/old_commands.yaml")
_MOST_NODES = 64
_RESULT = Path("benchmarks/results/experiments.json")
_GPUS = ("MI300X", "MI325X", "MI355X")
_VARIABLE = re.compile(r"\$\{([^:{}]+)(?::([^}]*))?\}")
# A number as Primus reads it after a variable is replaced.
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
# Merged key → where the resolved recipe has it. Keys whose merged value is null are not compared.
_MEGATRON = {
    "num_layers": "model.layers",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_size",
    "num_attention_heads": "model.heads",
    "norm_epsilon": "model.norm_eps",
    "rotary_base": "model.rope_theta",
    "add_qkv_bias": "model.qkv_bias",
    "vocab_size": "model.vocab_size",
    "train_iters": "megatron.training.steps",
    "seq_length": "megatron.training.seq_len",
    "micro_batch_size": "megatron.training.micro_batch_size",
    "global_batch_size": "megatron.training.global_batch_size",
    "seed": "megatron.training.seed",
    "lr": "megatron.training.lr",
    "min_lr": "megatron.training.min_lr",
    "lr_warmup_iters": "megatron.training.warmup_steps",
    "lr_decay_iters": "megatron.training.decay_steps",
    "lr_decay_style": "megatron.training.lr_schedule",
    "weight_decay": "megatron.training.weight_decay",
    "adam_beta1": "megatron.training.beta1",
    "adam_beta2": "megatron.training.beta2",
    "adam_eps": "megatron.training.eps",
    "clip_grad": "megatron.training.max_norm",
    "init_method_std": "megatron.model.init_method_std",
    "tensor_model_parallel_size": "megatron.model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "megatron.model.pipeline_model_parallel_size",
    "context_parallel_size": "megatron.model.context_parallel_size",
    "expert_model_parallel_size": "megatron.model.expert_model_parallel_size",
    "sequence_parallel": "megatron.model.sequence_parallel",
    "pipeline_model_parallel_layout": "megatron.model.pipeline_model_parallel_layout",
    "use_torch_fsdp2": "megatron.torch_fsdp2",
    "use_precision_aware_optimizer": "megatron.optimizer.use_precision_aware_optimizer",
    "main_grads_dtype": "megatron.optimizer.main_grads_dtype",
    "exp_avg_dtype": "megatron.optimizer.exp_avg_dtype",
    "exp_avg_sq_dtype": "megatron.optimizer.exp_avg_sq_dtype",
}
_EXPERTS = {
    "num_experts": "model.moe.experts",
    "moe_router_topk": "model.moe.top_k",
    "moe_router_topk_scaling_factor": "model.moe.route_scale",
    "moe_router_score_function": "model.moe.score",
    "moe_router_num_groups": "model.moe.groups",
    "moe_router_group_topk": "model.moe.top_groups",
    "moe_router_load_balancing_type": "megatron.model.moe_router_load_balancing_type",
    "moe_router_force_load_balancing": "megatron.model.moe_router_force_load_balancing",
    "moe_router_bias_update_rate": "megatron.model.moe_router_bias_update_rate",
}
_LATENT = {
    "q_lora_rank": "model.mla.q_lora_rank",
    "kv_lora_rank": "model.mla.kv_lora_rank",
    "qk_head_dim": "model.mla.qk_nope_head_dim",
    "qk_pos_emb_head_dim": "model.mla.qk_rope_head_dim",
    "v_head_dim": "model.mla.v_head_dim",
    "rotary_scaling_factor": "model.rope_scaling.factor",
    "original_max_position_embeddings": "model.rope_scaling.original_max_position",
    "mscale": "model.rope_scaling.mscale",
    "mscale_all_dim": "model.rope_scaling.mscale_all_dim",
}
# Sections of torchtitan's own keys that are compared one by one.
_TITAN = (
    "training",
    "optimizer",
    "lr_scheduler",
    "parallelism",
    "activation_checkpoint",
    "compile",
)
_TITAN_ELSEWHERE = ("training.mock_data", "training.dataset", "training.dataset_path")
# The values of our own fields that no recipe needs to set.
_USUAL: Mapping[str, Any] = {
    "model.qkv_bias": False,
    "model.tied_embeddings": False,
    "model.qk_norm": False,
    "model.mla.q_lora_rank": 0,
    "megatron.torch_fsdp2": False,
    "megatron.training.min_lr": 0.0,
    "megatron.training.weight_decay": 0.1,
    "megatron.training.beta1": 0.9,
    "megatron.training.beta2": 0.95,
    "megatron.training.eps": 1e-8,
    "megatron.training.lr_schedule": "constant",
    "megatron.model.init_method_std": 0.02,
    "megatron.model.sequence_parallel": False,
    "megatron.model.moe_router_force_load_balancing": False,
    "megatron.model.moe_router_bias_update_rate": 1e-3,
    "megatron.optimizer.use_precision_aware_optimizer": False,
    "megatron.optimizer.main_grads_dtype": "fp32",
    "megatron.optimizer.exp_avg_dtype": "fp32",
    "megatron.optimizer.exp_avg_sq_dtype": "fp32",
}


def main() -> int:
    """Write the result, and print a line for each reason of a refusal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--commit", default="", help="commit of the checkout, for the result")
    parser.add_argument("--proxies", action="store_true")
    parser.add_argument("--models-left", action="store_true")
    parser.add_argument(
        "--page",
        nargs=2,
        action="append",
        default=[],
        metavar=("CHECKOUT", "DOCUMENT"),
        help="a checkout of the page's time, and the page's name in old_commands.yaml",
    )
    parser.add_argument("--out", type=Path, default=_RESULT)
    args = parser.parse_args()
    os.environ["PRIMUS_ROOT"] = str(args.checkout)
    if args.models_left:
        _train_models_left(args.checkout, args.out)
        return 0
    rows = []
    kinds: dict[str, Path] = {}
    models: dict[str, Path] = {}
    for path in _files(args.checkout):
        row = _row(path, args.checkout)
        rows.append(row)
        if row["status"] == "trainable":
            kinds.setdefault(f"{row['backend']} {row['family']}", path)
            models.setdefault(f"{row['backend']} {_model(path)}", path)
    # What this call does not measure is kept.
    result: dict[str, Any] = {}
    if args.out.is_file():
        result = json.loads(args.out.read_text(encoding="utf-8"))
    result["primus"] = {"repository": "AMD-AGI/Primus", "commit": args.commit}
    result["totals"] = _totals(rows)
    if args.page:
        result["pages"] = {page: _page(Path(folder), page) for folder, page in args.page}
    if args.proxies:
        result["proxies"] = {kind: _trained(path, "--judge") for kind, path in kinds.items()}
        result["models"] = {model: _trained(path, "steps=5") for model, path in models.items()}
    result["files"] = rows
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["totals"], indent=1))
    return 0


def _train_models_left(checkout: Path, out: Path) -> None:
    """Train the proxy of each model whose run is missing or failed in the result ``out``."""
    result = json.loads(out.read_text(encoding="utf-8"))
    models = result["models"]
    first: dict[str, Path] = {}
    for row in result["files"]:
        if row["status"] == "trainable":
            path = checkout / row["file"]
            first.setdefault(f"{row['backend']} {_model(path)}", path)
    for model, path in first.items():
        if model in models and models[model]["exit_code"] == 0:
            continue
        models[model] = _trained(path, "steps=5")
        print(model, models[model], flush=True)
        result["models"] = {name: models[name] for name in first if name in models}
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _model(path: Path) -> str:
    """Return Primus's name of a file's model, whose preset for FP8 may have a name of its own."""
    module = _loaded(path)["modules"]["pre_trainer"]
    return Path(module["model"]).stem.removesuffix("-fp8")


def _files(checkout: Path) -> list[Path]:
    files: list[Path] = []
    for framework in ("megatron", "torchtitan"):
        for gpu in _GPUS:
            files += sorted((checkout / "examples" / framework / "configs" / gpu).glob("*.yaml"))
    return files


def _row(path: Path, checkout: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"file": path.relative_to(checkout).as_posix()}
    try:
        imported = import_experiment(path)
        recipe = resolve(str(path), (), Choices(gpu=path.parent.name.lower()))
    except PrimusError as error:
        words = f"{error.message} {error.hint or ''}"
        return row | {
            "status": "refused",
            "reason": error.message.splitlines()[0].replace(str(checkout), "CHECKOUT"),
            "misleading": "did you mean" in words,
        }
    memory = predict(recipe)
    differences, compared = _compared(path, checkout, recipe)
    return row | {
        "status": "trainable",
        "backend": recipe.backend,
        "family": recipe.architecture.family,
        "recipe": imported.recipe,
        "precision": recipe.precision,
        "nodes": recipe.get("nodes", int),
        "starts": _starts(recipe),
        **_larger(path, recipe),
        "predicted_gib": round(memory.peak / 2**30, 1),
        "of_it_states_gib": round(memory.states / 2**30, 1),
        "compared": compared,
        "differences": differences,
        "without_effect": len(imported.done.left_out),
    }


def _starts(recipe: Recipe) -> bool:
    """Return whether a run begins on its GPU, by the product's own check of its memory."""
    try:
        check_prediction(recipe)
    except PrimusError:
        return False
    return True


def _larger(path: Path, recipe: Recipe) -> dict[str, Any]:
    """Return what exceeds the GPU on the least nodes, and the least change with which it
    starts.

    A file has no number of nodes: whoever starts it chooses. The changes are tried in this order:
    more nodes; more nodes with as many sequences for each; these with all layers recomputed; with a
    micro batch of 1, too; with pipeline stages or more expert parallelism, too.
    """
    if _starts(recipe):
        return {}
    keys = recipe.knows.keys
    total = gpu_bytes(recipe.gpu)
    assert total is not None
    part = "activations"
    if predict(recipe).states > total:
        part = "states"
    recomputed = "activation_checkpoint.mode=full"
    if recipe.backend == "megatron":
        recomputed = (
            "model.recompute_granularity=full model.recompute_method=block "
            f"model.recompute_num_layers={recipe.architecture.layers}"
        )
    small = f"{recomputed} {keys['local_batch']}=1"
    changes = ["", recomputed, small]
    changes += [f"{_stages(recipe, number)} {small}" for number in (4, 8, 16)]
    if recipe.architecture.moe.experts:
        changes += [f"ep={number} {small}" for number in (16, 64)]
    first = recipe.get("nodes", int)
    every = [first * 2**power for power in range(7) if first * 2**power <= _MOST_NODES]
    tried = [(nodes, "", False) for nodes in every]
    tried += [(nodes, change, True) for change in changes for nodes in every[::3]]
    for nodes, change, in_proportion in tried:
        words = change.split()
        if in_proportion:
            words.append(f"{keys['global_batch']}={recipe.global_batch * nodes // first}")
        if _starts_with(path, recipe.gpu, nodes, words):
            return {"exceeds": part, "starts_with": " ".join([f"nodes={nodes}", *words])}
    return {"exceeds": part, "starts_with": None}


def _stages(recipe: Recipe, number: int) -> str:
    """Return the words for a ``number`` of pipeline stages, of which the last may be smaller."""
    layers = recipe.architecture.layers
    if recipe.backend != "megatron" or layers % number == 0:
        return f"pp={number}"
    last = layers - (number - 1) * math.ceil(layers / number)
    return f"pp={number} model.num_layers_in_last_pipeline_stage={last}"


def _starts_with(path: Path, gpu: str, nodes: int, words: list[str]) -> bool:
    try:
        return _starts(resolve(str(path), words, Choices(gpu=gpu, nodes=nodes)))
    except PrimusError:
        # Its batch or its layers do not divide so.
        return False


def _page(checkout: Path, document: str) -> dict[str, Any]:
    """Compare the commands of a page, in a checkout of its time, with the page's own figures."""
    rows = yaml.safe_load(_COMMANDS.read_text(encoding="utf-8"))
    os.environ["PRIMUS_ROOT"] = str(checkout)
    equal = 0
    files: set[str] = set()
    differences = []
    for row in rows:
        words = shlex.split(row.get("spelt", row["command"]).replace("\\\n", " "), comments=True)
        given = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        given |= row.get("given", {})
        exp = checkout / given.get("EXP", "")
        if row["document"] != document or "resolves" not in row or not exp.is_file():
            continue
        start = next(place for place, word in enumerate(words) if word.endswith(".sh"))
        files.add(given["EXP"])
        for gpu in row["gpus"]:
            request = requested(words[start], words[start + 1 :], {**given, "EXP": str(exp)})
            choices = replace(request.choices, gpu=gpu)
            recipe = resolve(request.recipe, request.words, choices)
            batch = {"local": recipe.local_batch, "global": recipe.global_batch}
            if batch == {key: row["resolves"][key] for key in batch}:
                equal += 1
            else:
                differences.append(f"line {row['line']}, {gpu}: {batch}")
    return {"commands_equal": equal, "differences": differences, "files": sorted(files)}


def _totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    refused = [row for row in rows if row["status"] == "refused"]
    trainable = [row for row in rows if row["status"] == "trainable"]
    large = [row for row in trainable if not row["starts"]]
    return {
        "files": len(rows),
        "trainable": len(trainable),
        "refused": len(refused),
        "misleading_hints": sum(row["misleading"] for row in refused),
        "refused_for_memory_on_their_least_nodes": len(large),
        "of_these_by_states": sum(row["exceeds"] == "states" for row in large),
        "of_these_with_more_nodes_they_start": sum(_needs_nodes_alone(row) for row in large),
        "of_these_with_no_change_tried_they_start": sum(not row["starts_with"] for row in large),
        "keys_compared": sum(row["compared"] for row in trainable),
        "keys_different": sum(len(row["differences"]) for row in trainable),
        "reasons": dict(Counter(row["reason"] for row in refused).most_common()),
    }


def _needs_nodes_alone(row: Mapping[str, Any]) -> bool:
    words = (row["starts_with"] or "").split()
    return bool(words) and all("nodes=" in word or "global_batch" in word for word in words)


def _loaded(file: Path) -> dict[str, Any]:
    tree = _filled(yaml.safe_load(file.read_text(encoding="utf-8")))
    extended = tree.pop("extends", [])
    if isinstance(extended, str):
        extended = [extended]
    merged: dict[str, Any] = {}
    for name in extended:
        merged = _over(merged, _loaded(file.parent / name))
    return _over(merged, tree)


def _filled(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _filled(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_filled(value) for value in tree]
    if not isinstance(tree, str) or "${" not in tree:
        return tree
    return _typed(_VARIABLE.sub(lambda match: os.environ.get(match[1], match[2] or ""), tree))


def _typed(text: str) -> str | bool | int | float:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    return text


def _over(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = deepcopy(dict(base))
    for key, value in more.items():
        if isinstance(merged.get(key), dict) and isinstance(value, dict):
            merged[key] = _over(merged[key], value)
        else:
            merged[key] = value
    return merged


def _merged(path: Path, checkout: Path) -> dict[str, Any]:
    """Return what Primus gives its trainer."""
    module = _loaded(path)["modules"]["pre_trainer"]
    presets = checkout / "primus" / "configs"
    framework = module["framework"]
    model = module["model"]
    trainer = _loaded(presets / "modules" / framework / module["config"])
    sizes = _loaded(presets / "models" / framework / model)
    return _over(_over(trainer, sizes), module.get("overrides") or {})


def _compared(path: Path, checkout: Path, recipe: Recipe) -> tuple[list[str], int]:
    """Return each difference in words, and how many keys were compared."""
    merged = _merged(path, checkout)
    expected = _of_titan(merged) if recipe.backend == "torchtitan" else _of_megatron(merged)
    values = {**_USUAL, **{key: one.value for key, one in recipe.settings.items()}}
    if recipe.backend == "torchtitan":
        # What a recipe does not set has torchtitan's own default.
        rules = backend_rules("torchtitan")
        values = {**{f"torchtitan.{key}": rule.default for key, rule in rules.items()}, **values}
    values["nodes × batch"] = recipe.global_batch
    differences = []
    for key, value in expected.items():
        here = values.get(key)
        if here is None and key.startswith(("megatron.model.", "torchtitan.")):
            here = 1 if key.endswith(("_size", "_degree")) else here
        if here != value and not (isinstance(value, float) and here == float(value)):
            differences.append(f"{key}: {here!r}, and Primus has {value!r}")
    return differences, len(expected)


def _of_megatron(merged: Mapping[str, Any]) -> dict[str, Any]:
    names = dict(_MEGATRON)
    if merged.get("num_experts"):
        names |= _EXPERTS
    if merged.get("multi_latent_attention"):
        names |= _LATENT
    expected = {key: merged[name] for name, key in names.items() if merged.get(name) is not None}
    if not merged.get("moe_router_enable_expert_bias"):
        expected.pop("megatron.model.moe_router_bias_update_rate", None)
    heads = merged["num_attention_heads"]
    groups = merged["num_query_groups"] if merged.get("group_query_attention") else heads
    expected["model.kv_heads"] = groups
    expected["model.tied_embeddings"] = not merged.get("untie_embeddings_and_output_weights")
    if not merged.get("multi_latent_attention"):
        expected["model.qk_norm"] = bool(merged.get("qk_layernorm"))
        scaled = bool(merged.get("use_rope_scaling"))
        expected["model.rope_scaling.kind"] = "llama3" if scaled else "none"
    if merged.get("fp8"):
        expected["precision"] = "mxfp8" if merged["fp8_recipe"] == "mxfp8" else "fp8"
        expected["megatron.model.fp8"] = merged["fp8"]
        expected["megatron.model.fp8_recipe"] = merged["fp8_recipe"]
    else:
        expected["precision"] = "bf16"
    if merged.get("recompute_granularity") and merged.get("recompute_num_layers"):
        for name in ("granularity", "method", "num_layers"):
            expected[f"megatron.model.recompute_{name}"] = merged[f"recompute_{name}"]
    stages = merged.get("num_virtual_stages_per_pipeline_rank") or merged.get(
        "virtual_pipeline_model_parallel_size"
    )
    if stages:
        expected["megatron.model.virtual_pipeline_model_parallel_size"] = stages
    if merged.get("use_torch_fsdp2"):
        expected["megatron.ddp.use_distributed_optimizer"] = False
    elif merged.get("use_distributed_optimizer") is not None:
        key = "megatron.ddp.use_distributed_optimizer"
        expected[key] = merged["use_distributed_optimizer"]
    expected["nodes × batch"] = merged["global_batch_size"]
    return expected


def _of_titan(merged: Mapping[str, Any]) -> dict[str, Any]:
    expected: dict[str, Any] = {}
    for part in _TITAN:
        for name, value in merged.get(part, {}).items():
            key = f"{part}.{name}"
            if value is not None and key not in _TITAN_ELSEWHERE:
                expected[f"torchtitan.{key}"] = value
    steps = merged["training"]["steps"]
    key = "torchtitan.lr_scheduler.warmup_steps"
    # torchtitan itself ends the warm-up with the run.
    expected[key] = min(steps, expected[key])
    converters = merged["model"].get("converters") or []
    eight = any("float8" in name for name in converters)
    expected["precision"] = "fp8" if eight else "bf16"
    return expected


def _trained(path: Path, word: str) -> dict[str, Any]:
    """Train the proxy of a file with one more ``word``, and return the verdict and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/run"
        command = [sys.executable, "-m", "primus_images.cli.main", "train", str(path)]
        command += ["--proxy", "--gpu", "cpu", "--output", output, word]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "file": path.name,
        "exit_code": done.returncode,
        "says": _said(done.stdout + done.stderr),
    }


def _said(output: str) -> list[str]:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("✓", "✗", "judged", "failed"))]
    return said[-2:]


if __name__ == "__main__":
    sys.exit(main())
