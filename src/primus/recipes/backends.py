"""What primus knows of each backend: ``backends.yaml`` as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

from primus.yamlfile import read_values

__all__ = ["Backend", "Declared", "backend", "backends"]

_FILE = Path(__file__).with_name("backends.yaml")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A class whose fields are keys: in ``file`` of ``package``, below the section ``under``."""

    package: str
    file: str
    name: str
    under: str


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend; see the comments in ``backends.yaml``. Keys come without the backend's name."""

    name: str
    modes: tuple[str, ...]
    packages: tuple[str, ...]
    cpu: tuple[str, ...]
    keys: Mapping[str, str]
    degrees: Mapping[str, str]
    schema: tuple[Declared, ...]
    owned: Mapping[str, str]
    resharding: bool = False
    sharded_precision: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)

    def key(self, what: str) -> str:
        """The full key of what every backend has: ``steps`` → ``torchtitan.training.steps``."""
        return f"{self.name}.{self.keys[what]}"


@cache
def backends() -> Mapping[str, Backend]:
    """All of them, by name."""
    content = cast(Mapping[str, Mapping[str, object]], read_values(_FILE).data)
    return {name: _backend(name, entry) for name, entry in content.items()}


def backend(name: str) -> Backend:
    """One by name. KeyError when there is none: names are checked where they come from."""
    return backends()[name]


def _backend(name: str, entry: Mapping[str, object]) -> Backend:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    values["schema"] = tuple(
        Declared(package=d["package"], file=d["file"], name=d["class"], under=d["under"])
        for d in entry["schema"]  # type: ignore[attr-defined]
    )
    return Backend(name=name, **values)  # type: ignore[arg-type]
