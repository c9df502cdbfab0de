"""Folders of tuning results: what a result is valid for, and whether a run may use it."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus.errors import HostError, InputError
from primus.files import write_file
from primus.recipes.recipe import Recipe

# Settings that change no matrix product, only the length of a run or the location of its files.
_NEUTRAL = ("steps", "seed", "deterministic", "checkpoint", "lr")


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a result is valid for: the version of PyTorch, the GPU's architecture and the recipe's hash."""

    pytorch: str
    arch: str
    recipe: str

    @staticmethod
    def of(recipe: Recipe, pytorch: str, arch: str) -> Key:
        """Return the key of ``recipe``, without the settings that change no matrix product."""
        neutral = {recipe.knows.key(name) for name in _NEUTRAL if name in recipe.knows.keys}
        values = {
            key: setting.value
            for key, setting in recipe.settings.items()
            if key not in neutral and not key.startswith(("assets.", "validation."))
        }
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return Key(pytorch=pytorch, arch=arch, recipe=digest)

    @property
    def digest(self) -> str:
        """The hash of the key, for names of folders."""
        return hashlib.sha256(json.dumps(vars(self)).encode()).hexdigest()[:16]

    def write(self, file: Path) -> None:
        """Write key.json."""
        write_file(file, json.dumps(vars(self), indent=2) + "\n")

    def require(self, tuned: Path, file: Path) -> None:
        """Raise InputError unless ``tuned`` exists and ``file`` contains this key."""
        if not tuned.is_file():
            raise InputError(f"there is no {tuned}", hint="the stage `tune` creates it")
        try:
            stored: Any = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            stored = None
        if not isinstance(stored, Mapping):
            raise InputError(f"{tuned} has no valid key: {file} is missing or damaged", hint="tune again")
        differences = [
            # The recipe's part is a hash, which tells a reader nothing.
            "other settings of the recipe" if name == "recipe" else f"{name} {stored.get(name)} instead of {value}"
            for name, value in vars(self).items()
            if stored.get(name) != value
        ]
        if differences:
            raise InputError(f"{tuned} was measured with {', '.join(differences)}", hint="tune again")


def folder_of(recipe: str, below: Path) -> Path:
    """Return the folder of a recipe's results below ``below``. A recipe file has the folder of its name."""
    return below.absolute() / recipe.rpartition("/")[2].removesuffix(".yaml")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder while the context is open. Raises HostError if another process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            hint = "wait for it, or choose another --folder"
            raise HostError(f"another process tunes in {folder}", hint=hint) from error
        yield
