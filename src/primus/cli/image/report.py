"""Compare finished runs."""

import argparse
import re
import sys
from dataclasses import asdict
from pathlib import Path

from primus.cli.verb import answer
from primus.errors import InputError
from primus.report import html, sheets
from primus.report.run import Run, read_all
from primus.system.host import lost_warning
from primus.terminal import Screen, Styled


def report(options: argparse.Namespace) -> int:
    """Compare finished runs: perf.csv (madengine's columns), perf_MODEL.csv (MAD's) and report.html with curves.

    The first run is the baseline. The exit code is 0 whether the runs passed or not.
    """
    if len(options.runs) > html.MOST_RUNS:
        raise InputError(f"{len(options.runs)} runs are too many", hint=f"compare at most {html.MOST_RUNS}")
    runs, left_out = read_all(options.runs)
    for error in left_out:
        print(f"primus report: left out: {error}", file=sys.stderr)
    files = {"perf.csv": sheets.perf_csv(runs), **_of_models(runs), "report.html": html.comparison(runs)}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (options.out / name).write_text(text, encoding="utf-8")
    if lost := lost_warning(options.out):
        print(f"primus: {lost}", file=sys.stderr)
    paths = [str(options.out / name) for name in files]
    shown = [
        {"label": r.label, "recipe": r.recipe, "passed": r.passed, "gpu": r.product or None, **asdict(r.summary)}
        for r in runs
    ]
    verdicts = [Styled(f"✓ {r.label}", "green") if r.passed else Styled(f"✗ {r.label}", "red") for r in runs]
    lines = Screen.of().table([("", *verdicts), *html.figures(runs)])
    return answer(options, {"files": paths, "runs": shown}, [*lines, *(f"  → {path}" for path in paths)])


def _of_models(runs: tuple[Run, ...]) -> dict[str, str]:
    stems = {run.recipe: Path(run.recipe).stem if "/" in run.recipe else run.recipe for run in runs}
    names = {recipe: f"perf_{re.sub(r'[^A-Za-z0-9._+-]', '_', stem)[:100]}.csv" for recipe, stem in stems.items()}
    return {
        file: sheets.benchmark_csv(
            [row for run in runs if names[run.recipe] == file for row in sheets.benchmark_rows(run)]
        )
        for file in dict.fromkeys(names.values())
    }
