"""One self-contained HTML page that compares runs: figures, curves and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from primus.report.html import document, grid
from primus.report.plot import CONTROLS, Line, chart
from primus.report.run import Run

MOST_RUNS = 8  # the number of distinguishable colours


def comparison(runs: Sequence[Run]) -> str:
    """Return the page for at most ``MOST_RUNS`` runs. The first run is the baseline."""
    title = f"{runs[0].label}: {runs[0].recipe}" if len(runs) == 1 else f"{len(runs)} runs compared"
    verdicts = {(run.label, verdict["name"]): verdict for run in runs for verdict in run.verdicts}
    units = "/".join(dict.fromkeys(run.unit for run in runs))
    return document(
        title,
        "".join(
            [
                f"<h1>{escape(title)}</h1>",
                *map(_outcome, runs),
                f"<h2>Figures</h2>{_table(runs)}",
                f"<h2>Curves</h2>{CONTROLS}",
                '<div class="charts">',
                _chart("Loss", "loss of the step", runs, "loss"),
                _chart("Throughput", f"tokens/s per {units}", runs, "tokens_per_second"),
                _chart("Gradient norm", "norm before clipping", runs, "grad_norm"),
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
        ("Steps, of them warm-up", lambda run: f"{run.summary.get('steps', len(run.series))}, {_warm(run)}"),
        ("Whole job", lambda run: f"{run.seconds:.0f} s"),
    ]
    cells = [(name, *(of(run) for run in runs)) for name, of in rows]
    return [row for row in cells if any(value != _NONE for value in row[1:])]


_NONE = "—"


def _shown(run: Run, name: str, form: str, unit: str = "") -> str:
    value = run.figure(name)
    return _NONE if value is None else format(value, form).replace("%", " %") + unit


def _warm(run: Run) -> str:
    return _shown(run, "warmup_steps", ".0f")


def _against(run: Run, first: Run) -> str:
    """Return the throughput relative to the first run, if both train the same recipe on the same kind of device."""
    mine, others = run.figure("tokens_per_second"), first.figure("tokens_per_second")
    if run is first or not mine or not others or (run.unit, run.recipe) != (first.unit, first.recipe):
        return _NONE
    return f"{mine / others - 1:+.1%}".replace("%", " %")


def _mfu(run: Run) -> str:
    mfu = run.summary.get("mfu")
    if isinstance(mfu, dict):
        shares = f"{float(mfu['causal']):.1%} / {float(mfu['non_causal']):.1%}".replace("%", " %")
        return f"{shares} of {float(mfu['peak_tflops']):,g} TFLOP/s {str(mfu['dtype']).upper()}"
    return str(run.summary.get("no_mfu") or _NONE).removeprefix("no MFU: ")


def _outcome(run: Run) -> str:
    failed = [verdict for verdict in run.verdicts if not verdict["passed"]]
    if run.passed:
        return (
            f'<div class="outcome pass"><strong>✓ {escape(run.label)}</strong> passed {len(run.verdicts)} checks.</div>'
        )
    items = "".join(f"<li>{escape(str(item['name']))}: {escape(str(item['reason']))}</li>" for item in failed)
    return f'<div class="outcome fail"><strong>✗ {escape(run.label)}</strong> failed.<ul>{items}</ul></div>'


def _table(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{escape(run.label)}</th>" for run in runs)
    rows = "".join(
        f'<tr><td class="name">{escape(name)}</td>' + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>"
        for name, *values in figures(runs)
    )
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{rows}</table></div>'


def _chart(title: str, y_title: str, runs: Sequence[Run], key: str) -> str:
    lines = [
        Line(label=run.label, colour=number, points=[(step["step"], step[key]) for step in run.series])
        for number, run in enumerate(runs)
    ]
    return chart(title, "step", y_title, lines)
