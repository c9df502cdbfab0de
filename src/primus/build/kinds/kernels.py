"""``kernels``: the GPU code for one architecture, taken from Debian packages that hold it for many.

A base is the same for every GPU: what its packages keep per architecture stays out of it and becomes a layer here, with
the files of one architecture alone, and with libraries whose fat binaries hold no other's code. Images for two GPUs
then share every byte that is for neither.
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
from typing import IO, TYPE_CHECKING, cast

from primus.build.kinds import Made
from primus.errors import CheckFailed, HostError
from primus.gpucode.fatbinary import keep_only
from primus.oci.contents import members
from primus.oci.left_out import LeftOut
from primus.oci.tar import Entry

if TYPE_CHECKING:
    from primus.build.execute import Workshop
    from primus.plan.action import Action

_NARROW = "narrow the base's pattern under `kernels`"
_LIST = re.compile(r"var/lib/dpkg/info/([^/:]+)(?::[^/]+)?\.list")


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """dpkg-deb, which unpacks the packages, is checked with the base that they belong to."""


def make(action: Action, shop: Workshop, scratch: Path) -> Made:
    """Write the files of the action's packages that are for its architecture."""
    found = KernelFiles(arch=str(action.spec["arch"]))
    patterns = cast("Mapping[str, Sequence[str]]", action.spec["kernels"])
    for deb in action.files:
        found.take(shop.file(deb), patterns[deb.name], scratch / deb.name)
    made = shop.write(action, found.entries)
    return replace(made, layer=replace(made.layer, left_out=found.left_out))


def is_for(path: str, arch: str) -> bool:
    """Whether the path names the architecture: gfx90 is no gfx90a."""
    return re.search(rf"{arch}(?![0-9a-f])", path) is not None


@dataclass(kw_only=True)
class KernelFiles:
    """The GPU code for ``arch`` of some packages; ``left_out`` counts what is for other architectures. Without an
    architecture everything is taken as it is.
    """

    arch: str | None
    left_out: LeftOut = field(default_factory=LeftOut)
    entries: list[Entry] = field(default_factory=list)

    def take(self, deb: Path, patterns: Sequence[str], folder: Path) -> None:
        """Add the package's files and symbolic links whose absolute path matches one of ``patterns``; their bytes are
        kept in ``folder``. A path that names architectures says whom the file is for; what names none must hold
        offload bundles, and loses the code of other architectures.

        Raises HostError for what is no Debian package, CheckFailed for a path that is no file or symbolic link, for a
        file without GPU code and one that cannot be read.
        """
        folder.mkdir(parents=True)
        whole: list[Entry] = []
        for member, stream in _members(deb):
            path = member.name.removeprefix("./").strip("/")
            if member.isdir() or not any(fnmatch.fnmatchcase("/" + path, pattern) for pattern in patterns):
                continue
            if self.arch and "gfx" in path and not is_for(path, self.arch):
                self.left_out = self.left_out.and_file(member.size)
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
        # Only now: dpkg-deb is gone, and its memory with it.
        self.entries += [replace(entry, source=self._pruned(entry.path, cast("Path", entry.source))) for entry in whole]

    def _pruned(self, path: str, whole: Path) -> Path:
        """The file without other architectures' code, instead of ``whole``."""
        copy, size = whole.with_suffix(".pruned"), whole.stat().st_size
        try:
            with whole.open("rb") as source, copy.open("wb") as out:
                removed = keep_only(str(self.arch), source, size, out)
        except ValueError as error:
            raise CheckFailed(f"/{path}: {error}", hint=f"{_NARROW}, so that it stays whole in the base") from None
        if removed is None:
            raise CheckFailed(f"/{path} holds no GPU code and names no architecture", hint=_NARROW)
        whole.unlink()
        self.left_out = self.left_out.and_code(path, removed.objects, removed.size, removed.targets)
        return copy


def _members(deb: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    # Each thread of dpkg-deb has a dictionary of its own.
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
    """Packages that keep files where ``kernels`` has a pattern, and are none of its packages: those files would be in
    no layer. ``entries`` are a base's; dpkg lists there what it left packed, too.
    """
    patterns = re.compile("|".join(fnmatch.translate(p) for of in kernels.values() for p in of))
    found = []
    for entry in entries:
        name = _LIST.fullmatch(entry.path)
        if name and name[1] not in kernels:
            text = b"".join(entry.chunks()).decode("utf-8", "replace")
            if any(patterns.match(line) for line in text.splitlines()):
                found.append(name[1])
    return sorted(found)
