"""Repeating a run step by step, each from the run's own weights, so that rounding does not accumulate."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from primus.recipes.architecture import Architecture, rebuilt
from primus.recipes.choose import CPU
from primus.training.reference import blocks, data, models, parameters, saved, update
from primus.training.reference.model import Model, Transformer
from primus.training.reference.models import Fit, Models, Part
from primus.training.reference.names import BIAS, Tensors, UnknownWeight, to_canonical
from primus.training.reference.parameters import is_trained, kept_dtype, without_bias
from primus.training.reference.rounding import bfloat
from primus.training.reference.update import gaps_of, scales_of, typical

# The relative rounding of weights and updates, by dtype. Smaller differences mean nothing.
_ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
# At steps that are not examined, the reference computes how far the precision moves its results if a gap exceeds the
# sum of this many times the noise of the examined ones and the difference below. A smaller gap passes whatever the
# noise is: both must stay below the limits in primus.training.proof.
_SUSPECT = 3.0
_SMALL = {"loss": 1.5e-6, "grad_norm": 3e-5, "gradient": 3e-5}
# How much the scores of two experts may differ, relative to the larger one, while rounding still decides between them.
# In each of two runs, one token that went to the other expert caused the whole gap of 0.6 of an expert with few tokens.
_DOUBT = 2.0**-6
# Each thread of the command line holds the gradients of a step.
_MOST_THREADS = 4
# Further roundings that are then tried, as scales of the grid to which numbers are rounded.
_GRIDS = (1.17, 1.33, 1.5, 1.67, 1.83)


def replay(output: Path, threads: int = 1) -> dict[str, Any]:
    """Compare every step of the run in ``output``, ``threads`` at the same time, for :mod:`primus.training.proof`."""
    began = time.monotonic()
    _use_one_core()
    job = json.loads((output / "job.json").read_text(encoding="utf-8"))
    folder = output / "witness"
    findings: dict[str, Any] = {
        "precision": job["precision"], "on_cpu": job["gpu"] == CPU, "unseen": not job["blocks"], "steps": []
    }  # fmt: skip
    steps = range(job["first_step"], job["last_step"] + 1)
    sizes = rebuilt(job["model"])
    try:
        start = _weights(job, sizes, folder, steps[0] - 1)
        findings["parameters"] = parameters.describe(job, sizes, start)
        findings["first"] = parameters.strange(job, sizes, start) + parameters.other_seeds(job, sizes, folder)
        if findings["parameters"]["missing"] or findings["parameters"]["shapes"]:
            # The run trained another model, so there is nothing to repeat.
            return findings
        replayed = _Replay(job, sizes, folder)
        config = job["config"]
        findings |= {
            "max_norm": update.settings(job).max_norm, "summands": job["data_parallel"] * job["accumulation"],
            # Whether the recipe asks for sums over ranks in bfloat16.
            "narrow_sums": config.get("sharding.reduce_dtype") == "bfloat16"
            or config.get("ddp.grad_reduce_in_fp32") is False,
        }  # fmt: skip
        before = start
        with ThreadPoolExecutor(threads, initializer=_use_one_core) as pool:
            for computed in replayed.compute(steps, pool):
                after = _weights(job, sizes, folder, computed.step)
                findings["steps"].append(replayed.compare(computed, before, after))
                before = after
        findings["constants"] = replayed.constants()
        findings["moved"] = parameters.moved(job, start, before, replayed.moving)
        findings["narrow"] = replayed.narrow
        findings["saved"] = saved.differences(output, job, sizes, before)
    except UnknownWeight as error:
        findings["problem"] = f"the run has a weight that the model has not: {error}"
    except FileNotFoundError as error:
        findings["problem"] = f"the run left no {Path(str(error.filename)).name}"
    findings["seconds"] = round(time.monotonic() - began, 2)
    return findings


def _use_one_core() -> None:
    # On a busy machine, threads that wait for each other cost more than a second thread gains on so small a model.
    torch.set_num_threads(1)
    # A mask's exponentials underflow, and denormal numbers are a hundred times as slow.
    torch.set_flush_denormal(True)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    loss: float
    losses: torch.Tensor
    gradients: Tensors
    norm: float
    clipped: Tensors


@dataclass(frozen=True, kw_only=True)
class _Step:
    """``used`` are the gradients that the run's optimizer used, and ``seen`` what else it left of the update; both are
    None if it did not run. ``limited`` are the reference's clipped gradients if there are no others.
    """

    step: int
    seen: dict[str, Any] | None
    used: Tensors | None
    narrow: bool
    figures: dict[str, Any]
    limited: Tensors | None
    sent: Mapping[str, torch.Tensor]
    of_weights: list[Part]
    blocks: list[dict[str, Any]] | str = field(default_factory=list)
    of_blocks: list[Part] = field(default_factory=list)


class _Replay:
    """The steps of one run: :meth:`compute` first, in any order, then :meth:`compare`, in order."""

    def __init__(self, job: dict[str, Any], sizes: Architecture, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self._models = Models(job, sizes)
        self._sizes = self._models.sizes
        self._settings = update.settings(job)
        self._optimizer = update.AdamW(self._settings)
        self._usual: dict[str, float] = {}
        self._usual_figures = {"loss": 0.0, "grad_norm": 0.0}
        self._reported = _reported(folder.parent / "exact.jsonl")
        self._exact = self._models.exact
        self._rounding = _ROUNDING[kept_dtype(job)]
        self.narrow = False
        self.moving: set[str] = set()
        self._examined = {*job["examined"]}
        self._samples = data.samples(job)
        self._of_blocks: list[Part] = []
        self._of_weights: list[Part] = []

    def constants(self) -> dict[str, dict[str, Any]]:
        model, backend = self._models.model(), self._job["backend"]
        every = (models.trials(model, backend), self._of_blocks), (models.trials_of_weights(model), self._of_weights)
        fits = [Fit(backend=backend, names=[*trials], parts=parts).found() for trials, parts in every]
        return fits[0] | fits[1]

    def compute(self, steps: Sequence[int], pool: Executor) -> list[_Step]:
        computed = {row.step: row for row in pool.map(self._compute_planned, steps)}
        for step in sorted(self._examined):
            noise = computed[step].figures["noise"]
            for kind, (gap, _) in noise["gaps"].items():
                self._usual[kind] = max(self._usual.get(kind, 0.0), gap)
            for key, usual in self._usual_figures.items():
                self._usual_figures[key] = max(usual, noise[key])
        suspicious = [
            step for step in steps if step not in self._examined and self._amplified(step, computed[step].figures)
        ]
        computed |= {row.step: row for row in pool.map(lambda step: self._compute(step, noisy=True), suspicious)}
        return [computed[step] for step in steps]

    def compare(self, computed: _Step, before: Tensors, after: Tensors) -> dict[str, Any]:
        step, seen, used = computed.step, computed.seen, computed.used
        rate = update.rate(self._settings, step)
        self.narrow |= computed.narrow
        row = {
            "step": step, "data": self._batches(step), "rate": rate, **computed.figures, "blocks": computed.blocks,
            "regular": step in self._examined, "own_gradient": seen is not None,
            "stale": seen["stale"] if seen else [], "apart": seen["apart"] if seen else [],
        }  # fmt: skip
        if seen is not None:
            row["rates"] = sorted(set(seen["rates"].values()))
        if used is not None:
            norm = self._reported.get(step, {}).get("grad_norm", 0.0)
            row |= {"used_norm": update.norm_of(used), "rounded": update.least_rounded(self._settings, used, norm)}
        self._of_blocks += computed.of_blocks
        self._of_weights += computed.of_weights
        row["biases"] = self._biases(before, after, computed.figures["closest"], computed.sent)
        gradients = used if used is not None else computed.limited
        expected = self._optimizer.update(_wide(without_bias(before)), _wide(gradients or {}), rate)
        row["update"] = update.gap(before, expected, after, self._rounding)
        self.moving |= update.moving(before, expected, self._rounding)
        return row

    def _amplified(self, step: int, figures: Mapping[str, Any]) -> bool:
        gaps: Mapping[str, tuple[float, str]] = figures.get("gaps", {})
        limits = {
            "loss": _SMALL["loss"] + _SUSPECT * self._usual_figures["loss"],
            "grad_norm": _SMALL["grad_norm"] + self._usual_figures["grad_norm"],
        }
        return any(self._gap(step, key, figures) > limit for key, limit in limits.items()) or any(
            gap > _SMALL["gradient"] + _SUSPECT * self._usual[kind] for kind, (gap, _) in gaps.items()
        )

    def _gap(self, step: int, key: str, figures: Mapping[str, Any]) -> float:
        expected = figures[key]
        return abs(self._reported.get(step, {}).get(key, expected) - expected) / expected if expected else 0.0

    def _compute_planned(self, step: int) -> _Step:
        examined = step in self._examined
        computed = self._compute(step, noisy=examined, trials=examined)
        return self._with_blocks(computed) if examined and self._job["blocks"] else computed

    def _with_blocks(self, computed: _Step) -> _Step:
        before = _weights(self._job, self._sizes, self._folder, computed.step - 1)
        wide, narrow = (self._models.weights(before, dtype) for dtype in (torch.float64, torch.float32))
        model = self._models.model()
        pair = blocks.Pair(
            exact=model, rounded=self._models.rounding(), weights=wide if self._exact else narrow, narrow=narrow,
            plain=replace(model, eight=None, choices={}) if isinstance(model, Model) and model.eight else model,
            trials={} if self._exact else models.trials(model, self._job["backend"]),
        )  # fmt: skip
        try:
            rows, products = blocks.compare(self._folder, self._job, computed.step, self._samples, pair)
        except blocks.Unlike as error:
            return replace(computed, blocks=str(error))
        return replace(computed, blocks=rows, of_blocks=[] if self._exact else products)

    def _compute(self, step: int, *, noisy: bool, trials: bool = False) -> _Step:
        before = _weights(self._job, self._sizes, self._folder, step - 1)
        file = self._folder / f"update-{step}.pt"
        seen: dict[str, Any] | None = torch.load(file, weights_only=True) if file.exists() else None
        raw = seen.pop("gradients") if seen else {}
        used = without_bias(to_canonical(self._job["backend"], self._sizes, raw)) if seen else None
        # In float32, the reference's own rounding is judged where it also computes in float64.
        model, dtype = self._models.model(), torch.float64 if noisy and self._exact else torch.float32
        weights = self._models.weights(before, dtype)
        exact = self._pass(step, weights, model)
        figures: dict[str, Any] = {"loss": exact.loss, "grad_norm": exact.norm, "closest": min(model.closest, 1e9)}
        limited, products = exact.clipped, []
        scales = scales_of(limited)
        if used is not None:
            figures |= {"missing": sorted(limited.keys() - used.keys()), "gaps": gaps_of(used, limited, scales)}
        if noisy:
            noise, rounded = self._noise(step, before, exact, scales)
            figures["noise"] = noise
            if not self._exact and self._doubtful(step, figures):
                # A few tokens may determine the error of a tensor or of the loss, and one rounding may spare them by
                # chance.
                others = [self._noise(step, before, exact, scales, grid)[0] for grid in _GRIDS]
                noise["gaps"] = {
                    kind: max(gap, typical([other["gaps"][kind] for other in others]))
                    for kind, gap in noise["gaps"].items()
                }
                for key in ("loss", "grad_norm"):
                    noise[key] = max(noise[key], math.sqrt(sum(other[key] ** 2 for other in others) / len(others)))
                noise["doubt"] = self._in_doubt(step, weights, limited, scales)
            if used is not None and trials:
                products = self._trials(step, weights, used, limited, rounded)
        return _Step(
            step=step, seen=seen, used=used, figures=figures, limited=limited if used is None else None,
            narrow=any(gradient.dtype == torch.bfloat16 for gradient in raw.values()),
            sent=model.sent if isinstance(model, Model) else {}, of_weights=products,
        )  # fmt: skip

    def _in_doubt(self, step: int, weights: Tensors, limited: Tensors, scales: Mapping[str, float]) -> dict[str, float]:
        """Return kind of tensor → how far its gradient moves if every token in doubt goes to the other expert."""
        model = self._models.model()
        if not isinstance(model, Model) or not self._sizes.moe.experts:
            return {}
        other = self._pass(step, weights, replace(model, doubt=_DOUBT))
        return {kind: gap for kind, (gap, _) in gaps_of(other.clipped, limited, scales).items()}

    def _doubtful(self, step: int, figures: Mapping[str, Any]) -> bool:
        gaps, noise = figures.get("gaps", {}), figures["noise"]
        pairs = [(gap, noise["gaps"][kind][0]) for kind, (gap, _) in gaps.items()]
        pairs.append((self._gap(step, "loss", figures), noise["loss"]))
        # The noise of a norm is that of its whole vector, so a norm of the same rounding is much closer.
        pairs.append((self._gap(step, "grad_norm", figures), noise["grad_norm"] / _SUSPECT))
        return any(1e-5 + _SUSPECT * usual < gap <= 10 * _SUSPECT * usual for gap, usual in pairs)

    def _trials(self, step: int, weights: Tensors, used: Tensors, limited: Tensors, rounded: Tensors) -> list[Part]:
        trials = models.trials_of_weights(self._models.model())
        changed = [self._pass(step, weights, trial).clipped for trial in trials.values()]
        return models.products(used, limited, rounded, changed) if changed else []

    def _biases(self, before: Tensors, after: Tensors, closest: float, sent: Mapping[str, torch.Tensor]) -> list[str]:
        wrong, dialect = [], self._models.dialect
        for layer, count in sent.items() if dialect.bias_rate else ():
            name, mean = f"{layer}gate{BIAS}", count.double().mean()
            if name not in after:
                wrong.append(f"{name} is missing")
                continue
            # If rounding decides the routing of a token, experts near the mean may be on either side of it.
            slack = 0.0 if self._exact and closest > 1e-5 else 2 + 0.1 * float(mean)
            decided = (count - mean).abs() > slack if slack else torch.ones_like(count, dtype=torch.bool)
            moved, expected = ((after[name] - before[name]).double()[decided], (mean - count).sign()[decided])
            expected = expected * dialect.bias_rate
            if dialect.centered:
                moved, expected = moved - moved.mean(), expected - expected.mean()
            if len(expected) and float((moved - expected).abs().max()) > 0.01 * dialect.bias_rate:
                wrong.append(f"{name} did not move towards balance")
        return wrong

    def _batches(self, step: int) -> list[str]:
        different: list[str] = []
        shares: list[int] = []
        for file in sorted(self._folder.glob(f"batch-{step}-*.pt")):
            seen = torch.load(file, weights_only=True)
            rank = int(seen["data_rank"])
            for name, mine in self._samples.batch(step, rank).items():
                whole = torch.cat(seen[name]) if seen.get(name) else torch.empty(0)
                if whole.shape != mine.shape:
                    shapes = f"{list(whole.shape)}, not {list(mine.shape)}"
                    different.append(f"step {step}, rank {rank}: {name} have the shape {shapes}")
                elif not torch.equal(whole, mine):
                    share = float((whole != mine).float().mean())
                    different.append(f"step {step}, rank {rank}: {share:.0%} of the {name} are others")
            shares.append(rank)
        ranks, parallel = self._job["world_size"], self._job["data_parallel"]
        if len(shares) != ranks:
            different.append(f"step {step}: {len(shares)} of {ranks} ranks left their batch")
        elif any(shares.count(share) != ranks // parallel for share in range(parallel)):
            different.append(
                f"step {step}: the ranks took the shares {shares} of the data, not {parallel} different ones"
            )
        return different

    def _pass(self, step: int, weights: Tensors, model: Transformer) -> _Pass:
        trained = {name for name in weights if is_trained(self._job, name)}
        leaves = {name: tensor.clone().requires_grad_(name in trained) for name, tensor in weights.items()}
        ranks, pieces, every_loss = self._job["data_parallel"], self._job["accumulation"], []
        batches = [self._samples.batch(step, rank) for rank in range(ranks)]
        terms = sum(self._samples.terms(batch) for batch in batches)
        for batch in batches:
            for parts in zip(*(tensor.chunk(pieces) for tensor in batch.values()), strict=True):
                losses, balance = model.losses(leaves, dict(zip(batch, parts, strict=True)))
                (losses.sum() / terms + balance / (ranks * pieces)).backward()
                every_loss.append(losses.detach().to(torch.float64).flatten())
        # An expert that no token chose has zero gradients; its moments still move it.
        gradients = {
            name: torch.zeros_like(weights[name]) if leaves[name].grad is None else leaves[name].grad
            for name in trained
        }
        every, norm = torch.cat(every_loss), update.norm_of(gradients)
        clipped = update.clipped(gradients, norm, self._settings.max_norm)
        return _Pass(loss=float(every.sum()) / terms, losses=every, gradients=gradients, norm=norm, clipped=clipped)

    def _noise(
        self, step: int, before: Tensors, exact: _Pass, scales: Mapping[str, float], grid: float = 1.0
    ) -> tuple[dict[str, Any], Tensors]:
        """Return how far the run's precision alone moves the results, and the clipped gradients of that repetition."""
        other = self._pass(step, self._models.weights(before, torch.float32), self._models.rounding(grid))
        # The error of the mean can be small by chance. The errors of single labels show how large it can become.
        spread = float((other.losses - exact.losses).std()) / math.sqrt(len(exact.losses))
        moved, clipped = other.gradients, other.clipped
        if not self._exact:
            # Each gradient is a number of the run's precision before it is summed over ranks.
            rounded = {name: bfloat(gradient) for name, gradient in moved.items()}
            clipped = update.clipped(rounded, other.norm, self._settings.max_norm)
        error = math.sqrt(sum(float((moved[n] - gradient).square().sum()) for n, gradient in exact.gradients.items()))
        return {
            "loss": max(abs(other.loss - exact.loss), spread) / exact.loss,
            # The error of a norm is at most that of its vector.
            "grad_norm": error / exact.norm,
            "gaps": gaps_of(clipped, exact.clipped, scales),
        }, clipped


def _weights(job: Mapping[str, Any], sizes: Architecture, folder: Path, step: int) -> Tensors:
    seen = torch.load(folder / f"weights-{step}.pt", weights_only=True)
    return to_canonical(job["backend"], sizes, seen["weights"])


def _reported(file: Path) -> dict[int, dict[str, float]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = map(json.loads, lines)
    return {int(row["step"]): {key: float(row[key]) for key in ("loss", "grad_norm")} for row in rows}


def _wide(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.to(torch.float64) for name, tensor in tensors.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    findings = replay(folder, threads=min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    (folder / "proof.json").write_text(json.dumps(findings, indent=1) + "\n", encoding="utf-8")
