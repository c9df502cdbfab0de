"""From a request to its lock, changing as little as it can: what still answers its pin keeps its version."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from primus.progress import Progress
from primus.versions.debs import resolve_debs
from primus.versions.indexes import Indexes
from primus.versions.lock import BaseRequest, Lock, LockedFile, Request, drift
from primus.versions.registry import installed, resolve_image
from primus.versions.repository import resolve_commit
from primus.versions.sources import Sources, ask
from primus.versions.wheels import resolve_sdists, resolve_tools, resolve_wheels

__all__ = ["Stale", "resolve", "stale"]

Stale = frozenset[str]

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
    progress: Progress,
) -> Lock:
    """The lock that answers ``request``. With ``refresh`` nothing of ``previous`` is kept.

    ``gone`` are files of ``previous`` that no source offers any more: they and what hangs on them are taken anew.

    Raises InputError when the pins cannot be met and HostError when a source is out of reach.
    """
    parts = stale(request, previous, refresh, gone)
    keep: dict[str, str] = {}
    if previous is not None and not refresh:
        keep = {f.name: f.version for f in previous.of("wheel") if f not in gone}
    if parts:
        ask(Sources.of_request(request).probes(Indexes.of_host), request.channel)
    ways: dict[str, Callable[[], Sequence[LockedFile]]] = {
        "wheels": lambda: resolve_wheels(request, progress=progress, keep=keep),
        "sdists": lambda: resolve_sdists(request, progress=progress),
        "gits": lambda: [resolve_commit(name, one) for name, one in request.gits.items()],
        "tools": lambda: resolve_tools(request, progress=progress),
    }
    for name, base in request.bases.items():
        ways[f"base {name}"] = lambda name=name, base=base: _base(name, base, request, progress)  # type: ignore[misc]
    work = [way for part, way in ways.items() if part in parts]
    files = previous.files if previous is not None else ()
    kept = [f for f in files if (f"base {f.base}" if f.base else _PARTS[f.kind]) in ways.keys() - parts]
    with ThreadPoolExecutor(max(1, len(work))) as pool:
        futures = [pool.submit(one) for one in work]
        found = [file for future in futures for file in future.result()]
    answer = sorted([*kept, *found], key=lambda f: (f.kind, f.base or "", f.name))
    return Lock(target=request.target, channel=request.channel, pins=request.flat(), files=tuple(answer))


def _base(name: str, base: BaseRequest, request: Request, progress: Progress) -> tuple[LockedFile, ...]:
    """The packages of a base, below them the layers of its image."""
    if base.image is None:
        return resolve_debs(name, base, request.architecture, progress=progress)
    layers = resolve_image(name, base.image, request.architecture)
    if not base.packages:
        return layers
    with tempfile.TemporaryDirectory(prefix="primus-image-") as folder:
        status = installed(base.image, request.architecture, layers, Path(folder))
    return (*layers, *resolve_debs(name, base, request.architecture, progress=progress, status=status))
