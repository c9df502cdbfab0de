"""Checking that the modified recipes of a folder load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from primus.recipes.known import supported
from primus.recipes.load import read


def check_changed(folder: Path | str, now: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Raise InputError for a recipe in ``folder`` that does not load.

    ``now`` and ``before`` map the folder's files, and those of the last build, to something that differs if they do.
    Recipes that did not change are not read.
    """
    for name in _changed(now, before):
        supported(read(Path(folder, name)).settings)


def _changed(now: Mapping[str, str], before: Mapping[str, str]) -> Iterator[str]:
    """Yield the recipes that differ, or all if a file changed that several of them may use."""
    differ = {name for name in (*now, *before) if now.get(name) != before.get(name) and name.endswith(".yaml")}
    several = any("/" in name or name not in now for name in differ)
    recipes = (name for name in now if name.endswith(".yaml") and not name.startswith(".") and "/" not in name)
    yield from (name for name in recipes if several or name in differ)
