"""Golden curves: losses and gradient norms of a release's proxies in FP32 on a CPU.

They are kept in the repository.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from primus_images.errors import InputError
from primus_images.files import write_file
from primus_images.schema import build_typed, read_json
from primus_images.terminal import some
from primus_images.training.judge.checks import Verdict, relative_gap
from primus_images.training.judge.record import NO_GPU, Record
from primus_images.versions.lock import LockedFile

FOLDER = "benchmarks/golden"
_COMMAND = "primus validate cpu --suite quick --record-golden"
_WORDS = {"loss": "the loss", "grad_norm": "the gradient norm"}
# Relative tolerances between types of CPU, which add in different orders, in the first steps and in
# the last: training amplifies a difference of 1e-7 by about 2 in each step. Measured over 20 steps
# between CPUs of two makers: 2.4e-4 and 1e-3 for FLUX, 1e-3 and 8e-2 for a mixture of experts,
# 2.5e-5 and 2.2e-4 for a dense model.
_TOLERANCE = {"loss": (2e-4, 5e-3), "grad_norm": (2e-3, 0.2)}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The figures of each step of one recipe, backend and mode.

    ``recipe`` is its digest, and ``cpu`` the type of CPU that computed them; empty if unknown.
    """

    recipe: str
    cpu: str
    loss: tuple[float | None, ...]
    grad_norm: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The curves of a release (``v26.11-cpu``) by name, as one file has them.

    ``versions`` are those of the packages that computed them.
    """

    release: str
    command: str = _COMMAND
    date: str = ""
    image: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Curve]


class _Gap(NamedTuple):
    """The relative gap of a figure at a step. It is infinite if one side lacks the step."""

    step: int
    figure: str
    size: float

    @property
    def tolerated(self) -> bool:
        """Whether CPUs of two types may differ by it."""
        least, most = _TOLERANCE[self.figure]
        grown = least / 100 * 2.2 ** (self.step - 1)
        return self.size <= min(max(least, grown), most)


def load(root: Path, release: str) -> Curves | None:
    """Read the curves of ``release`` (``v26.11-cpu``); None if there are none.

    Raises InputError for a damaged file.
    """
    path = root / FOLDER / f"{release}.json"
    try:
        curves = build_typed(Curves, read_json(path).data, str(path))
        for curve in curves.curves.values():
            if len(curve.loss) != len(curve.grad_norm) or not curve.cpu:
                raise ValueError("a curve has steps without a figure, or no CPU")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InputError) as error:
        raise InputError(
            "not a file of golden curves",
            where=path,
            hint="create it again with primus validate cpu --suite quick --record-golden",
        ) from error
    return curves


def of_pins(root: Path, release: str, files: Iterable[LockedFile]) -> Curves | None:
    """Return the curves of ``release`` if the packages of its lock, ``files``, computed them.

    Without them, None: those of another release or of other versions say nothing of it.
    """
    curves = load(root, release)
    if curves is None:
        return None
    locked = {}
    for file in files:
        if file.kind == "wheel" and file.base is None:
            locked[file.name] = file.version
    for package, version in curves.versions.items():
        if locked.get(package, version) != version:
            return None
    return curves


def name_of(record: Record) -> str | None:
    """Return the name of the curve in a record; None unless it is of FP32 on a CPU."""
    recipe = record.recipe
    if (recipe.precision, recipe.gpu, record.gpu) != ("fp32", "cpu", NO_GPU):
        return None
    return f"{recipe.name}-{recipe.backend}-{recipe.mode}"


def recorded(root: Path, target: str) -> list[Curves]:
    """Return the curves of each release of ``target`` (``cpu``), the newest release first."""
    names = []
    for path in (root / FOLDER).glob(f"v*-{target}.json"):
        if re.fullmatch(r"v[0-9.]+", path.stem.removesuffix(f"-{target}")):
            names.append(path.stem)
    names.sort(key=lambda name: [int(n) for n in re.findall(r"[0-9]+", name)], reverse=True)
    files = [load(root, name) for name in names]
    return [curves for curves in files if curves is not None]


def compared(files: Sequence[Curves], record: Record) -> Verdict | str:
    """Compare the first job of ``record`` with the newest curve of the same recipe.

    It may be of an earlier release. Returns a sentence if there is no curve to compare with.
    """
    name = name_of(record) or ""
    having = [file for file in files if name in file.curves]
    if not having:
        return f"the golden curve: none is recorded for {name}"
    for file in having:
        curve = file.curves[name]
        if curve.recipe == record.recipe.sha256:
            return _verdict(file.release, curve, _curve(record))
    return f"the golden curve: {name} was recorded from another version of the recipe"


def _verdict(release: str, curve: Curve, new: Curve) -> Verdict:
    gaps = list(_gaps(curve, new))
    outside = [gap for gap in gaps if not gap.tolerated]
    largest = max((gap.size for gap in gaps), default=math.inf)
    steps = len(curve.loss)
    if outside:
        gap = outside[0]
        figure = _WORDS[gap.figure]
        reason = f"{figure} leaves the curve of {release} at step {gap.step}, by {gap.size:.1e}"
    elif largest == 0:
        reason = f"{steps} steps are equal to the last bit to those of {release}"
    else:
        reason = f"{steps} steps agree with {release} within the tolerance between types of CPU"
    limits = [f"{_WORDS[key]} {least:g} to {most:g}" for key, (least, most) in _TOLERANCE.items()]
    return Verdict(
        "golden curve",
        not outside and bool(gaps),
        reason,
        measured=f"{largest:.1e}",
        limit=f"relative gap by step: {', '.join(limits)}",
    )


def changes(
    old: Curves | None, new: Curves | None, old_name: str = "", new_name: str = ""
) -> tuple[str, ...]:
    """Return which curves of two sides agree, and the others: one sentence for each that differs.

    Curves of one side alone are one sentence, and so is a side without any; none if neither has.
    """
    if not old and not new:
        return ()
    if not old or not new:
        without = new_name if old else old_name
        return (f"{without} has no golden curves, so training was not compared",)
    if old == new:
        return (f"training was not compared: both sides have the curves of one run, {old.release}",)
    common = sorted(old.curves.keys() & new.curves.keys())
    changed = []
    for name in common:
        sentence = _change(name, old.curves[name], new.curves[name])
        if sentence:
            changed.append(sentence)
    sentences = [*_agreement(len(common), len(changed)), *changed]
    for side, other in ((old, new), (new, old)):
        alone = sorted(side.curves.keys() - other.curves.keys())
        if alone:
            sentences.append(f"only {side.release} has a curve of {some(alone, 3)}")
    return tuple(sentences)


def _agreement(common: int, changed: int) -> Iterator[str]:
    """Yield how many of the curves that both sides have agree."""
    if common == 1 and not changed:
        yield "the only golden curve of both sides agrees"
    elif common and not changed:
        yield f"all {common} golden curves of both sides agree"
    elif common > changed:
        yield f"{common - changed} of {common} golden curves of both sides agree"


def _change(name: str, before: Curve, after: Curve) -> str:
    """Return how the curve of a name differs between two releases; empty if it does not."""
    same_cpu = before.cpu and before.cpu == after.cpu
    for gap in _gaps(before, after):
        differs = gap.size > 0 if same_cpu else not gap.tolerated
        if differs:
            recipe = "" if before.recipe == after.recipe else "; its recipe changed as well"
            figure = _WORDS[gap.figure]
            return f"{figure} of {name} changed at step {gap.step}, by {gap.size:.1e}{recipe}"
    return ""


def save(root: Path, curves: Curves, *, keep: bool = False) -> None:
    """Write the curves of a release to its file.

    With ``keep``, its other curves stay. Raises InputError if other versions recorded them.
    """
    old = load(root, curves.release) if keep else None
    if old and curves.versions:
        _require_same(old, curves.versions)
        curves = replace(curves, curves={**old.curves, **curves.curves})
    curves = replace(curves, curves=dict(sorted(curves.curves.items())))
    text = json.dumps(asdict(curves), indent=1) + "\n"
    write_file(root / FOLDER / f"{curves.release}.json", text)


def check_locked(root: Path, release: str, files: Iterable[LockedFile]) -> None:
    """Raise InputError, before a run, if other versions than ``files`` recorded the curves."""
    old = load(root, release)
    if old is None:
        return
    versions = {}
    for file in files:
        if file.kind == "wheel" and file.base is None and file.name in old.versions:
            versions[file.name] = file.version
    _require_same(old, versions)


def _require_same(old: Curves, versions: Mapping[str, str]) -> None:
    for package in sorted(versions):
        version = old.versions.get(package)
        if version != versions[package]:
            raise InputError(
                f"the curves of other recipes were recorded with {package} {version}",
                where=f"{FOLDER}/{old.release}.json",
                hint="record all of them anew: without --recipe",
            )


def of_records(release: str, records: Sequence[Record], date: str = "", cpu: str = "") -> Curves:
    """Return the curves of all ``records`` that passed and logged steps.

    ``cpu`` is the type that computed them.
    """
    curves = {}
    for record in records:
        name = name_of(record)
        if record.passed and name and record.jobs[0].steps:
            curves[name] = replace(_curve(record), cpu=cpu)
    return Curves(
        release=release,
        date=date,
        image=records[0].image.content if records else "",
        versions=records[0].versions if records else {},
        curves=curves,
    )


def _curve(record: Record) -> Curve:
    steps = record.jobs[0].steps
    return Curve(
        recipe=record.recipe.sha256,
        cpu="",
        loss=tuple(step["loss"] for step in steps),
        grad_norm=tuple(step["grad_norm"] for step in steps),
    )


def _gaps(old: Curve, new: Curve) -> Iterator[_Gap]:
    """Yield the gaps in the order of the steps."""
    for index in range(max(len(old.loss), len(new.loss))):
        yield _Gap(index + 1, "loss", _gap(old.loss, new.loss, index))
        yield _Gap(index + 1, "grad_norm", _gap(old.grad_norm, new.grad_norm, index))


def _gap(old: Sequence[float | None], new: Sequence[float | None], index: int) -> float:
    if index >= min(len(old), len(new)):
        return math.inf
    before = old[index]
    after = new[index]
    if before is None or after is None:
        return math.inf
    return relative_gap(before, after)
