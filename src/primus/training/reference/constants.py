"""Find constants that a run has wrong by less than its precision's noise: norm epsilon, rotary angles, scales.

The rounding errors of a run point in any direction; a wrong constant moves all gradients in one, which the reference
knows: it computes once more with that constant changed. The part of the run's errors in this direction says how far the
constant is changed in the run: 0 is not at all, 1 is as far as in the reference's trial. All constants are fitted
together, because one may look like another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from primus.training.reference.diffusion import Diffusion
from primus.training.reference.model import Constants, Model

__all__ = ["Fit", "trials"]

Gradients = Mapping[str, torch.Tensor]
AnyModel = Model | Diffusion

_ROUNDED = "rotary angles rounded to BF16"
# The other backends round the angles in a run in BF16; their part is fitted, and not judged.
_EXACT_ANGLES = ("torchtitan",)
_BOTH = {
    "norm epsilon + 0.001": Constants(norm_eps=1e-3),
    "attention scale × 1.01": Constants(attention=1.01),
    "rotary angles rounded to FP8": Constants(angles=lambda table: table.to(torch.float8_e4m3fn).to(table.dtype)),
    _ROUNDED: Constants(angles=lambda table: table.to(torch.bfloat16).to(table.dtype)),
}
_LANGUAGE = {
    "z-loss of 0.0003": Constants(z_loss=3e-4),
    "labels smoothed by 0.01": Constants(smoothing=0.01),
}


def trials(model: AnyModel) -> dict[str, AnyModel]:
    """``model`` with one constant changed, by the name of the change. Its rounding stays out."""
    if isinstance(model, Diffusion):
        return {name: _fresh(model, constants=constants) for name, constants in _BOTH.items()}
    sizes, plain = model.sizes, replace(model, eight=False)
    found = {name: _fresh(plain, constants=constants) for name, constants in (_BOTH | _LANGUAGE).items()}
    changed = {"rotary base × 1.05": replace(sizes, rope_theta=sizes.rope_theta * 1.05)}
    moe = sizes.moe
    if moe.experts:
        changed["weight of experts × 1.01"] = replace(sizes, moe=replace(moe, route_scale=moe.route_scale * 1.01))
        if moe.auxiliary_loss and plain.dialect.balance != "none":
            more = replace(moe, auxiliary_loss=moe.auxiliary_loss * 1.5)
            changed["balancing loss × 1.5"] = replace(sizes, moe=more)
    if sizes.window:
        changed["window + 1"] = replace(sizes, window=sizes.window + 1)
    return found | {name: _fresh(plain, sizes=other) for name, other in changed.items()}


def _fresh(model: AnyModel, **changes: Any) -> AnyModel:
    return replace(model, sent={}, closest=math.inf, **changes)


@dataclass
class Fit:
    """Least squares over the steps that were added: direction of each change → how far the run went in it."""

    backend: str
    _names: list[str] = field(default_factory=list)
    # Of each step: products of directions with each other, with the run's errors, and with the noise.
    _steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(
        self, run: Gradients, own: Gradients, noisy: Gradients, plain: Gradients, changed: Mapping[str, Gradients]
    ) -> None:
        """Take a step: gradients of the run, of the reference, and of the reference in the run's precision.

        ``changed`` has those with each constant changed and ``plain`` those with none changed, both without rounding.
        """
        names = [name for name in own if name in run]
        noise: dict[str, float] = {}
        for name in names:
            kind = _kind(name)
            noise[kind] = noise.get(kind, 0.0) + float((noisy[name] - own[name]).double().square().sum())
        # A kind of tensor counts by how exactly the precision decides its gradient.
        scales = {name: noise[_kind(name)] ** -0.5 for name in names if noise[_kind(name)] > 0}

        def errors(found: Gradients, right: Gradients) -> torch.Tensor:
            parts = [(found[name].double() - right[name].double()).flatten() * s for name, s in scales.items()]
            return torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64)

        gap, rounding = errors(run, own), errors(noisy, own)
        directions = torch.stack([errors(gradients, plain) for gradients in changed.values()])
        if all(bool(tensor.isfinite().all()) for tensor in (gap, rounding, directions)):
            self._names = list(changed)
            self._steps.append((directions @ directions.T, directions @ gap, directions @ rounding))

    def found(self) -> dict[str, dict[str, float]]:
        """Name of a change → ``share``, how far the run went, and ``noise``, how far its precision alone may go.

        ``noise`` is 1e9 where these steps cannot tell. Changes without any effect on the run are left out.
        """
        if not self._steps:
            return {}
        squares = sum(step[0] for step in self._steps)
        assert isinstance(squares, torch.Tensor)
        seen = [n for n in range(len(self._names)) if float(squares[n, n]) > 0]
        if not seen:
            return {}
        shares, rounding = (self._solved(seen, which, None) for which in (1, 2))
        count = len(self._steps)
        spread = torch.full_like(rounding, 1e9)
        if count > 2:
            # The jackknife: how far the answer depends on a single step.
            without = torch.stack([self._solved(seen, 2, number) for number in range(count)])
            spread = ((count - 1) / count * (without - without.mean(0)).square().sum(0)).sqrt()
        return {
            self._names[n]: {"share": float(share), "noise": min(1e9, abs(float(bias)) + float(wide))}
            for n, share, bias, wide in zip(seen, shares, rounding, spread, strict=True)
            if self._names[n] != _ROUNDED or self.backend in _EXACT_ANGLES
        }

    def _solved(self, seen: list[int], which: int, without: int | None) -> torch.Tensor:
        rows = [step for number, step in enumerate(self._steps) if number != without]
        squares = torch.stack([row[0] for row in rows]).sum(0)[seen][:, seen]
        products = torch.stack([row[which] for row in rows]).sum(0)[seen]
        # Directions differ in length by orders of magnitude.
        lengths = squares.diagonal().sqrt().clamp(min=1e-30)
        return (torch.linalg.pinv(squares / lengths / lengths[:, None]) @ (products / lengths)) / lengths


def _kind(name: str) -> str:
    return re.sub(r"\.\d+", "", name)
