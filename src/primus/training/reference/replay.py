"""Repeat a run step by step, each from the run's own weights, and write down how far the two are apart.

Every step starts from the weights that the run had before it, so rounding does not add up and each step is judged by
itself: its tokens, its loss, its gradients, its learning rate, its update.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from primus.recipes.architecture import Architecture, RopeScaling, rebuilt
from primus.training.reference import data, update
from primus.training.reference.model import Dialect, Model, shapes
from primus.training.reference.names import UnknownWeight, to_canonical

__all__ = ["replay"]

Tensors = dict[str, torch.Tensor]
_BIAS = ".e_score_correction_bias"
# Weights and their updates have this many bits: what is smaller than their rounding says nothing.
_ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


def replay(output: Path) -> dict[str, Any]:
    """Compare every step of the run in ``output`` with the reference; :mod:`primus.training.proof` reads the result."""
    began = time.monotonic()
    job = json.loads((output / "job.json").read_text(encoding="utf-8"))
    folder = output / "witness"
    found: dict[str, Any] = {"precision": job["precision"], "steps": []}
    first, last = job["first_step"], job["last_step"]
    sizes = rebuilt(job["model"])
    try:
        before = _weights(job, sizes, folder, first - 1)
        found["parameters"] = _parameters(job, sizes, before)
        if found["parameters"]["missing"] or found["parameters"]["shapes"]:
            # Another model: there is nothing to repeat.
            return found
        replayed = _Replay(job, sizes, folder)
        for step in range(first, last + 1):
            after = _weights(job, sizes, folder, step)
            found["steps"].append(replayed.step(step, before, after))
            before = after
        found["moved"] = _moved(job, _weights(job, sizes, folder, first - 1), before)
    except UnknownWeight as error:
        found["problem"] = f"the run has a weight that the model has not: {error}"
    except FileNotFoundError as error:
        found["problem"] = f"the run left no {Path(str(error.filename)).name}"
    found["seconds"] = round(time.monotonic() - began, 2)
    return found


class _Replay:
    """One run's steps, in order: the optimizer's moments are carried from step to step."""

    def __init__(self, job: dict[str, Any], sizes: Architecture, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self._sizes = _as_trained(job, sizes)
        self._given = update.settings(job)
        self._optimizer = update.AdamW(self._given)
        self._samples: data.Samples = data.Stream(job) if job["backend"] == "torchtitan" else data.numbered(job)
        self._dialect = _dialect(job)

    def step(self, step: int, before: Tensors, after: Tensors) -> dict[str, Any]:
        """Figures of one step: what the run had and what the reference has."""
        different = self._batches(step)
        losses, gradients = self._gradients(step, before)
        norm = update.norm_of(gradients)
        row: dict[str, Any] = {"step": step, "data": different, "loss": losses, "grad_norm": norm}
        if self._job["precision"] != "fp32":
            row["noise"] = self._noise(step, before, losses, gradients)
        limited = update.clipped(gradients, norm, self._given.max_norm)
        row["rate"] = rate = update.rate(self._given, step)
        seen = _load(self._folder / f"update-{step}.pt")
        used = limited
        if seen is not None:
            row["rates"] = sorted(set(seen["rates"].values()))
            used = _wide(to_canonical(self._job["backend"], self._sizes, seen["gradients"]))
            row["gradient"] = _worst_gap(
                used, limited, math.sqrt(sum(float(g.square().sum()) for g in limited.values()))
            )
        row["own_gradient"] = seen is not None
        expected = self._optimizer.update(_without_bias(before), used, rate)
        row["update"] = self._update_gap(before, expected, after, judged=None if seen is not None else self._told())
        return row

    def _told(self) -> dict[str, torch.Tensor]:
        """Which elements of each weight an unknown gradient decides beyond its own rounding.

        Adam's step has the size of the rate however small the gradient is: where a gradient is rounding alone, so is
        the sign of the step. In float32 that is a thousandth of the tensor's usual gradient, in less a third of it.
        """
        exact = self._job["precision"] == "fp32"
        sizes = {name: second.sqrt() for name, second in self._optimizer.second.items()}
        usual = {name: float(size.square().mean().sqrt()) for name, size in sizes.items()}
        least = max(usual.values()) * (1e-6 if exact else 1e-3)
        share = 1e-3 if exact else 0.3
        return {name: (size > share * usual[name]) & (usual[name] > least) for name, size in sizes.items()}

    def _batches(self, step: int) -> list[str]:
        """Which micro-batches the run trained on are not those of the recipe."""
        different: list[str] = []
        shares: list[int] = []
        for file in sorted(self._folder.glob(f"batch-{step}-*.pt")):
            seen = torch.load(file, weights_only=True)
            rank = int(seen["data_rank"])
            inputs, labels = self._samples.batch(step, rank)
            for name, mine, theirs in (("inputs", inputs, seen["inputs"]), ("labels", labels, seen["labels"])):
                whole = torch.cat(theirs) if theirs else torch.empty(0)
                if whole.shape != mine.shape:
                    shapes = f"{list(whole.shape)}, not {list(mine.shape)}"
                    different.append(f"step {step}, rank {rank}: {name} have the shape {shapes}")
                elif not torch.equal(whole, mine):
                    share = float((whole != mine).float().mean())
                    different.append(f"step {step}, rank {rank}: {share:.0%} of the {name} are other tokens")
            shares.append(rank)
        ranks, parallel = self._job["world_size"], self._job["data_parallel"]
        if len(shares) != ranks:
            different.append(f"step {step}: {len(shares)} of {ranks} ranks left their batch")
        elif any(shares.count(share) != ranks // parallel for share in range(parallel)):
            different.append(
                f"step {step}: the ranks took the shares {shares} of the data, not {parallel} different ones"
            )
        return different

    def _gradients(self, step: int, weights: Tensors, model: Model | None = None) -> tuple[float, Tensors]:
        model = model or Model(self._sizes, self._dialect)
        trained = {name for name in weights if _trained(self._job, name)}
        leaves = {name: tensor.clone().requires_grad_(name in trained) for name, tensor in weights.items()}
        if self._job["mode"] == "lora":
            config = self._job["config"]
            leaves[".lora_scale"] = torch.tensor(
                float(config.get("lora.alpha", 32.0)) / float(config.get("lora.rank", 16)), dtype=torch.float64
            )
        total, ranks = 0.0, self._job["data_parallel"]
        batches = [self._samples.batch(step, rank) for rank in range(ranks)]
        terms = sum(int((labels >= 0).sum()) for _, labels in batches)
        calls = ranks * self._job["accumulation"]
        for inputs, labels in batches:
            pieces = self._job["accumulation"]
            for one, wanted in zip(inputs.chunk(pieces), labels.chunk(pieces), strict=True):
                loss, balance = model.loss(leaves, one, wanted)
                (loss / terms + balance / calls).backward()
                total += float(loss.detach())
        # An expert that no token chose has a gradient of zeros; its moments still move it.
        gradients = {
            name: torch.zeros_like(weights[name]) if leaves[name].grad is None else leaves[name].grad
            for name in trained
        }
        return total / terms, gradients

    def _noise(self, step: int, weights: Tensors, loss: float, gradients: Tensors) -> dict[str, float]:
        """How far this precision alone moves loss and gradients: the reference once more, with its rounding."""
        narrow = self._job["precision"] == "bf16"
        rounded = Model(self._sizes, self._dialect, factors=_bfloat if narrow else _EightBits.apply, between=_bfloat)
        other, moved = self._gradients(step, weights, rounded)
        norm, changed = update.norm_of(gradients), update.norm_of(moved)
        return {
            "loss": abs(other - loss) / loss,
            "grad_norm": abs(changed - norm) / norm,
            "gradient": _worst_gap(moved, gradients, norm)["gap"],
        }

    def _update_gap(
        self, before: Tensors, expected: Tensors, after: Tensors, judged: dict[str, torch.Tensor] | None
    ) -> dict[str, Any]:
        worst, at = 0.0, ""
        rounding = _ROUNDING[torch.bfloat16 if self._narrow(after) else torch.float32]
        for name, wanted in expected.items():
            told = 1.0 if judged is None or name not in judged else judged[name].to(wanted.dtype)
            change = float(((wanted - before[name]) * told).norm())
            gap = max(0.0, float(((after[name] - wanted) * told).norm()) - rounding * float(wanted.norm()))
            if not gap:
                continue
            relative = gap / change if change else math.inf
            if relative > worst:
                worst, at = relative, name
        return {"gap": min(worst, 1e9), "name": at}

    def _narrow(self, weights: Tensors) -> bool:
        """Whether the run keeps its weights in bfloat16 (they are widened here without loss)."""
        matrix = next(tensor for tensor in weights.values() if tensor.ndim > 1)
        return bool(torch.equal(matrix.bfloat16().to(matrix.dtype), matrix))


def _dialect(job: Mapping[str, Any]) -> Dialect:
    if job["backend"] == "torchtitan":
        # Its experts are balanced by a bias in the router, not by a loss.
        return Dialect(softmax_mscale=True)
    moe = job["model"]["moe"]
    if job["backend"] == "megatron" and moe["experts"]:
        kind = str(job["config"].get("model.moe_router_load_balancing_type", "aux_loss"))
        return Dialect(
            balance={"seq_aux_loss": "sequence", "aux_loss": "batch"}.get(kind, "none"),
            group_best=max(1, moe["top_k"] // moe["top_groups"]),
        )
    return Dialect()


def _as_trained(job: Mapping[str, Any], sizes: Architecture) -> Architecture:
    """torchtitan stretches DeepSeek's positions only where a sequence is longer than the original ones."""
    short = sizes.rope_scaling.original_max_position >= int(job["config"].get("training.seq_len", 0))
    if job["backend"] == "torchtitan" and sizes.rope_scaling.kind == "yarn" and short:
        return replace(sizes, rope_scaling=RopeScaling())
    return sizes


def _weights(job: Mapping[str, Any], sizes: Architecture, folder: Path, step: int) -> Tensors:
    seen = torch.load(folder / f"weights-{step}.pt", weights_only=True)
    return _wide(to_canonical(job["backend"], sizes, seen["weights"]))


def _wide(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.to(torch.float64) for name, tensor in tensors.items()}


def _load(file: Path) -> dict[str, Any] | None:
    return torch.load(file, weights_only=True) if file.exists() else None


def _without_bias(weights: Tensors) -> Tensors:
    return {name: tensor for name, tensor in weights.items() if not name.endswith(_BIAS)}


def _trained(job: Mapping[str, Any], name: str) -> bool:
    return not name.endswith(_BIAS) and (job["mode"] != "lora" or ".lora_" in name)


def _parameters(job: Mapping[str, Any], sizes: Architecture, weights: Tensors) -> dict[str, Any]:
    """Which parameters the model must have and the run lacks, has besides, or has in another shape; first values."""
    expected = shapes(sizes)
    present = {name: tuple(tensor.shape) for name, tensor in _without_bias(weights).items() if ".lora_" not in name}
    matrices: dict[tuple[int, ...], list[tuple[str, torch.Tensor]]] = {}
    strange = []
    for name, tensor in weights.items():
        if name.endswith(_BIAS):
            continue
        if not bool(torch.isfinite(tensor).all()):
            strange.append(f"{name} is not finite")
        elif tensor.ndim > 1 and ".lora_B." not in name and float(tensor.std()) == 0:
            strange.append(f"{name} holds one value")
        elif tensor.ndim > 1 and ".lora_" not in name:
            same = [other for other, value in matrices.get(tuple(tensor.shape), []) if torch.equal(value, tensor)]
            if not (job["backend"] == "torchtitan" and ".experts." in name):
                # On a CPU torchtitan draws the same numbers on every rank, so ranks share out equal experts.
                strange += [f"{name} equals {other}" for other in same[:1]]
            matrices.setdefault(tuple(tensor.shape), []).append((name, tensor))
    return {
        "missing": sorted(set(expected) - set(present)),
        "besides": sorted(set(present) - set(expected)),
        "shapes": [f"{n}: {list(present[n])}, not {list(s)}" for n, s in expected.items() if present.get(n, s) != s],
        "first_values": strange,
        "count": sum(math.prod(shape) for shape in expected.values()),
        "trained": sum(tensor.numel() for name, tensor in weights.items() if _trained(job, name)),
    }


def _moved(job: Mapping[str, Any], first: Tensors, last: Tensors) -> dict[str, list[str]]:
    """Trained weights that no step changed, and frozen ones that some did."""
    still = [name for name in first if _trained(job, name) and torch.equal(first[name], last[name])]
    frozen = [name for name in first if not _trained(job, name) and not torch.equal(first[name], last[name])]
    return {"still": still, "frozen_moved": [name for name in frozen if not name.endswith(_BIAS)]}


def _worst_gap(run: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], whole: float) -> dict[str, Any]:
    """The tensor whose gradients differ most, relative to its own length or to a thousandth of the whole's."""
    worst: dict[str, Any] = {"gap": 0.0, "name": "", "missing": sorted(set(own) - set(run))}
    for name, wanted in own.items():
        if name not in run:
            continue
        scale = max(float(wanted.norm()), 1e-3 * whole) or 1.0
        gap = float((run[name] - wanted).norm()) / scale
        if not gap <= worst["gap"]:
            worst |= {"gap": gap if math.isfinite(gap) else 1e9, "name": name}
    return worst


def _bfloat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(torch.float64)


class _EightBits(torch.autograd.Function):
    """Round to float8_e4m3fn by the tensor's largest value (gradients to e5m2), as tensorwise scaling does."""

    @staticmethod
    def forward(_context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _scaled(_bfloat(tensor), torch.float8_e4m3fn)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _scaled(_bfloat(gradient), torch.float8_e5m2)


def _scaled(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = torch.finfo(dtype).max / tensor.abs().amax().clamp(min=1e-12)
    return (tensor * scale).to(torch.float32).to(dtype).to(torch.float64) / scale
