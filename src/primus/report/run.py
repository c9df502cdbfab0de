"""One finished run, read back from the folder of a job or from the record of a validation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from primus.errors import InputError
from primus.recipes.backends import backend
from primus.yamlfile import refuse_special

__all__ = ["Run", "read", "read_all"]

_NOT_OURS = "name the folder of a `primus train`, or the record.json of a `primus validate`"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a report says of a run. ``summary`` holds the fields of :class:`primus.training.metrics.Summary`,
    ``series`` one mapping per step; ``product`` is the GPU as torch prints it, "" on a CPU. Figures that an older
    run did not write are missing.
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
        """What a rate is a rate of: one ``GPU``, or one ``rank`` on a CPU."""
        return "GPU" if self.product else "rank"

    def figure(self, name: str) -> float | None:
        """A number of the summary, None when it has none."""
        value = self.summary.get(name)
        return float(value) if isinstance(value, int | float) else None


def read_all(paths: Sequence[Path]) -> tuple[Run, ...]:
    """The runs, each with a label of its own. InputError as :func:`read`, and when one is named twice."""
    runs: list[Run] = []
    for path in paths:
        run = read(path)
        if any(other.source.resolve() == run.source.resolve() for other in runs):
            raise InputError(f"{path} is named twice")
        runs.append(run)
    labels = [run.label for run in runs]
    return tuple(
        run if labels.count(run.label) == 1 else replace(run, label=f"{run.label} ({number})")
        for number, run in enumerate(runs, 1)
    )


def read(path: Path) -> Run:
    """One run. InputError: nothing there, no JSON, not ours, not ended, or no step in it."""
    if not path.exists():
        raise InputError(f"there is no {path}", hint=_NOT_OURS)
    if path.is_dir() and (path / "record.json").is_file():
        path = path / "record.json"
    try:
        run = _job(path) if path.is_dir() else _record(path)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise InputError(f"not what primus writes: {missing}", where=str(path), hint=_NOT_OURS) from None
    if not all(isinstance(word, str) for word in (run.recipe, run.backend, run.mode, run.precision)):
        raise InputError("not what primus writes: recipe and choices must be text", where=str(path), hint=_NOT_OURS)
    if not run.series:
        raise InputError("the run logged no step", where=str(path), hint="its log.txt says why")
    return run


def _job(folder: Path) -> Run:
    if not (folder / "job.json").is_file():
        raise InputError(f"{folder} holds no job.json", hint=_NOT_OURS)
    if not (folder / "result.json").is_file():
        raise InputError(f"{folder} holds no result.json: the run has not ended, or was interrupted")
    job, left = _json(folder / "job.json"), _json(folder / "result.json")
    facts = _json(folder / "facts.json") if (folder / "facts.json").is_file() else {}
    settings = {key: entry["value"] for key, entry in job["settings"].items()}
    lines = _text(folder / "metrics.jsonl").splitlines() if (folder / "metrics.jsonl").is_file() else []
    series = [_parsed(line, f"{folder / 'metrics.jsonl'}:{number}") for number, line in enumerate(lines, 1)]
    recipe = job["recipe"]
    return Run(
        label=folder.resolve().name,
        source=folder,
        recipe=recipe["name"],
        arguments=("train", recipe["name"], *recipe["overrides"]),
        passed=left["passed"],
        seconds=float(left["seconds"]),
        verdicts=_verdicts(left),
        summary=dict(left["summary"]),
        series=tuple(map(_step, series)),
        ranks=int(job["world_size"]),
        **_common(job, settings, facts),
    )


def _record(path: Path) -> Run:
    record = _json(path)
    recipe, base = record["recipe"], record["jobs"][0]
    return Run(
        label=f"{record['target']} {recipe['name']}",
        source=path,
        recipe=recipe["name"],
        arguments=tuple(base["command"][1:]),
        passed=record["passed"],
        seconds=float(base.get("seconds", 0.0)),
        verdicts=_verdicts(record),
        summary=dict(record["measurements"]),
        series=tuple(map(_step, base.get("series", ()))),
        ranks=int(recipe["ranks"]),
        image=dict(record["image"]),
        **_common(recipe, recipe["settings"], record["facts"]),
    )


def _common(what: Mapping[str, Any], settings: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    knows = backend(what["backend"])
    return {
        "backend": what["backend"],
        "mode": what["mode"],
        "precision": what["precision"],
        "nodes": int(settings["nodes"]),
        "local_batch": int(settings[knows.key("local_batch")]),
        "seq_len": int(settings[knows.key("seq_len")]),
        "corpus": str(settings.get("assets.corpus", "")),
        "product": str(facts.get("gpu", "")),
    }


def _verdicts(holder: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    wanted = ("name", "passed", "measured", "limit", "reason")
    return tuple({key: verdict[key] for key in wanted} for verdict in holder["verdicts"])


def _step(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A step whose figures are numbers or None, so that whatever draws them can rely on it."""
    figures = {key: None if value is None else float(value) for key, value in entry.items()}
    return {"loss": None, "grad_norm": None, "tokens_per_second": None, **figures, "step": int(entry["step"])}


def _json(path: Path) -> dict[str, Any]:
    return _parsed(_text(path), str(path))


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError:
        raise InputError("not JSON: nested too deeply", where=where, hint=_NOT_OURS) from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}", where=where, hint=_NOT_OURS) from None
    if not isinstance(value, dict):
        raise InputError("not a JSON object", where=where, hint=_NOT_OURS)
    return value


def _text(path: Path) -> str:
    refuse_special(path, str(path))
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text", where=str(path), hint=_NOT_OURS) from None
