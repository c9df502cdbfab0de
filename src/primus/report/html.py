"""Self-contained HTML pages: of a validation record, and of several runs compared."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from primus.report.plot import CONTROLS, Line, assets, chart
from primus.report.run import Run, of_record

MOST_RUNS = 8  # the number of distinguishable colours
_NONE = "—"

# With this policy, the browser refuses to load anything from outside the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_LIGHT = """\
--bg:#fff;--fg:#1c2127;--soft:#5b6673;--rule:#dfe3e8;
--card:#f6f8fa;
--good:#11753a;--goodbg:#e2f5e9;--bad:#b3261e;--badbg:#fdeceb;--select:rgba(31,95,191,.15);
--s0:#1f5fbf;--s1:#e07b1f;--s2:#8e3fc2;--s3:#0f8a7e;--s4:#b3261e;--s5:#6b7a12;--s6:#d14a91;--s7:#4a4f57"""
_STYLE = """
:root{color-scheme:light dark;_LIGHT}
@media(prefers-color-scheme:dark){:root{--bg:#14181d;--fg:#e6e9ed;--soft:#9aa5b1;--rule:#2f363e;
--card:#1c2229;
--good:#6fd596;--goodbg:#163423;--bad:#ff9a92;--badbg:#40191a;--select:rgba(120,174,245,.2);
--s0:#78aef5;--s1:#f5a65b;--s2:#c79bf0;--s3:#5cc8bd;--s4:#ff9a92;--s5:#c3cf6a;--s6:#f59ac8;--s7:#c3cad3}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:28px 20px 60px;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:34px 0 10px}p{margin:4px 0}
.sub{color:var(--soft)}code,pre{font:14px/1.45 ui-monospace,"SF Mono",Menlo,Consolas,monospace}
pre{background:var(--card);padding:10px 12px;border-radius:6px;margin:6px 0;white-space:pre-wrap;
overflow-wrap:anywhere}
.outcome{border-radius:8px;padding:14px 16px;margin:18px 0;font-size:16px}
.outcome.pass{background:var(--goodbg);color:var(--good)}
.outcome.fail{background:var(--badbg);color:var(--bad)}
.outcome.note{border:1px dashed currentColor}
.outcome ul{margin:8px 0 0;padding-left:20px}
.wide{overflow-x:auto}.wide:focus-visible{outline:2px solid var(--s0)}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:6px 12px 6px 0;vertical-align:top;
border-bottom:1px solid var(--rule)}th{font-weight:600;color:var(--soft);font-size:14px}
td.num{font-variant-numeric:tabular-nums}
.checks td:nth-child(n+3){overflow-wrap:anywhere;min-width:8em}.checks td:last-child{min-width:20em}
table+table,.wide+.wide{margin-top:22px}
.pass-mark{color:var(--good);font-weight:600;white-space:nowrap}
.fail-mark{color:var(--bad);font-weight:700;white-space:nowrap}tr.fail{background:var(--badbg)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:18px}
figure.chart{margin:0;background:var(--card);border-radius:8px;padding:12px 10px 8px;min-width:0}
figcaption{font-weight:600;margin:0 6px 6px}figcaption .sub{font-weight:400;margin-left:10px}
.controls{display:flex;flex-wrap:wrap;align-items:center;gap:10px 22px;margin:0 0 14px}
.controls .sub{font-size:14px}.controls input{vertical-align:middle}.controls output{display:inline-block;width:3em}
.buttons{display:flex;gap:8px}button{font:inherit;color:inherit;background:var(--card);border:1px solid var(--rule);
border-radius:6px;padding:6px 12px;min-height:36px}
.u-legend{text-align:left!important;margin:4px 0 0!important;overflow-wrap:anywhere}
.u-legend .raw{display:none!important}
.u-legend .u-marker{border-radius:50%}.u-legend th,.u-legend td{border:0!important}
.u-select{background:var(--select)!important}
details{margin:8px 0}summary{cursor:pointer;color:var(--soft)}
:is(button,input,summary):focus-visible{outline:2px solid var(--s0);outline-offset:2px}
@media(max-width:700px){.checks,.checks tbody,.checks tr,.checks td{display:block}.checks tr:first-child{display:none}
.checks tr{padding:8px 0;border-bottom:1px solid var(--rule)}.checks td{border:0;padding:1px 0;min-width:0!important}
.checks td[data-head]:not(:empty)::before{content:attr(data-head)": ";color:var(--soft)}}
@media print{:root{color-scheme:light;_LIGHT}body{max-width:none;padding:0}.controls{display:none}
figure,tr{break-inside:avoid}h2{break-after:avoid}.wide{overflow:visible}}
""".replace("_LIGHT", _LIGHT)


def page(record: Mapping[str, Any]) -> str:
    """Return the page. Everything shown comes from ``record`` (see :mod:`primus.training.suite`)."""
    recipe = record["recipe"]
    title = f"Validation of {record['target']} with {recipe['name']}"
    body = "".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="sub">{escape(str(recipe.get("description", "")))}</p>',
            _outcome(record),
            *(_box("note", f"<strong>Not run:</strong> {escape(text)}") for text in record.get("not_run", ())),
            f"<h2>Figures</h2>{_run_table([of_record(record)])}" if record["measurements"] else "",
            f'<h2>Curves</h2>{CONTROLS}<div class="charts">{_charts(record["jobs"])}</div>',
            f"<h2>Checks</h2>{verdict_table(record['verdicts'])}",
            f"<h2>What ran</h2>{_what(record)}",
            f"<h2>Commands</h2>{_commands(record['jobs'])}",
        ]
    )
    return document(title, body)


def document(title: str, body: str) -> str:
    """Return a page with ``body`` (HTML) in the style of the reports, and the script that draws its charts."""
    style, script = assets()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{style}{_STYLE}</style></head><body>{body}"
        f"<script>{script}</script></body></html>\n"
    )


def comparison(runs: Sequence[Run]) -> str:
    """Return the page for at most ``MOST_RUNS`` runs. The first run is the baseline."""
    title = f"{runs[0].label}: {runs[0].recipe}" if len(runs) == 1 else f"{len(runs)} runs compared"
    verdicts = {(run.label, verdict.name): asdict(verdict) for run in runs for verdict in run.verdicts}
    units = "/".join(dict.fromkeys(run.unit for run in runs))
    return document(
        title,
        "".join(
            [
                f"<h1>{escape(title)}</h1>",
                *map(_run_outcome, runs),
                f"<h2>Figures</h2>{_run_table(runs)}",
                f"<h2>Curves</h2>{CONTROLS}",
                '<div class="charts">',
                _run_chart("Loss", "loss of the step", runs, "loss"),
                _run_chart("Throughput", f"tokens/s per {units}", runs, "tokens_per_second"),
                _run_chart("Gradient norm", "norm before clipping", runs, "grad_norm"),
                f"</div><h2>Checks</h2>{grid(verdicts, 'Check')}",
            ]
        ),
    )


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
    """Return the throughput relative to the first run, if both train the same recipe on the same kind of device."""
    mine, others = run.figure("tokens_per_second"), first.figure("tokens_per_second")
    if run is first or not mine or not others or (run.unit, run.recipe) != (first.unit, first.recipe):
        return _NONE
    return f"{mine / others - 1:+.1%}".replace("%", " %")


def _mfu(run: Run) -> str:
    if mfu := run.summary.mfu:
        shares = f"{mfu.causal:.1%} / {mfu.non_causal:.1%}".replace("%", " %")
        return f"{shares} of {mfu.peak_tflops:,g} TFLOP/s {mfu.dtype.upper()}"
    return (run.summary.no_mfu or _NONE).removeprefix("no MFU: ")


def _run_outcome(run: Run) -> str:
    if run.passed:
        return _box("pass", f"<strong>✓ {escape(run.label)}</strong> passed {len(run.verdicts)} checks.")
    failed = [asdict(verdict) for verdict in run.verdicts if not verdict.passed]
    return _box("fail", f"<strong>✗ {escape(run.label)}</strong> failed.", failed)


def _box(kind: str, text: str, failed: Sequence[Mapping[str, Any]] = ()) -> str:
    items = "".join(f"<li>{escape(verdict['name'])}: {escape(verdict['reason'])}</li>" for verdict in failed)
    return f'<div class="outcome {kind}">{text}{f"<ul>{items}</ul>" if items else ""}</div>'


def _wide(rows: str, kind: str = "") -> str:
    return f'<div class="wide" tabindex="0"><table class="{kind}">{rows}</table></div>'


def _run_table(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{escape(run.label)}</th>" for run in runs)
    rows = "".join(
        f'<tr><td class="name">{escape(name)}</td>' + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>"
        for name, *values in figures(runs)
    )
    return _wide(f"<tr><th></th>{head}</tr>{rows}")


def _run_chart(title: str, y_title: str, runs: Sequence[Run], key: str) -> str:
    lines = [_line(run.label, colour, run.series, key) for colour, run in enumerate(runs)]
    return chart(title, "step", y_title, lines)


def _outcome(record: Mapping[str, Any]) -> str:
    verdicts = record["verdicts"]
    failed = [verdict for verdict in verdicts if not verdict["passed"] and not verdict.get("skipped")]
    skipped = sum(bool(verdict.get("skipped")) for verdict in verdicts)
    if record["passed"]:
        return _box("pass", f"<strong>✓ Passed.</strong> All {len(verdicts)} checks hold.")
    more = f", {skipped} were skipped" if skipped else ""
    text = f"<strong>✗ Failed.</strong> {len(failed)} of {len(verdicts)} checks do not hold{more}."
    return _box("fail", text, failed)


_COLOURS = {"base": 0, "repeat": 1, "resume": 2}


def _charts(jobs: Sequence[Mapping[str, Any]]) -> str:
    drawn = [job for job in jobs if job["name"] in _COLOURS and job.get("series")]

    base = [job for job in drawn if job["name"] == "base"]

    def lines(key: str, jobs: Sequence[Mapping[str, Any]]) -> list[Line]:
        return [_line(job["name"], _COLOURS[job["name"]], job["series"], key) for job in jobs]

    return (
        chart("Loss", "step", "cross entropy, nats", lines("loss", drawn))
        + chart("Gradient norm", "step", "norm before clipping", lines("grad_norm", drawn))
        + chart("Throughput", "step", "tokens/s per rank", lines("tokens_per_second", base))
    )


def _line(label: str, colour: int, series: Sequence[Mapping[str, Any]], key: str) -> Line:
    return Line(label=label, colour=colour, points=[(step["step"], step[key]) for step in series])


def verdict_table(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of checks of the whole suite and of failed ones, and the grid of those of single jobs."""
    overall = [verdict for verdict in verdicts if ": " not in verdict["name"]]
    single = [verdict for verdict in verdicts if ": " in verdict["name"]]
    rows = "".join(_row(verdict) for verdict in [*overall, *(item for item in single if not item["passed"])])
    head = "<tr><th></th><th>Check</th><th>Measured</th><th>Limit</th><th>Reason</th></tr>"
    cells = {(job, check): verdict for verdict in single for job, check in [verdict["name"].split(": ", 1)]}
    return _wide(head + rows, "checks") + grid(cells, "Check of each job")


def _mark(verdict: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a verdict's CSS class, sign and word."""
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
    checks = list(dict.fromkeys(check for _, check in cells))
    rows = []
    for check in checks:
        row = [f'<td class="name">{escape(check)}</td>']
        for job in jobs:
            verdict = cells.get((job, check))
            if verdict is None:
                row.append('<td class="sub">—</td>')
                continue
            mark, sign, _ = _mark(verdict)
            shown = f'<span class="{mark}">{sign}</span> {escape(verdict["measured"])}'
            row.append(f'<td title="{escape(verdict["reason"])}">{shown}</td>')
        rows.append(f"<tr>{''.join(row)}</tr>")
    head = "".join(f"<th>{escape(job)}</th>" for job in jobs)
    return _wide(f"<tr><th>{escape(title)}</th>{head}</tr>{''.join(rows)}")


def _what(record: Mapping[str, Any]) -> str:
    facts = record.get("facts", {})
    linears = facts.get("linears", {})
    shown: dict[str, Any] = {
        "Made": record["made"],
        **{f"Image {key}": value for key, value in record["image"].items()},
        "GPU": record["gpu"],
        "Recipe sha256": record["recipe"]["sha256"],
        "Suite sha256": record["suite"]["sha256"],
        "Ranks": facts.get("world_size", "—"),
        "Device, collectives": f"{facts.get('device', '—')}, {facts.get('backend', '—')}",
        "Parameters": f"{facts['parameters']:,}" if "parameters" in facts else "—",
        "Linear weights in forward": _counted(linears.get("weight_dtypes", {})),
        "Linear inputs in forward": _counted(linears.get("input_dtypes", {})),
        "Attention kernels": ", ".join(facts.get("attention", [])) or "—",
        "Final weights digest": facts.get("weights_sha256", "—"),
        **{f"{name}": version for name, version in record["versions"].items()},
    }
    rows = "".join(
        f'<tr><td class="name">{escape(name)}</td><td><code>{escape(str(value))}</code></td></tr>'
        for name, value in shown.items()
    )
    return _wide(rows)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "—"


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
