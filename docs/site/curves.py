"""The page of golden curves: every recipe's loss and gradient norm, as in a report of runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from primus_images.release.diff import table
from primus_images.report.html import chart, rendered

PAGE = "measured/golden-curves"


def curves_page(root: Path) -> str:
    """Return the page as Markdown, without the drawings."""
    record = _record(root)
    rows = [
        (
            *_names(name),
            len(curve["loss"]),
            *(f"{curve['loss'][at]:.4f}" for at in (0, -1)),
            curve["cpu"],
        )
        for name, curve in record["curves"].items()
    ]
    head = ("recipe", "backend", "mode", "steps", "first loss", "last loss", "CPU")
    return "\n".join(["# Golden curves", "", _intro(record), "", *table(head, rows), ""])


def curves_html(root: Path) -> dict[str, str]:
    """Return path in the site → the page with a chart of each recipe, which takes the place of the
    one of Sphinx.
    """
    record = _record(root)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name, curve in record["curves"].items():
        recipe, backend, mode = _names(name)
        pairs = enumerate(zip(curve["loss"], curve["grad_norm"], strict=True), 1)
        steps = [{"step": step, "loss": loss, "grad_norm": norm} for step, (loss, norm) in pairs]
        runs.setdefault(recipe, {})[f"{backend}, {mode}"] = steps
    parts = [
        '<p><a href="../index.html">primus-images</a> › <a '
        'href="../validation.html">Validation</a></p>'
        f"<h1>Golden curves</h1><p>{_intro(record)}</p>{rendered('controls.html')}"
    ]
    for recipe, series in runs.items():
        charts = chart("Loss", "of the step", series, "loss") + chart(
            "Gradient norm", "before clipping", series, "grad_norm"
        )
        parts.append(f'<h2>{recipe}</h2><div class="charts">{charts}</div>')
    return {
        f"{PAGE}.html": rendered("page.html", title="Golden curves", body=Markup("".join(parts)))
    }


def _record(root: Path) -> Mapping[str, Any]:
    (file,) = (root / "benchmarks/golden").glob("*-cpu.json")
    record: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return record


def _names(curve: str) -> tuple[str, str, str]:
    recipe, backend, mode = curve.rsplit("-", 2)
    return recipe, backend, mode


def _intro(record: Mapping[str, Any]) -> str:
    return (
        f"Small models of {record['release']}, trained in FP32 on a CPU in the image, recorded "
        f"on {record['date']}. "
        "Each validation in FP32 on a CPU compares its runs with them."
    )
