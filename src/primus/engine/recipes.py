"""The recipes that a build is about to put into an image: each must load, or nothing is built.

Inside the image, ``primus list`` reads every recipe, so one that cannot be read breaks the command for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from primus.plan.action import tree_rows
from primus.recipes.changed import check_changed

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
