"""From a request to its lock, changing as little as it can: what still answers its pin keeps its version."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from primus.progress import Progress
from primus.versions.debs import resolve_debs
from primus.versions.indexes import Indexes
from primus.versions.lock import BaseRequest, Commit, Lock, LockedFile, Request, drift
from primus.versions.registry import installed, resolve_image
from primus.versions.repository import resolve_commit
from primus.versions.sources import Sources, ask
from primus.versions.wheels import resolve_sdists, resolve_tools, resolve_wheels

__all__ = ["Known", "Stale", "resolve", "stale"]

Stale = frozenset[str]
# What was found for a base or a commit, by its name and what was asked.
Known = dict[tuple[str, BaseRequest | Commit], tuple[LockedFile, ...]]

# Kind of a pin or file → the part of the lock that it belongs to; what is not here belongs to a base.
_PARTS = {"wheel": "wheels", "deb": "wheels", "sdist": "sdists", "git": "gits", "tool": "tools"}


def stale(request: Request, previous: Lock | None, refresh: bool = False, gone: Collection[LockedFile] = ()) -> Stale:
    """The parts to resolve anew: ``"wheels"``, ``"sdists"``, ``"gits"``, ``"tools"`` and ``"base NAME"``."""
    parts = {f"base {name}" for name in request.bases} | set(_PARTS.values())
    if previous is None or refresh:
        return frozenset(parts)
    changed = {f"base {f.base}" if f.base else _PARTS[f.kind] for f in gone}
    for one in drift(previous, request):
        kind, _, rest = one.pin.partition(" ")
        if kind in ("architecture", "python"):
            return frozenset(parts)
        changed.add(f"base {rest.rpartition(' ')[0]}" if kind == "base" else _PARTS[kind])
        # What is built here is no longer, or not yet, an answer for what the wheels need.
        if kind in ("sdist", "git"):
            changed.add("wheels")
        # A base's glibc and exact Python decide which wheels fit it.
        if one.pin.startswith("base ") and one.pin.endswith((" suite", " python")):
            changed.add("wheels")
    return frozenset(changed & parts)


def resolve(
    request: Request,
    *,
    previous: Lock | None,
    refresh: bool = False,
    gone: Collection[LockedFile] = (),
    known: Known | None = None,
    progress: Progress,
) -> Lock:
    """The lock that answers ``request``. With ``refresh`` nothing of ``previous`` is kept.

    ``gone`` are files of ``previous`` that no source offers any more: they and what hangs on them are taken anew.
    ``known`` gathers bases and commits, so that targets locked one after the other ask for each once.

    Raises InputError when the pins cannot be met and HostError when a source is out of reach.
    """
    parts = stale(request, previous, refresh, gone)
    keep: dict[str, str] = {}
    if previous is not None and not refresh:
        keep = {f.name: f.version for f in previous.of("wheel") if f not in gone}
    if parts:
        ask(Sources.of_request(request).probes(Indexes.of_host), request.channel)
    known = {} if known is None else known
    ways: dict[str, Callable[[], Sequence[LockedFile]]] = {
        "wheels": lambda: resolve_wheels(request, progress=progress, keep=keep),
        "sdists": lambda: resolve_sdists(request, progress=progress),
        "gits": lambda: _commits(request.gits, known),
        "tools": lambda: resolve_tools(request, progress=progress),
    }
    for name, base in request.bases.items():
        ways[f"base {name}"] = partial(_base, name, base, request.architecture, known, progress)
    work = [way for part, way in ways.items() if part in parts]
    files = previous.files if previous is not None else ()
    kept = [f for f in files if (f"base {f.base}" if f.base else _PARTS[f.kind]) in ways.keys() - parts]
    with ThreadPoolExecutor(max(1, len(work))) as pool:
        futures = [pool.submit(one) for one in work]
        found = [file for future in futures for file in future.result()]
    answer = sorted([*kept, *found], key=lambda f: (f.kind, f.base or "", f.name))
    return Lock(target=request.target, channel=request.channel, pins=request.flat(), files=tuple(answer))


def _commits(commits: Mapping[str, Commit], known: Known) -> list[LockedFile]:
    for name, one in commits.items():
        if (name, one) not in known:
            known[name, one] = (resolve_commit(name, one),)
    return [file for item in commits.items() for file in known[item]]


def _base(name: str, base: BaseRequest, architecture: str, known: Known, progress: Progress) -> tuple[LockedFile, ...]:
    """The packages of a base, below them the layers of its image."""
    if (name, base) not in known:
        layers: tuple[LockedFile, ...] = ()
        status = ""
        if base.image is not None:
            layers = resolve_image(name, base.image, architecture)
            with tempfile.TemporaryDirectory(prefix="primus-image-") as folder:
                status = installed(base.image, architecture, layers, Path(folder)) if base.packages else ""
        if base.packages or not layers:
            layers = (*layers, *resolve_debs(name, base, architecture, progress=progress, status=status))
        known[name, base] = layers
    return known[name, base]
