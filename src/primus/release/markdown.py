"""Markdown that several generated pages share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(head: Sequence[str], body: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table. Pipes in cells are escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in body]


def measured_on(machine: Mapping[str, Any]) -> str:
    """Return the line of a list that describes the machine of a measurement."""
    return (
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {machine['system']}, "
        f"Linux {machine['kernel']}, Python {machine['python']}"
    )


def met(row: Mapping[str, Any]) -> str:
    """Return the cell that says whether a measurement met its bar, if it has one."""
    return ("yes" if row["met"] else "**no**") if "met" in row else "–"
