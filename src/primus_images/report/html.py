"""Self-contained HTML pages, from the templates beside this file: of a validation record, and of
several runs compared.

uPlot draws the charts and provides zoom, live values and a legend that hides lines. ``charts.js``
adds smoothing, a log axis, touch, and marks for missing values.
"""

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
from primus_images.training.judge.record import Record

MOST_RUNS = 8  # the number of distinguishable colours
_NONE = "—"
_WIDEST = 5  # pixels of a line
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
    if len(runs) == 1:
        title = f"{runs[0].label}: {runs[0].recipe}"
    else:
        title = f"{len(runs)} runs compared"
    return rendered(
        "runs.html",
        title=title,
        runs=runs,
        figures=figures(runs),
        unit="/".join(dict.fromkeys(r.unit for r in runs)),
        series={run.label: run.series for run in runs},
        cells={
            (run.label, verdict.name): asdict(verdict) for run in runs for verdict in run.verdicts
        },
    )


def figures(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return the rows of a table: the name of a figure, then its value in each run. Rows without
    values are omitted.
    """
    cells = [
        (name, *(_figure(form, run, runs[0]) for run in runs))
        for name, form in COLUMNS["figures"].items()
    ]
    return [row for row in cells if any(value != _NONE for value in row[1:])]


def _figure(form: str, run: Run, first: Run) -> str:
    summary = run.summary
    gain = None
    shares = (run.summary.no_mfu or _NONE).removeprefix("no MFU: ")
    mfu = summary.mfu
    if mfu:
        shares = (
            f"{mfu.causal:.1%} / {mfu.non_causal:.1%} of {mfu.peak_tflops:,g} TFLOP/s "
            f"{mfu.dtype.upper()}"
        )
    speed = summary.tokens_per_second
    others = first.summary.tokens_per_second
    if (
        run is not first
        and speed
        and others
        and (run.unit, run.recipe) == (first.unit, first.recipe)
    ):
        gain = speed / others - 1
    try:
        text = form.format(
            run=run,
            summary=summary,
            mfu=shares,
            gain=gain,
            gpu=run.product or "none: CPU",
            settings=shlex.join(run.arguments[2:]) or _NONE,
            nodes=f" on {run.nodes} nodes" if run.nodes > 1 else "",
        )
    except TypeError:  # a figure that is None has no digits
        return _NONE
    return text.replace("%", " %")


def chart(
    title: str, y_title: str, series: Mapping[str, Sequence[Mapping[str, Any]]], key: str
) -> str:
    """Return the HTML element of a chart of ``key`` by step with its data, or a sentence if there
    is nothing to draw.

    ``series`` is name of a line → its steps. A value that is None or not finite is missing: the
    chart has a gap there, and a cross on its axis. Later lines are drawn above earlier ones, and
    thinner, so that equal lines do not hide each other.
    """
    lines: list[dict[str, Any]] = []
    for number, (label, steps) in enumerate(series.items()):
        points = [(step["step"], step[key]) for step in steps]
        finite = [(x, y if y is not None and math.isfinite(y) else None) for x, y in points]
        width = min(1 + len(series) - number, _WIDEST)
        lines.append({"label": label, "colour": number, "width": width, "points": finite})
    empty = all(y is None for line in lines for _, y in line["points"])
    # Escaped, because "</script>" in a label would end the element.
    data = {"title": title, "x": "step", "y": y_title, "lines": lines}
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return rendered("chart.html", title=title, y_title=y_title, data="" if empty else text)


def rendered(template: str, **values: Any) -> str:
    """Return the text of a template with ``values``, all of which it escapes."""
    return str(_templates().get_template(template).render(**values))


@cache
def _templates() -> Any:
    # Images have it for PyTorch, and only pages need it.
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    templates.globals |= dict[str, Any](
        asset=lambda name: Markup((Path(__file__).parent / name).read_text(encoding="utf-8")),
        chart=lambda *arguments: Markup(chart(*arguments)),
        by_job=lambda verdicts: {
            tuple(row["name"].split(": ", 1)): row for row in verdicts if ": " in row["name"]
        },
        shown=shlex.join,
    )
    return templates
