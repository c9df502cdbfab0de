"""Reading a finished run from the folder of a job or from the record of a validation."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from primus.errors import InputError
from primus.files import read_bytes
from primus.recipes.backends import backends
from primus.schema import build, parse_json
from primus.training.checks import Verdict
from primus.training.metrics import Summary
from primus.training.outcome import RESULT_FILE, RunResult

_NOT_OURS = "name the folder of a `primus train`, or the record.json of a `primus validate`"

_UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The data of one run.

    ``series`` has one mapping per step. ``product`` is the GPU name that torch reports; it is empty on a CPU. Figures
    that an older version did not write are missing.
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
    verdicts: tuple[Verdict, ...]
    summary: Summary
    series: tuple[Mapping[str, Any], ...]
    image: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """What rates refer to: one ``GPU``, or one ``rank`` on a CPU."""
        return "GPU" if self.product else "rank"

    def figure(self, name: str) -> float | None:
        """Return a number of the summary, or None."""
        value = getattr(self.summary, name)
        return None if value is None else float(value)


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
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise InputError(f"not a file that primus wrote: {reason}", where=str(path), hint=_NOT_OURS) from None
    if not run.series:
        raise NoResult("the run logged no step", where=str(path), hint="see its log.txt")
    return run


def _job(folder: Path) -> Run:
    if not (folder / "job.json").is_file():
        raise InputError(f"{folder} contains no job.json", hint=_NOT_OURS)
    if not (folder / RESULT_FILE).is_file():
        raise NoResult(
            f"{folder} contains no {RESULT_FILE}: the run has not ended, or was interrupted",
            hint="wait until the run has ended, or leave it out",
        )
    job, ended = _document(folder / "job.json").data, build(RunResult, _document(folder / RESULT_FILE))
    if ended.passed is None or ended.summary is None:
        raise KeyError("passed")
    facts = _document(folder / "facts.json").data if (folder / "facts.json").is_file() else {}
    lines = _bytes(folder / "metrics.jsonl").splitlines() if (folder / "metrics.jsonl").is_file() else []
    recipe = job["recipe"]
    return Run(
        label=str(_readable(folder.resolve().name)),
        source=folder,
        recipe=_text(recipe["name"]),
        arguments=("train", _text(recipe["name"]), *map(_text, recipe["overrides"])),
        passed=ended.passed,
        seconds=ended.seconds,
        verdicts=ended.verdicts,
        summary=ended.summary,
        series=tuple(
            _step(_parsed(line, f"{folder / 'metrics.jsonl'}:{number}").data) for number, line in enumerate(lines, 1)
        ),
        ranks=_whole(job["world_size"]),
        **_common(job, {key: entry["value"] for key, entry in job["settings"].items()}, facts),
    )


def _record(path: Path) -> Run:
    document = _document(path)
    record = document.data
    recipe, jobs = _object(record["recipe"], "recipe"), record["jobs"]
    if not jobs:
        raise ValueError("jobs is empty")
    base = _object(jobs[0], "jobs.0")
    if not base.get("series"):
        raise NoResult("the run logged no step", where=str(path), hint="see its log.txt")
    return Run(
        label=f"{_text(record['target'])} {_text(recipe['name'])}",
        source=path,
        recipe=_text(recipe["name"]),
        arguments=tuple(map(_text, base["command"]))[1:],
        passed=record["passed"] is True,
        seconds=_number(base.get("seconds", 0.0)),
        verdicts=tuple(
            build(Verdict, document, row, ("verdicts", number)) for number, row in enumerate(record["verdicts"])
        ),
        summary=build(Summary, document, record["measurements"], ("measurements",)),
        series=tuple(map(_step, base["series"])),
        ranks=_whole(recipe["ranks"]),
        image={key: value for key, value in record["image"].items() if isinstance(value, str)},
        **_common(recipe, recipe["settings"], record["facts"]),
    )


def _common(what: Mapping[str, Any], settings: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    name = _text(what["backend"])
    if name not in backends():
        raise ValueError(f"there is no backend {name!r}")
    knows = backends()[name]
    return {
        "backend": name,
        "mode": _text(what["mode"]),
        "precision": _text(what["precision"]),
        "nodes": _whole(settings["nodes"]),
        "local_batch": _whole(settings[knows.key("local_batch")]),
        "seq_len": _whole(settings[knows.key("seq_len")]),
        "corpus": _text(settings.get("assets.corpus", "")),
        "product": _text(facts.get("gpu", "")),
    }


def _step(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a step in which every figure is a number or None, as the charts require."""
    figures = {key: None if value is None else _number(value) for key, value in entry.items()}
    return {"loss": None, "grad_norm": None, "tokens_per_second": None, **figures, "step": _whole(entry["step"])}


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be an object, not {value!r:.40}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r:.40} is not a number")
    return float(value)


def _whole(value: Any) -> int:
    if (number := _number(value)) < 1 or number != int(number):
        raise ValueError(f"{value!r:.40} is not a whole number of at least 1")
    return int(number)


def _readable(data: Any) -> Any:
    """Return JSON data without characters that a file or terminal cannot show."""
    if isinstance(data, dict):
        return {key: _readable(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_readable(value) for value in data]
    return _UNREADABLE.sub("\N{REPLACEMENT CHARACTER}", data) if isinstance(data, str) else data


def _parsed(data: bytes, name: str) -> Any:
    document = parse_json(data, name)
    if not isinstance(document.data, dict):
        raise InputError("not a JSON object", where=name, hint=_NOT_OURS)
    return replace(document, data=_readable(document.data))


def _document(path: Path) -> Any:
    return _parsed(_bytes(path), str(path))


def _bytes(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
