"""``kernels``: GPU code for one architecture, from Debian packages that contain code for many.

A base is the same for every GPU. What its packages have for one architecture goes into a layer of its own, so images
for two GPUs share every byte that is not specific to one of them.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, cast

from primus.engine.workshop import Workshop
from primus.errors import CheckFailed, HostError
from primus.gpucode.bundles import keep_only
from primus.oci.contents import members
from primus.oci.store import Layer, LeftOut
from primus.oci.tar import Entry
from primus.plan.action import Action
from primus.programs import need

_NARROW = "narrow the base's pattern under `kernels`"
_LIST = re.compile(r"var/lib/dpkg/info/([^/:]+)(?::[^/]+)?\.list")


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Raise HostError if dpkg-deb, which unpacks the packages, is missing and cannot be installed."""
    need("dpkg-deb", "dpkg", say=shop.progress.say)


def make(action: Action, shop: Workshop, scratch: Path) -> Layer:
    """Write the files of the action's packages that are for its architecture."""
    kernels = KernelFiles(arch=str(action.spec["arch"]))
    patterns = cast("Mapping[str, Sequence[str]]", action.spec["kernels"])
    for deb in action.files:
        kernels.take(shop.file(deb), patterns[deb.name], scratch / deb.name)
    return replace(shop.write(action, kernels.entries), left_out=kernels.left_out)


def _is_for(path: str, arch: str) -> bool:
    return re.search(rf"{arch}(?![0-9a-f])", path) is not None


@dataclass(kw_only=True)
class KernelFiles:
    """The GPU code for ``arch`` in some packages; with None, for all. ``left_out`` counts code for others."""

    arch: str | None
    left_out: LeftOut = field(default_factory=LeftOut)
    entries: list[Entry] = field(default_factory=list)

    def take(self, deb: Path, patterns: Sequence[str], folder: Path) -> None:
        """Add the package's files and symbolic links whose absolute path matches one of ``patterns``; ``folder`` keeps
        their bytes.

        A path that contains names of architectures shows which GPUs the file is for. From any other file, code for
        other architectures is removed. Raises HostError if ``deb`` is not a package, CheckFailed for a path that is
        neither a file nor a symbolic link, and for a file without readable GPU code.
        """
        folder.mkdir(parents=True)
        whole: list[Entry] = []
        for member, stream in _members(deb):
            path = member.name.removeprefix("./").strip("/")
            if member.isdir() or not any(fnmatch.fnmatchcase("/" + path, pattern) for pattern in patterns):
                continue
            if self.arch and "gfx" in path and not _is_for(path, self.arch):
                self.left_out += LeftOut(files=1, size=member.size)
            elif member.issym():
                self.entries.append(Entry(path=path, kind="symlink", mode=0o777, link=member.linkname))
            elif stream is None:
                raise CheckFailed(f"/{path} is neither a file nor a symbolic link", hint=_NARROW)
            else:
                copy = folder / str(len(self.entries) + len(whole))
                with copy.open("wb") as out:
                    shutil.copyfileobj(stream, out, 1 << 20)
                entry = Entry(path=path, mode=member.mode, size=member.size, source=copy)
                (whole if self.arch and "gfx" not in path else self.entries).append(entry)
        # Only now has dpkg-deb ended and freed its memory.
        self.entries += [replace(entry, source=self._pruned(entry.path, cast("Path", entry.source))) for entry in whole]

    def _pruned(self, path: str, whole: Path) -> Path:
        copy, size = whole.with_suffix(".pruned"), whole.stat().st_size
        try:
            with whole.open("rb") as source, copy.open("wb") as out:
                removed = keep_only(str(self.arch), source, size, out)
        except ValueError as error:
            raise CheckFailed(f"/{path}: {error}", hint=f"{_NARROW}, so that it stays whole in the base") from None
        if removed is None:
            raise CheckFailed(f"/{path} holds no GPU code and names no architecture", hint=_NARROW)
        whole.unlink()
        self.left_out += LeftOut(pruned=min(removed.objects, 1), objects=removed.objects, freed=removed.size)
        return copy


def _members(deb: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    # Each thread of dpkg-deb allocates its own dictionary.
    env = {**os.environ, "DPKG_DEB_THREADS_MAX": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as process:
        try:
            with tarfile.open(fileobj=cast("IO[bytes]", process.stdout), mode="r|", bufsize=1 << 20) as archive:
                for member in members(archive):
                    yield member, archive.extractfile(member) if member.isreg() else None
        except tarfile.TarError as error:
            raise HostError(f"{deb.name} cannot be unpacked: {error}", hint="fetch it again") from None
        finally:
            process.kill()


def unlisted(entries: Iterable[Entry], kernels: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the packages in a base's dpkg database whose files match a pattern of ``kernels``, but that ``kernels``
    does not list. No layer would contain these files.
    """
    patterns = re.compile("|".join(fnmatch.translate(p) for of in kernels.values() for p in of))
    packages = []
    for entry in entries:
        name = _LIST.fullmatch(entry.path)
        if name and name[1] not in kernels:
            text = b"".join(entry.chunks()).decode("utf-8", "replace")
            if any(patterns.match(line) for line in text.splitlines()):
                packages.append(name[1])
    return sorted(packages)
