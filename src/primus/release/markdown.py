"""Markdown that several generated pages are made of."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["rows"]


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A table, line by line."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body]
