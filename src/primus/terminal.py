"""Text for a terminal: tables and sentences that fit its width, and color if the terminal supports it.

The verbs in the image use this module, too, and an image has only PyYAML. Tables are therefore laid out with the
standard library, and rich only draws progress.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TextIO
from unicodedata import combining, east_asian_width

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_GAP = "  "
# A column of fewer characters than this breaks most words.
_NARROWEST = 12
_SIGNED = r"(?s)(\s*)((?:[✓✗–→] )?)(.*)"
# A word that is too long for its column may be broken after one of these.
_PARTS = r"[^/+:@,=_-]*[/+:@,=_-]|[^/+:@,=_-]+"


class Styled(str):
    """Text with a style ("bold", "dim", "red", "green", "yellow", "cyan").

    Layout treats it as plain text, and a screen without color prints it as such.
    """

    __slots__ = ("style",)
    style: str

    def __new__(cls, text: str, style: str) -> Styled:
        """Return ``text`` in ``style``."""
        self = super().__new__(cls, text)
        self.style = style
        return self


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The target of a layout: a width in columns (None: unlimited, as in a pipe), and whether color is shown."""

    width: int | None = None
    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO | None = None) -> Screen:
        """Return the screen of ``stream`` (default: standard output).

        A pipe has no width, so that each row stays on one line for grep; ``COLUMNS`` sets a width for pipes as
        well. Color needs a terminal other than ``TERM=dumb``, and no ``NO_COLOR``.
        """
        stream = stream or sys.stdout
        terminal = stream.isatty()
        width: int | None = None
        if re.fullmatch(r"[0-9]{1,9}", columns := os.environ.get("COLUMNS", "")):
            width = int(columns)
        elif terminal:
            try:
                width = os.get_terminal_size(stream.fileno()).columns
            except (OSError, ValueError):
                width = None
        colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        return cls(width=max(width, 20) if width else None, colour=colour)

    def paint(self, text: str, style: str = "") -> str:
        """Return ``text`` in ``style``, or in its own style if it is :class:`Styled`."""
        style = style or getattr(text, "style", "")
        return f"\033[{_CODES[style]}m{text}\033[0m" if self.colour and style and text else str(text)

    def verdict(self, passed: bool) -> str:
        """Return a green check mark or a red cross."""
        return self.paint("✓", "green") if passed else self.paint("✗", "red")

    def wrap(self, text: str, indent: str = "", hanging: str | None = None) -> list[str]:
        """Wrap one paragraph. The first line begins with ``indent``, the others with ``hanging`` (default: the
        same).

        ``indent`` may be painted. Without a width, the paragraph is one line.
        """
        hanging = indent if hanging is None else hanging
        if self.width is None:
            return [indent + self.paint(text)]
        lines = _broken(text, self.width - max(_columns(_bare(indent)), _columns(_bare(hanging))))
        style = getattr(text, "style", "")
        return [(hanging if number else indent) + self.paint(line, style) for number, line in enumerate(lines)]

    def fit(self, text: str) -> str:
        """Wrap the lines of a finished text below their own beginnings, and color a leading ``✓`` or ``✗``.

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
        """Return aligned columns as lines that fit the screen; ``right`` are the numbers of right-aligned
        columns.

        If a table is too wide, its cells are wrapped, the widest column first. If that is not enough, each row
        becomes a block with ``head`` as labels.
        """
        lines = [*([[Styled(cell, "bold") for cell in head]] if head else []), *rows]
        if not lines:
            return []
        cells = [[_one_line(cell) for cell in line] for line in lines]
        natural = [max(_columns(line[column]) for line in cells) for column in range(len(cells[0]))]
        widths: list[int] | None = natural
        if self.width is not None:
            room = self.width - len(indent) - len(_GAP) * (len(natural) - 1)
            widths = _fitting(cells, natural, room)
            if widths is None and head:
                return self._blocks(head, rows, indent)
            if widths is None:
                # A key and its text: the key is not broken as long as half of the screen is left for the text.
                widths = _shrunk(natural, [min(n, max(1, room // len(natural))) for n in natural], room)
                if any(width < min(n, _NARROWEST) for width, n in zip(widths, natural, strict=True)):
                    return [line for row in cells for line in self._paragraph(row, indent)]
        return [line for row in cells for line in self._row(row, widths or natural, right, indent)]

    def _row(self, cells: Sequence[str], widths: Sequence[int], right: Collection[int], indent: str) -> list[str]:
        columns = [_broken(cell, width) for cell, width in zip(cells, widths, strict=True)]
        lines = []
        for number in range(max(map(len, columns))):
            words = []
            for column, (parts, width) in enumerate(zip(columns, widths, strict=True)):
                text = parts[number] if number < len(parts) else ""
                space = " " * (width - _columns(text))
                text = self.paint(text, getattr(cells[column], "style", ""))
                words.append(space + text if column in right else text + space)
            lines.append((indent + _GAP.join(words)).rstrip())
        return lines

    def _paragraph(self, cells: Sequence[str], indent: str) -> list[str]:
        mark, rest = cells[0], cells[1:]
        if _columns(mark) > 1:
            return self.wrap(" ".join(filter(None, cells)), indent, indent + _GAP)
        first = indent + self.paint(mark or " ") + _GAP
        return self.wrap(" ".join(filter(None, rest)), first, " " * _columns(_bare(first)))

    def _blocks(self, head: Sequence[str], rows: Sequence[Sequence[str]], indent: str) -> list[str]:
        width, lines = max(map(_columns, head[1:]), default=0), []
        for row in rows:
            lines += self.wrap(Styled(_one_line(row[0]), getattr(row[0], "style", "bold")), indent)
            for name, cell in zip(head[1:], row[1:], strict=True):
                if cell:
                    label = indent + _GAP + name + " " * (width - _columns(name)) + _GAP
                    if self.width is not None and self.width - _columns(label) < _NARROWEST:
                        lines += self.wrap(name, indent + _GAP)
                        lines += self.wrap(_one_line(cell), indent + _GAP * 2)
                    else:
                        lines += self.wrap(_one_line(cell), label, " " * _columns(label))
        return lines


PLAIN = Screen()


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    plain = "".join(c if c.isprintable() else " " for c in text)
    return Styled(plain, text.style) if isinstance(text, Styled) else plain


def _bare(text: str) -> str:
    return re.sub(r"\033\[[0-9;]*m", "", text)


def _columns(text: str) -> int:
    """Return the number of columns that a terminal needs for the text."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _fitting(cells: Sequence[Sequence[str]], natural: Sequence[int], room: int) -> list[int] | None:
    """Return widths that fit ``room`` with whole words, or with words broken after punctuation, or None."""
    if sum(natural) <= room:
        return list(natural)
    for split in (str.split, lambda text: [part for word in text.split() for part in re.findall(_PARTS, word)]):
        least = [max(max(map(_columns, split(line[n])), default=0) for line in cells) for n in range(len(natural))]
        if sum(least) <= room:
            return _shrunk(natural, least, room)
    return None


def _shrunk(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return ``natural`` with the widest columns narrowed until the sum fits ``room``, none below its ``least``."""
    widths = list(natural)
    while sum(widths) > room:
        wide = [column for column, width in enumerate(widths) if width > max(1, least[column])]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _broken(text: str, width: int) -> list[str]:
    """Break the text into lines of at most ``width`` columns: between words, else after punctuation, else anywhere."""
    width = max(1, width)
    if _columns(text) <= width:
        return [text]
    lines, line = [], ""
    for word in text.split():
        if line and _columns(line) + 1 + _columns(word) <= width:
            line = f"{line} {word}"
            continue
        if line:
            lines.append(line)
        line = ""
        for part in [word] if _columns(word) <= width else re.findall(_PARTS, word):
            if line and _columns(line) + _columns(part) > width:
                lines.append(line)
                line = ""
            line += part
            while _columns(line) > width:
                cut = next(n for n in range(len(line), 0, -1) if n == 1 or _columns(line[:n]) <= width)
                lines.append(line[:cut])
                line = line[cut:]
    return [*lines, line] if line else lines or [""]


def counted(amount: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{amount:,} {noun}" + ("" if amount == 1 else "s")


def bytes_text(amount: int) -> str:
    """Format bytes in decimal units, as registries count them."""
    value, unit = float(amount), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
