"""Resolving a request to a lock with as few changes as possible: versions that still match their pins are kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from primus.errors import InputError
from primus.progress import Progress
from primus.versions.debs import resolve_debs
from primus.versions.lock import BaseRequest, Commit, Lock, LockedFile, Request, drift
from primus.versions.registry import resolve_image
from primus.versions.repository import resolve_commit
from primus.versions.wheels import resolve_build, resolve_sdists, resolve_wheels

# Files of bases and commits, so that targets that are locked together resolve each of them once.
Shared = dict[BaseRequest | Commit, tuple[LockedFile, ...]]

# Only maintainer scripts call these, and those of an extra do not run, so apt is told that they are installed.
# Otherwise, `passwd` would be installed with them, and contains programs that run as root.
_FOR_SCRIPTS = (
    "\nPackage: adduser\nStatus: install ok installed\nVersion: 999\nArchitecture: all\nMulti-Arch: foreign\n"
)
# Kind of a pin or file → its part of the lock. Bases and builds are parts by name.
_PARTS = {"wheel": "wheels", "deb": "wheels", "sdist": "sdists", "git": "gits"}


def stale(
    request: Request, previous: Lock | None, refresh: bool = False, gone: Collection[LockedFile] = ()
) -> frozenset[str]:
    """Return the parts to resolve again: ``wheels``, ``sdists``, ``gits``, ``base NAME`` and ``build NAME``."""
    builds = {f"build {name}" for name in request.builds}
    parts = {f"base {name}" for name in request.bases} | {*_PARTS.values()} | builds
    if previous is None or refresh:
        return frozenset(parts)
    changed = {_part(f) for f in gone}
    for change in drift(previous, request):
        kind, _, rest = change.pin.partition(" ")
        if kind in ("architecture", "python"):
            return frozenset(parts)
        changed.add(_PARTS.get(kind) or f"{kind} {rest.rpartition(' ')[0]}")
        # A package that is built here, or was until now, changes which wheels are needed.
        if kind in ("sdist", "git"):
            changed.add("wheels")
        # A base's glibc and exact Python determine which wheels fit it.
        if change.pin.startswith("base ") and change.pin.endswith((" suite", " python")):
            changed.add("wheels")
    if "wheels" in changed:
        # They have the image's versions.
        changed |= builds
    # An extra is installed over its base, so both come from the archive of the same day.
    for name, base in request.bases.items():
        if base.over and changed & {f"base {name}", f"base {base.over}"}:
            changed |= {f"base {name}", f"base {base.over}"}
    return frozenset(changed & parts)


def _part(file: LockedFile) -> str:
    if file.base is None:
        return _PARTS[file.kind]
    return f"{'build' if file.kind == 'wheel' else 'base'} {file.base}"


def resolve(
    request: Request,
    *,
    previous: Lock | None,
    refresh: bool = False,
    gone: Collection[LockedFile] = (),
    shared: Shared | None = None,
    progress: Progress,
) -> Lock:
    """Resolve ``request`` to a lock. With ``refresh``, no version of ``previous`` is kept.

    ``gone`` are files of ``previous`` that no source offers any more. They, and what depends on them, are resolved
    again. ``shared`` collects results for the targets that are locked later. Raises InputError if the pins cannot be
    fulfilled, HostError if a source is not available.
    """
    shared = {} if shared is None else shared
    parts = stale(request, previous, refresh, gone)
    keep: dict[str, str] = {}
    if previous is not None and not refresh:
        keep = {f.name: f.version for f in previous.of("wheel") if f not in gone}
    ways: dict[str, Callable[[], Sequence[LockedFile]]] = {
        "wheels": lambda: resolve_wheels(request, progress=progress, keep=keep),
        "sdists": lambda: resolve_sdists(request, progress=progress),
        "gits": lambda: _commits(request.gits, shared),
        "bases": lambda: _bases(request, parts, shared, progress),
    }
    files = previous.files if previous is not None else ()
    here = {"wheels", "sdists", "gits", *(f"base {name}" for name in request.bases)}
    unchanged = [f for f in files if _part(f) in here - parts]
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(way) for part, way in ways.items() if part in (*parts, "bases")]
        resolved = [file for future in futures for file in future.result()]
    for name, base in request.bases.items():
        if base.over and f"base {name}" in parts:
            resolved = _without(name, base.over, resolved)
    image = {f.name: f.version for f in (*unchanged, *resolved) if f.kind == "wheel"}
    for name in request.builds:
        before = previous.of("wheel", name) if previous is not None else ()
        if f"build {name}" in parts:
            held = {} if refresh else {f.name: f.version for f in before if f not in gone}
            wheels = request.builds[name]
            resolved += resolve_build(request, name, wheels, image=image, keep=held, progress=progress)
        else:
            unchanged += before
    answer = sorted([*unchanged, *resolved], key=lambda f: (f.kind, f.base or "", f.name))
    return Lock(target=request.target, channel=request.channel, pins=request.flat(), files=tuple(answer))


def _without(extra: str, base: str, files: Sequence[LockedFile]) -> list[LockedFile]:
    below = {f.name: f for f in files if f.base == base and f.kind in ("deb", "layer")}
    result = []
    for file in files:
        same = below.get(file.name) if file.base == extra else None
        if same is None:
            result.append(file)
        elif same.sha256 != file.sha256:
            raise InputError(
                f"{extra} needs {file.name} {file.version}, and base {base} has {same.version}",
                hint=f"name the suite of {file.name} under `packages` of the base",
            )
    return result


def _commits(commits: Mapping[str, Commit], shared: Shared) -> list[LockedFile]:
    for name, commit in commits.items():
        if commit not in shared:
            shared[commit] = (resolve_commit(name, commit),)
    return [file for commit in commits.values() for file in shared[commit]]


def _bases(request: Request, parts: Collection[str], shared: Shared, progress: Progress) -> list[LockedFile]:
    bases = {name: base for name, base in request.bases.items() if f"base {name}" in parts}
    lacking = {base: name for name, base in reversed(bases.items()) if base not in shared}
    with ThreadPoolExecutor() as pool:
        files = pool.map(lambda base: _base(lacking[base], base, progress), lacking)
        shared.update(zip(lacking, files, strict=True))
    return [replace(file, base=name) for name, base in bases.items() for file in shared[base]]


def _base(name: str, base: BaseRequest, progress: Progress) -> tuple[LockedFile, ...]:
    assumed = _FOR_SCRIPTS if base.over else ""
    if base.image is None:
        return resolve_debs(name, base, progress=progress, status=assumed)
    layers, status = resolve_image(name, base.image)
    if not base.packages:
        return layers
    return (*layers, *resolve_debs(name, base, progress=progress, status=status + assumed))
