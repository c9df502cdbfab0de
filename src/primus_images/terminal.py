"""Text for a terminal: tables and sentences that fit its width, and color if the terminal supports
it.

The verbs in the image use this module, too, and rich is a dependency of the host's verbs only.
Tables are therefore laid out with the standard library, and rich only draws progress.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import NamedTuple, Self, TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_GAP = "  "
_SIGNED = r"(?s)(\s*)((?:[✓✗–→] )?)(.*)"


class Styled(str):
    """Text with a style ("bold", "dim", "red", "green", "yellow", "cyan").

    Layout treats it as plain text, and a screen without color prints it as such.
    """

    style: str

    def __new__(cls, text: str, style: str) -> Self:
        """Return ``text`` in ``style``."""
        self = super().__new__(cls, text)
        self.style = style
        return self


class Screen(NamedTuple):
    """The target of a layout: a width in columns (None: unlimited, as in a pipe), and whether color
    is shown.
    """

    width: int | None = None
    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO | None = None) -> Self:
        """Return the screen of ``stream`` (default: standard output).

        A pipe has no width, so that each row stays on one line for grep; ``COLUMNS`` sets a width
        for pipes as well. Color needs a terminal other than ``TERM=dumb``, and no ``NO_COLOR``.
        """
        terminal = (stream or sys.stdout).isatty()
        width = 0
        if terminal or "COLUMNS" in os.environ:
            width = shutil.get_terminal_size((0, 0)).columns
        colour = (
            terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        )
        return cls(width=max(width, 20) if width else None, colour=colour)

    def paint(self, text: str, style: str = "") -> str:
        """Return ``text`` in ``style``, or in its own style if it is :class:`Styled`."""
        style = style or getattr(text, "style", "")
        if self.colour and style and text:
            return f"\033[{_CODES[style]}m{text}\033[0m"
        return str(text)

    def wrap(self, text: str, indent: str = "", hanging: str | None = None) -> list[str]:
        """Wrap one paragraph. The first line begins with ``indent``, the others with ``hanging``
        (default: the same).

        ``indent`` may be painted. Without a width, the paragraph is one line.
        """
        if hanging is None:
            hanging = indent
        if self.width is None:
            return [indent + self.paint(text)]
        lines = _broken(text, self.width - max(len(_bare(indent)), len(_bare(hanging))))
        style = getattr(text, "style", "")
        return [
            (hanging if number else indent) + self.paint(line, style)
            for number, line in enumerate(lines)
        ]

    def fit(self, text: str) -> str:
        """Wrap the lines of a finished text below their own beginnings, and color a leading ``✓``
        or ``✗``.

        A line that begins with ``→`` is not wrapped, so that its path can be copied.
        """
        lines = []
        for line in text.split("\n"):
            indent, sign, rest = re.match(_SIGNED, line).groups()  # type: ignore[union-attr]  # it matches any line
            shown = self.paint(sign, {"✓": "green", "✗": "red"}.get(sign.strip(), ""))
            if sign.startswith("→"):
                lines.append(line)
                continue
            lines += self.wrap(rest, indent + shown, " " * (len(indent) + max(2, len(sign))))
        return "\n".join(lines)

    def table(
        self,
        rows: Sequence[Sequence[str]],
        *,
        head: Sequence[str] = (),
        right: Collection[int] = (),
        indent: str = "",
    ) -> list[str]:
        """Return aligned columns as lines that fit the screen; ``right`` are the numbers of
        right-aligned columns.

        If a table is too wide, its cells are wrapped, the widest column first, and words that need
        more than half of the screen broken. Where the longest words do not fit beside each other,
        each row is a paragraph.
        """
        lines = [*([[Styled(cell, "bold") for cell in head]] if head else []), *rows]
        if not lines:
            return []
        cells = [[_one_line(cell) for cell in line] for line in lines]
        columns = range(len(cells[0]))
        widths = [max(len(line[column]) for line in cells) for column in columns]
        if self.width is not None:
            room = self.width - len(indent) - len(_GAP) * (len(columns) - 1)
            longest = (
                max(map(len, " ".join(column).split()), default=0)
                for column in zip(*cells, strict=True)
            )
            words = [min(length, room // 2) for length in longest]
            while sum(widths) > room and (wide := [c for c in columns if widths[c] > words[c]]):
                widths[max(wide, key=widths.__getitem__)] -= 1
            if sum(widths) > room:
                paragraphs = (_GAP.join(filter(None, row)) for row in cells)
                return [
                    line
                    for text in paragraphs
                    for line in self.wrap(text, indent, indent + 2 * _GAP)
                ]
        return [line for row in cells for line in self._row(row, widths, right, indent)]

    def _row(
        self, cells: Sequence[str], widths: Sequence[int], right: Collection[int], indent: str
    ) -> list[str]:
        wrapped = [_broken(cell, width) for cell, width in zip(cells, widths, strict=True)]
        lines = []
        for parts in zip_longest(*wrapped, fillvalue=""):
            words = []
            for column, (text, width) in enumerate(zip(parts, widths, strict=True)):
                space = " " * (width - len(text))
                painted = self.paint(text, getattr(cells[column], "style", ""))
                words.append(space + painted if column in right else painted + space)
            lines.append((indent + _GAP.join(words)).rstrip())
        return lines


PLAIN = Screen()


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    plain = "".join(c if c.isprintable() else " " for c in text)
    if isinstance(text, Styled):
        return Styled(plain, text.style)
    return plain


def _bare(text: str) -> str:
    return re.sub(r"\033\[[0-9;]*m", "", text)


def _broken(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""]


def say(text: str) -> None:
    """Print a line to standard error. Bars of a progress that are there stay below it."""
    print(text, file=sys.stderr, flush=True)


def counted(amount: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{amount:,} {noun}" + ("" if amount == 1 else "s")


def some(names: Sequence[str], most: int) -> str:
    """``a, b and 3 more``: the first ``most`` of the names, and how many there are besides."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def bytes_text(amount: int) -> str:
    """Format bytes in decimal units, as registries count them."""
    value = float(amount)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value = value / 1000
        unit = larger
    if unit == "B" or value >= 100:
        return f"{value:.0f} {unit}"
    return f"{value:.1f} {unit}"
