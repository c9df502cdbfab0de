"""Self-contained HTML pages of a validation record, and of several runs compared.

uPlot draws the charts and provides zoom, live values and a legend that hides lines. ``charts.js``
adds smoothing, a log axis, touch, and marks for missing values.
"""

import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from primus_images.report.run import Run, of_record
from primus_images.report.sheets import COLUMNS
from primus_images.terminal import counted
from primus_images.training.judge.record import Record
from primus_images.training.run.logs import BY_CORPUS

MOST_RUNS = 8  # the number of distinguishable colours
_NONE = "—"
_WIDEST = 5  # pixels of a line
# The versions that a run is compared by.
_SHOWN = ("torch", "torchtitan", "megatron-core", "transformers", "torchao", "primus-images")
# The jobs of a suite whose curves must be equal.
_DRAWN = ("base", "repeat", "resume")


def page(record: Record) -> str:
    """Return the page of a validation. Everything shown comes from its record."""
    title = f"Validation of {record.target} with {record.recipe.name}"
    series = {}
    for job in record.jobs:
        if job.name in _DRAWN and job.series:
            series[job.name] = job.series
    runs = [of_record(record)] if record.measurements else []
    return rendered(
        "record.html",
        title=title,
        record=record.as_json(),
        runs=runs,
        series=series,
        figures=figures(runs),
    )


def comparison(runs: Sequence[Run]) -> str:
    """Return the page for at most ``MOST_RUNS`` runs. The first run is the baseline."""
    title = f"{len(runs)} runs compared"
    if len(runs) == 1:
        title = f"{runs[0].label}: {runs[0].recipe}"
    cells = {}
    for run in runs:
        for verdict in run.verdicts:
            cells[run.label, verdict.name] = asdict(verdict)
    return rendered(
        "runs.html",
        title=title,
        runs=runs,
        figures=figures(runs),
        unit="/".join(dict.fromkeys(run.unit for run in runs)),
        series={run.label: run.series for run in runs},
        cells=cells,
    )


def figures(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return the rows of a table: the name of a figure, then its value in each run.

    Rows without values are omitted.
    """
    rows = []
    values_of_runs = [_values(run, runs[0]) for run in runs]
    for name, form in COLUMNS["figures"].items():
        texts = [_figure(form, values) for values in values_of_runs]
        if any(text != _NONE for text in texts):
            rows.append((name, *texts))
    return rows


def _figure(form: str, values: Mapping[str, Any]) -> str:
    try:
        text = form.format(**values)
    except TypeError:  # a figure that is None has no digits
        return _NONE
    return text.replace("%", " %")


def _values(run: Run, first: Run) -> dict[str, Any]:
    """Return what the rows of the table are made of: name in their forms → value."""
    nodes = ""
    if run.nodes > 1:
        nodes = f" on {run.nodes} nodes"
    return {
        "run": run,
        "summary": run.summary,
        "mfu": _mfu(run),
        "gain": _gain(run, first),
        "gpu": run.product or "none: CPU",
        "settings": shlex.join(run.arguments[2:]) or _NONE,
        "nodes": nodes,
        "best_step": _best_step(run),
        **_facts(run),
    }


def _facts(run: Run) -> dict[str, str]:
    """Return what a run trained on, and where it began and ended, as texts."""
    text = ""
    if run.documents:
        text = f"{counted(run.documents, 'document')}, {run.tokens:,} tokens"
    seen = ""
    if run.series and run.series[-1].get("tokens"):
        seen = f"{run.series[-1]['tokens']:,.0f}"
    versions = [f"{name} {version}" for name, version in run.versions.items() if name in _SHOWN]
    facts = {
        "global_batch": str(run.global_batch or ""),
        "parameters": f"{run.parameters:,}" if run.parameters else "",
        "text": text,
        "seen": seen,
        "checkpoint": run.checkpoint,
        "resumed_from": run.resumed_from,
        "versions": ", ".join(versions),
    }
    return {name: value or _NONE for name, value in facts.items()}


def _best_step(run: Run) -> str:
    """Return the words for the step of the least evaluation loss, if its step is known."""
    for step in run.series:
        if step.get("eval_loss") is not None and step["eval_loss"] == run.summary.eval_loss:
            return f" at step {step['step']:.0f}"
    return ""


def _mfu(run: Run) -> str:
    mfu = run.summary.mfu
    if not mfu:
        return (run.summary.no_mfu or _NONE).removeprefix("no MFU: ")
    peak = f"{mfu.peak_tflops:,g} TFLOP/s {mfu.dtype.upper()}"
    return f"{mfu.causal:.1%} / {mfu.non_causal:.1%} of {peak}"


def _gain(run: Run, first: Run) -> float | None:
    """Return how much faster a run is than the first one, if the two can be compared."""
    speed = run.summary.tokens_per_second
    base = first.summary.tokens_per_second
    comparable = run.unit == first.unit and run.recipe == first.recipe
    if run is first or not comparable or not speed or not base:
        return None
    return speed / base - 1


def chart(
    title: str,
    y_title: str,
    series: Mapping[str, Sequence[Mapping[str, Any]]] | None,
    key: str,
) -> str:
    """Return the HTML element of a chart of ``key``, or a sentence if there is no data.

    It is drawn by step, tokens or time, as the reader chooses.

    If ``series`` is None, there is no chart.

    ``series`` is name of a line → its steps. A value that is None or not finite is missing: the
    chart has a gap there, and a cross on its axis. Later lines are drawn above earlier ones, and
    thinner, so that equal lines do not hide each other.
    """
    if series is None:
        return ""
    lines: list[dict[str, Any]] = []
    empty = True
    for number, (label, steps) in enumerate(series.items()):
        points = []
        for step in steps:
            value = _finite(step[key])
            empty = empty and value is None
            tokens = _finite(step.get("tokens"))
            seconds = _finite(step.get("seconds"))
            points.append((step["step"], value, tokens, seconds))
        width = min(1 + len(series) - number, _WIDEST)
        lines.append({"label": label, "colour": number, "width": width, "points": points})
    text = ""
    if not empty:
        data = {"title": title, "y": y_title, "lines": lines}
        # Escaped, because "</script>" in a label would end the element.
        text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return rendered("chart.html", title=title, y_title=y_title, data=text)


def logged(
    series: Mapping[str, Sequence[Mapping[str, Any]]], key: str
) -> dict[str, list[Mapping[str, Any]]] | None:
    """Return the steps of each run that have ``key``; None if no run has any.

    An evaluation, for example, is not after every step. A run keeps its place, and so its colour.
    """
    logs = {}
    for label, steps in series.items():
        logs[label] = [step for step in steps if step.get(key) is not None]
    if any(logs.values()):
        return logs
    return None


def _by_corpus(series: Mapping[str, Sequence[Mapping[str, Any]]] | None) -> list[Any]:
    """Return a chart of the evaluations on each corpus of a mixture."""
    from markupsafe import Markup

    steps = itertools.chain.from_iterable((series or {}).values())
    keys: dict[str, None] = {}
    for step in steps:
        keys |= dict.fromkeys(key for key in step if key.startswith(BY_CORPUS))
    charts = []
    for key in keys:
        title = f"Evaluation on {key.removeprefix(BY_CORPUS)}"
        drawn = chart(title, "loss of its held-out text", logged(series or {}, key), key)
        charts.append(Markup(drawn))
    return charts


def _finite(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value


def rendered(template: str, **values: Any) -> str:
    """Return the text of a template with ``values``, all of which it escapes."""
    return str(_templates().get_template(template).render(**values))


@cache
def _templates() -> Any:
    # Images have it for PyTorch, and only pages need it.
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    folder = Path(__file__).parent

    def asset(name: str) -> Any:
        return Markup((folder / name).read_text(encoding="utf-8"))

    def drawn(*arguments: Any) -> Any:
        return Markup(chart(*arguments))

    templates = Environment(loader=FileSystemLoader(folder), autoescape=True)
    templates.globals |= {"asset": asset, "chart": drawn, "by_job": _by_job, "shown": shlex.join}
    templates.globals |= {"logged": logged, "by_corpus": _by_corpus}
    return templates


def _by_job(verdicts: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Return (job, check) → verdict of those verdicts that name a job."""
    by_job = {}
    for row in verdicts:
        if ": " in row["name"]:
            by_job[tuple(row["name"].split(": ", 1))] = row
    return by_job
