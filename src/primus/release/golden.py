"""Golden curves: losses and gradient norms of a release's proxies in FP32 on a CPU, kept in the repository."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from primus.errors import InputError
from primus.files import write_file
from primus.schema import read_json
from primus.training.checks import Verdict, relative_gap

FOLDER = "benchmarks/golden"
_FIGURES = ("loss", "grad_norm")
_WORDS = {"loss": "the loss", "grad_norm": "the gradient norm"}
# Relative tolerances between types of CPU, which add in different orders; training amplifies the difference. Measured
# with and without vector instructions of later CPUs, over 20 steps: 2.5e-5 and 2.2e-4.
_TOLERANCE = {"loss": 2e-4, "grad_norm": 2e-3}


def load(root: Path, release: str) -> dict[str, Any] | None:
    """Read the curves of ``release`` (``v26.11-cpu``); None if there are none. Raises InputError for a damaged file."""
    path = root / FOLDER / f"{release}.json"
    try:
        content: Any = read_json(path).data
        if any(len(c["loss"]) != len(c["grad_norm"]) or not c["cpu"] for c in content["curves"].values()):
            raise ValueError("a curve has steps without a figure, or no CPU")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "create it again with primus validate cpu --suite quick --record-golden"
        raise InputError("not a file of golden curves", where=str(path), hint=hint) from error
    return cast(dict[str, Any], content)


def name_of(evidence: Mapping[str, Any]) -> str | None:
    """Return the name of the curve in a validation record; None unless the record is of FP32 on a CPU."""
    recipe = evidence["recipe"]
    if recipe["precision"] != "fp32" or recipe["gpu"] != "cpu" or evidence["gpu"] != "none":
        return None
    return f"{recipe['name']}-{recipe['backend']}-{recipe['mode']}"


def compared(golden: Mapping[str, Any] | None, evidence: Mapping[str, Any]) -> Verdict | str:
    """Compare the first job of ``evidence`` with its curve. Returns a sentence if there is no curve to compare with."""
    name = name_of(evidence)
    curve = (golden or {}).get("curves", {}).get(name)
    if curve is None:
        return f"the golden curve: none is recorded for {name}"
    if curve["recipe"] != evidence["recipe"]["sha256"]:
        return f"the golden curve: {name} was recorded from another version of the recipe"
    gaps = _gaps(curve, _curve(evidence))
    outside = [(step, key, gap) for step, key, gap in gaps if not gap <= _TOLERANCE[key]]
    largest = max((gap for _, _, gap in gaps), default=math.inf)
    if outside:
        step, key, gap = outside[0]
        reason = f"{_WORDS[key]} leaves the curve at step {step}, by {gap:.1e}"
    elif largest == 0:
        reason = f"{len(curve['loss'])} steps are equal to the last bit"
    else:
        reason = f"{len(curve['loss'])} steps agree within the tolerance between types of CPU"
    limit = f"relative gap ≤ {_TOLERANCE['loss']:g} (loss), {_TOLERANCE['grad_norm']:g} (gradient norm)"
    return Verdict(name="golden curve", passed=not outside and bool(gaps), reason=reason, measured=f"{largest:.1e}",
                   limit=limit)  # fmt: skip


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences between the curves of two releases, one sentence per recipe and backend."""
    sentences = []
    for name in sorted({*old["curves"], *new["curves"]}):
        before, after = old["curves"].get(name), new["curves"].get(name)
        if before is None or after is None:
            sentences.append(f"{name} has a curve in {(new if before is None else old)['release']} only")
            continue
        limits = dict.fromkeys(_FIGURES, 0.0) if before["cpu"] == after["cpu"] else _TOLERANCE
        for step, key, gap in _gaps(before, after):
            if not gap <= limits[key]:
                recipe = "" if before["recipe"] == after["recipe"] else "; its recipe changed as well"
                sentences.append(f"{_WORDS[key]} of {name} changed at step {step}, by {gap:.1e}{recipe}")
                break
    return tuple(sentences)


def record(
    root: Path, release: str, records: Sequence[Mapping[str, Any]], *, date: str, cpu: str, keep: bool = False
) -> int:
    """Write the curves of all ``records`` that passed to the file of ``release``. Returns how many it then has.

    With ``keep``, its other curves stay if they were recorded with the same versions.
    """
    versions = records[0]["versions"] if records else {}
    old = load(root, release) if keep else None
    curves = dict(old["curves"]) if old and old["versions"] == versions else {}
    curves |= {
        name: {"recipe": evidence["recipe"]["sha256"], "cpu": cpu, **_curve(evidence)}
        for evidence in records
        if evidence["passed"] and (name := name_of(evidence))
    }
    content = {
        "release": release,
        "command": "primus validate cpu --suite quick --record-golden",
        "date": date,
        "image": records[0]["image"]["content"] if records else "",
        "versions": versions,
        "curves": dict(sorted(curves.items())),
    }
    path = root / FOLDER / f"{release}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=1) + "\n")
    return len(curves)


def _curve(evidence: Mapping[str, Any]) -> dict[str, list[float]]:
    series = evidence["jobs"][0].get("series", [])
    return {key: [step[key] for step in series] for key in _FIGURES}


def _gaps(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[int, str, float]]:
    """Return (step, figure, relative gap) in order. The gap is infinite if one side lacks the step."""
    gaps = []
    for place in range(max(len(old["loss"]), len(new["loss"]))):
        for key in _FIGURES:
            pair = [side[key][place] for side in (old, new) if place < len(side[key])]
            gap = relative_gap(*pair) if len(pair) == 2 and None not in pair else math.inf
            gaps.append((place + 1, key, gap))
    return gaps
