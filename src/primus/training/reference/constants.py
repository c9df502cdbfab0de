"""Find wrong constants whose effect is below the noise of a run's precision: norm epsilon, rotary angles, scales.

Rounding errors of a run point in all directions. A wrong constant moves all gradients in one direction, which the
reference knows, because it computes once more with that constant changed. The part of the run's errors in this
direction shows how far the constant is changed in the run: 0 is not at all, 1 is as far as in the reference's trial.
All constants are fitted together, because one may look like another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from primus.training.reference.diffusion import Diffusion
from primus.training.reference.model import Constants, Model, bfloat
from primus.training.reference.names import kind_of

Gradients = Mapping[str, torch.Tensor]
AnyModel = Model | Diffusion


def _fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor rounded to float8_e4m3fn; its gradient passes unchanged."""
    return tensor + (tensor.detach().to(torch.float8_e4m3fn).to(tensor.dtype) - tensor.detach())


_ROUNDED = "rotary angles rounded to BF16"
# The other backends round the angles of a BF16 run; that share is fitted, but not judged.
_EXACT_ANGLES = ("torchtitan",)
_BOTH = {
    "norm epsilon + 0.001": Constants(norm_eps=1e-3),
    "attention scale × 1.01": Constants(attention=1.01),
    "rotary angles rounded to FP8": Constants(angles=_fp8),
    "shares of attention rounded to FP8": Constants(shares=_fp8),
    _ROUNDED: Constants(angles=bfloat),
}
# These changes concern the rounding to FP8, not the values that are rounded.
_FORMAT = "gradients of products rounded to E4M3"
_OF_EIGHT = {
    "outputs not rounded to FP8": Constants(wide="outputs"),
    "gradients of states not rounded to FP8": Constants(wide="gradients of states"),
    "gradients of weights not rounded to FP8": Constants(wide="gradients of weights"),
    _FORMAT: Constants(one_format=True),
}
# A step with at least this part of all evidence for a change must show at least this much of it.
_PART, _AT_EACH_STEP = 0.05, 0.25
# A share below the limits of the verdict, but beyond what most healthy runs show; and the same for FP8's own rounding.
_SUSPECT, _SUSPECT_EIGHT = 0.4, 0.15
_LANGUAGE = {
    "z-loss of 0.0003": Constants(z_loss=3e-4),
    "labels smoothed by 0.01": Constants(smoothing=0.01),
}
# The opposite of these changes is no fault: a negative z-loss, or less rounding than the reference's.
_ONE_SIDED = {*_LANGUAGE, _ROUNDED, "rotary angles rounded to FP8", "shares of attention rounded to FP8"}


def trials(model: AnyModel) -> dict[str, AnyModel]:
    """Return ``model`` with one constant changed, by the name of the change, and without rounding."""
    if isinstance(model, Diffusion):
        return {name: _fresh(model, constants=constants) for name, constants in _BOTH.items()}
    sizes, plain = model.sizes, replace(model, eight=None)
    found = {name: _fresh(plain, constants=constants) for name, constants in (_BOTH | _LANGUAGE).items()}
    changed = {"rotary base × 1.05": replace(sizes, rope_theta=sizes.rope_theta * 1.05)}
    moe = sizes.moe
    if moe.experts:
        changed["weight of experts × 1.01"] = replace(sizes, moe=replace(moe, route_scale=moe.route_scale * 1.01))
        if moe.top_k > 1:
            found["weights of a token's experts in reverse"] = _fresh(plain, constants=Constants(reversed_shares=True))
        if moe.auxiliary_loss and plain.dialect.balance != "none":
            more = replace(moe, auxiliary_loss=moe.auxiliary_loss * 1.5)
            changed["balancing loss × 1.5"] = replace(sizes, moe=more)
    if sizes.window:
        changed["window + 1"] = replace(sizes, window=sizes.window + 1)
    return found | {name: _fresh(plain, sizes=other) for name, other in changed.items()}


def trials_of_eight(model: AnyModel) -> dict[str, AnyModel]:
    """Return ``model`` with another rounding to FP8, by the name of the change; none if it does not round to FP8."""
    if isinstance(model, Diffusion) or model.eight is None:
        return {}
    return {name: _fresh(model, constants=constants) for name, constants in _OF_EIGHT.items()}


def _fresh(model: AnyModel, **changes: Any) -> AnyModel:
    return replace(model, sent={}, closest=math.inf, **changes)


@dataclass(frozen=True, kw_only=True)
class Products:
    """One step: names of the changes and, for each tensor, the products of their directions with each other, with the
    run's errors, and with the noise.
    """

    names: Sequence[str]
    parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def products(
    run: Gradients, own: Gradients, noisy: Gradients, plain: Gradients, changed: Mapping[str, Gradients]
) -> Products:
    """Multiply gradients of one step: of the run, of the reference, and of the reference in the run's precision.

    ``changed`` has those with each constant changed, ``plain`` those with none changed, both without rounding.
    """
    names = [name for name in own if name in run and bool(run[name].isfinite().all())]
    noise: dict[str, float] = {}
    for name in names:
        error = float((noisy[name] - own[name]).double().square().sum())
        noise[kind_of(name)] = noise.get(kind_of(name), 0.0) + error
    parts = []
    for name in names:
        # Weight each kind of tensor by how exactly the precision determines its gradient.
        if (least := noise[kind_of(name)]) > 0:
            moved = torch.stack([(other[name].double() - plain[name]).flatten() for other in changed.values()])
            errors, rounding = ((found[name].double() - own[name]).flatten() for found in (run, noisy))
            parts.append((moved @ moved.T / least, moved @ errors / least, moved @ rounding / least))
    return Products(names=list(changed), parts=parts)


@dataclass
class Fit:
    """Least squares over the added steps: direction of each change → how far the run moved in it.

    ``routed``: the model has experts. Rounding sends tokens to other experts, which changes the gradients of all
    tensors of that step together, now and then by a lot. A constant is wrong at every step, so the median step
    decides.
    """

    backend: str
    routed: bool
    _names: list[str] = field(default_factory=list)
    # For each tensor and step, as in Products.
    _parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    # The step of each part.
    _steps: list[int] = field(default_factory=list)

    def add(self, step: Products) -> None:
        """Add a step."""
        self._names = list(step.names)
        number = self._steps[-1] + 1 if self._steps else 0
        self._parts += step.parts
        self._steps += [number] * len(step.parts)

    def suspicious(self) -> bool:
        """Return whether the steps so far seem to show a change."""
        return any(
            abs(row["share"] - row["rounding"])
            > max(_SUSPECT_EIGHT if row["eight"] else _SUSPECT, 3 * row["deviation"])
            for row in self.found().values()
        )

    def found(self) -> dict[str, dict[str, Any]]:
        """Return name of a change → how far the run moved (``share``), how far rounding alone does, and a
        standard deviation.

        ``steps``: the share that each added step shows alone. ``every``: whether each step that could show the change
        does. ``rounding`` is the share in the reference that computes in the run's precision. The deviation is how
        much the tensors disagree, or with experts the steps, in the run or in this reference, whichever is larger.
        ``eight``: the change concerns the rounding to FP8; the deviation is then that of the reference.
        ``one_sided``: only a positive share is a fault. Changes without an effect are left out.
        """
        if not self._parts:
            return {}
        squares, errors, noise = (torch.stack(parts) for parts in zip(*self._parts, strict=True))
        # Directions differ in length by orders of magnitude.
        lengths = squares.sum(0).diagonal().sqrt()
        seen = [n for n, length in enumerate(lengths.tolist()) if length > 0]
        squares, errors, noise = squares[:, seen][:, :, seen], errors[:, seen], noise[:, seen]
        scale = torch.outer(lengths[seen], lengths[seen])
        inverse = torch.linalg.pinv(squares.sum(0) / scale) / scale
        steps = torch.tensor(self._steps)
        count = int(steps[-1]) + 1

        eight = torch.tensor([self._names[n] in _OF_EIGHT for n in seen])

        def fitted(products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            shares = inverse @ products.sum(0)
            left = (products - squares @ shares) @ inverse
            of_tensors = left.square().sum(0)
            each = torch.stack([
                torch.linalg.pinv(squares[steps == n].sum(0) / scale) / scale @ products[steps == n].sum(0)
                for n in range(count)
            ])  # fmt: skip
            if not self.routed:
                return shares, of_tensors.sqrt(), each
            of_steps = torch.zeros(count, len(shares), dtype=left.dtype).index_add(0, steps, left)
            # The residuals of all steps add up to zero, so one step shows no deviation, and two show half of it.
            squared = of_steps.square().sum(0) * count / max(1, count - 1)
            # A run may lose FP8 at some steps only, which the median would not show.
            median = each.quantile(0.5, dim=0)
            return torch.where(eight, shares, median), of_tensors.maximum(squared).sqrt(), each

        (shares, own, each), (rounding, other, each_other) = fitted(errors), fitted(noise)
        # One step of unusual rounding may decide the share of all steps. A wrong constant shows at every step that has
        # a part in that share. With experts, the median decides.
        parts = torch.stack([squares[steps == n].sum(0).diagonal() for n in range(count)]) / lengths[seen].square()
        less = (each - each_other) * (shares - rounding).sign() < _AT_EACH_STEP
        every = ~((parts >= _PART) & less).any(0) | eight | self.routed
        # If the largest gradient of a tensor moves a little, so does the grid. The run then rounds all of the values in
        # another way than the reference, which looks like another format at that step. A wrong format is wrong always.
        median = rounding + (each - each_other).quantile(0.5, dim=0)
        shares = torch.where(torch.tensor([self._names[n] == _FORMAT for n in seen]), median, shares)
        # A run that loses FP8 at some steps disagrees with itself, and that must not widen its limit.
        deviations = torch.where(eight, other, own.maximum(other))
        columns = (shares, rounding, deviations, eight, every, each.T)
        rows = zip(seen, *(column.tolist() for column in columns), strict=True)
        return {
            self._names[n]: {
                "share": share,
                "rounding": alone,
                "deviation": deviation,
                "eight": known,
                "every": shown_always,
                "one_sided": self._names[n] in _ONE_SIDED,
                "steps": of_steps,
            }
            for n, share, alone, deviation, known, shown_always, of_steps in rows
            if self._names[n] != _ROUNDED or self.backend in _EXACT_ANGLES
        }
