"""The table of backends, read from ``backends.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

from primus.yamlfile import Scalar, read_values

_FILE = Path(__file__).with_name("backends.yaml")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend. Keys omit the backend's name. The comments in ``backends.yaml`` explain the fields."""

    name: str
    modes: tuple[str, ...]
    packages: tuple[str, ...]
    cpu: tuple[str, ...]
    keys: Mapping[str, str]
    degrees: Mapping[str, str]
    owned: Mapping[str, str]
    memory_error: float
    judged: tuple[str, ...]
    unmodelled: tuple[str, ...] = ()
    shard: str = ""
    warmup: str = "training.warmup_steps"
    evaluates: bool = False
    resharding: bool = False
    sharded_precision: bool = False
    latent_tp: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    inside: Sequence[str] = ()
    checkpointing: Sequence[Mapping[str, Scalar]] = ()

    def key(self, what: str) -> str:
        """Return the full key of a setting that every backend has: ``steps`` → ``torchtitan.training.steps``."""
        return f"{self.name}.{self.keys[what]}"


@cache
def backends() -> Mapping[str, Backend]:
    """Return all backends by name."""
    content = cast(Mapping[str, Mapping[str, object]], read_values(_FILE).data)
    table = {}
    for name, entry in content.items():
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        table[name] = Backend(name=name, **fields)  # type: ignore[arg-type]
    return table
