"""The reference's models of one run: exact, rounded, or with one constant changed.

A wrong constant moves what a block computes in a direction that the reference knows. How far the
run's errors go in it shows how far the constant is changed: 0 is not at all, 1 as far as in the
trial. All constants are fitted together.
"""

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from primus_images.gpus.table import arch_of, generation
from primus_images.recipes.architecture import Architecture, RopeScaling
from primus_images.recipes.choose import CPU
from primus_images.recipes.family import family
from primus_images.training.judge.reference.diffusion import Diffusion
from primus_images.training.judge.reference.model import (
    Constants,
    Dialect,
    Model,
    Transformer,
    is_narrow,
)
from primus_images.training.judge.reference.names import BIAS, Job, Tensors
from primus_images.training.judge.reference.rounding import LIMITS, bfloat, exact
from primus_images.yamlfile import read_values

if TYPE_CHECKING:
    from primus_images.training.judge.reference.blocks import Result


class Models:
    """The models that repeat the run of ``job``, and the weights with which they compute."""

    def __init__(self, job: Job, sizes: Architecture) -> None:
        self._job = job
        length = int(job["config"].get("training.seq_len", 0))
        self.sizes = as_trained(sizes, job["backend"], length)
        self.dialect = _dialect(job)
        self.exact = job["precision"] == "fp32"

    def model(self) -> Transformer:
        """Return the model that repeats the run.

        FP8's rounding is large and known, so it is repeated as well.
        """
        job = self._job
        if self.sizes.of_images:
            guidance = float(job["config"].get("guidance", 1.0))
            entering = bfloat
            if self.exact:
                entering = exact
            return Diffusion(self.sizes, guidance=guidance, entering=entering)
        model = Model(self.sizes, dialect=self.dialect)
        if job["precision"] == "fp8":
            name = "e4m3fn"
            if job["gpu"] != CPU:
                name = arch_of(generation(job["gpu"])).fp8
            model.eight = getattr(torch, f"float8_{name}")
        return model

    def rounding(self, grid: float = 1.0) -> Transformer:
        """Return the model that rounds as the run does, to a ``grid`` scaled by 1 to 2."""
        model = self.model()
        if self.exact:
            return model
        model.between = lambda tensor: bfloat(tensor * grid) / grid
        on_cpu = self._job["gpu"] == CPU
        if isinstance(model, Model):
            inner = LIMITS["inner"]
            model.inner = inner.get(self.sizes.family, inner[self._job["backend"]])
            # No fused kernel supports values of another size than keys.
            model.adding = on_cpu and not self.sizes.mla.kv_lora_rank
        elif isinstance(model, Diffusion) and on_cpu:
            # PyTorch keeps them as bfloat16 numbers on CPUs, and as float32 numbers on GPUs.
            model.keeping = model.between
            model.adding = True
        return model

    def weights(self, weights: Tensors, dtype: torch.dtype) -> Tensors:
        """Return ``weights`` as the run computes with them, and the scale of adapters.

        They have the type ``dtype``.
        """
        computed = {}
        for name, tensor in weights.items():
            if self._keeps(name):
                computed[name] = tensor.to(dtype)
            else:
                computed[name] = bfloat(tensor).to(dtype)
        if self._job["mode"] == "lora":
            computed[".adapter_scale"] = torch.tensor(scale_of(self._job), dtype=torch.float64)
        return computed

    def _keeps(self, name: str) -> bool:
        if self.exact or name.endswith(BIAS):
            return True
        if self._job["precision"] != "fp8":
            return False
        # torchtitan can gather weights in FP8, which it then rounds from float32.
        gathered = self._job["config"].get("quantize.linear.float8.enable_fsdp_float8_all_gather")
        return bool(gathered) and is_narrow(name)


def scale_of(job: Job) -> float:
    """Return the factor of what adapters add to their layers."""
    config = job["config"]
    alpha = float(config.get("lora.alpha", 32.0))
    rank = float(config.get("lora.rank", 16))
    return alpha / rank


def _dialect(job: Job) -> Dialect:
    moe = job["model"]["moe"]
    if job["backend"] == "torchtitan":
        # Its experts are balanced by a bias in the router, not by a loss.
        return Dialect(softmax_mscale=True, bias_rate=moe["auxiliary_loss"], centered=True)
    if job["backend"] == "megatron" and moe["experts"]:
        config = job["config"]
        kind = config.get("model.moe_router_load_balancing_type", "aux_loss")
        balances = {"seq_aux_loss": "sequence", "aux_loss": "batch"}
        balance = balances.get(kind, "none")
        best = moe["top_k"] // moe["top_groups"]
        rate = 0.0
        if moe["score"] == "sigmoid":
            rate = float(config.get("model.moe_router_bias_update_rate", 1e-3))
        return Dialect(balance=balance, group_best=max(1, best), bias_rate=rate)
    if job["precision"] == "fp32":
        return Dialect()
    # transformers rounds the factor of Gemma's embedding as it rounds the embedding.
    return Dialect(scale=bfloat)


def as_trained(sizes: Architecture, backend: str, length: int) -> Architecture:
    """Return the sizes as trained.

    torchtitan scales DeepSeek's positions only beyond the original length.
    """
    short = length <= sizes.rope_scaling.original_max_position
    if backend == "torchtitan" and sizes.rope_scaling.kind == "yarn" and short:
        return replace(sizes, rope_scaling=RopeScaling())
    return sizes


def _eight_bit(tensor: Tensor) -> Tensor:
    # The gradient is that of the tensor itself.
    plain = tensor.detach()
    rounded = plain.to(torch.float8_e4m3fn).to(tensor.dtype)
    return tensor + (rounded - plain)


_ROUNDINGS = {"bf16": bfloat, "fp8": _eight_bit}
_TRIALS: Mapping[str, Any] = read_values(Path(__file__).with_name("trials.yaml")).data
_ROUNDED = "rotary angles rounded to BF16"
# Most backends round the angles of a BF16 run; that share is fitted, but not judged.
_AS_BACKEND = "rotary angles rounded to BF16 by the backend"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model with one constant changed.

    ``shows`` is where the change is looked for: in the "outputs" of blocks or of the "head", in the
    "gradients" of blocks, or in those of the "loss". ``rounds``: the model rounds to FP8 as the run
    does.
    """

    model: Transformer
    shows: tuple[str, ...]
    rounds: bool = False


def trials(model: Transformer, backend: str) -> dict[str, Trial]:
    """Return ``model`` with one constant changed, by the name of the change."""
    if not isinstance(model, Model):
        variants = _of_table(model, "all")
        variants[_AS_BACKEND] = variants.pop(_ROUNDED)
        return variants
    plain = replace(model, eight=None)
    variants = _of_table(plain, "all")
    rounds = True
    if backend == "torchtitan":
        # Its Qwen 3 rounds them (torchtitan 0.2.2: models/qwen3/model/model.py), its other models
        # do not.
        of_backend = family(model.sizes.family).backends[backend]
        rounds = of_backend.model == "qwen3"
    if rounds:
        variants[_AS_BACKEND] = variants.pop(_ROUNDED)
    variants |= _of_table(plain, "language")
    for name, changes in _changes_of_sizes(model):
        variants[name] = Trial(model=_changed(plain, **changes), shows=("outputs",))
    for name, changes in _changes_of_balance(model):
        changed = _changed(model, **changes)
        variants[name] = Trial(model=changed, shows=("gradients",), rounds=True)
    if model.eight is not None:
        for name, trial in _of_table(model, "eight").items():
            variants[name] = replace(trial, rounds=True)
    elif _ROUNDED in variants:
        # The smallest of these changes needs all evidence. FP8 hides it in any case.
        variants[_ROUNDED] = replace(variants[_ROUNDED], shows=("outputs", "gradients"))
    return variants


def _changed(model: Transformer, **changes: Any) -> Transformer:
    return replace(model, sent={}, choices={}, closest=math.inf, **changes)


def _of_table(model: Transformer, key: str) -> dict[str, Trial]:
    variants = {}
    for name, row in _TRIALS[key].items():
        values = {}
        for constant, value in row["constants"].items():
            values[constant] = _ROUNDINGS.get(value, value)
        constants = Constants(**values)
        changed = _changed(model, constants=constants)
        shows = tuple(row["shows"])
        variants[name] = Trial(model=changed, shows=shows)
    return variants


def _changes_of_sizes(model: Model) -> Iterator[tuple[str, dict[str, Any]]]:
    sizes = model.sizes
    moe = sizes.moe
    larger = replace(sizes, rope_theta=sizes.rope_theta * 1.05)
    yield "rotary base × 1.05", {"sizes": larger}
    if sizes.window:
        wider = replace(sizes, window=sizes.window + 1)
        yield "window + 1", {"sizes": wider}
    if moe.experts:
        heavier = replace(moe, route_scale=moe.route_scale * 1.01)
        yield "weight of experts × 1.01", {"sizes": replace(sizes, moe=heavier)}
    if moe.experts and moe.top_k > 1:
        reverse = Constants(reversed_shares=True)
        yield "weights of a token's experts in reverse", {"constants": reverse}


def _changes_of_balance(model: Model) -> Iterator[tuple[str, dict[str, Any]]]:
    moe = model.sizes.moe
    kind = model.dialect.balance
    if not (moe.experts and moe.auxiliary_loss) or kind == "none":
        return
    more = replace(moe, auxiliary_loss=moe.auxiliary_loss * 1.5)
    sizes = replace(model.sizes, moe=more)
    yield "balancing loss × 1.5", {"sizes": sizes}
    other = "sequence"
    if kind == "sequence":
        other = "batch"
    dialect = replace(model.dialect, balance=other)
    yield "balancing loss of other groups of tokens", {"dialect": dialect}


# Of a part of the evidence: the products of the directions of all changes with each other, with the
# run's errors, and with the noise.
Part = tuple[Tensor, Tensor, Tensor]


def products_of_blocks(names: Sequence[str], results: "Iterable[Result]") -> list[Part]:
    """Multiply the results of one step's blocks.

    A part of the evidence is one sample in one result. ``names`` are those of the changes.
    """
    parts: list[Part] = []
    for result in results:
        noise = result.noises
        if not result.moved or not bool(result.certain.any()):
            continue
        usual = float(noise[result.certain].square().mean())
        if not usual:
            continue
        # Weight each token by how exactly the precision determines it.
        squares = noise.square().clamp(min=usual)
        weight = (result.certain / squares).sqrt().unsqueeze(-1)
        none = torch.zeros_like(result.exact)
        weighted = [result.moved.get(name, none) * weight for name in names]
        moved = torch.stack(weighted).double().flatten(2)
        errors = (result.run - result.exact) * weight
        errors = errors.double().flatten(1)
        rounding = (result.rounded - result.exact) * weight
        rounding = rounding.double().flatten(1)
        for sample, directions in enumerate(moved.unbind(1)):
            if bool(result.certain[sample].any()):
                with_each_other = directions @ directions.T
                with_errors = directions @ errors[sample]
                with_rounding = directions @ rounding[sample]
                parts.append((with_each_other, with_errors, with_rounding))
    return parts


def fit(names: Sequence[str], parts: Sequence[Part]) -> dict[str, dict[str, Any]]:
    """Fit all ``parts`` of the evidence by least squares. ``names`` are those of the changes.

    Returns name of a change → the ``share`` by which the run moved, how much of it is ``rounding``,
    and a ``deviation``: how much the parts of the evidence disagree in this reference.
    ``one_sided``: only a positive share is a fault. ``biased``: other roundings look like a small
    change. ``eight``: the change concerns the rounding to FP8.
    """
    if not parts:
        return {}
    squares, errors, noise = (torch.stack(part) for part in zip(*parts, strict=True))
    # Directions differ in length by orders of magnitude.
    lengths = squares.sum(0).diagonal().sqrt()
    moving = [number for number, length in enumerate(lengths.tolist()) if length > 0]
    squares = squares[:, moving][:, :, moving]
    errors = errors[:, moving]
    noise = noise[:, moving]
    scale = torch.outer(lengths[moving], lengths[moving])
    inverse = torch.linalg.pinv(squares.sum(0) / scale) / scale
    shares = inverse @ errors.sum(0)
    rounding = inverse @ noise.sum(0)
    # A run in which one rank or some steps are wrong disagrees with itself, and that must not widen
    # its limit.
    unexplained = noise - squares @ rounding
    by_part = unexplained @ inverse
    deviations = by_part.square().sum(0).sqrt()
    rules: Mapping[str, Any] = ChainMap(*_TRIALS.values())
    fitted = {}
    for place, number in enumerate(moving):
        name = names[number]
        if name == _AS_BACKEND:
            continue
        rule = rules.get(name, {})
        fitted[name] = {
            "share": float(shares[place]),
            "rounding": float(rounding[place]),
            "deviation": float(deviations[place]),
            "eight": name in _TRIALS["eight"],
            "one_sided": bool(rule.get("one_sided")),
            "biased": bool(rule.get("biased")),
        }
    return fitted
