"""From a request to its lock, changing as little as it can: what still answers its pin keeps its version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from primus.progress import Progress
from primus.versions.debs import resolve_debs
from primus.versions.lock import Lock, LockedFile, Request, drift
from primus.versions.wheels import resolve_build, resolve_sdists, resolve_wheels

__all__ = ["Stale", "resolve", "stale"]

Stale = frozenset[str]


def stale(request: Request, previous: Lock | None, refresh: bool = False, gone: Collection[LockedFile] = ()) -> Stale:
    """The parts to resolve anew: ``"wheels"``, ``"sdists"``, ``"base NAME"`` and ``"build NAME"``."""
    builds = {f"build {name}" for name in request.builds}
    parts = {f"base {name}" for name in request.bases} | {"wheels", "sdists"} | builds
    if previous is None or refresh:
        return frozenset(parts)
    changed = {_part(f) for f in gone}
    for one in drift(previous, request):
        kind, _, rest = one.pin.partition(" ")
        if kind in ("architecture", "python"):
            return frozenset(parts)
        base = f"base {rest.rpartition(' ')[0]}"
        build = f"build {rest.rpartition(' ')[0]}"
        changed |= {"wheel": {"wheels"}, "deb": {"wheels"}, "sdist": {"sdists"}, "base": {base}, "build": {build}}[kind]
        # A base's glibc and exact Python decide which wheels fit it.
        if one.pin.startswith("base ") and one.pin.endswith((" suite", " python")):
            changed.add("wheels")
    if "wheels" in changed:
        # They have the image's versions.
        changed |= builds
    return frozenset(changed & parts)


def _part(file: LockedFile) -> str:
    if file.kind == "wheel":
        return f"build {file.base}" if file.base else "wheels"
    return "sdists" if file.kind == "sdist" else f"base {file.base}"


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
    work: list[Callable[[], Sequence[LockedFile]]] = []
    kept: list[LockedFile] = []
    if "wheels" in parts:
        work.append(lambda: resolve_wheels(request, progress=progress, keep=keep))
    elif previous is not None:
        kept += previous.of("wheel")
    if "sdists" in parts:
        work.append(lambda: resolve_sdists(request, progress=progress))
    elif previous is not None:
        kept += previous.of("sdist")
    for name, base in request.bases.items():
        if f"base {name}" in parts:
            work.append(
                lambda name=name, base=base: resolve_debs(name, base, request.architecture, progress=progress)  # type: ignore[misc]
            )
        elif previous is not None:
            kept += previous.of("deb", name)
    with ThreadPoolExecutor(max(1, len(work))) as pool:
        futures = [pool.submit(one) for one in work]
        found = [file for future in futures for file in future.result()]
    image = {f.name: f.version for f in (*kept, *found) if f.kind == "wheel"}
    for name, wheels in request.builds.items():
        before = previous.of("wheel", name) if previous is not None else ()
        if f"build {name}" in parts:
            held = {} if refresh else {f.name: f.version for f in before if f not in gone}
            found += resolve_build(request, name, wheels, image=image, keep=held, progress=progress)
        else:
            kept += before
    files = sorted([*kept, *found], key=lambda f: (f.kind, f.base or "", f.name))
    return Lock(target=request.target, channel=request.channel, pins=request.flat(), files=tuple(files))
