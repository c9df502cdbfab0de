"""Compare finished runs."""

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from primus_images.cli.verb import Options, answer
from primus_images.errors import InputError
from primus_images.report import html, sheets
from primus_images.report.run import Run, read_all
from primus_images.system.host import lost_warning
from primus_images.terminal import Screen, Styled

# A row of several runs is long, and its cells are sentences: a pipe gets a table to read, too.
_PIPED_COLUMNS = 120


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """The options of ``report``."""

    runs: Sequence[Path]
    out: Path


def report(options: ReportOptions) -> int:
    """Compare finished runs: perf.csv (madengine's columns), perf_MODEL.csv (MAD's) and report.html
    with curves.
    """
    if len(options.runs) > html.MOST_RUNS:
        raise InputError(
            f"{len(options.runs)} runs are too many", hint=f"compare at most {html.MOST_RUNS}"
        )
    runs, left_out = read_all(options.runs)
    for error in left_out:
        print(f"primus report: left out: {error}", file=sys.stderr)
    paths = _write(runs, options.out)
    document = {"files": paths, "runs": [_document(run) for run in runs]}
    verdicts = [_verdict(run) for run in runs]
    screen = Screen.of()
    if screen.width is None:
        screen = Screen(width=_PIPED_COLUMNS)
    lines = screen.table([("", *verdicts), *html.figures(runs)])
    return answer(options, document, [*lines, *(f"  → {path}" for path in paths)])


def _write(runs: Sequence[Run], folder: Path) -> list[str]:
    files = {
        "perf.csv": sheets.text_of("perf", map(sheets.perf_row, runs)),
        **_sheets_of_models(runs),
        "report.html": html.comparison(runs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    lost = lost_warning(folder)
    if lost:
        print(f"primus: {lost}", file=sys.stderr)
    return [str(folder / name) for name in files]


def _document(run: Run) -> dict[str, object]:
    return {
        "label": run.label,
        "recipe": run.recipe,
        "passed": run.passed,
        "gpu": run.product or None,
        **asdict(run.summary),
    }


def _verdict(run: Run) -> Styled:
    if run.passed:
        return Styled(f"✓ {run.label}", "green")
    if run.stopped:
        return Styled(f"– {run.label}", "yellow")
    return Styled(f"✗ {run.label}", "red")


def _sheets_of_models(runs: Sequence[Run]) -> dict[str, str]:
    rows: dict[str, list[dict[str, str]]] = {}
    for run in runs:
        model = run.recipe
        if "/" in model:
            model = Path(model).stem
        model = re.sub(r"[^A-Za-z0-9._+-]", "_", model)[:100]
        rows.setdefault(model, []).extend(sheets.benchmark_rows(run))
    return {f"perf_{model}.csv": sheets.text_of("benchmark", rows[model]) for model in rows}
