"""Charts for a page: their data as JSON, and the files that style and draw them.

uPlot draws the lines and provides zoom, live values and a legend that hides lines. ``charts.js`` adds smoothing, a log
axis, touch, and marks for missing values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_WIDEST = 5  # pixels


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
