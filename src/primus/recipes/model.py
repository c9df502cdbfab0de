"""A resolved recipe: one flat table of settings, each with the place it came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from primus.errors import InputError

__all__ = ["WORDS", "Recipe", "Scalar", "Setting", "Value"]

# How a type is called in a sentence to a person.
WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "None": "null",
}

Scalar = str | int | float | bool | None
Value = Scalar | list[Scalar]
Kind = TypeVar("Kind", str, int, float, bool)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value and its origin: ``file:line:col``, or the words of the command line that set it."""

    value: Value
    origin: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train. Keys of ``settings`` are dotted: ``torchtitan.training.steps``.

    ``overrides`` are the ``key=value`` words of the user, so that the same recipe can be asked for again.
    """

    name: str
    path: Path
    settings: Mapping[str, Setting]
    overrides: tuple[str, ...] = ()

    def get(self, key: str, kind: type[Kind]) -> Kind:
        """The value of ``key`` as ``kind``.

        InputError when it is another type: on a machine without the backend nothing else has judged its keys.
        """
        setting = self.settings[key]
        value = setting.value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InputError(f"{key} must be {WORDS[kind.__name__]}, not {value!r}", where=setting.origin)
        return value

    def find(self, key: str, default: Kind) -> Kind:
        """The value of ``key``, or ``default`` when the recipe does not set it."""
        return self.get(key, type(default)) if key in self.settings else default

    def section(self, prefix: str) -> dict[str, Value]:
        """All values below ``prefix``, keyed by the rest of their names, in the recipe's order."""
        head = prefix + "."
        return {key.removeprefix(head): setting.value for key, setting in self.settings.items() if key.startswith(head)}

    def asset(self, key: str) -> Path:
        """Where the file or folder named by ``assets.KEY`` is."""
        return self.path.parent / self.get(f"assets.{key}", str)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.get(f"{self.backend}.training.steps", int)

    @property
    def backend(self) -> str:
        """The framework that trains."""
        return self.get("backend", str)

    @property
    def digest(self) -> str:
        """sha256 over every resolved value and the bytes of every asset: equal digests train the same."""
        hasher = hashlib.sha256()
        values = {key: setting.value for key, setting in self.settings.items()}
        hasher.update(json.dumps(values, sort_keys=True).encode())
        for key in sorted(self.section("assets")):
            root = self.asset(key)
            files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
            for file in files:
                hasher.update(f"\n{key} {file.relative_to(root).as_posix()}\n".encode())
                hasher.update(file.read_bytes())
        return hasher.hexdigest()
