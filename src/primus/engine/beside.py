"""Checking the modified recipes in a child process, while this process makes their layer.

The parser of YAML and the tables of backends and GPUs take half of the time of such a build to load. The check needs
nothing from this process, and only one bit is returned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

# Both processes need it. Loaded before the fork, it is loaded once.
from primus import schema  # noqa: F401

if TYPE_CHECKING:
    from primus.engine.unchanged import Builds

_Rows = tuple[str, dict[str, str], dict[str, str]]


class RecipeCheck:
    """Checks the modified recipes of ``builds`` in a child process, which loads the parser of YAML and the tables of
    backends and GPUs while this process makes the layer. Either takes half of the time of such a build.
    """

    def __init__(self, builds: Builds) -> None:
        self._passed: bool | None = None
        self._child = 0
        if rows := list(_modified_recipes(builds)):
            try:
                self._child = os.fork()
            except OSError:
                self._passed = False
                return
            if not self._child:
                _check_and_exit(rows)

    def passed(self) -> bool:
        """Wait for the child. Returns whether all modified recipes load."""
        if self._passed is None:
            try:
                self._passed = not self._child or os.waitpid(self._child, 0)[1] == 0
            except ChildProcessError:
                # Whoever started this command lets it ignore SIGCHLD, so the kernel keeps no exit code.
                self._passed = False
        return self._passed


def _modified_recipes(builds: Builds) -> Iterator[_Rows]:
    """Yield modified folders of recipes, each with path → mark of its files, now and at the last build."""
    seen = set()
    for note, changed in builds:
        for layer, paths, marks in note["groups"]:
            folder = f"{note['root']}/recipes"
            if layer in changed and note["local"][layer]["root"] == folder and (paths, marks) not in seen:
                seen.add((paths, marks))
                names = [path[len(folder) + 1 :] for path in paths.split("\n")]
                now, before = (dict(zip(names, of.split(" "), strict=True)) for of in (changed[layer], marks))
                yield folder, now, before


def _check_and_exit(rows: Sequence[_Rows]) -> NoReturn:
    code = 1
    try:
        from primus.recipes.changed import check_changed

        for folder, now, before in rows:
            check_changed(folder, now, before)
        code = 0
    finally:
        # Nothing but the exit code leaves this process: the ordinary build says what is wrong.
        os._exit(code)
