"""Self-contained HTML pages: of a validation record, and of several runs compared.

uPlot draws the charts and provides zoom, live values and a legend that hides lines. ``charts.js`` adds smoothing, a log
axis, touch, and marks for missing values.
"""

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from primus.report.run import Run, of_record

MOST_RUNS = 8  # the number of distinguishable colours
_NONE = "—"
_WIDEST = 5  # pixels of a line
# The jobs of a suite whose curves must be equal.
_DRAWN = ("base", "repeat", "resume")

# With this policy, the browser refuses to load anything from outside the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(record: Mapping[str, Any]) -> str:
    """Return the page. Everything shown comes from ``record`` (see :mod:`primus.training.suite`)."""
    recipe = record["recipe"]
    title = f"Validation of {record['target']} with {recipe['name']}"
    drawn = {job["name"]: job["series"] for job in record["jobs"] if job["name"] in _DRAWN and job.get("series")}
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(str(recipe.get("description", "")))}</p>',
        _outcome("the suite", record["passed"], record["verdicts"]),
        *(_box("note", f"<strong>Not run:</strong> {escape(text)}") for text in record.get("not_run", ())),
        f"<h2>Figures</h2>{_run_table([of_record(record)])}" if record["measurements"] else "",
        f"<h2>Curves</h2>{_curves(drawn, 'rank')}",
        f"<h2>Checks</h2>{verdict_table(record['verdicts'])}",
        f"<h2>What ran</h2>{_what(record)}",
        f"<h2>Commands</h2>{_commands(record['jobs'])}",
    ]
    return document(title, "".join(parts))


def document(title: str, body: str) -> str:
    """Return a page with ``body`` (HTML) in the style of the reports, and the script that draws its charts."""
    terms = " ".join(asset("uplot/LICENSE").split())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{asset('uplot/uPlot.min.css')}\n{asset('report.css')}</style></head>"
        f"<body>{body}<script>/* {terms} */\n{asset('uplot/uPlot.iife.min.js')}\n{asset('charts.js')}</script>"
        "</body></html>\n"
    )


def comparison(runs: Sequence[Run]) -> str:
    """Return the page for at most ``MOST_RUNS`` runs. The first run is the baseline."""
    title = f"{runs[0].label}: {runs[0].recipe}" if len(runs) == 1 else f"{len(runs)} runs compared"
    verdicts = {(run.label, verdict.name): asdict(verdict) for run in runs for verdict in run.verdicts}
    units = "/".join(dict.fromkeys(run.unit for run in runs))
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(_outcome(run.label, run.passed, [asdict(verdict) for verdict in run.verdicts]) for run in runs),
        f"<h2>Figures</h2>{_run_table(runs)}<h2>Curves</h2>{_curves({run.label: run.series for run in runs}, units)}",
        f"<h2>Checks</h2>{grid(verdicts, 'Check')}",
    ]
    return document(title, "".join(parts))


def figures(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return the rows of a table: the name of a figure, then its value in each run. Rows without values are omitted."""
    first = runs[0]
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("Recipe", lambda run: run.recipe),
        ("Backend, mode", lambda run: f"{run.backend}, {run.mode}"),
        ("Precision", lambda run: run.precision),
        ("GPU", lambda run: run.product or "none: CPU"),
        ("Ranks", lambda run: f"{run.ranks}" + (f" on {run.nodes} nodes" if run.nodes > 1 else "")),
        ("Batch per rank × length", lambda run: f"{run.local_batch} × {run.seq_len}"),
        ("Tokens/s per GPU or rank", lambda run: _shown(run, "tokens_per_second", ",.0f")),
        ("Against the first", lambda run: _against(run, first)),
        ("Images/s per GPU or rank", lambda run: _shown(run, "images_per_second", ",.2f")),
        ("Spread", lambda run: _shown(run, "spread", ".1%")),
        ("TFLOP/s, causal", lambda run: _shown(run, "tflops_causal", ",.4g")),
        ("TFLOP/s, non-causal", lambda run: _shown(run, "tflops_non_causal", ",.4g")),
        ("MFU, causal / non-causal", _mfu),
        ("Memory, peak", lambda run: _shown(run, "memory_gib", ".2f", " GiB")),
        ("Joules per step and GPU", lambda run: _shown(run, "joules_per_step", ",.0f")),
        ("First loss", lambda run: _shown(run, "first_loss", ".4f")),
        ("Last loss", lambda run: _shown(run, "last_loss", ".4f")),
        ("Evaluation loss, least", lambda run: _shown(run, "eval_loss", ".4f")),
        ("Perplexity then", lambda run: _shown(run, "eval_perplexity", ".4g")),
        ("Steps, of them warm-up", lambda run: f"{run.summary.steps}, {_shown(run, 'warmup_steps', '.0f')}"),
        ("Whole job", lambda run: f"{run.seconds:.0f} s"),
    ]
    cells = [(name, *(of(run) for run in runs)) for name, of in rows]
    return [row for row in cells if any(value != _NONE for value in row[1:])]


def _shown(run: Run, name: str, form: str, unit: str = "") -> str:
    value = run.figure(name)
    return _NONE if value is None else format(value, form).replace("%", " %") + unit


def _against(run: Run, first: Run) -> str:
    mine, others = run.figure("tokens_per_second"), first.figure("tokens_per_second")
    if run is first or not mine or not others or (run.unit, run.recipe) != (first.unit, first.recipe):
        return _NONE
    return f"{mine / others - 1:+.1%}".replace("%", " %")


def _mfu(run: Run) -> str:
    if mfu := run.summary.mfu:
        shares = f"{mfu.causal:.1%} / {mfu.non_causal:.1%}".replace("%", " %")
        return f"{shares} of {mfu.peak_tflops:,g} TFLOP/s {mfu.dtype.upper()}"
    return (run.summary.no_mfu or _NONE).removeprefix("no MFU: ")


def _outcome(name: str, passed: bool, verdicts: Sequence[Mapping[str, Any]]) -> str:
    if passed:
        return _box("pass", f"<strong>✓ {escape(name)}</strong> passed {len(verdicts)} checks.")
    failed = [verdict for verdict in verdicts if not verdict["passed"] and not verdict.get("skipped")]
    skipped = sum(bool(verdict.get("skipped")) for verdict in verdicts)
    more = f", {skipped} were skipped" if skipped else ""
    items = "".join(f"<li>{escape(verdict['name'])}: {escape(verdict['reason'])}</li>" for verdict in failed)
    text = f"<strong>✗ {escape(name)}</strong> failed {len(failed)} of {len(verdicts)} checks{more}."
    return _box("fail", f"{text}<ul>{items}</ul>")


def _box(kind: str, text: str) -> str:
    return f'<div class="outcome {kind}">{text}</div>'


def _table(head: Sequence[str], rows: Iterable[str], kind: str = "") -> str:
    names = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    return f'<div class="wide" tabindex="0"><table class="{kind}">{names}{"".join(rows)}</table></div>'


def _named(name: str, cells: Iterable[str]) -> str:
    return f'<tr><td class="name">{escape(name)}</td>{"".join(cells)}</tr>'


def _run_table(runs: Sequence[Run]) -> str:
    rows = (_named(name, (f"<td>{escape(value)}</td>" for value in values)) for name, *values in figures(runs))
    return _table(("", *(run.label for run in runs)), rows)


def charts(*elements: str) -> str:
    """Return charts (HTML elements) side by side, below the controls that concern all of them."""
    return f'{asset("controls.html")}<div class="charts">{"".join(elements)}</div>'


def _curves(series: Mapping[str, Sequence[Mapping[str, Any]]], unit: str) -> str:
    def curve(title: str, y_title: str, key: str) -> str:
        lines = [
            Line(label=label, colour=colour, points=[(step["step"], step[key]) for step in steps])
            for colour, (label, steps) in enumerate(series.items())
        ]
        return chart(title, "step", y_title, lines)

    return charts(
        curve("Loss", "loss of the step", "loss"),
        curve("Throughput", f"tokens/s per {unit}", "tokens_per_second"),
        curve("Gradient norm", "norm before clipping", "grad_norm"),
    )


def verdict_table(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of checks of the whole suite and of failed ones, and the grid of those of single jobs."""
    overall = [verdict for verdict in verdicts if ": " not in verdict["name"]]
    single = [verdict for verdict in verdicts if ": " in verdict["name"]]
    rows = map(_row, [*overall, *(verdict for verdict in single if not verdict["passed"])])
    cells = {(job, check): verdict for verdict in single for job, check in [verdict["name"].split(": ", 1)]}
    return _table(("", "Check", "Measured", "Limit", "Reason"), rows, "checks") + grid(cells, "Check of each job")


def _mark(verdict: Mapping[str, Any]) -> tuple[str, str, str]:
    if verdict["passed"]:
        return "pass-mark", "✓", "pass"
    return ("sub", "–", "skipped") if verdict.get("skipped") else ("fail-mark", "✗", "fail")


def _row(verdict: Mapping[str, Any]) -> str:
    mark, sign, word = _mark(verdict)
    return (
        f'<tr class="{"fail" if word == "fail" else ""}"><td class="{mark}">{sign} {word}</td>'
        f'<td class="name">{escape(verdict["name"])}</td>'
        f'<td class="num" data-head="measured">{escape(verdict["measured"])}</td>'
        f'<td class="num" data-head="limit">{escape(verdict["limit"])}</td><td>{escape(verdict["reason"])}</td></tr>'
    )


def grid(cells: Mapping[tuple[str, str], Mapping[str, Any]], title: str) -> str:
    """Return a table of verdicts with a row per check and a column per job. ``cells`` is (job, check) → verdict."""
    jobs = list(dict.fromkeys(job for job, _ in cells))

    def cell(job: str, check: str) -> str:
        if (verdict := cells.get((job, check))) is None:
            return f'<td class="sub">{_NONE}</td>'
        mark, sign, _ = _mark(verdict)
        shown = f'<span class="{mark}">{sign}</span> {escape(verdict["measured"])}'
        return f'<td title="{escape(verdict["reason"])}">{shown}</td>'

    checks = dict.fromkeys(check for _, check in cells)
    return _table((title, *jobs), (_named(check, (cell(job, check) for job in jobs)) for check in checks))


def _what(record: Mapping[str, Any]) -> str:
    facts = record.get("facts", {})
    linears = facts.get("linears", {})
    shown: dict[str, Any] = {
        "Made": record["made"],
        **{f"Image {key}": value for key, value in record["image"].items()},
        "GPU": record["gpu"],
        "Recipe sha256": record["recipe"]["sha256"],
        "Suite sha256": record["suite"]["sha256"],
        "Ranks": facts.get("world_size", _NONE),
        "Device, collectives": f"{facts.get('device', _NONE)}, {facts.get('backend', _NONE)}",
        "Parameters": f"{facts['parameters']:,}" if "parameters" in facts else _NONE,
        "Linear weights in forward": _counted(linears.get("weight_dtypes", {})),
        "Linear inputs in forward": _counted(linears.get("input_dtypes", {})),
        "Attention kernels": ", ".join(facts.get("attention", [])) or _NONE,
        "Final weights digest": facts.get("weights_sha256", _NONE),
        **record["versions"],
    }
    return _table((), (_named(name, [f"<td><code>{escape(str(value))}</code></td>"]) for name, value in shown.items()))


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or _NONE


def _commands(jobs: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for job in jobs:
        end = f"exit code {job['exit_code']}, {job['seconds']:.0f} s" if job["ran"] else "was not run"
        parts.append(f"<p><strong>{escape(job['name'])}</strong> <span class='sub'>{escape(end)}</span></p>")
        parts.append(f"<pre>{escape(shlex.join(job['command']))}</pre>")
        if job.get("argv"):
            launcher = escape(shlex.join(job["argv"]))
            parts.append(f"<details><summary>what it starts</summary><pre>{launcher}</pre></details>")
    return "".join(parts)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series of (x, y) points with increasing x. ``colour`` is the number of a page colour, 0 to 7.

    A y that is None or not finite is missing: the chart has a gap there, and a cross on its axis.
    """

    label: str
    colour: int
    points: Sequence[tuple[float, float | None]]


def chart(title: str, x_title: str, y_title: str, lines: Sequence[Line]) -> str:
    """Return the HTML element of a chart with its data, or a sentence if there is nothing to draw.

    Later lines are drawn above earlier ones, and thinner, so that equal lines do not hide each other.
    """

    def finite(line: Line) -> list[tuple[float, float | None]]:
        return [(x, y if y is not None and math.isfinite(y) else None) for x, y in line.points]

    if all(y is None for line in lines for _, y in finite(line)):
        return f'<p class="empty">{escape(title)}: no step was logged, nothing to draw.</p>'
    drawn = [line for line in lines if line.points]
    widths = [min(2 + above, _WIDEST) for above in reversed(range(len(drawn)))]
    data = {
        "title": title,
        "x": x_title,
        "y": y_title,
        "lines": [
            {"label": line.label, "colour": line.colour, "width": width, "points": finite(line)}
            for line, width in zip(drawn, widths, strict=True)
        ],
    }
    # Escaped, because "</script>" in a label would end the element.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return (
        f'<figure class="chart"><figcaption>{escape(title)}<span class="sub">{escape(y_title)}</span></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(title)} by {escape(x_title)}"></div>'
        f'<script type="application/json">{text}</script></figure>'
    )


def asset(name: str) -> str:
    """Return the text of a file beside this one."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
