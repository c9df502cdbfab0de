"""Pick what runs images on this machine."""

from __future__ import annotations

from collections.abc import Callable

from primus.errors import HostError, InputError
from primus.sandbox.container import Engine
from primus.sandbox.embedded import EmbeddedEngine

__all__ = ["ENGINES", "choose"]

ENGINES = ("auto", "embedded", "docker")


def choose(name: str = "auto", say: Callable[[str], None] | None = None) -> Engine:
    """The engine called ``name``; ``auto`` prefers the one that needs no daemon.

    ``say`` gets a line when an engine starts something long. Raises InputError for an unknown name and
    HostError, naming what is missing for each engine, when none can run.
    """
    from primus.sandbox.docker import DockerEngine

    engines: dict[str, Engine] = {"embedded": EmbeddedEngine(say), "docker": DockerEngine(say)}
    if name != "auto" and name not in engines:
        raise InputError(f"no engine {name!r}", hint=f"one of {', '.join(ENGINES)}")
    lacks = {}
    for candidate, engine in engines.items():
        if name in ("auto", candidate):
            lack = engine.available()
            if lack is None:
                return engine
            lacks[candidate] = lack
    raise HostError("nothing here can run an image: " + "; ".join(f"{n}: {lack}" for n, lack in lacks.items()))
