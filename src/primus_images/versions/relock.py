"""Resolving a request to a lock with as few changes as possible.

Versions that still match their pins are kept.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from primus_images.errors import InputError
from primus_images.progress import Progress
from primus_images.terminal import counted
from primus_images.versions.debs import resolve_debs
from primus_images.versions.lock import (
    Lock,
    LockedFile,
    Request,
    Shared,
    drift,
    file_order,
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

_Files = tuple[LockedFile, ...]
_Way = Callable[..., _Files]


def stale(
    request: Request, previous: Lock | None, gone: Collection[LockedFile] = ()
) -> frozenset[str]:
    """Return the parts to resolve again: ``wheels``, ``sdists``, ``gits``, ``base NAME`` and
    ``build NAME``.
    """
    causes = _causes(request)
    if previous is None:
        return frozenset(causes)
    changes = [change.pin for change in drift(previous, request)]
    changes += [_part(file) for file in gone]
    again = set()
    for part, cause in causes.items():
        pattern = re.compile(f"architecture|python|{cause}")
        if any(pattern.fullmatch(change) for change in changes):
            again.add(part)
    return frozenset(again)


def _causes(request: Request) -> dict[str, str]:
    """Return part → pattern of what it follows from: pins, and parts whose files are gone."""
    # A package that is built here, or was until now, changes which wheels are needed. A base's
    # glibc and exact Python determine which wheels fit it.
    wheels = "wheels|(wheel|deb|sdist|git) .*|base .* (suite|python)"
    causes = {"wheels": wheels, "sdists": "sdists|sdist .*", "gits": "gits|git .*"}
    for name, base in request.bases.items():
        # An extra is installed over its base, so both come from the archive of the same day.
        family = base.over or name
        together = [
            re.escape(other)
            for other, about in request.bases.items()
            if family in (other, about.over)
        ]
        causes[f"base {name}"] = rf"base ({'|'.join(together)})( \w+)?"
    for name in request.builds:
        # Builds have the image's versions.
        causes[f"build {name}"] = rf"{wheels}|build {re.escape(name)}( wheels)?"
    return causes


def _part(file: LockedFile) -> str:
    if file.base is None:
        return f"{file.kind}s"
    if file.kind == "wheel":
        return f"build {file.base}"
    return f"base {file.base}"


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
    for file in previous.files if previous else ():
        locked[_part(file)].append(file)
    task = _Resolving(request, shared, progress)

    def kept(part: str) -> dict[str, str]:
        return {file.name: file.version for file in locked[part] if file not in gone}

    def files_of(part: str) -> Sequence[LockedFile]:
        if part in parts:
            return task.part(part, kept(part))
        return locked[part]

    order = ["gits", "sdists", "wheels", *(f"base {name}" for name in request.bases)]
    with ThreadPoolExecutor() as pool:
        files = list(chain.from_iterable(pool.map(files_of, order)))
    for name, base in request.bases.items():
        if base.over and f"base {name}" in parts:
            files = _without(name, base.over, files)
    image = {file.name: file.version for file in files if file.kind == "wheel"}
    for name in request.builds:
        part = f"build {name}"
        files += task.build(name, image, kept(part)) if part in parts else locked[part]
    return Lock(
        target=request.target,
        channel=request.channel,
        pins=request.flat(),
        files=tuple(sorted(files, key=file_order)),
    )


class _Resolving(NamedTuple):
    """The parts of one request that are asked of the sources."""

    request: Request
    shared: Shared
    progress: Progress

    def shown(self, label: str, noun: str, resolve: _Way, *arguments: object) -> _Files:
        self.progress.start(label, label, unit="files")
        files = resolve(*arguments)
        self.progress.finish(label, counted(len(files), noun))
        return files

    def part(self, part: str, kept: Mapping[str, str]) -> Sequence[LockedFile]:
        """Resolve what needs nothing of the other parts."""
        if part == "wheels":
            return self.wheels(kept)
        if part == "sdists":
            return self.sdists()
        if part == "gits":
            return self.commits()
        return self.base(part.removeprefix("base "))

    def commits(self) -> list[LockedFile]:
        files: list[LockedFile] = []
        for name, commit in self.request.gits.items():
            if commit not in self.shared:
                self.shared[commit] = (resolve_commit(name, commit),)
            files += self.shared[commit]
        return files

    def wheels(self, kept: Mapping[str, str]) -> _Files:
        if not self.request.wheels:
            return ()
        return self.shown("resolve wheels", "wheel", resolve_wheels, self.request, kept)

    def sdists(self) -> _Files:
        if not self.request.sdists:
            return ()
        return self.shown("find source archives", "source archive", resolve_sdists, self.request)

    def build(self, name: str, image: Mapping[str, str], kept: Mapping[str, str]) -> _Files:
        wheels = self.request.builds[name]
        arguments = (self.request, name, wheels, image, kept)
        return self.shown(f"resolve wheels of {name}", "wheel", resolve_build, *arguments)

    def base(self, name: str) -> list[LockedFile]:
        base = self.request.bases[name]
        if base not in self.shared:
            layers: _Files = ()
            debs: _Files = ()
            status = ""
            if base.image:
                layers, status = resolve_image(name, base.image)
            if base.over:
                status += _FOR_SCRIPTS
            if base.packages or not base.image:
                label = f"resolve packages of {name}"
                debs = self.shown(label, "package", resolve_debs, name, base, status)
            self.shared[base] = (*layers, *debs)
        return [replace(file, base=name) for file in self.shared[base]]


def _without(extra: str, base: str, files: Sequence[LockedFile]) -> list[LockedFile]:
    """Leave out what ``base`` has of the packages of ``extra``."""
    below = {f.name: f for f in files if f.base == base and f.kind in ("deb", "layer")}
    kept = []
    for file in files:
        if file.base != extra or file.name not in below:
            kept.append(file)
        elif below[file.name].sha256 != file.sha256:
            raise InputError(
                f"{extra} needs {file.name} {file.version}, and base {base} has "
                f"{below[file.name].version}",
                hint=f"name the suite of {file.name} under `packages` of the base",
            )
    return kept
