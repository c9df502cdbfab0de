"""A line chart as inline SVG: no library, no script. Colours are the page's, through CSS classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "line_chart", "ticks"]

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 44
_DOTTED = 200  # more points than that lie on each other


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series of (x, y) points; ``style`` is a CSS class: ``a`` solid, ``b`` dashed, ``c`` dots,
    ``r0`` … ``r7`` one colour each. Long lines have no dots.

    A y of None (or not finite) is a gap, marked by a cross on the axis: a missing value must be seen.
    """

    label: str
    style: str
    points: Sequence[tuple[float, float | None]]


def line_chart(title: str, x_title: str, y_title: str, lines: Sequence[Line], *, legend: bool = True) -> str:
    """The chart as an ``<svg>`` element; a sentence in its place when there is nothing to draw."""
    values = [y for line in lines for _, y in line.points if y is not None and math.isfinite(y)]
    places = [x for line in lines for x, _ in line.points]
    if not values or not places:
        return f'<p class="empty">{escape(title)}: no step was logged, nothing to draw.</p>'
    y_marks = ticks(min(values), max(values), 5)
    x_marks = [mark for mark in ticks(min(places), max(places), 8) if min(places) <= mark <= max(places)]
    low, high = min(y_marks[0], *values), max(y_marks[-1], *values)
    first, last = min(places), max(places)

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - first) / (last - first) if last > first else 0.5)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ((y - low) / (high - low) if high > low else 0.5)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>',
    ]
    for mark in y_marks:
        y = down(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    base = HEIGHT - BOTTOM
    for mark in x_marks:
        x = across(mark)
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{base}" x2="{x:.1f}" y2="{base + 5}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 19}" text-anchor="middle">{mark:g}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + base) / 2
    parts.append(f'<text class="label" x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>')
    parts.append(
        f'<text class="label" transform="translate(14 {middle_y}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_title)}</text>"
    )
    for line in lines:
        parts += _draw(line, across, down, base)
    parts.append(_legend(lines) if legend else "")
    parts.append("</svg>")
    return "".join(parts)


def _draw(line: Line, across: Callable[[float], float], down: Callable[[float], float], base: float) -> list[str]:
    parts: list[str] = []
    run: list[str] = []

    def flush() -> None:
        if len(run) > 1 and line.style != "c":
            parts.append(f'<polyline class="{line.style}" points="{" ".join(run)}"/>')
        run.clear()

    for x, y in line.points:
        if y is None or not math.isfinite(y):
            flush()
            parts.append(f'<text class="gap" x="{across(x):.1f}" y="{base - 4}" text-anchor="middle">✕</text>')
            continue
        run.append(f"{across(x):.1f},{down(y):.1f}")
        if len(line.points) > _DOTTED and line.style != "c":
            continue
        at = f'cx="{across(x):.1f}" cy="{down(y):.1f}"'
        tip = f"<title>{escape(line.label)}, step {x:g}: {y:.6g}</title>"
        radius = 3.4 if line.style == "c" else 2.2
        parts.append(f'<circle class="{line.style}" {at} r="{radius}">{tip}</circle>')
    flush()
    return parts


def _legend(lines: Sequence[Line]) -> str:
    parts, right = [], WIDTH - RIGHT
    for line in reversed(lines):
        right -= 7 * len(line.label) + 34
        mark = (
            f'<circle class="{line.style}" cx="{right + 10}" cy="14" r="3.4"/>'
            if line.style == "c"
            else f'<line class="{line.style}" x1="{right}" y1="14" x2="{right + 20}" y2="14"/>'
        )
        parts.append(f'{mark}<text class="tick" x="{right + 26}" y="18">{escape(line.label)}</text>')
    return "".join(parts) if len(lines) > 1 else ""


def ticks(low: float, high: float, about: int) -> list[float]:
    """About ``about`` round numbers, 1, 2 or 5 times a power of ten apart, that cover ``low`` … ``high``."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    start = math.floor(low / step + 1e-9)
    end = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(start, end + 1)]
