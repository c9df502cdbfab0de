"""Golden curves: losses and gradient norms of a release's proxies in FP32 on a CPU, kept in the
repository.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from primus_images.errors import InputError
from primus_images.files import write_file
from primus_images.schema import read_json
from primus_images.training.judge.checks import Verdict, relative_gap
from primus_images.versions.lock import LockedFile

FOLDER = "benchmarks/golden"
_WORDS = {"loss": "the loss", "grad_norm": "the gradient norm"}
# Relative tolerances between types of CPU, which add in different orders, in the first steps and in
# the last: training amplifies a difference of 1e-7 by about 2 in each step. Measured over 20 steps
# between CPUs of two makers: 2.4e-4 and 1e-3 for FLUX, 1e-3 and 8e-2 for a mixture of experts,
# 2.5e-5 and 2.2e-4 for a dense model.
_TOLERANCE = {"loss": (2e-4, 5e-3), "grad_norm": (2e-3, 0.2)}


def load(root: Path, release: str) -> dict[str, Any] | None:
    """Read the curves of ``release`` (``v26.11-cpu``); None if there are none. Raises InputError
    for a damaged file.
    """
    path = root / FOLDER / f"{release}.json"
    try:
        content: Any = read_json(path).data
        if any(
            len(c["loss"]) != len(c["grad_norm"]) or not c["cpu"]
            for c in content["curves"].values()
        ):
            raise ValueError("a curve has steps without a figure, or no CPU")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            "not a file of golden curves",
            where=path,
            hint="create it again with primus validate cpu --suite quick --record-golden",
        ) from error
    return cast(dict[str, Any], content)


def name_of(evidence: Mapping[str, Any]) -> str | None:
    """Return the name of the curve in a validation record; None unless the record is of FP32 on a
    CPU.
    """
    recipe = evidence["recipe"]
    if recipe["precision"] != "fp32" or recipe["gpu"] != "cpu" or evidence["gpu"] != "none":
        return None
    return f"{recipe['name']}-{recipe['backend']}-{recipe['mode']}"


def recorded(root: Path, target: str) -> list[dict[str, Any]]:
    """Return the curves that every release recorded in ``target`` (``cpu``), those of the newest
    release first.
    """
    paths = (root / FOLDER).glob(f"v*-{target}.json")
    names = (
        path.stem
        for path in paths
        if re.fullmatch(r"v[0-9.]+", path.stem.removesuffix(f"-{target}"))
    )
    newest = sorted(
        names, key=lambda name: [int(n) for n in re.findall(r"[0-9]+", name)], reverse=True
    )
    return [curves for name in newest if (curves := load(root, name)) is not None]


def compared(every: Sequence[Mapping[str, Any]], evidence: Mapping[str, Any]) -> Verdict | str:
    """Compare the first job of ``evidence`` with the newest curve of the same recipe, also of an
    earlier release.

    Returns a sentence if there is no curve to compare with.
    """
    name = name_of(evidence)
    recipe = evidence["recipe"]["sha256"]
    curves = [(file["release"], file["curves"][name]) for file in every if name in file["curves"]]
    if not curves:
        return f"the golden curve: none is recorded for {name}"
    release, curve = next((pair for pair in curves if pair[1]["recipe"] == recipe), ("", None))
    if curve is None:
        return f"the golden curve: {name} was recorded from another version of the recipe"
    gaps = _gaps(curve, _curve(evidence))
    outside = [(step, key, gap) for step, key, gap in gaps if not gap <= _tolerance(key, step)]
    largest = max((gap for _, _, gap in gaps), default=math.inf)
    if outside:
        step, key, gap = outside[0]
        reason = f"{_WORDS[key]} leaves the curve of {release} at step {step}, by {gap:.1e}"
    elif largest == 0:
        reason = f"{len(curve['loss'])} steps are equal to the last bit to those of {release}"
    else:
        reason = (
            f"{len(curve['loss'])} steps agree with {release} within the tolerance between "
            "types of CPU"
        )
    limits = ", ".join(
        f"{_WORDS[key]} {least:g} to {most:g}" for key, (least, most) in _TOLERANCE.items()
    )
    return Verdict(
        "golden curve",
        not outside and bool(gaps),
        reason,
        measured=f"{largest:.1e}",
        limit=f"relative gap by step: {limits}",
    )


def _tolerance(key: str, step: int) -> float:
    least, most = _TOLERANCE[key]
    return min(max(least, least / 100 * 2.2 ** (step - 1)), most)


def changes(old: Mapping[str, Any], new: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Return the differences of the curves of two sides called ``names``, one sentence per recipe
    and backend.

    Without differences, one sentence says so, or which side has no curves; none if neither has.
    """
    if not old and not new:
        return ()
    if not old or not new:
        return (f"{names[bool(old)]} has no golden curves, so training was not compared",)
    sentences = []
    for name in sorted({*old["curves"], *new["curves"]}):
        before = old["curves"].get(name)
        after = new["curves"].get(name)
        if before is None or after is None:
            sentences.append(
                f"{name} has a curve in {(new if before is None else old)['release']} only"
            )
            continue
        same_cpu = before["cpu"] and before["cpu"] == after["cpu"]
        for step, key, gap in _gaps(before, after):
            if not gap <= (0 if same_cpu else _tolerance(key, step)):
                recipe = "; its recipe changed as well"
                if before["recipe"] == after["recipe"]:
                    recipe = ""
                sentences.append(
                    f"{_WORDS[key]} of {name} changed at step {step}, by {gap:.1e}{recipe}"
                )
                break
    return tuple(sentences) or (
        f"all {len(old['curves'].keys() & new['curves'].keys())} golden curves agree",
    )


def record(
    root: Path,
    release: str,
    records: Sequence[Mapping[str, Any]],
    *,
    date: str,
    cpu: str,
    keep: bool = False,
) -> int:
    """Write the curves of all ``records`` that passed to the file of ``release``. Returns how many
    it wrote anew.

    With ``keep``, its other curves stay. Raises InputError if other versions recorded them.
    """
    if records:
        versions = records[0]["versions"]
    else:
        versions = {}
    old = None
    if keep and records:
        old = load(root, release)
    if old:
        _refuse_others(old, versions)
    new = curves_of(records, cpu)
    curves = {**(old["curves"] if old else {}), **new}
    content = {
        "release": release,
        "command": "primus validate cpu --suite quick --record-golden",
        "date": date,
        "image": records[0]["image"]["content"] if records else "",
        "versions": versions,
        "curves": dict(sorted(curves.items())),
    }
    write_file(root / FOLDER / f"{release}.json", json.dumps(content, indent=1) + "\n")
    return len(new)


def check_locked(root: Path, release: str, files: Iterable[LockedFile]) -> None:
    """Raise InputError, before a run, if curves of ``release`` were recorded with other versions
    than ``files``.
    """
    locked = {
        file.name: file.version for file in files if file.kind == "wheel" and file.base is None
    }
    old = load(root, release)
    if old:
        _refuse_others(old, {name: locked[name] for name in old["versions"] if name in locked})


def _refuse_others(old: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    changed = sorted(name for name in versions if old["versions"].get(name) != versions[name])
    if changed:
        version = old["versions"].get(changed[0])
        package = changed[0]
        raise InputError(
            f"the curves of other recipes were recorded with {package} {version}",
            where=f"{FOLDER}/{old['release']}.json",
            hint="record all of them anew: without --recipe",
        )


def curves_of(records: Sequence[Mapping[str, Any]], cpu: str) -> dict[str, Any]:
    """Return the curves of all ``records`` that passed, by name. ``cpu`` is the type of CPU that
    computed them.
    """
    return {
        name: {"recipe": evidence["recipe"]["sha256"], "cpu": cpu, **_curve(evidence)}
        for evidence in records
        if evidence["passed"] and (name := name_of(evidence))
    }


def _curve(evidence: Mapping[str, Any]) -> dict[str, list[float]]:
    return {key: [step[key] for step in evidence["jobs"][0].get("series", [])] for key in _WORDS}


def _gaps(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[int, str, float]]:
    """Return (step, figure, relative gap) in order. The gap is infinite if one side lacks the step."""
    gaps = []
    for place in range(max(len(old["loss"]), len(new["loss"]))):
        for key in _WORDS:
            pair = [side[key][place] for side in (old, new) if place < len(side[key])]
            if len(pair) == 2 and None not in pair:
                gap = relative_gap(*pair)
            else:
                gap = math.inf
            gaps.append((place + 1, key, gap))
    return gaps
