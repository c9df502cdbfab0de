"""Self-contained HTML pages of a validation record, and of several runs compared.

uPlot draws the charts and provides zoom, live values and a legend that hides lines. ``charts.js``
adds smoothing, a log axis, touch, and marks for missing values.
"""

import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from primus_images.report.run import Run, of_record
from primus_images.report.sheets import COLUMNS
from primus_images.terminal import counted
from primus_images.training.judge.record import Record
from primus_images.training.run.logs import BY_CORPUS
from primus_images.training.run.metrics import perplexity

MOST_RUNS = 8  # the number of distinguishable colours
_NONE = "—"
_WIDEST = 5  # pixels of a line
_FEW_MINUTES = 5
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
        resumed={run.label: run.resumed_after for run in runs},
        configuration=configuration(runs),
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
        "started": _moment(run.started),
        "lasted": _lasted(run.seconds),
        "host": run.host,
        "global_batch": str(run.global_batch or ""),
        "parameters": f"{run.parameters:,}" if run.parameters else "",
        "text": text,
        "seen": seen,
        "checkpoint": run.checkpoint,
        "resumed_from": run.resumed_from,
        "joined": _joined(run),
        "image": " ".join(run.image.values()),
        "commit": run.commit,
        "versions": ", ".join(versions),
    }
    return {name: value or _NONE for name, value in facts.items()}


def _moment(text: str) -> str:
    """Return a moment that ISO 8601 describes, without its seconds."""
    with suppress(ValueError):
        return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return ""


def _lasted(seconds: float) -> str:
    """Return a duration: in seconds, above some minutes also in hours and minutes."""
    text = f"{seconds:,.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if minutes + 60 * hours > _FEW_MINUTES:
        text += f" ({hours} h {minutes} min)"
    return text


def _joined(run: Run) -> str:
    """Return which steps of a run are those of the runs that it goes on from."""
    if not run.resumed_after:
        return ""
    first, last = run.series[0]["step"] or 0, run.series[-1]["step"] or 0
    places = ", ".join(map(str, run.resumed_after))
    return f"steps {first:.0f} to {last:.0f}, resumed after {places}"


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
    *,
    sparse: bool = False,
) -> str:
    """Return the HTML element of a chart of ``key``, or a sentence if there is no data.

    It is drawn by step, tokens or time, as the reader chooses; all charts of a page share these,
    which :func:`axes` writes. If ``series`` is None, there is no chart.

    ``series`` is name of a line → its steps. A value that is None or not finite is missing: the
    chart has a gap there, and a cross on its axis. With ``sparse``, not every step has a value, as
    of an evaluation; there is no chart if none has one. Later lines are drawn above earlier ones,
    and thinner, so that equal lines do not hide each other.
    """
    if series is None:
        return ""
    lines: list[dict[str, Any]] = []
    empty = True
    for number, (label, steps) in enumerate(series.items()):
        values = [_digits(step.get(key)) for step in steps]
        width = min(1 + len(series) - number, _WIDEST)
        line: dict[str, Any] = {"label": label, "colour": number, "width": width, "values": values}
        if sparse:
            at = [place for place, step in enumerate(steps) if step.get(key) is not None]
            line |= {"at": at, "values": [values[place] for place in at]}
        empty = empty and all(value is None for value in values)
        lines.append(line)
    if sparse and empty:
        return ""
    text = ""
    if not empty:
        text = _embedded({"title": title, "y": y_title, "lines": lines})
    return rendered("chart.html", title=title, y_title=y_title, data=text)


def axes(
    series: Mapping[str, Sequence[Mapping[str, Any]]] | None,
    resumed: Mapping[str, Sequence[int]] | None = None,
) -> str:
    """Return what all charts are drawn by, as JSON: the steps, tokens and seconds of each line.

    ``resumed`` is line → the steps after which its run was resumed.
    """
    lines = {}
    for label, steps in (series or {}).items():
        lines[label] = {
            "step": [step["step"] for step in steps],
            "tokens": [_digits(step.get("tokens"), 16) for step in steps],
            "seconds": [_digits(step.get("seconds")) for step in steps],
            "resumed": list((resumed or {}).get(label, ())),
        }
    return _embedded(lines)


def _embedded(data: Any) -> str:
    """Return JSON for an element of the page: escaped, as "</script>" in a label would end it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _digits(value: float | None, digits: int = 7) -> float | None:
    """Return a value with as many digits as a chart shows; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    if short.is_integer():
        return int(short)
    return short


def curves_of(
    series: Mapping[str, Sequence[Mapping[str, Any]]] | None,
) -> dict[str, list[dict[str, Any]]]:
    """Return the steps of each line with what follows from them: perplexity, MFU in percent."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for label, steps in (series or {}).items():
        lines[label] = []
        for step in steps:
            more: dict[str, Any] = {}
            if step.get("eval_loss") is not None:
                more["eval_perplexity"] = perplexity(step["eval_loss"])
            if step.get("mfu_non_causal") is not None:
                more["mfu"] = 100 * step["mfu_non_causal"]
            lines[label].append({**step, **more})
    return lines


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
        charts.append(Markup(chart(title, "loss of its held-out text", series, key, sparse=True)))
    return charts


def configuration(runs: Sequence[Run]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the settings that differ between runs, and those that all have: name, then values."""
    names = dict.fromkeys(itertools.chain.from_iterable(run.settings for run in runs))
    differing: list[tuple[str, ...]] = []
    common: list[tuple[str, ...]] = []
    for name in names:
        values = [run.settings.get(name, _NONE) for run in runs]
        if len(set(values)) > 1:
            differing.append((name, *values))
        else:
            common.append((name, values[0]))
    return differing, common


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

    def drawn(*arguments: Any, sparse: bool = False) -> Any:
        return Markup(chart(*arguments, sparse=sparse))

    def shared(*arguments: Any) -> Any:
        return Markup(axes(*arguments))

    templates = Environment(loader=FileSystemLoader(folder), autoescape=True)
    templates.globals |= {"asset": asset, "chart": drawn, "by_job": _by_job, "shown": shlex.join}
    templates.globals |= {"axes": shared, "by_corpus": _by_corpus, "curves_of": curves_of}
    templates.globals |= {"soft": _soft}
    return templates


def _soft(text: str) -> Any:
    """Return a text with names of settings and paths, which may be broken between their words."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=[a-z])([._/=])(?=[a-z]{3})", r"\1<wbr>", str(escape(text))))


def _by_job(verdicts: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Return (job, check) → verdict of those verdicts that name a job."""
    by_job = {}
    for row in verdicts:
        if ": " in row["name"]:
            by_job[tuple(row["name"].split(": ", 1))] = row
    return by_job
