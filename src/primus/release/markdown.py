"""Tables in Markdown, which all generated pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], body: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table. Pipes in cells are escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in body]


def section(title: str, head: Sequence[str], body: Iterable[Iterable[object]], intro: str = "") -> list[str]:
    """Return the lines of a section with a table, and a sentence before it."""
    return [f"## {title}", "", *([intro, ""] if intro else []), *table(head, body), ""]
