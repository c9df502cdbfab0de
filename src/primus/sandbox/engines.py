"""Selecting the engine that runs images on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, cast

from primus.errors import HostError, InputError

if TYPE_CHECKING:
    from primus.sandbox.container import Engine

# In order of preference: the first needs no daemon. An engine is imported only when it is tried.
_CLASSES: Mapping[str, tuple[str, str]] = {
    "embedded": ("primus.sandbox.embedded", "EmbeddedEngine"),
    "docker": ("primus.sandbox.docker", "DockerEngine"),
}
ENGINES = ("auto", *_CLASSES)


def choose(name: str = "auto", say: Callable[[str], None] | None = None) -> Engine:
    """Return the engine called ``name``; ``auto`` prefers the one that needs no daemon.

    ``say`` is called with a line before an engine does something that takes long. Raises InputError for an unknown
    name, and HostError, with what each engine lacks, if none can run.
    """
    if name not in ENGINES:
        raise InputError(f"there is no engine {name!r}", hint=f"one of {', '.join(ENGINES)}")
    lacks = {}
    for candidate, (module, title) in _CLASSES.items():
        if name in ("auto", candidate):
            engine = cast("Engine", getattr(import_module(module), title)(say))
            lack = engine.available()
            if lack is None:
                return engine
            lacks[candidate] = lack
    raise HostError("no sandbox engine can run here: " + "; ".join(f"{n}: {lack}" for n, lack in lacks.items()))
