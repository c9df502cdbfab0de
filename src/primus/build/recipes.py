"""The recipes that a build is about to put into an image: each must load, or nothing is built.

Inside the image, ``primus list`` reads every recipe, so one that cannot be read breaks the command for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from primus.oci.store import Store
from primus.plan.action import Action, ImagePlan
from primus.recipes.choose import supported
from primus.recipes.load import read


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
                for name in _changed(store, plan, action):
                    supported(read(folder / name).settings)


def _changed(store: Store, plan: ImagePlan, action: Action) -> Iterator[str]:
    """Yield the recipes that differ from the last build, or all if a file changed that several of them may use."""
    try:
        state = store.record("targets", plan.state) or {}
        before = dict(state["inputs"]["actions"][action.name]["tree"])
    except (KeyError, TypeError, ValueError):
        before = {}
    now = {name: f"{kind} {value}" for name, kind, value in action.tree if name.endswith(".yaml")}
    differ = {name for name in (*now, *before) if now.get(name) != before.get(name) and name.endswith(".yaml")}
    several = any("/" in name or name not in now for name in differ)
    yield from (name for name in now if not name.startswith(".") and "/" not in name and (several or name in differ))
