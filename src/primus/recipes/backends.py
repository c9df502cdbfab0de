"""What primus knows of each backend: ``backends.yaml`` as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

from primus.yamlfile import Scalar, read_values

__all__ = ["Backend", "Model", "backend", "backends"]

_FILE = Path(__file__).with_name("backends.yaml")


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a backend computes of the models of some families; keys come without ``model.``."""

    families: Sequence[str]
    latent: bool = False
    fields: Sequence[str]
    values: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    whole: Sequence[str] = ()
    linears: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend; see the comments in ``backends.yaml``. Keys come without the backend's name."""

    name: str
    modes: tuple[str, ...]
    packages: tuple[str, ...]
    cpu: tuple[str, ...]
    keys: Mapping[str, str]
    degrees: Mapping[str, str]
    owned: Mapping[str, str]
    models: tuple[Model, ...]
    warmup: str = "training.warmup_steps"
    resharding: bool = False
    sharded_precision: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    inside: Sequence[str] = ()

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
    values["models"] = tuple(Model(**row) for row in entry["models"])  # type: ignore[attr-defined]
    return Backend(name=name, **values)  # type: ignore[arg-type]
