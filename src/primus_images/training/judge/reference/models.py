"""The reference's models of one run, as its job describes them: exact, rounded, or with one
constant changed.

A wrong constant moves what a block computes in a direction that the reference knows. How far the
run's errors go in it shows how far the constant is changed: 0 is not at all, 1 as far as in the
trial. All constants are fitted together.
"""

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
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
from primus_images.training.judge.reference.names import BIAS, Tensors, kind_of
from primus_images.training.judge.reference.rounding import LIMITS, bfloat, exact
from primus_images.yamlfile import read_values

if TYPE_CHECKING:
    from primus_images.training.judge.reference.blocks import Result


class Models:
    """The models that repeat the run of ``job``, and the weights with which they compute."""

    def __init__(self, job: Mapping[str, Any], sizes: Architecture) -> None:
        self._job = job
        self.sizes = as_trained(
            sizes, job["backend"], int(job["config"].get("training.seq_len", 0))
        )
        self.dialect = _dialect(job)
        self.exact = job["precision"] == "fp32"

    def model(self) -> Transformer:
        """Return the model that repeats the run. FP8's rounding is large and known, so it is
        repeated as well.
        """
        if self.sizes.of_images:
            guidance = float(self._job["config"].get("guidance", 1.0))
            return Diffusion(
                self.sizes, guidance=guidance, entering=exact if self.exact else bfloat
            )
        eight = None
        if self._job["precision"] == "fp8":
            if self._job["gpu"] == CPU:
                name = "e4m3fn"
            else:
                name = arch_of(generation(self._job["gpu"])).fp8
            eight = getattr(torch, f"float8_{name}")
        return Model(self.sizes, dialect=self.dialect, eight=eight)

    def rounding(self, grid: float = 1.0) -> Transformer:
        """Return the model that rounds as the run's precision does, to a ``grid`` scaled by 1 to 2."""
        model = self.model()
        if not self.exact:
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
        """Return ``weights`` as the run computes with them, in ``dtype``, and the scale of
        adapters.
        """
        computed = {
            name: (t if self._kept(name) else t.to(torch.bfloat16)).to(dtype)
            for name, t in weights.items()
        }
        if self._job["mode"] == "lora":
            computed[".adapter_scale"] = torch.tensor(scale_of(self._job), dtype=torch.float64)
        return computed

    def _kept(self, name: str) -> bool:
        # torchtitan can gather weights in FP8, which it then rounds from float32.
        gathered = self._job["config"].get("quantize.linear.float8.enable_fsdp_float8_all_gather")
        eight = self._job["precision"] == "fp8" and gathered and is_narrow(name)
        return self.exact or name.endswith(BIAS) or bool(eight)


def scale_of(job: Mapping[str, Any]) -> float:
    """Return the factor of what adapters add to their layers."""
    config = job["config"]
    return float(config.get("lora.alpha", 32.0)) / float(config.get("lora.rank", 16))


def _dialect(job: Mapping[str, Any]) -> Dialect:
    if job["backend"] == "torchtitan":
        # Its experts are balanced by a bias in the router, not by a loss.
        return Dialect(
            softmax_mscale=True, bias_rate=job["model"]["moe"]["auxiliary_loss"], centered=True
        )
    moe = job["model"]["moe"]
    if job["backend"] == "megatron" and moe["experts"]:
        kind = str(job["config"].get("model.moe_router_load_balancing_type", "aux_loss"))
        return Dialect(
            balance={"seq_aux_loss": "sequence", "aux_loss": "batch"}.get(kind, "none"),
            group_best=max(1, moe["top_k"] // moe["top_groups"]),
            bias_rate=float(job["config"].get("model.moe_router_bias_update_rate", 1e-3))
            if moe["score"] == "sigmoid"
            else 0.0,
        )
    # transformers rounds the factor of Gemma's embedding as it rounds the embedding.
    return Dialect(scale=exact if job["precision"] == "fp32" else bfloat)


def as_trained(sizes: Architecture, backend: str, length: int) -> Architecture:
    """Return the sizes as trained: torchtitan scales DeepSeek's positions only beyond the original
    length.
    """
    short = length <= sizes.rope_scaling.original_max_position
    if backend == "torchtitan" and sizes.rope_scaling.kind == "yarn" and short:
        return replace(sizes, rope_scaling=RopeScaling())
    return sizes


Gradients = Mapping[str, Tensor]


_ROUNDINGS = {
    "bf16": bfloat,
    "fp8": lambda t: t + (t.detach().to(torch.float8_e4m3fn).to(t.dtype) - t.detach()),
}
_TRIALS: Mapping[str, Any] = read_values(Path(__file__).with_name("trials.yaml")).data
_ROUNDED = "rotary angles rounded to BF16"
# Most backends round the angles of a BF16 run; that share is fitted, but not judged.
_AS_BACKEND = "rotary angles rounded to BF16 by the backend"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model with one constant changed. ``shows`` is where the change is looked for: in the
    "outputs" of blocks or of the "head", in the "gradients" of blocks or of "weights", or in those
    of the "loss". ``rounds``: the model rounds to FP8 as the run does.
    """

    model: Transformer
    shows: tuple[str, ...]
    rounds: bool


def trials(model: Transformer, backend: str) -> dict[str, Trial]:
    """Return ``model`` with one constant changed, by the name of the change."""
    sizes = model.sizes
    moe = model.sizes.moe
    if isinstance(model, Model):
        plain = replace(model, eight=None)
    else:
        plain = model
    variants: dict[str, Trial] = {}

    def change(name: str, *shows: str, rounds: bool = False, **changes: Any) -> None:
        changed = replace(
            model if rounds else plain, sent={}, choices={}, closest=math.inf, **changes
        )
        variants[name] = Trial(model=changed, shows=shows, rounds=rounds)

    def change_constants(of: str) -> None:
        for name, row in _TRIALS[of].items():
            constants = {
                key: _ROUNDINGS.get(value, value) for key, value in row["constants"].items()
            }
            change(name, *row["shows"], rounds=of == "eight", constants=Constants(**constants))

    change_constants("all")
    # torchtitan's Qwen 3 rounds them (torchtitan 0.2.2: models/qwen3/model/model.py), its other
    # models do not.
    if backend != "torchtitan" or family(sizes.family).backends[backend].model == "qwen3":
        variants[_AS_BACKEND] = variants.pop(_ROUNDED)
    if not isinstance(model, Model):
        return variants
    change_constants("language")
    change(
        "rotary base × 1.05", "outputs", sizes=replace(sizes, rope_theta=sizes.rope_theta * 1.05)
    )
    if sizes.window:
        change("window + 1", "outputs", sizes=replace(sizes, window=sizes.window + 1))
    if moe.experts:
        heavier = replace(moe, route_scale=moe.route_scale * 1.01)
        change("weight of experts × 1.01", "outputs", sizes=replace(sizes, moe=heavier))
    if moe.experts and moe.top_k > 1:
        change(
            "weights of a token's experts in reverse",
            "outputs",
            constants=Constants(reversed_shares=True),
        )
    if moe.experts and moe.auxiliary_loss and model.dialect.balance != "none":
        more = replace(sizes, moe=replace(moe, auxiliary_loss=moe.auxiliary_loss * 1.5))
        other = replace(
            model.dialect, balance="sequence" if model.dialect.balance == "batch" else "batch"
        )
        change("balancing loss × 1.5", "gradients", rounds=True, sizes=more)
        change("balancing loss of other groups of tokens", "gradients", rounds=True, dialect=other)
    if model.eight is not None:
        change_constants("eight")
    elif _ROUNDED in variants:
        # The smallest of these changes needs all evidence. FP8 hides it in any case.
        variants[_ROUNDED] = replace(variants[_ROUNDED], shows=("outputs", "gradients"))
    return variants


# Of a part of the evidence: the products of the directions of all changes with each other, with the
# run's errors, and with the noise.
Part = tuple[Tensor, Tensor, Tensor]


def products_of_blocks(names: Sequence[str], results: "Iterable[Result]") -> list[Part]:
    """Multiply the results of one step's blocks. A part of the evidence is one sample in one
    result.
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
        weight = (result.certain / noise.square().clamp(min=usual)).sqrt().unsqueeze(-1)
        none = torch.zeros_like(result.exact)
        moved = torch.stack([result.moved.get(name, none) * weight for name in names]).double()
        seen = [
            ((tensor - result.exact) * weight).double().flatten(1)
            for tensor in (result.run, result.rounded)
        ]
        for sample, directions in enumerate(moved.flatten(2).unbind(1)):
            if bool(result.certain[sample].any()):
                parts.append(
                    (directions @ directions.T, *(directions @ errors[sample] for errors in seen))
                )
    return parts


def products(
    run: Gradients, exact: Gradients, noisy: Gradients, changed: Sequence[Gradients]
) -> list[Part]:
    """Multiply gradients of one step, each tensor a part of the evidence. ``changed`` are those of
    the trials.
    """
    names = [name for name in exact if name in run and bool(run[name].isfinite().all())]
    noise: dict[str, float] = {}
    for name in names:
        error = float((noisy[name] - exact[name]).double().square().sum())
        noise[kind_of(name)] = noise.get(kind_of(name), 0.0) + error
    parts = []
    for name in names:
        # Weight each kind of tensor by how exactly the precision determines its gradient.
        least = noise[kind_of(name)]
        if least > 0:
            moved = torch.stack(
                [(other[name].double() - exact[name]).flatten() for other in changed]
            )
            errors, rounding = (
                (gradients[name].double() - exact[name]).flatten() for gradients in (run, noisy)
            )
            parts.append(
                (moved @ moved.T / least, moved @ errors / least, moved @ rounding / least)
            )
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
    seen = [n for n, length in enumerate(lengths.tolist()) if length > 0]
    squares = squares[:, seen][:, :, seen]
    errors = errors[:, seen]
    noise = noise[:, seen]
    scale = torch.outer(lengths[seen], lengths[seen])
    inverse = torch.linalg.pinv(squares.sum(0) / scale) / scale
    shares = inverse @ errors.sum(0)
    rounding = inverse @ noise.sum(0)
    # A run in which one rank or some steps are wrong disagrees with itself, and that must not widen
    # its limit.
    deviations = ((noise - squares @ rounding) @ inverse).square().sum(0).sqrt()
    rule: Mapping[str, Any] = ChainMap(*_TRIALS.values())
    rows = zip(
        [names[n] for n in seen],
        shares.tolist(),
        rounding.tolist(),
        deviations.tolist(),
        strict=True,
    )
    return {
        name: {
            "share": share,
            "rounding": alone,
            "deviation": deviation,
            "eight": name in _TRIALS["eight"],
            **{key: bool(rule.get(name, {}).get(key)) for key in ("one_sided", "biased")},
        }
        for name, share, alone, deviation in rows
        if name != _AS_BACKEND
    }
