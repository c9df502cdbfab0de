"""Resolving a request to a lock with as few changes as possible: versions that still match their
pins are kept.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from primus_images.errors import InputError
from primus_images.progress import Progress
from primus_images.terminal import counted
from primus_images.versions.debs import resolve_debs
from primus_images.versions.lock import (
    BaseRequest,
    Commit,
    Lock,
    LockedFile,
    Request,
    Shared,
    drift,
)
from primus_images.versions.remotes import resolve_commit, resolve_image
from primus_images.versions.wheels import resolve_build, resolve_sdists, resolve_wheels

# Only maintainer scripts call these, and those of an extra do not run, so apt is told that they are
# installed. Otherwise, `passwd` would be installed with them, and contains programs that run as
# root.
_FOR_SCRIPTS = (
    "\nPackage: adduser\nStatus: install ok installed\nVersion: 999\nArchitecture: "
    "all\nMulti-Arch: foreign\n"
)
_Way = Callable[..., tuple[LockedFile, ...]]


def stale(
    request: Request, previous: Lock | None, gone: Collection[LockedFile] = ()
) -> frozenset[str]:
    """Return the parts to resolve again: ``wheels``, ``sdists``, ``gits``, ``base NAME`` and
    ``build NAME``.
    """
    # Part → what it follows from: pins, and files of parts that are gone. A package that is built
    # here, or was until now, changes which wheels are needed. A base's glibc and exact Python
    # determine which wheels fit it.
    wheels = "wheels|(wheel|deb|sdist|git) .*|base .* (suite|python)"
    sources = {"wheels": wheels, "sdists": "sdists|sdist .*", "gits": "gits|git .*"}
    for name, base in request.bases.items():
        # An extra is installed over its base, so both come from the archive of the same day.
        both = [
            re.escape(n)
            for n, other in request.bases.items()
            if (other.over or n) == (base.over or name)
        ]
        sources[f"base {name}"] = rf"base ({'|'.join(both)})( \w+)?"
    # Builds have the image's versions.
    sources |= {
        f"build {name}": rf"{wheels}|build {re.escape(name)}( wheels)?" for name in request.builds
    }
    if previous is None:
        return frozenset(sources)
    changes = [*(change.pin for change in drift(previous, request)), *map(_part, gone)]
    return frozenset(
        part
        for part, source in sources.items()
        if any(re.fullmatch(f"architecture|python|{source}", change) for change in changes)
    )


def _part(file: LockedFile) -> str:
    if file.base is None:
        return f"{file.kind}s"
    return f"{'build' if file.kind == 'wheel' else 'base'} {file.base}"


def resolve(
    request: Request,
    previous: Lock | None,
    shared: Shared,
    progress: Progress,
    gone: Collection[LockedFile] = (),
) -> Lock:
    """Resolve ``request`` to a lock. Versions of ``previous`` that fit are kept.

    ``shared`` collects results for the targets that are locked later. ``gone`` are files of
    ``previous`` that no source offers any more. They, and what depends on them, are resolved again.
    Raises InputError if the pins cannot be fulfilled, HostError if a source is not available.
    """
    parts = stale(request, previous, gone)
    locked: dict[str, list[LockedFile]] = defaultdict(list)
    for file in previous.files if previous is not None else ():
        locked[_part(file)].append(file)

    def versions(part: str) -> dict[str, str]:
        return {file.name: file.version for file in locked[part] if file not in gone}

    show = partial(_shown, progress)
    with ThreadPoolExecutor() as pool:
        if "gits" in parts:
            futures = [pool.submit(_commits, request.gits, shared)]
        else:
            futures = []
        if "wheels" in parts and request.wheels:
            futures.append(
                pool.submit(
                    show, "resolve wheels", "wheel", resolve_wheels, request, versions("wheels")
                )
            )
        if "sdists" in parts and request.sdists:
            futures.append(
                pool.submit(show, "find source archives", "source archive", resolve_sdists, request)
            )
        files = _bases(request, parts, shared, show)
        files += [file for future in futures for file in future.result()]
    for name, base in request.bases.items():
        if base.over and f"base {name}" in parts:
            files = _without(name, base.over, files)
    here = {"wheels", "sdists", "gits", *(f"base {name}" for name in request.bases)}
    files += [file for part in here - parts for file in locked[part]]
    image = {file.name: file.version for file in files if file.kind == "wheel"}
    for name, wheels in request.builds.items():
        part = f"build {name}"
        if part in parts:
            label = f"resolve wheels of {name}"
            files += show(
                label, "wheel", resolve_build, request, name, wheels, image, versions(part)
            )
        else:
            files += locked[part]
    answer = sorted(files, key=lambda f: (f.kind, f.base or "", f.name))
    return Lock(
        target=request.target, channel=request.channel, pins=request.flat(), files=tuple(answer)
    )


def _shown(
    progress: Progress, label: str, noun: str, way: _Way, *arguments: object
) -> tuple[LockedFile, ...]:
    progress.start(label, label, unit="files")
    files = way(*arguments)
    progress.finish(label, counted(len(files), noun))
    return files


def _without(extra: str, base: str, files: Sequence[LockedFile]) -> list[LockedFile]:
    below = {f.name: f for f in files if f.base == base and f.kind in ("deb", "layer")}
    result = []
    for file in files:
        same = None
        if file.base == extra:
            same = below.get(file.name)
        if same is None:
            result.append(file)
        elif same.sha256 != file.sha256:
            raise InputError(
                f"{extra} needs {file.name} {file.version}, and base {base} has {same.version}",
                hint=f"name the suite of {file.name} under `packages` of the base",
            )
    return result


def _commits(commits: Mapping[str, Commit], shared: Shared) -> tuple[LockedFile, ...]:
    for name, commit in commits.items():
        if commit not in shared:
            shared[commit] = (resolve_commit(name, commit),)
    return tuple(file for commit in commits.values() for file in shared[commit])


def _bases(
    request: Request, parts: Collection[str], shared: Shared, show: _Way
) -> list[LockedFile]:
    bases = {name: base for name, base in request.bases.items() if f"base {name}" in parts}
    lacking = {base: name for name, base in reversed(bases.items()) if base not in shared}
    with ThreadPoolExecutor() as pool:
        files = pool.map(lambda base: _base(lacking[base], base, show), lacking)
        shared.update(zip(lacking, files, strict=True))
    return [replace(file, base=name) for name, base in bases.items() for file in shared[base]]


def _base(name: str, base: BaseRequest, show: _Way) -> tuple[LockedFile, ...]:
    layers, status = resolve_image(name, base.image) if base.image else ((), "")
    if base.image and not base.packages:
        return layers
    status += _FOR_SCRIPTS if base.over else ""
    return (
        *layers,
        *show(f"resolve packages of {name}", "package", resolve_debs, name, base, status),
    )
