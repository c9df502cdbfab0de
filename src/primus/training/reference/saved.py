"""The random states of a run's checkpoint, and its exported weights, which transformers loads as a user would."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from primus.recipes.architecture import Architecture
from primus.training.reference import data
from primus.training.reference.model import Model
from primus.training.reference.models import scale_of
from primus.training.reference.names import to_canonical
from primus.training.reference.parameters import adapter_shapes

# Hugging Face's configuration key → the size of the recipe that it must equal.
_SIZES = {
    "hidden_size": "hidden_size", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads", "vocab_size": "vocab_size", "rms_norm_eps": "norm_eps",
    "intermediate_size": "ffn_size", "tie_word_embeddings": "tied_embeddings", "rope_theta": "rope_theta",
}  # fmt: skip
# The same for the scaling of rotary positions.
_SCALING = {
    "factor": "factor", "original_max_position_embeddings": "original_max_position",
    "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
}  # fmt: skip
# Settings of adapters that name where they come from, or concern training only.
_FREE = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "init_lora_weights", "lora_dropout",
    "peft_type", "peft_version", "revision", "task_type",
}  # fmt: skip
# How far logits may be apart. Measured: 4e-7.
_LOGITS = 1e-4


def differences(
    output: Path, job: Mapping[str, Any], sizes: Architecture, last: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return how the files in ``output`` differ from what was trained; ``last`` are the run's last weights."""
    findings = [
        f"rank {file.stem.partition('-')[2]} has other random states after loading its checkpoint"
        for file in sorted((output / "witness").glob("random-*.json"))
        if not json.loads(file.read_text(encoding="utf-8"))["kept"]
    ]
    if job["mode"] == "lora" and job["config"].get("export") == "merged":
        job, last = {**job, "mode": "full"}, _merged(last, scale_of(job))
        return findings + _exported(output / "weights", job, sizes, last, tolerance=1e-6)
    if job["config"].get("save_weights") or job["config"].get("export") == "merged":
        findings += _exported(output / "weights", job, sizes, last)
    return findings


def _merged(weights: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    whole = {name: tensor.double() for name, tensor in weights.items() if ".lora_" not in name}
    for name, down in weights.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix("lora_A.weight")
            whole[layer + "weight"] += scale * (weights[layer + "lora_B.weight"].double() @ down.double())
    return whole


def _exported(
    folder: Path,
    job: Mapping[str, Any],
    sizes: Architecture,
    last: Mapping[str, torch.Tensor],
    *,
    tolerance: float = 0.0,
) -> list[str]:
    from safetensors.torch import load_file

    saved: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        saved |= {f"model.{_experts(name)}": tensor for name, tensor in load_file(file).items()}
    saved = to_canonical(job["backend"], sizes, saved)
    adapters = job["mode"] == "lora"
    expected = {name: tensor for name, tensor in last.items() if not adapters or ".lora_" in name}
    findings = [f"{folder.name} lacks {name}" for name in expected if name not in saved]
    findings += [
        f"{name} in {folder.name} is not the trained one"
        for name, tensor in expected.items()
        if name in saved and not torch.allclose(saved[name], tensor.to(saved[name].dtype), rtol=0, atol=tolerance)
    ]
    findings += _other_tokens(folder, Path(job["assets"]["tokenizer"]), Path(str(job["config"].get("weights"))))
    if not adapters and not findings:
        findings += _other_logits(folder, job, sizes, saved)
    file = folder / ("adapter_config.json" if adapters else "config.json")
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= config.get("rope_parameters") or {}
    if adapters:
        config["target_modules"] = sorted(config["target_modules"])
    return findings + [
        f"{file.name}: {key} is {config.get(key)}, not {value}"
        for key, value in _described(job, sizes).items()
        if config.get(key) != value
    ]


def _described(job: Mapping[str, Any], sizes: Architecture) -> dict[str, Any]:
    if job["mode"] == "lora":
        config = job["config"]
        rank = int(config.get("lora.rank", 16))
        adapted = adapter_shapes(sizes, rank, config.get("lora.targets") or ())
        return _adapter_defaults() | {
            "r": rank, "lora_alpha": float(config.get("lora.alpha", 32.0)), "use_rslora": False, "use_dora": False,
            "rank_pattern": {}, "alpha_pattern": {}, "target_modules": sorted({n.split(".")[-3] for n in adapted}),
        }  # fmt: skip
    settings = {key: getattr(sizes, name) for key, name in _SIZES.items()}
    if sizes.moe.experts:
        settings["intermediate_size"] = sizes.moe.ffn_size or sizes.ffn_size
    scaling = sizes.rope_scaling
    if scaling.kind == "llama3":
        settings |= {key: getattr(scaling, name) for key, name in _SCALING.items()}
    if scaling.kind in ("none", "llama3"):
        settings["rope_type"] = "default" if scaling.kind == "none" else scaling.kind
    return settings


def _adapter_defaults() -> dict[str, Any]:
    from peft import LoraConfig

    defaults: dict[str, Any] = json.loads(json.dumps(LoraConfig().to_dict(), default=sorted))
    return {key: value for key, value in defaults.items() if key not in _FREE}


def _other_tokens(folder: Path, tokenizer: Path, initial: Path) -> list[str]:
    if not tokenizer.is_dir():
        return []
    findings = [
        f"{file.name} is not the tokenizer's"
        for file in sorted(folder.glob("tokenizer*"))
        if (tokenizer / file.name).is_file() and file.read_bytes() != (tokenizer / file.name).read_bytes()
    ]
    marks = data.marks(tokenizer)
    for file in (folder / "config.json", folder / "generation_config.json"):
        config, before = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            for path in (file, initial / file.name)
        )
        findings += [
            f"{file.name}: {key} is {config[key]}, not {number}"
            for key, number in marks.items()
            if key in config and config[key] not in (number, before.get(key))
        ]
    return findings


def _other_logits(
    folder: Path, job: Mapping[str, Any], sizes: Architecture, weights: Mapping[str, torch.Tensor]
) -> list[str]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = data.samples(dict(job)).batch(1, 0)["inputs"][:1]
    with torch.no_grad():
        theirs = model(tokens).logits
        ours, _ = Model(sizes).prediction(
            {name: tensor.float() for name, tensor in weights.items()}, {"inputs": tokens}
        )
    gap = float((theirs - ours).norm() / ours.norm())
    return [] if gap <= _LOGITS else [f"{folder.name}, loaded with transformers, gives other logits: {gap:.1%} apart"]


def _experts(name: str) -> str:
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(?<=\.experts\.)(\d+)\.(w[123])\.", lambda match: f"{match[1]}.{parts[match[2]]}.", name)
