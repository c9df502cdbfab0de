"""Reading a finished run from the folder of a job or from the record of a validation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from primus.errors import InputError
from primus.files import refuse_special
from primus.jsonfile import short_int
from primus.recipes.backends import backends

_NOT_OURS = "name the folder of a `primus train`, or the record.json of a `primus validate`"

_UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The data of one run.

    ``summary`` contains the fields of :class:`primus.training.metrics.Summary`, and ``series`` one mapping per step.
    ``product`` is the GPU name that torch reports; it is empty on a CPU. Figures that an older version did not write
    are missing.
    """

    label: str
    source: Path
    recipe: str
    backend: str
    mode: str
    precision: str
    ranks: int
    nodes: int
    local_batch: int
    seq_len: int
    corpus: str
    arguments: tuple[str, ...]
    product: str
    passed: bool
    seconds: float
    verdicts: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    series: tuple[Mapping[str, Any], ...]
    image: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """What rates refer to: one ``GPU``, or one ``rank`` on a CPU."""
        return "GPU" if self.product else "rank"

    def figure(self, name: str) -> float | None:
        """Return a number of the summary, or None."""
        value = self.summary.get(name)
        return float(value) if isinstance(value, int | float) else None


class NoResult(InputError):
    """The folder of a run that has not ended, was interrupted, or failed before its first step."""


def read_all(paths: Sequence[Path]) -> tuple[tuple[Run, ...], tuple[NoResult, ...]]:
    """Read the runs and give each a unique label. Of several, those without a result are left out, with the reasons.

    Raises InputError as :func:`read`, for a run named twice, and if no run is left.
    """
    runs: list[Run] = []
    left_out: list[NoResult] = []
    for path in paths:
        try:
            run = read(path)
        except NoResult as error:
            left_out.append(error)
            continue
        if any(other.source.resolve() == run.source.resolve() for other in runs):
            raise InputError(f"{path} is named twice")
        runs.append(run)
    if not runs:
        raise left_out[0]
    labels = [run.label for run in runs]
    labelled = (
        run if labels.count(run.label) == 1 else replace(run, label=f"{run.label} ({number})")
        for number, run in enumerate(runs, 1)
    )
    return tuple(labelled), tuple(left_out)


def read(path: Path) -> Run:
    """Read one run. Raises InputError if it does not exist, is not a run of primus, has not ended, or has no step."""
    if not path.exists():
        raise InputError(f"there is no {path}", hint=_NOT_OURS)
    if path.is_dir() and (path / "record.json").is_file():
        path = path / "record.json"
    try:
        run = _job(path) if path.is_dir() else _record(path)
    except ValueError as error:
        raise InputError(f"not a file that primus wrote: {error}", where=str(path), hint=_NOT_OURS) from None
    if not run.series:
        raise NoResult("the run logged no step", where=str(path), hint="see its log.txt")
    return run


def _job(folder: Path) -> Run:
    if not (folder / "job.json").is_file():
        raise InputError(f"{folder} contains no job.json", hint=_NOT_OURS)
    if not (folder / "result.json").is_file():
        raise NoResult(
            f"{folder} contains no result.json: the run has not ended, or was interrupted",
            hint="wait until the run has ended, or leave it out",
        )
    job, left = _json(folder / "job.json"), _json(folder / "result.json")
    facts = _json(folder / "facts.json") if (folder / "facts.json").is_file() else _Object({})
    settings = _Object({key: entry.value("value") for key, entry in job.inside("settings").objects()})
    lines = _text(folder / "metrics.jsonl").splitlines() if (folder / "metrics.jsonl").is_file() else []
    series = [_parsed(line, f"{folder / 'metrics.jsonl'}:{number}") for number, line in enumerate(lines, 1)]
    recipe = job.inside("recipe")
    return Run(
        label=_readable(folder.resolve().name),
        source=folder,
        recipe=recipe.text("name"),
        arguments=("train", recipe.text("name"), *recipe.texts("overrides")),
        passed=left.flag("passed"),
        seconds=left.number("seconds"),
        verdicts=_verdicts(left),
        summary=_summary(left.inside("summary")),
        series=tuple(map(_step, series)),
        ranks=job.whole("world_size"),
        **_common(job, settings, facts),
    )


def _record(path: Path) -> Run:
    record = _json(path)
    recipe, jobs = record.inside("recipe"), record.list("jobs")
    if not jobs:
        raise ValueError("jobs is empty")
    base = jobs[0]
    return Run(
        label=f"{record.text('target')} {recipe.text('name')}",
        source=path,
        recipe=recipe.text("name"),
        arguments=base.texts("command")[1:],
        passed=record.flag("passed"),
        seconds=base.number("seconds") if "seconds" in base.fields else 0.0,
        verdicts=_verdicts(record),
        summary=_summary(record.inside("measurements")),
        series=tuple(map(_step, base.list("series"))) if "series" in base.fields else (),
        ranks=recipe.whole("ranks"),
        image={key: _readable(value) for key, value in record.inside("image").fields.items() if isinstance(value, str)},
        **_common(recipe, recipe.inside("settings"), record.inside("facts")),
    )


def _common(what: _Object, settings: _Object, facts: _Object) -> dict[str, Any]:
    if (name := what.text("backend")) not in backends():
        raise ValueError(f"there is no backend {name!r}")
    knows = backends()[name]
    return {
        "backend": name,
        "mode": what.text("mode"),
        "precision": what.text("precision"),
        "nodes": settings.whole("nodes"),
        "local_batch": settings.whole(knows.key("local_batch")),
        "seq_len": settings.whole(knows.key("seq_len")),
        "corpus": settings.text("assets.corpus") if "assets.corpus" in settings.fields else "",
        "product": facts.text("gpu") if "gpu" in facts.fields else "",
    }


def _verdicts(holder: _Object) -> tuple[Mapping[str, Any], ...]:
    wanted = ("name", "measured", "limit", "reason")
    found = holder.list("verdicts")
    return tuple({key: one.text(key) for key in wanted} | {"passed": one.flag("passed")} for one in found)


def _summary(found: _Object) -> dict[str, Any]:
    """Return the figures (numbers or None) and texts of a summary. MFU keeps both conventions and the peak."""
    figures: dict[str, Any] = {}
    for key, value in found.fields.items():
        if key == "mfu" and value is not None:
            mfu = found.inside(key)
            numbers = {name: mfu.number(name) for name in ("causal", "non_causal", "peak_tflops")}
            figures[key] = numbers | {"dtype": mfu.text("dtype")}
        elif isinstance(value, str):
            figures[key] = found.text(key)
        else:
            figures[key] = None if value is None else found.number(key)
    return figures


def _step(entry: _Object) -> Mapping[str, Any]:
    """Return a step in which every figure is a number or None, as the charts require."""
    figures = {key: None if value is None else entry.number(key) for key, value in entry.fields.items()}
    return {"loss": None, "grad_norm": None, "tokens_per_second": None, **figures, "step": entry.whole("step")}


@dataclass(frozen=True)
class _Object:
    """A JSON object at ``place`` of its file. Its methods read a field of one type; any other type is a ValueError."""

    fields: Mapping[str, Any]
    place: str = ""

    def value(self, key: str) -> Any:
        if key not in self.fields:
            raise ValueError(f"{self.place}{key} is missing")
        return self.fields[key]

    def text(self, key: str) -> str:
        return _readable(self._typed(key, str, "text"))

    def texts(self, key: str) -> tuple[str, ...]:
        found = self._typed(key, list, "a list")
        if not all(isinstance(item, str) for item in found):
            raise ValueError(f"{self.place}{key} must contain text only")
        return tuple(map(_readable, found))

    def flag(self, key: str) -> bool:
        return bool(self._typed(key, bool, "true or false"))

    def number(self, key: str) -> float:
        found = self.value(key)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise ValueError(f"{self.place}{key} must be a number, not {found!r:.40}")
        return float(found)

    def whole(self, key: str) -> int:
        found = self.number(key)
        if found < 1 or found != int(found):
            raise ValueError(f"{self.place}{key} must be a whole number of at least 1, not {self.value(key)!r:.40}")
        return int(found)

    def inside(self, key: str) -> _Object:
        return _Object(self._typed(key, dict, "an object"), f"{self.place}{key}.")

    def objects(self) -> Iterator[tuple[str, _Object]]:
        return ((key, self.inside(key)) for key in self.fields)

    def list(self, key: str) -> Sequence[_Object]:
        items = {str(number): item for number, item in enumerate(self._typed(key, list, "a list"))}
        return [one for _, one in _Object(items, f"{self.place}{key}.").objects()]

    def _typed(self, key: str, kind: type, words: str) -> Any:
        if not isinstance(found := self.value(key), kind):
            raise ValueError(f"{self.place}{key} must be {words}, not {found!r:.40}")  # noqa: TRY004
        return found


def _readable(text: str) -> str:
    """Return ``text`` without characters that a file or terminal cannot show."""
    return _UNREADABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _json(path: Path) -> _Object:
    return _parsed(_text(path), str(path))


def _parsed(text: str, where: str) -> _Object:
    try:
        value = json.loads(text, parse_int=short_int)
    except RecursionError:
        raise InputError("not JSON: nested too deeply", where=where, hint=_NOT_OURS) from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}", where=where, hint=_NOT_OURS) from None
    if not isinstance(value, dict):
        raise InputError("not a JSON object", where=where, hint=_NOT_OURS)
    return _Object(value)


def _text(path: Path) -> str:
    refuse_special(path, str(path))
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text", where=str(path), hint=_NOT_OURS) from None
