"""Charts for a page: their data as JSON, and the library and script that draw them, all inside the page.

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

_HERE = Path(__file__).parent
_WIDEST = 5  # pixels
# The controls above the charts of a report; charts.js handles them.
CONTROLS = """\
<div class="controls" role="group" aria-label="All charts">
<label>Smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" value="0"><output
 for="smoothing">0</output></label>
<label><input type="checkbox" id="log"> Log axis</label>
<span class="buttons"><button type="button" id="in">Zoom in</button><button type="button" id="out">Zoom out</button
><button type="button" id="reset">Whole run</button></span>
<span class="sub">Drag across a chart, or pinch it, to zoom; double-click to see the whole run.
Click a name below a chart to hide its line.</span></div>
<noscript><p>The charts need JavaScript. The tables hold every figure without it.</p></noscript>
"""


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
    finite = [{x: y for x, y in line.points if y is not None and math.isfinite(y)} for line in lines]
    if not any(finite):
        return f'<p class="empty">{escape(title)}: no step was logged, nothing to draw.</p>'
    drawn = [(line, values) for line, values in zip(lines, finite, strict=True) if line.points]
    data = {
        "title": title,
        "x": x_title,
        "y": y_title,
        "lines": [
            {
                "label": line.label,
                "colour": line.colour,
                "width": min(2 + above, _WIDEST),
                "points": [[x, values.get(x)] for x, _ in line.points],
            }
            for above, (line, values) in zip(reversed(range(len(drawn))), drawn, strict=True)
        ],
    }
    # Escaped, because "</script>" in a label would end the element.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return (
        f'<figure class="chart"><figcaption>{escape(title)}<span class="sub">{escape(y_title)}</span></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(title)} by {escape(x_title)}"></div>'
        f'<script type="application/json">{text}</script></figure>'
    )


def assets() -> tuple[str, str]:
    """Return the style sheet and the scripts that a page with charts needs once; the library comes first."""
    library = _HERE / "uplot"
    style = (library / "uPlot.min.css").read_text(encoding="utf-8")
    code = (library / "uPlot.iife.min.js").read_text(encoding="utf-8")
    terms = " ".join((library / "LICENSE").read_text(encoding="utf-8").split())
    script = (_HERE / "charts.js").read_text(encoding="utf-8")
    return style, f"/* {terms} */\n{code}\n{script}"
