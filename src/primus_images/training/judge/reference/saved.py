"""The random states of a run's checkpoint, and its exported weights.

transformers loads these as a user would.
"""

import json
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from primus_images.files import json_if_readable
from primus_images.recipes.architecture import Architecture
from primus_images.recipes.family import described, family
from primus_images.training.judge.reference import data
from primus_images.training.judge.reference.model import Model
from primus_images.training.judge.reference.models import scale_of
from primus_images.training.judge.reference.names import Job, Tensors, to_canonical
from primus_images.training.judge.reference.parameters import adapters_of
from primus_images.training.judge.reference.rounding import LIMITS

_LIMITS = LIMITS["saved"]


def differences(output: Path, job: dict[str, Any], sizes: Architecture, last: Tensors) -> list[str]:
    """Return how the files in ``output`` differ from what was trained.

    ``last`` are the run's last weights.
    """
    findings = []
    witness = output / "witness"
    for file in sorted(witness.glob("random-*.json")):
        if not json_if_readable(file).get("kept"):
            _, _, rank = file.stem.partition("-")
            findings.append(f"rank {rank} has other random states after loading its checkpoint")
    config = job["config"]
    merged = config.get("export") == "merged"
    if not (merged or config.get("save_weights")):
        return findings
    folder = output / "weights"
    tokenizer = Path(job["assets"]["tokenizer"])
    initial = Path(str(config.get("weights")))
    findings += _other_tokens(folder, tokenizer, initial)
    if job["mode"] == "lora" and not merged:
        return findings + _other_adapters(folder, job, sizes, last)
    tolerance = 0.0
    if job["mode"] == "lora":
        last = _merged(last, scale_of(job))
        tolerance = 1e-6
    return findings + _other_model(folder, job, sizes, last, tolerance)


def _merged(weights: Tensors, scale: float) -> Tensors:
    whole = {name: tensor.double() for name, tensor in weights.items() if ".lora_" not in name}
    for name, down in weights.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix("lora_A.weight")
            up = weights[layer + "lora_B.weight"]
            product = up.double() @ down.double()
            whole[layer + "weight"] += scale * product
    return whole


def _other_model(
    folder: Path, job: dict[str, Any], sizes: Architecture, last: Tensors, tolerance: float
) -> list[str]:
    from transformers import AutoModelForCausalLM

    findings = list(_other_sizes(folder / "config.json", sizes))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation="eager"
        )
    except (OSError, RuntimeError, ValueError) as error:
        return [*findings, f"transformers cannot load {folder.name}: {error}"]
    tensors = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensors[f"model.{name}"] = tensor.detach()
    saved = to_canonical("finetune", sizes, tensors)
    findings += _other_weights(folder, saved, last, tolerance)
    batch = data.samples(job).batch(1, 0)
    tokens = batch["inputs"][:1]
    weights = {name: tensor.float() for name, tensor in saved.items()}
    with torch.no_grad():
        theirs = model.float()(tokens).logits
        ours, _ = Model(sizes).prediction(weights, {"inputs": tokens})
    difference = (theirs - ours).norm()
    gap = float(difference / ours.norm())
    if not gap <= _LIMITS["logits"]:
        findings.append(
            f"{folder.name}, loaded with transformers, gives other logits: {gap:.1%} apart"
        )
    return findings


def _other_sizes(file: Path, sizes: Architecture) -> Iterator[str]:
    config = json.loads(file.read_text(encoding="utf-8"))
    # Programs before transformers 5 read rope_theta and rope_scaling.
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    findings: list[str] = []
    usual_heads = sizes.heads * sizes.head_size == sizes.hidden_size
    of_family = family(sizes.family)
    for settings in (config, older):
        for key, name, value in described(of_family, settings, file):
            size = attrgetter(key)(sizes)
            if key == "head_dim" and usual_heads:
                # A file leaves out the size of a head if it follows from others.
                size = 0
            if value != size:
                findings.append(f"{file.name}: {name} is {value}, not {size}")
    yield from dict.fromkeys(findings)


def _other_adapters(folder: Path, job: Job, sizes: Architecture, last: Tensors) -> list[str]:
    from safetensors.torch import load_file

    adapters = {name: tensor for name, tensor in last.items() if ".lora_" in name}
    stored = load_file(folder / "adapter_model.safetensors")
    saved = to_canonical("finetune", sizes, stored)
    findings = _other_weights(folder, saved, adapters, 0.0)
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["target_modules"] = sorted(settings["target_modules"])
    # PEFT writes an empty list for a mixture of experts.
    settings["target_parameters"] = settings.get("target_parameters") or None
    for key, expected in _lora_settings(job, sizes).items():
        value = settings.get(key)
        if key not in _LIMITS["free"] and value != expected:
            findings.append(f"{file.name}: {key} is {value}, not {expected}")
    return findings


def _lora_settings(job: Job, sizes: Architecture) -> dict[str, Any]:
    from peft import LoraConfig

    config = job["config"]
    targets = {name.split(".")[-3] for name in adapters_of(job, sizes)}
    expected = LoraConfig(
        r=int(config.get("lora.rank", 16)),
        lora_alpha=float(config.get("lora.alpha", 32.0)),
        target_modules=sorted(targets),
    )
    text = json.dumps(expected.to_dict(), default=sorted)
    settings: dict[str, Any] = json.loads(text)
    return settings


def _other_weights(folder: Path, saved: Tensors, expected: Tensors, tolerance: float) -> list[str]:
    findings = []
    for name, tensor in expected.items():
        value = saved.get(name)
        same = False
        if value is not None:
            trained = tensor.to(value.dtype)
            same = torch.allclose(value, trained, rtol=0, atol=tolerance)
        if not same:
            findings.append(f"{name} in {folder.name} is not the trained one")
    return findings


def _other_tokens(folder: Path, tokenizer: Path, initial: Path) -> Iterator[str]:
    if not tokenizer.is_dir():
        return
    for file in sorted(folder.glob("tokenizer*")):
        source = tokenizer / file.name
        if source.is_file() and file.read_bytes() != source.read_bytes():
            yield f"{file.name} is not the tokenizer's"
    marks = data.marks(tokenizer)
    for name in ("config.json", "generation_config.json"):
        config = json_if_readable(folder / name)
        before = json_if_readable(initial / name)
        for key, number in marks.items():
            if key not in config:
                continue
            value = config[key]
            if value not in (number, before.get(key)):
                yield f"{name}: {key} is {value}, not {number}"
