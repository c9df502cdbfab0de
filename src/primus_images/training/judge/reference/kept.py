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
    if interval and last == job["last_step"]:
        folder = folder_of(output, last)
        if not folder.is_dir():
            findings.append(f"step {last}, the last one, has no checkpoint")
    if best is not None:
        folder = folder_of(output, best)
        if not folder.is_dir():
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
    backend = job["backend"]
    stored_weights = _weights(job, stored)
    saved = to_canonical(backend, sizes, stored_weights)
    findings: list[str] = []
    for name, tensor in weights.items():
        if name not in saved and not is_trained(job, name):
            # Frozen weights are read from their source again.
            continue
        findings += _difference(job, name, saved.get(name), tensor)
    every_moment = {"exp_avg": optimizer.first, "exp_avg_sq": optimizer.second}
    for key, expected in every_moment.items():
        stored_moments = _moments(stored, key)
        moments = to_canonical(backend, sizes, stored_moments)
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
        if name.endswith(BIAS):
            continue
        tensor = saved.get(name, torch.empty(0))
        rounded = expected.to(tensor.dtype)
        if not torch.equal(tensor, rounded):
            findings.append(f"{folder.name}: {name} is not what transformers needs")
    return findings


def _tensors(folder: Path) -> dict[str, Tensor]:
    # Most runs keep no checkpoint, and importing this takes longer than reading one.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(folder)
    tensors = {}
    stored = reader.read_metadata().state_dict_metadata
    for name, metadata in stored.items():
        if isinstance(metadata, TensorStorageMetadata):
            dtype = metadata.properties.dtype
            tensors[name] = torch.empty(metadata.size, dtype=dtype)
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _on_one_rank(stored: Mapping[str, Tensor]) -> bool:
    """Return whether one rank of Megatron has the whole model."""
    for name in stored:
        inner = name.removeprefix("model.")
        if inner != name and not _PLACE.match(inner):
            return False
    return True


def _weights(job: Job, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = {}
    backend = job["backend"]
    for name, tensor in stored.items():
        if backend == "torchtitan":
            if not name.startswith(_OTHER_STATES):
                weights[name] = tensor
        elif name.startswith("model."):
            inner = name.removeprefix("model.")
            if backend == "megatron":
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
    # Megatron saves its weights in bfloat16, and the optimizer's of float32 beside them.
    may_differ = job["backend"] == "megatron" and not name.endswith(BIAS)
    if saved.dtype != expected.dtype and not may_differ:
        yield f"{name} is {saved.dtype}, and was trained in {expected.dtype}"
    rounded = expected.to(saved.dtype)
    if not torch.equal(saved, rounded):
        yield f"{name} is not that of the step"


def _other_moments(key: str, saved: Tensors, expected: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in saved.items():
        moment: Any = expected.get(name)
        if moment is None or tensor.dtype != torch.float32:
            continue
        gap = float((tensor.double() - moment).norm())
        length = float(moment.norm())
        if not gap <= LIMITS["saved"]["moments"] * length:
            yield f"{key} of {name} is not that of the step"
