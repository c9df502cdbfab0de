"""Repeating a run step by step, each from the run's own weights, so that rounding does not
accumulate.
"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus_images.recipes.architecture import Architecture, architecture
from primus_images.recipes.choose import CPU
from primus_images.training.judge.reference import blocks, data, models, parameters, saved, update
from primus_images.training.judge.reference.model import Model, Transformer
from primus_images.training.judge.reference.models import Models, Part
from primus_images.training.judge.reference.names import BIAS, Tensors, UnknownWeight, to_canonical
from primus_images.training.judge.reference.parameters import is_trained, kept_dtype, without_bias
from primus_images.training.judge.reference.rounding import LIMITS, bfloat
from primus_images.training.judge.reference.update import gaps_of, scales_of, typical

_LIMITS = LIMITS["replay"]
# Each thread of the command line holds the gradients of a step.
_MOST_THREADS = 4


def replay(output: Path, threads: int = 1) -> dict[str, Any]:
    """Compare every step of the run in ``output``, ``threads`` at the same time, for
    :mod:`primus_images.training.judge.proof`.
    """
    _use_one_core()
    job = json.loads((output / "job.json").read_text(encoding="utf-8"))
    folder = output / "witness"
    findings: dict[str, Any] = {
        "precision": job["precision"],
        "on_cpu": job["gpu"] == CPU,
        "unseen": not job["blocks"],
        "steps": [],
    }
    steps = range(job["first_step"], job["last_step"] + 1)
    sizes = architecture(job["model"])
    try:
        start = _weights(job, sizes, folder, steps[0] - 1)
        findings["parameters"] = parameters.describe(job, sizes, start)
        findings["first"] = parameters.strange(job, sizes, folder, start)
        if findings["parameters"]["missing"]:
            # The run trained another model, so there is nothing to repeat.
            return findings
        replayed = _Replay(job, sizes, folder)
        config = job["config"]
        findings |= {
            "max_norm": update.settings(job).max_norm,
            "summands": job["data_parallel"] * job["accumulation"],
            # Whether the recipe asks for sums over ranks in bfloat16, or Megatron divides those of
            # FSDP2 by labels.
            "narrow_sums": config.get("sharding.reduce_dtype") == "bfloat16"
            or config.get("ddp.grad_reduce_in_fp32") is False
            or bool(config.get("torch_fsdp2") and job["precision"] == "bf16"),
        }
        before = start
        with ThreadPoolExecutor(threads, initializer=_use_one_core) as pool:
            for computed in replayed.compute(steps, pool):
                after = _weights(job, sizes, folder, computed.row["step"])
                findings["steps"].append(computed.row | replayed.updated(computed, before, after))
                before = after
        findings["constants"] = replayed.constants()
        findings["moved"] = parameters.moved(job, start, before, replayed.moving)
        findings["narrow"] = replayed.narrow
        findings["saved"] = saved.differences(output, job, sizes, before)
    except UnknownWeight as error:
        findings["problem"] = f"the run has a weight that the model has not: {error}"
    except FileNotFoundError as error:
        findings["problem"] = f"the run left no {Path(str(error.filename)).name}"
    return findings


def _use_one_core() -> None:
    # On a busy machine, threads that wait for each other cost more than a second thread gains on so
    # small a model.
    torch.set_num_threads(1)
    # A mask's exponentials underflow, and denormal numbers are a hundred times as slow.
    torch.set_flush_denormal(True)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    loss: float
    losses: Tensor
    gradients: Tensors
    norm: float
    clipped: Tensors


@dataclass(frozen=True, kw_only=True)
class _Step:
    """``row`` is what the step adds to ``proof.json``. ``gradients`` are those that the run's
    optimizer used; the reference's clipped ones if it did not run. ``sent``: layer → the number of
    tokens of each expert.
    """

    row: dict[str, Any]
    gradients: Tensors
    sent: Mapping[str, Tensor]
    of_weights: list[Part]
    of_blocks: list[Part]


class _Replay:
    """The steps of one run: :meth:`compute` first, in any order, then :meth:`updated`, in order."""

    def __init__(self, job: dict[str, Any], sizes: Architecture, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self._models = Models(job, sizes)
        self._sizes = self._models.sizes
        self._settings = update.settings(job)
        self._optimizer = update.AdamW(self._settings)
        file = folder.parent / "exact.jsonl"
        rows = map(
            json.loads, file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        )
        self._reported = {
            int(row["step"]): {key: float(row[key]) for key in ("loss", "grad_norm")}
            for row in rows
        }
        self._exact = self._models.exact
        self._rounding = _LIMITS["rounding"][kept_dtype(job)]
        self.narrow = False
        self.moving: set[str] = set()
        self._examined = {*job["examined"]}
        self._samples = data.samples(job)
        self._of_blocks: list[Part] = []
        self._of_weights: list[Part] = []

    def constants(self) -> dict[str, dict[str, Any]]:
        trials = models.trials(self._models.model(), self._job["backend"])
        return models.fit([*trials], self._of_blocks) | models.fit(
            [*self._of_weights_alone()], self._of_weights
        )

    def _of_weights_alone(self) -> dict[str, models.Trial]:
        trials = models.trials(self._models.model(), self._job["backend"])
        return {name: trial for name, trial in trials.items() if "weights" in trial.shows}

    def compute(self, steps: Sequence[int], pool: Executor) -> list[_Step]:
        computed = dict(zip(steps, pool.map(self._examine, steps), strict=True))
        usual: dict[str, float] = {}
        for step in self._examined:
            for key, noise in _noises(computed[step].row["noise"]).items():
                usual[key] = max(usual.get(key, 0.0), noise)
        suspicious = [
            step
            for step in steps
            if step not in self._examined
            and any(
                gap > _limit("small", key) + _limit("suspect", key) * usual[key]
                for key, gap in self._gaps(computed[step].row).items()
            )
        ]
        computed |= zip(
            suspicious,
            pool.map(lambda step: self._compute(step, noisy=True), suspicious),
            strict=True,
        )
        return [computed[step] for step in steps]

    def updated(self, computed: _Step, before: Tensors, after: Tensors) -> dict[str, Any]:
        row = computed.row
        self._of_blocks += computed.of_blocks
        self._of_weights += computed.of_weights
        expected = self._optimizer.update(
            _wide(without_bias(before)), _wide(computed.gradients), row["rate"]
        )
        self.moving |= update.moving(before, expected, self._rounding)
        return {
            "biases": self._biases(before, after, row["closest"], computed.sent),
            "update": update.gap(before, expected, after, self._rounding),
        }

    def _gaps(self, row: Mapping[str, Any]) -> dict[str, float]:
        gaps = {kind: gap for kind, (gap, _) in row.get("gaps", {}).items()}
        for key in ("loss", "grad_norm"):
            expected = row[key]
            reported = self._reported.get(row["step"], {}).get(key, expected)
            gaps[key] = abs(reported - expected) / expected if expected else 0.0
        return gaps

    def _examine(self, step: int) -> _Step:
        if step not in self._examined:
            return self._compute(step, noisy=False)
        computed = self._compute(step, noisy=True, trials=True)
        if self._job["blocks"]:
            return self._with_blocks(computed)
        return computed

    def _with_blocks(self, computed: _Step) -> _Step:
        step = computed.row["step"]
        model = self._models.model()
        before = _weights(self._job, self._sizes, self._folder, step - 1)
        wide, narrow = (
            self._models.weights(before, dtype) for dtype in (torch.float64, torch.float32)
        )
        pair = blocks.Pair(
            exact=model,
            rounded=self._models.rounding(),
            weights=wide if self._exact else narrow,
            narrow=narrow,
            plain=replace(model, eight=None, choices={})
            if isinstance(model, Model) and model.eight
            else model,
            trials={} if self._exact else models.trials(model, self._job["backend"]),
        )
        try:
            rows, products = blocks.compare(self._folder, self._job, step, self._samples, pair)
        except blocks.Unlike as error:
            return replace(computed, row=computed.row | {"blocks": str(error)})
        return replace(
            computed, row=computed.row | {"blocks": rows}, of_blocks=[] if self._exact else products
        )

    def _compute(self, step: int, *, noisy: bool, trials: bool = False) -> _Step:
        before = _weights(self._job, self._sizes, self._folder, step - 1)
        file = self._folder / f"update-{step}.pt"
        seen: dict[str, Any] | None = torch.load(file, weights_only=True) if file.exists() else None
        if seen:
            raw = seen["gradients"]
        else:
            raw = {}
        used = None
        if seen:
            used = without_bias(to_canonical(self._job["backend"], self._sizes, raw))
        # In float32, the reference's own rounding is judged where it also computes in float64.
        model = self._models.model()
        if noisy and self._exact:
            dtype = torch.float64
        else:
            dtype = torch.float32
        weights = self._models.weights(before, dtype)
        exact = self._pass(step, weights, model)
        row: dict[str, Any] = {
            "step": step,
            "data": self._batches(step),
            "rate": update.rate(self._job, step),
            "blocks": [],
            "loss": exact.loss,
            "grad_norm": exact.norm,
            "closest": min(model.closest, 1e9),
            "regular": step in self._examined,
            "own_gradient": seen is not None,
            "stale": [],
            "apart": [],
        }
        limited = exact.clipped
        products = []
        scales = scales_of(limited)
        if seen is not None and used is not None:
            self.narrow |= any(gradient.dtype == torch.bfloat16 for gradient in raw.values())
            norm = self._reported.get(step, {}).get("grad_norm", 0.0)
            row |= {
                "stale": seen["stale"],
                "apart": seen["apart"],
                "rates": sorted(set(seen["rates"].values())),
                "missing": sorted(limited.keys() - used.keys()),
                "gaps": gaps_of(used, limited, scales),
                "used_norm": update.norm_of(used),
                "rounded": update.least_rounded(self._settings, used, norm),
            }
        if noisy:
            row["noise"], rounded = noise, _ = self._noise(step, before, exact, scales)
            if not self._exact and self._doubtful(row):
                # A few tokens may determine the error of a tensor or of the loss, and one rounding
                # may spare them by chance.
                others = [
                    self._noise(step, before, exact, scales, grid)[0] for grid in _LIMITS["grids"]
                ]
                noise["gaps"] = {
                    kind: max(gap, typical([other["gaps"][kind] for other in others]))
                    for kind, gap in noise["gaps"].items()
                }
                for key in ("loss", "grad_norm"):
                    noise[key] = max(
                        noise[key],
                        math.sqrt(sum(other[key] ** 2 for other in others) / len(others)),
                    )
                noise["doubt"] = self._in_doubt(step, weights, limited, scales)
            if used is not None and trials:
                changes = self._of_weights_alone()
            else:
                changes = {}
            changed = [self._pass(step, weights, trial.model).clipped for trial in changes.values()]
            if used is not None and changed:
                products = models.products(used, limited, rounded, changed)
        return _Step(
            row=row,
            gradients=limited if used is None else used,
            of_weights=products,
            of_blocks=[],
            sent=model.sent if isinstance(model, Model) else {},
        )

    def _in_doubt(
        self, step: int, weights: Tensors, limited: Tensors, scales: Mapping[str, float]
    ) -> dict[str, float]:
        """Return kind of tensor → how far its gradient moves if every token in doubt goes to the
        other expert.
        """
        model = self._models.model()
        if not isinstance(model, Model) or not self._sizes.moe.experts:
            return {}
        other = self._pass(step, weights, replace(model, doubt=_LIMITS["doubt"]))
        return {kind: gap for kind, (gap, _) in gaps_of(other.clipped, limited, scales).items()}

    def _doubtful(self, row: Mapping[str, Any]) -> bool:
        noises = {
            key: _limit("suspect", key) * noise for key, noise in _noises(row["noise"]).items()
        }
        return any(
            1e-5 + noises[key] < gap <= 10 * noises[key] for key, gap in self._gaps(row).items()
        )

    def _biases(
        self, before: Tensors, after: Tensors, closest: float, sent: Mapping[str, Tensor]
    ) -> list[str]:
        wrong = []
        dialect = self._models.dialect
        for layer, count in sent.items() if dialect.bias_rate else ():
            name = f"{layer}gate{BIAS}"
            mean = count.double().mean()
            if name not in after:
                wrong.append(f"{name} is missing")
                continue
            # If rounding decides the routing of a token, experts near the mean may be on either
            # side of it.
            if self._exact and closest > 1e-5:
                slack = 0.0
            else:
                slack = 2 + 0.1 * float(mean)
            if slack:
                decided = (count - mean).abs() > slack
            else:
                decided = torch.ones_like(count, dtype=torch.bool)
            moved = (after[name] - before[name]).double()[decided]
            expected = (mean - count).sign()[decided]
            expected = expected * dialect.bias_rate
            if dialect.centered:
                moved = moved - moved.mean()
                expected = expected - expected.mean()
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
                if seen.get(name):
                    whole = torch.cat(seen[name])
                else:
                    whole = torch.empty(0)
                if whole.shape != mine.shape:
                    shapes = f"{list(whole.shape)}, not {list(mine.shape)}"
                    different.append(f"step {step}, rank {rank}: {name} have the shape {shapes}")
                elif not torch.equal(whole, mine):
                    share = float((whole != mine).float().mean())
                    different.append(
                        f"step {step}, rank {rank}: {share:.0%} of the {name} are others"
                    )
            shares.append(rank)
        ranks = self._job["world_size"]
        parallel = self._job["data_parallel"]
        if sorted(shares) != [share for share in range(parallel) for _ in range(ranks // parallel)]:
            each = f"each of {parallel} by {ranks // parallel} ranks"
            different.append(
                f"step {step}: the ranks took the shares {shares} of the data, not {each}"
            )
        return different

    def _pass(self, step: int, weights: Tensors, model: Transformer) -> _Pass:
        trained = {name for name in weights if is_trained(self._job, name)}
        leaves = {
            name: tensor.clone().requires_grad_(name in trained) for name, tensor in weights.items()
        }
        ranks = self._job["data_parallel"]
        pieces = self._job["accumulation"]
        every_loss = []
        batches = [self._samples.batch(step, rank) for rank in range(ranks)]
        terms = sum(self._samples.terms(batch) for batch in batches)
        for batch in batches:
            for parts in zip(*(tensor.chunk(pieces) for tensor in batch.values()), strict=True):
                losses, balance = model.losses(leaves, dict(zip(batch, parts, strict=True)))
                (losses.sum() / terms + balance / (ranks * pieces)).backward()
                every_loss.append(losses.detach().to(torch.float64).flatten())
        # An expert that no token chose has zero gradients; its moments still move it.
        gradients = {
            name: torch.zeros_like(weights[name])
            if leaves[name].grad is None
            else leaves[name].grad
            for name in trained
        }
        every = torch.cat(every_loss)
        norm = update.norm_of(gradients)
        clipped = update.clipped(gradients, norm, self._settings.max_norm)
        return _Pass(
            loss=float(every.sum()) / terms,
            losses=every,
            gradients=gradients,
            norm=norm,
            clipped=clipped,
        )

    def _noise(
        self,
        step: int,
        before: Tensors,
        exact: _Pass,
        scales: Mapping[str, float],
        grid: float = 1.0,
    ) -> tuple[dict[str, Any], Tensors]:
        """Return how far the run's precision alone moves the results, and the clipped gradients of
        that repetition.
        """
        other = self._pass(
            step, self._models.weights(before, torch.float32), self._models.rounding(grid)
        )
        # The error of the mean can be small by chance. The errors of single labels show how large
        # it can become.
        spread = float((other.losses - exact.losses).std()) / math.sqrt(len(exact.losses))
        moved = other.gradients
        clipped = other.clipped
        if not self._exact:
            # Each gradient is a number of the run's precision before it is summed over ranks.
            rounded = {name: bfloat(gradient) for name, gradient in moved.items()}
            clipped = update.clipped(rounded, other.norm, self._settings.max_norm)
        error = math.sqrt(
            sum(
                float((moved[n] - gradient).square().sum())
                for n, gradient in exact.gradients.items()
            )
        )
        return {
            "loss": max(abs(other.loss - exact.loss), spread) / exact.loss,
            # The error of a norm is at most that of its vector.
            "grad_norm": error / exact.norm,
            "gaps": gaps_of(clipped, exact.clipped, scales),
        }, clipped


def _noises(noise: Mapping[str, Any]) -> dict[str, float]:
    gaps = {kind: gap for kind, (gap, _) in noise["gaps"].items()}
    return gaps | {key: noise[key] for key in ("loss", "grad_norm")}


def _limit(kind: str, key: str) -> float:
    return float(_LIMITS[kind].get(key, _LIMITS[kind]["gradient"]))


def _weights(job: Mapping[str, Any], sizes: Architecture, folder: Path, step: int) -> Tensors:
    seen = torch.load(folder / f"weights-{step}.pt", weights_only=True)
    return to_canonical(job["backend"], sizes, seen["weights"])


def _wide(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.to(torch.float64) for name, tensor in tensors.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    findings = replay(folder, threads=min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    (folder / "proof.json").write_text(json.dumps(findings, indent=1) + "\n", encoding="utf-8")
