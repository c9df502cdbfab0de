"""Repeating a run step by step.

Each step begins with the run's own weights, so that rounding does not accumulate.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus_images.recipes.architecture import Architecture, architecture
from primus_images.recipes.choose import CPU
from primus_images.training.judge.reference import (
    blocks,
    data,
    dropout,
    evaluation,
    kept,
    models,
    parameters,
    saved,
    update,
)
from primus_images.training.judge.reference.model import Model, Transformer
from primus_images.training.judge.reference.models import Models, Part
from primus_images.training.judge.reference.names import (
    BIAS,
    Job,
    Tensors,
    UnknownWeight,
    to_canonical,
)
from primus_images.training.judge.reference.parameters import is_trained, kept_dtype, without_bias
from primus_images.training.judge.reference.rounding import LIMITS, bfloat
from primus_images.training.judge.reference.update import Gaps, gaps_of, scales_of, typical

_LIMITS = LIMITS["replay"]
# Each thread of the command line holds the gradients of a step.
_MOST_THREADS = 4
_FIGURES = ("loss", "grad_norm")
Row = dict[str, Any]


def replay(output: Path, threads: int = 1) -> dict[str, Any]:
    """Compare every step of the run in ``output``, ``threads`` at the same time.

    :mod:`primus_images.training.judge.proof` judges what this returns.
    """
    _use_one_core()
    job = json.loads((output / "job.json").read_text(encoding="utf-8"))
    findings: dict[str, Any] = {
        "precision": job["precision"],
        "on_cpu": job["gpu"] == CPU,
        "unseen": not job["blocks"],
        "steps": [],
    }
    try:
        _add_findings(findings, output, job, threads)
    except UnknownWeight as error:
        findings["problem"] = f"the run has a weight that the model has not: {error}"
    except FileNotFoundError as error:
        findings["problem"] = f"the run left no {Path(str(error.filename)).name}"
    return findings


def _add_findings(
    findings: dict[str, Any], output: Path, job: dict[str, Any], threads: int
) -> None:
    folder = output / "witness"
    evaluated = evaluation.reported(output)
    last = evaluation.last_step(job, evaluated)
    steps = range(job["first_step"], last + 1)
    sizes = architecture(job["model"])
    start = _weights(job, sizes, folder, steps[0] - 1)
    findings["parameters"] = parameters.describe(job, sizes, start)
    findings["first"] = parameters.strange(job, sizes, folder, start)
    if findings["parameters"]["missing"]:
        # The run trained another model, so there is nothing to repeat.
        return
    replayed = _Replay(job, sizes, folder)
    findings["max_norm"] = update.settings(job).max_norm
    findings["tokens"] = replayed.tokens(steps[0])
    findings["summands"] = job["data_parallel"] * job["accumulation"]
    findings["narrow_sums"] = _adds_narrowly(job)
    best = evaluation.best(evaluated)
    findings["checkpoints"] = kept.missing(output, job, last, best)
    before = start
    with ThreadPoolExecutor(threads, initializer=_use_one_core) as pool:
        computed = replayed.compute(steps, pool)
        for step in computed:
            after = _weights(job, sizes, folder, step.row["step"])
            row = step.row | replayed.updated(step, before, after)
            findings["steps"].append(row)
            findings["checkpoints"] += replayed.checkpoint(step, after)
            before = after
    findings["evaluations"] = replayed.evaluations(steps)
    findings["dropout"] = replayed.dropout.findings(steps)
    findings["constants"] = replayed.constants(computed)
    findings["moved"] = parameters.moved(job, start, before, replayed.moving)
    findings["narrow"] = any(step.narrow for step in computed)
    exported = before
    if best is not None:
        exported = _weights(job, sizes, folder, best)
    findings["saved"] = saved.differences(output, job, sizes, exported)


def _adds_narrowly(job: Job) -> bool:
    """Return whether the recipe asks for sums over ranks in bfloat16.

    Megatron also divides those of FSDP2 by labels.
    """
    config = job["config"]
    if config.get("sharding.reduce_dtype") == "bfloat16":
        return True
    if config.get("ddp.grad_reduce_in_fp32") is False:
        return True
    return bool(config.get("torch_fsdp2")) and job["precision"] == "bf16"


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

    @cached_property
    def scales(self) -> dict[str, float]:
        return scales_of(self.clipped)

    def gaps(self, gradients: Tensors) -> Gaps:
        return gaps_of(gradients, self.clipped, self.scales)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A repeated step.

    ``row`` is what it adds to ``proof.json``. ``gradients`` are those that the run's optimizer
    used; the reference's clipped ones if it did not run. ``sent``: layer → the number of tokens of
    each expert. ``parts`` are the evidence of changed constants.
    """

    row: Row
    gradients: Tensors
    narrow: bool
    sent: Mapping[str, Tensor]
    parts: Sequence[Part] = ()


class _Replay:
    """The steps of one run: :meth:`compute` first, in any order, then :meth:`updated`, in order."""

    def __init__(self, job: dict[str, Any], sizes: Architecture, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self._models = Models(job, sizes)
        self._sizes = self._models.sizes
        self._settings = update.settings(job)
        self._optimizer = update.AdamW(self._settings)
        self._reported = _reported(folder.parent / "exact.jsonl")
        self._exact = self._models.exact
        self._rounding = _LIMITS["rounding"][kept_dtype(job)]
        self._samples = data.samples(job)
        self.dropout = dropout.Dropout(job, sizes, folder)
        self.moving: set[str] = set()

    def constants(self, computed: Sequence[_Step]) -> dict[str, Row]:
        parts: list[Part] = []
        for step in computed:
            parts += step.parts
        trials = models.trials(self._models.model(), self._job["backend"])
        return models.fit([*trials], parts)

    def compute(self, steps: Sequence[int], pool: Executor) -> list[_Step]:
        # A run that ends early has no last ones.
        examined = [step for step in self._job["examined"] if step in steps]
        examinations = pool.map(self._examine, steps)
        computed = dict(zip(steps, examinations, strict=True))
        usual: dict[str, float] = {}
        for step in examined:
            noises = _noises(computed[step].row["noise"])
            for key, noise in noises.items():
                before = usual.get(key, 0.0)
                usual[key] = max(before, noise)
        suspicious = []
        for step in steps:
            if step not in examined and self._is_suspicious(computed[step].row, usual):
                suspicious.append(step)
        again = pool.map(self._compute_noisy, suspicious)
        computed |= zip(suspicious, again, strict=True)
        return [computed[step] for step in steps]

    def _compute_noisy(self, step: int) -> _Step:
        return self._compute(step, noisy=True)

    def updated(self, computed: _Step, before: Tensors, after: Tensors) -> Row:
        rate = computed.row["rate"]
        weights = _wide(without_bias(before))
        gradients = _wide(computed.gradients)
        expected = self._optimizer.update(weights, gradients, rate)
        self.moving |= update.moving(before, expected, self._rounding)
        biases = list(self._wrong_biases(before, after, computed))
        gap = update.gap(before, expected, after, self._rounding)
        return {"biases": biases, "update": gap}

    def tokens(self, step: int) -> float:
        """Return the tokens of ``step``, those of images included, as a mean over all ranks."""
        job = self._job
        total = 0
        for rank in range(job["data_parallel"]):
            batch = self._samples.batch(step, rank)
            if "inputs" in batch:
                total += batch["inputs"].numel()
            else:
                of_image = int(job["config"]["training.seq_len"])
                total += len(batch["latents"]) * of_image
        return total / int(job["world_size"])

    def checkpoint(self, computed: _Step, after: Tensors) -> list[str]:
        """Return how the checkpoint after a step differs from it; nothing if none was kept."""
        folder = kept.folder_of(self._folder.parent, computed.row["step"])
        if not folder.is_dir():
            return []
        return kept.differences(folder, self._job, self._sizes, after, self._optimizer)

    def evaluations(self, steps: Sequence[int]) -> list[Row]:
        due = [step for step in steps if evaluation.due(self._job, step)]
        if not due:
            return []
        held_out = evaluation.Evaluation(self._job, self._models)
        rows = []
        for step in due:
            weights = self._weights_before(step + 1)
            rows.append(held_out.repeated(step, weights))
        return rows

    def _is_suspicious(self, row: Row, usual: Mapping[str, float]) -> bool:
        for key, gap in self._gaps(row).items():
            noise = _limit("suspect", key) * usual[key]
            if gap > _limit("small", key) + noise:
                return True
        return False

    def _gaps(self, row: Row) -> dict[str, float]:
        gaps = {kind: gap for kind, (gap, _) in row.get("gaps", {}).items()}
        reported_figures = self._reported.get(row["step"], {})
        for key in _FIGURES:
            expected = row[key]
            reported = reported_figures.get(key, expected)
            gaps[key] = 0.0
            if expected:
                gaps[key] = abs(reported - expected) / expected
        return gaps

    def _examine(self, step: int) -> _Step:
        if step not in self._job["examined"]:
            return self._compute(step, noisy=False)
        computed = self._compute(step, noisy=True)
        if self._job["blocks"]:
            return self._with_blocks(computed)
        return computed

    def _with_blocks(self, computed: _Step) -> _Step:
        step = computed.row["step"]
        model = self._models.model()
        before = self._weights_before(step)
        narrow = self._models.weights(before, torch.float32)
        weights = narrow
        trials: Mapping[str, models.Trial] = {}
        if self._exact:
            weights = self._models.weights(before, torch.float64)
        else:
            trials = models.trials(model, self._job["backend"])
        plain = model
        if isinstance(model, Model) and model.eight:
            plain = replace(model, eight=None, choices={})
        pair = blocks.Pair(
            exact=model,
            rounded=self._models.rounding(),
            weights=weights,
            narrow=narrow,
            plain=plain,
            trials=trials,
        )
        try:
            rows, parts = blocks.compare(self._folder, self._job, step, self._samples, pair)
        except blocks.Unlike as error:
            unlike = computed.row | {"blocks": str(error)}
            return replace(computed, row=unlike)
        if self._exact:
            parts = []
        row = computed.row | {"blocks": rows}
        return replace(computed, row=row, parts=parts)

    def _compute(self, step: int, *, noisy: bool) -> _Step:
        before = self._weights_before(step)
        taken = self._taken(step)
        model = self._models.model()
        dtype = torch.float32
        if noisy and self._exact:
            # In float32, the reference's own rounding is judged where it also computes in float64.
            dtype = torch.float64
        weights = self._models.weights(before, dtype)
        exact = self._pass(step, weights, model)
        row: Row = {
            "step": step,
            "data": self._different_data(step),
            "rate": update.rate(self._job, step),
            "blocks": [],
            "loss": exact.loss,
            "grad_norm": exact.norm,
            "closest": min(model.closest, 1e9),
            "regular": step in self._job["examined"],
            "own_gradient": taken is not None,
            "stale": [],
            "apart": [],
        }
        gradients = exact.clipped
        narrow = False
        if taken is not None:
            gradients = taken["gradients"]
            dtypes = {gradient.dtype for gradient in gradients.values()}
            narrow = torch.bfloat16 in dtypes
            row |= self._row_of_update(step, taken, exact)
        if noisy:
            row["noise"] = self._noise(step, before, exact)
            if not self._exact and self._is_doubtful(row):
                self._widen_noise(row, before, weights, exact)
        return _Step(row=row, gradients=gradients, narrow=narrow, sent=model.sent)

    def _row_of_update(self, step: int, taken: Mapping[str, Any], exact: _Pass) -> Row:
        gradients = taken["gradients"]
        norm = self._reported.get(step, {}).get("grad_norm", 0.0)
        rates = set(taken["rates"].values())
        missing = exact.clipped.keys() - gradients.keys()
        return {
            "stale": taken["stale"],
            "apart": taken["apart"],
            "rates": sorted(rates),
            "missing": sorted(missing),
            "gaps": exact.gaps(gradients),
            "used_norm": update.norm_of(gradients),
            "rounded": update.least_rounded(self._settings, gradients, norm),
        }

    def _widen_noise(self, row: Row, before: Tensors, weights: Tensors, exact: _Pass) -> None:
        """Replace the noise of a step by that of several roundings, where theirs is larger.

        A few tokens may determine the error of a tensor or of the loss, and one rounding may spare
        them by chance. Each of ``grids`` rounds numbers in another place.
        """
        noise = row["noise"]
        step = row["step"]
        others = [self._noise(step, before, exact, grid) for grid in _LIMITS["grids"]]
        for kind, gap in noise["gaps"].items():
            of_others = [other["gaps"][kind] for other in others]
            noise["gaps"][kind] = max(gap, typical(of_others))
        for key in _FIGURES:
            square = sum(other[key] ** 2 for other in others) / len(others)
            typical_noise = math.sqrt(square)
            noise[key] = max(noise[key], typical_noise)
        noise["doubt"] = self._in_doubt(step, weights, exact)

    def _in_doubt(self, step: int, weights: Tensors, exact: _Pass) -> dict[str, float]:
        """Return how far the gradients of each kind of tensor move if tokens change their experts.

        These are all tokens in doubt, which go to the other expert.
        """
        model = self._models.model()
        if not isinstance(model, Model) or not self._sizes.moe.experts:
            return {}
        doubtful = replace(model, doubt=_LIMITS["doubt"])
        other = self._pass(step, weights, doubtful)
        gaps = exact.gaps(other.clipped)
        return {kind: gap for kind, (gap, _) in gaps.items()}

    def _is_doubtful(self, row: Row) -> bool:
        noises = _noises(row["noise"])
        for key, gap in self._gaps(row).items():
            noise = _limit("suspect", key) * noises[key]
            if 1e-5 + noise < gap <= 10 * noise:
                return True
        return False

    def _wrong_biases(self, before: Tensors, after: Tensors, computed: _Step) -> Iterator[str]:
        dialect = self._models.dialect
        if not dialect.bias_rate:
            return
        for layer, count in computed.sent.items():
            name = f"{layer}gate{BIAS}"
            mean = count.double().mean()
            if name not in after:
                yield f"{name} is missing"
                continue
            decided = torch.ones_like(count, dtype=torch.bool)
            if not self._exact or computed.row["closest"] <= 1e-5:
                # If rounding decides the routing of a token, experts near the mean may be on either
                # side of it.
                distance = (count - mean).abs()
                decided = distance > 2 + 0.1 * float(mean)
            every_move = (after[name] - before[name]).double()
            moved = every_move[decided]
            direction = (mean - count).sign()
            expected = direction[decided] * dialect.bias_rate
            if not len(expected):
                continue
            if dialect.centered:
                moved = moved - moved.mean()
                expected = expected - expected.mean()
            largest = float((moved - expected).abs().max())
            if largest > 0.01 * dialect.bias_rate:
                yield f"{name} did not move towards balance"

    def _different_data(self, step: int) -> list[str]:
        different: list[str] = []
        shares: list[int] = []
        for file in sorted(self._folder.glob(f"batch-{step}-*.pt")):
            recorded = torch.load(file, weights_only=True)
            rank = int(recorded["data_rank"])
            shares.append(rank)
            for name, expected in self._samples.batch(step, rank).items():
                tensor = torch.empty(0)
                if recorded.get(name):
                    tensor = torch.cat(recorded[name])
                difference = _difference(name, tensor, expected)
                if difference:
                    different.append(f"step {step}, rank {rank}: {difference}")
        parallel = self._job["data_parallel"]
        each = self._job["world_size"] // parallel
        expected_shares = [*range(parallel)] * each
        if sorted(shares) != sorted(expected_shares):
            different.append(
                f"step {step}: the ranks took the shares {shares} of the data, "
                f"not each of {parallel} by {each} ranks"
            )
        return different

    def _pass(self, step: int, weights: Tensors, model: Transformer) -> _Pass:
        leaves = {}
        for name, tensor in weights.items():
            leaf = tensor.clone()
            leaves[name] = leaf.requires_grad_(is_trained(self._job, name))
        first_leaf, *_ = leaves.values()
        ranks = self._job["data_parallel"]
        pieces = self._job["accumulation"]
        batches = [self._samples.batch(step, rank) for rank in range(ranks)]
        terms = sum(self._samples.terms(batch) for batch in batches)
        losses = []
        for rank, batch in enumerate(batches):
            for piece, micro_batch in enumerate(data.micro_batches(batch, pieces)):
                factors = self.dropout.factors(step, rank, piece, first_leaf.dtype)
                of_labels, balance = model.losses(leaves | factors, micro_batch)
                loss = of_labels.sum() / terms + balance / (ranks * pieces)
                loss.backward()
                computed = of_labels.detach().to(torch.float64)
                losses.append(computed.flatten())
        gradients = {}
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[name] = leaf.grad
            elif leaf.requires_grad:
                # An expert that no token chose has zero gradients; its moments still move it.
                gradients[name] = torch.zeros_like(leaf)
        every_loss = torch.cat(losses)
        mean = float(every_loss.sum()) / terms
        norm = update.norm_of(gradients)
        clipped = update.clipped(gradients, norm, self._settings.max_norm)
        return _Pass(loss=mean, losses=every_loss, gradients=gradients, norm=norm, clipped=clipped)

    def _noise(self, step: int, before: Tensors, exact: _Pass, grid: float = 1.0) -> Row:
        """Return how far the run's precision alone moves the results."""
        weights = self._models.weights(before, torch.float32)
        other = self._pass(step, weights, self._models.rounding(grid))
        # The error of the mean can be small by chance. The errors of single labels show how large
        # it can become.
        errors = other.losses - exact.losses
        spread = float(errors.std()) / math.sqrt(len(errors))
        clipped = other.clipped
        if not self._exact:
            # Each gradient is a number of the run's precision before it is summed over ranks.
            rounded = {name: bfloat(gradient) for name, gradient in other.gradients.items()}
            clipped = update.clipped(rounded, other.norm, self._settings.max_norm)
        squares = 0.0
        for name, gradient in exact.gradients.items():
            difference = other.gradients[name] - gradient
            squares += float(difference.square().sum())
        of_mean = abs(other.loss - exact.loss)
        return {
            "loss": max(of_mean, spread) / exact.loss,
            # The error of a norm is at most that of its vector.
            "grad_norm": math.sqrt(squares) / exact.norm,
            "gaps": exact.gaps(clipped),
        }

    def _weights_before(self, step: int) -> Tensors:
        return _weights(self._job, self._sizes, self._folder, step - 1)

    def _taken(self, step: int) -> dict[str, Any] | None:
        """Return what the optimizer got, None if it did not run."""
        file = self._folder / f"update-{step}.pt"
        if not file.exists():
            return None
        taken: dict[str, Any] = torch.load(file, weights_only=True)
        gradients = to_canonical(self._job["backend"], self._sizes, taken["gradients"])
        return taken | {"gradients": without_bias(gradients)}


def _reported(file: Path) -> dict[int, dict[str, float]]:
    reported = {}
    if file.exists():
        text = file.read_text(encoding="utf-8")
        for line in text.splitlines():
            row = json.loads(line)
            step = int(row["step"])
            reported[step] = {key: float(row[key]) for key in _FIGURES}
    return reported


def _noises(noise: Mapping[str, Any]) -> dict[str, float]:
    noises = {kind: gap for kind, (gap, _) in noise["gaps"].items()}
    for key in _FIGURES:
        noises[key] = noise[key]
    return noises


def _limit(kind: str, key: str) -> float:
    limits = _LIMITS[kind]
    return float(limits.get(key, limits["gradient"]))


def _difference(name: str, tensor: Tensor, expected: Tensor) -> str:
    if tensor.shape != expected.shape:
        return f"{name} have the shape {list(tensor.shape)}, not {list(expected.shape)}"
    if torch.equal(tensor, expected):
        return ""
    differs = tensor != expected
    share = float(differs.float().mean())
    return f"{share:.0%} of the {name} are others"


def _weights(job: Job, sizes: Architecture, folder: Path, step: int) -> Tensors:
    recorded = torch.load(folder / f"weights-{step}.pt", weights_only=True)
    return to_canonical(job["backend"], sizes, recorded["weights"])


def _wide(tensors: Tensors) -> Tensors:
    return {name: tensor.to(torch.float64) for name, tensor in tensors.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    cores = len(os.sched_getaffinity(0))
    findings = replay(folder, threads=min(_MOST_THREADS, cores))
    text = json.dumps(findings, indent=1)
    (folder / "proof.json").write_text(text + "\n", encoding="utf-8")
