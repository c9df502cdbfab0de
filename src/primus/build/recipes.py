"""The recipes that a build is about to put into an image: each must load, or nothing is built.

Inside the image, ``primus list`` reads every recipe, so one that cannot be read breaks the command for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from primus.plan.action import tree_rows
from primus.recipes.choose import supported
from primus.recipes.load import read

if TYPE_CHECKING:
    from primus.oci.store import Store
    from primus.plan.action import ImagePlan


def check_recipes(store: Store, plans: Sequence[ImagePlan]) -> None:
    """Raise InputError, with the place, for a recipe of the project that does not load.

    Reads only the recipes that changed since the last build of a target, because that build read the others.
    """
    checked: set[str] = set()
    for plan in plans:
        folder = plan.resolved.root / "recipes"
        for action in plan.layers:
            if action.root == str(folder) and action.key not in checked and store.layer(action.key) is None:
                checked.add(action.key)
                try:
                    state = store.record("targets", plan.state) or {}
                    before = dict(state["inputs"]["actions"][action.name]["tree"])
                except (KeyError, TypeError, ValueError):
                    before = {}
                check_changed(folder, tree_rows(action.tree), before)


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
