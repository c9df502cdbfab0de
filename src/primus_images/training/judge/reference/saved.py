"""The random states of a run's checkpoint, and its exported weights, which transformers loads as a
user would.
"""

import json
from collections.abc import Iterator, Mapping
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
from primus_images.training.judge.reference.names import Tensors, to_canonical
from primus_images.training.judge.reference.parameters import adapter_shapes
from primus_images.training.judge.reference.rounding import LIMITS

_LIMITS = LIMITS["saved"]


def differences(output: Path, job: dict[str, Any], sizes: Architecture, last: Tensors) -> list[str]:
    """Return how the files in ``output`` differ from what was trained; ``last`` are the run's last
    weights.
    """
    findings = [
        f"rank {file.stem.partition('-')[2]} has other random states after loading its checkpoint"
        for file in sorted((output / "witness").glob("random-*.json"))
        if not json.loads(file.read_text(encoding="utf-8"))["kept"]
    ]
    folder = output / "weights"
    config = job["config"]
    merged = config.get("export") == "merged"
    if not (merged or config.get("save_weights")):
        return findings
    initial = Path(str(config.get("weights")))
    findings += _other_tokens(folder, Path(job["assets"]["tokenizer"]), initial)
    if job["mode"] != "lora":
        return findings + _other_model(folder, job, sizes, last, tolerance=0.0)
    if merged:
        return findings + _other_model(
            folder, job, sizes, _merged(last, scale_of(job)), tolerance=1e-6
        )
    return findings + _other_adapters(folder, job, sizes, last)


def _merged(weights: Tensors, scale: float) -> Tensors:
    whole = {name: tensor.double() for name, tensor in weights.items() if ".lora_" not in name}
    for name, down in weights.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix("lora_A.weight")
            whole[layer + "weight"] += scale * (
                weights[layer + "lora_B.weight"].double() @ down.double()
            )
    return whole


def _other_model(
    folder: Path, job: dict[str, Any], sizes: Architecture, last: Tensors, *, tolerance: float
) -> list[str]:
    from transformers import AutoModelForCausalLM

    file = folder / "config.json"
    # A file leaves out the size of a head if it follows from others.
    usual = sizes.heads * sizes.head_size == sizes.hidden_size
    findings = []
    for key, name, value in described(
        family(sizes.family), json.loads(file.read_text(encoding="utf-8")), file
    ):
        if value != (size := 0 if key == "head_dim" and usual else attrgetter(key)(sizes)):
            findings.append(f"{file.name}: {name} is {value}, not {size}")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation="eager"
        )
    except (OSError, RuntimeError, ValueError) as error:
        return [*findings, f"transformers cannot load {folder.name}: {error}"]
    tensors = (*model.named_parameters(), *model.named_buffers())
    saved = to_canonical(
        "finetune", sizes, {f"model.{name}": tensor.detach() for name, tensor in tensors}
    )
    findings += _other_weights(folder, saved, last, tolerance)
    tokens = data.samples(job).batch(1, 0)["inputs"][:1]
    with torch.no_grad():
        theirs = model.float()(tokens).logits
        ours, _ = Model(sizes).prediction(
            {n: t.float() for n, t in saved.items()}, {"inputs": tokens}
        )
    gap = float((theirs - ours).norm() / ours.norm())
    if not gap <= _LIMITS["logits"]:
        findings.append(
            f"{folder.name}, loaded with transformers, gives other logits: {gap:.1%} apart"
        )
    return findings


def _other_adapters(
    folder: Path, job: Mapping[str, Any], sizes: Architecture, last: Tensors
) -> list[str]:
    from peft import LoraConfig
    from safetensors.torch import load_file

    config = job["config"]
    adapters = {name: tensor for name, tensor in last.items() if ".lora_" in name}
    saved = load_file(folder / "adapter_model.safetensors")
    findings = _other_weights(folder, to_canonical("finetune", sizes, saved), adapters, 0.0)
    rank = int(config.get("lora.rank", 16))
    targets = {
        name.split(".")[-3]
        for name in adapter_shapes(sizes, rank, config.get("lora.targets") or ())
    }
    expected = LoraConfig(
        r=rank, lora_alpha=float(config.get("lora.alpha", 32.0)), target_modules=sorted(targets)
    )
    file = folder / "adapter_config.json"
    seen = json.loads(file.read_text(encoding="utf-8"))
    seen["target_modules"] = sorted(seen["target_modules"])
    for key, value in json.loads(json.dumps(expected.to_dict(), default=sorted)).items():
        if key not in _LIMITS["free"] and seen.get(key) != value:
            findings.append(f"{file.name}: {key} is {seen.get(key)}, not {value}")
    return findings


def _other_weights(folder: Path, saved: Tensors, expected: Tensors, tolerance: float) -> list[str]:
    return [
        f"{name} in {folder.name} is not the trained one"
        for name, tensor in expected.items()
        if (seen := saved.get(name)) is None
        or not torch.allclose(seen, tensor.to(seen.dtype), rtol=0, atol=tolerance)
    ]


def _other_tokens(folder: Path, tokenizer: Path, initial: Path) -> Iterator[str]:
    if not tokenizer.is_dir():
        return
    for file in sorted(folder.glob("tokenizer*")):
        if (source := tokenizer / file.name).is_file() and file.read_bytes() != source.read_bytes():
            yield f"{file.name} is not the tokenizer's"
    for name in ("config.json", "generation_config.json"):
        config, before = (json_if_readable(where / name) for where in (folder, initial))
        for key, number in data.marks(tokenizer).items():
            if key in config and config[key] not in (number, before.get(key)):
                yield f"{name}: {key} is {config[key]}, not {number}"
