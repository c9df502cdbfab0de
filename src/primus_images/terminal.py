"""Text for a terminal: tables and sentences that fit its width, and color where it is shown.

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
_OBEYED = re.compile(r"(?!\x1b\[\d{0,2}m)[\0-\x08\x0b-\x1f\x7f-\x9f]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SIGNS = {"✓ ": "green", "✗ ": "red", "– ": ""}


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
    """The target of a layout: a width in columns (None: unlimited), and whether color is shown."""

    width: int | None = None
    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO | None = None) -> Self:
        """Return the screen of ``stream`` (default: standard output).

        A pipe has no width, so that each row stays on one line for grep; ``COLUMNS`` sets a width
        for pipes as well. Color needs a terminal other than ``TERM=dumb``, and no ``NO_COLOR``.
        """
        terminal = (stream or sys.stdout).isatty()
        width = None
        if terminal or "COLUMNS" in os.environ:
            columns = shutil.get_terminal_size((0, 0)).columns
            if columns:
                width = max(columns, 20)
        shows_colour = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
        return cls(width=width, colour=terminal and shows_colour)

    def paint(self, text: str, style: str = "") -> str:
        """Return ``text`` in ``style``, or in its own style if it is :class:`Styled`."""
        style = style or getattr(text, "style", "")
        if self.colour and style and text:
            return f"\033[{_CODES[style]}m{text}\033[0m"
        return str(text)

    def wrap(self, text: str, indent: str = "", hanging: str | None = None) -> list[str]:
        """Wrap one paragraph; without a width, it is one line.

        The first line begins with ``indent``, which may be painted, the others with ``hanging``
        (default: the same).
        """
        if hanging is None:
            hanging = indent
        lines = [text]
        if self.width is not None:
            lines = _broken(text, self.width - max(len(_bare(indent)), len(_bare(hanging))))
        style = getattr(text, "style", "")
        first, *others = [self.paint(line, style) for line in lines]
        return [indent + first, *(hanging + line for line in others)]

    def fit(self, text: str) -> str:
        """Wrap the lines of a finished text below their own beginnings, and color ``✓`` and ``✗``.

        A line that begins with ``→`` is not wrapped, so that its path can be copied.
        """
        lines = []
        for line in text.split("\n"):
            stripped = line.lstrip()
            indent = line[: len(line) - len(stripped)]
            if stripped.startswith("→"):
                lines.append(line)
                continue
            sign = ""
            if stripped[:2] in _SIGNS:
                sign = self.paint(stripped[:2], _SIGNS[stripped[:2]])
                stripped = stripped[2:]
            lines += self.wrap(stripped, indent + sign, indent + "  ")
        return "\n".join(lines)

    def table(
        self,
        rows: Sequence[Sequence[str]],
        *,
        head: Sequence[str] = (),
        right: Collection[int] = (),
        indent: str = "",
    ) -> list[str]:
        """Return aligned columns as lines that fit the screen.

        ``right`` are the numbers of right-aligned columns. If a table is too wide, its cells are
        wrapped, the widest column first, and words that need more than half of the screen broken.
        Where the longest words do not fit beside each other, each row is a paragraph.
        """
        cells = [[_one_line(cell) for cell in row] for row in rows]
        if head:
            cells.insert(0, [Styled(cell, "bold") for cell in head])
        if not cells:
            return []
        columns = list(zip(*cells, strict=True))
        widths = [max(map(len, column)) for column in columns]
        if self.width is not None:
            room = self.width - len(indent) - len(_GAP) * (len(columns) - 1)
            widths = _shrunk(widths, columns, room)
            if sum(widths) > room:
                return self._paragraphs(cells, indent)
        lines = []
        for row in cells:
            lines += self._row(row, widths, right, indent)
        return lines

    def _paragraphs(self, cells: Sequence[Sequence[str]], indent: str) -> list[str]:
        lines = []
        for row in cells:
            text = _GAP.join(filter(None, row))
            lines += self.wrap(text, indent, indent + 2 * _GAP)
        return lines

    def _row(
        self, cells: Sequence[str], widths: Sequence[int], right: Collection[int], indent: str
    ) -> list[str]:
        wrapped = [_broken(cell, width) for cell, width in zip(cells, widths, strict=True)]
        lines = []
        for parts in zip_longest(*wrapped, fillvalue=""):
            words = []
            for column, part in enumerate(parts):
                space = " " * (widths[column] - len(part))
                painted = self.paint(part, getattr(cells[column], "style", ""))
                words.append(space + painted if column in right else painted + space)
            lines.append((indent + _GAP.join(words)).rstrip())
        return lines


PLAIN = Screen()


def _shrunk(widths: list[int], columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return narrower widths that fit the room, as far as the longest words permit."""
    least = []
    for column in columns:
        words = " ".join(column).split()
        longest = max(map(len, words), default=0)
        least.append(min(longest, room // 2))
    widths = list(widths)
    while sum(widths) > room:
        wrappable = [number for number, width in enumerate(widths) if width > least[number]]
        if not wrappable:
            break
        widest = max(wrappable, key=lambda number: widths[number])
        widths[widest] -= 1
    return widths


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


def harmless(text: str, *, colors: bool = True) -> str:
    """Return ``text`` with a sign for each control character that a terminal would obey.

    A server or a file may have sent it, and could move the cursor, hide text or set the clipboard.
    Ends of lines and tabs stay, and so do our own ``colors``.
    """
    shown = _OBEYED.sub(_REPLACEMENT, text)
    if colors:
        return shown
    return shown.replace("\x1b", _REPLACEMENT)


def say(text: str) -> None:
    """Print a line to standard error. Bars of a progress that are there stay below it."""
    print(harmless(text), file=sys.stderr, flush=True)


def counted(amount: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    if amount == 1:
        return f"1 {noun}"
    return f"{amount:,} {noun}s"


def some(names: Sequence[str], most: int) -> str:
    """``a, b and 3 more``: the first ``most`` of the names, and how many there are besides."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


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
