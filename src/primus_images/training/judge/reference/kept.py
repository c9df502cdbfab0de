"""The checkpoints that a run kept: another run may begin with any of them."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus_images.recipes.architecture import Architecture
from primus_images.training.judge.reference.names import BIAS, Job, Tensors, to_canonical
from primus_images.training.judge.reference.parameters import is_trained
from primus_images.training.judge.reference.rounding import LIMITS
from primus_images.training.judge.reference.update import AdamW

_MOMENT = re.compile(r"optimizer\.state\.(.+)\.(exp_avg|exp_avg_sq)")
# What else a checkpoint of torchtitan has.
_OTHER_STATES = ("optimizer.", "lr_scheduler.", "dataloader", "train_state")
# Megatron names the place of a rank in the model, and its wrappers.
_PARAMETER = re.compile(r"(weight\d*|bias)$")
_PLACE = re.compile(r"tp0\.pp0(\.ep0)?\.0\.(module\.)*")


def folder_of(output: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step``."""
    return output / "checkpoint" / f"step-{step}"


def missing(output: Path, job: Job, last: int, best: int | None) -> list[str]:
    """Return which checkpoints the run must have left and did not.

    These are that of its ``last`` step, if it saves any, and that of its ``best`` evaluation.
    """
    findings = []
    config = job["config"]
    interval = int(config.get("training.checkpoint_interval", 0))
    if job["backend"] == "torchtitan" and config.get("checkpoint.enable"):
        interval = int(config.get("checkpoint.interval", 500))
    if interval and last == job["last_step"] and not folder_of(output, last).is_dir():
        findings.append(f"step {last}, the last one, has no checkpoint")
    if best is not None and not folder_of(output, best).is_dir():
        findings.append(f"step {best}, whose evaluation is the best, has no checkpoint")
    return findings


def differences(
    folder: Path, job: Job, sizes: Architecture, weights: Tensors, optimizer: AdamW
) -> list[str]:
    """Return how the checkpoint in ``folder`` differs from ``weights`` and from the moments.

    The moments of ``optimizer`` are those that the gradients of all steps until then make.
    """
    if any(folder.glob("*.safetensors")):
        return _other_model(folder, sizes, weights)
    stored = _tensors(folder)
    if job["backend"] == "megatron" and not _on_one_rank(stored):
        # The pieces of ranks that share layers or experts are joined by nothing here.
        return []
    saved = to_canonical(job["backend"], sizes, _weights(job, stored))
    findings: list[str] = []
    for name, tensor in weights.items():
        if name not in saved and not is_trained(job, name):
            # Frozen weights are read from their source again.
            continue
        findings += _difference(job, name, saved.get(name), tensor)
    for key, expected in (("exp_avg", optimizer.first), ("exp_avg_sq", optimizer.second)):
        moments = to_canonical(job["backend"], sizes, _moments(stored, key))
        findings += _other_moments(key, moments, expected)
    return [f"{folder.name}: {finding}" for finding in findings]


def _other_model(folder: Path, sizes: Architecture, weights: Tensors) -> list[str]:
    """Return how the files differ that torchtitan wrote by transformers' names."""
    from safetensors.torch import load_file

    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors[f"model.{name}"] = tensor
    findings = []
    saved = to_canonical("finetune", sizes, tensors)
    for name, expected in weights.items():
        tensor = saved.get(name, torch.empty(0))
        if not name.endswith(BIAS) and not torch.equal(tensor, expected.to(tensor.dtype)):
            findings.append(f"{folder.name}: {name} is not what transformers needs")
    return findings


def _tensors(folder: Path) -> dict[str, Tensor]:
    # Most runs keep no checkpoint, and importing this takes longer than reading one.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(folder)
    tensors = {}
    for name, metadata in reader.read_metadata().state_dict_metadata.items():
        if isinstance(metadata, TensorStorageMetadata):
            tensors[name] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _on_one_rank(stored: Mapping[str, Tensor]) -> bool:
    """Return whether one rank of Megatron has the whole model."""
    names = [name.removeprefix("model.") for name in stored if name.startswith("model.")]
    return all(_PLACE.match(name) for name in names)


def _weights(job: Job, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in stored.items():
        if job["backend"] == "torchtitan":
            if not name.startswith(_OTHER_STATES):
                weights[name] = tensor
        elif name.startswith("model."):
            inner = name.removeprefix("model.")
            if job["backend"] == "megatron":
                inner = _PLACE.sub("", inner)
                if not _PARAMETER.search(inner):
                    continue
            weights[inner] = tensor
    return weights


def _moments(stored: Mapping[str, Tensor], key: str) -> dict[str, Tensor]:
    moments = {}
    for name, tensor in stored.items():
        match = _MOMENT.fullmatch(name)
        if match and match[2] == key:
            moments[match[1]] = tensor
    return moments


def _difference(job: Job, name: str, saved: Tensor | None, expected: Tensor) -> Iterator[str]:
    if saved is None:
        yield f"{name} is missing"
        return
    if saved.dtype != expected.dtype and (job["backend"] != "megatron" or name.endswith(BIAS)):
        # Megatron saves its weights in bfloat16, and the optimizer's of float32 beside them.
        yield f"{name} is {saved.dtype}, and was trained in {expected.dtype}"
    if not torch.equal(saved, expected.to(saved.dtype)):
        yield f"{name} is not that of the step"


def _other_moments(key: str, saved: Tensors, expected: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in saved.items():
        moment: Any = expected.get(name)
        if moment is None or tensor.dtype != torch.float32:
            continue
        gap = float((tensor.double() - moment).norm())
        if not gap <= LIMITS["saved"]["moments"] * float(moment.norm()):
            yield f"{key} of {name} is not that of the step"
