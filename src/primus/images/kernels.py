"""The kernel files of one GPU architecture, straight out of Debian packages that bring them for many.

A base is the same for every GPU: what its packages keep per architecture stays out of it and becomes a layer here, with
the files of one architecture alone. Images for two GPUs then share every byte that is for neither.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from primus.errors import CheckFailed, HostError
from primus.images.tar import Entry

__all__ = ["KernelFiles", "is_for", "unlisted"]

_LIST = re.compile(r"var/lib/dpkg/info/([^/:]+)(?::[^/]+)?\.list")


def is_for(path: str, arch: str) -> bool:
    """Whether the path names the architecture: gfx90 is no gfx90a."""
    return re.search(rf"{arch}(?![0-9a-f])", path) is not None


@dataclass(kw_only=True)
class KernelFiles:
    """The kernel files for ``arch`` of some packages; ``left_out`` counts those for other architectures, and bytes."""

    arch: str
    left_out: tuple[int, int] = (0, 0)
    entries: list[Entry] = field(default_factory=list)

    def take(self, deb: Path, pattern: str, folder: Path) -> None:
        """Add the package's files whose absolute path matches ``pattern``; their bytes are kept in ``folder``.

        Raises HostError for what is no Debian package, CheckFailed for a kernel file that is no plain file.
        """
        folder.mkdir(parents=True)
        for member, stream in _members(deb):
            path = member.name.removeprefix("./").strip("/")
            if member.isdir() or not fnmatch.fnmatchcase("/" + path, pattern):
                continue
            if not is_for(path, self.arch):
                self.left_out = (self.left_out[0] + 1, self.left_out[1] + member.size)
                continue
            if stream is None:
                raise CheckFailed(f"/{path} is a kernel file and no plain file", hint="narrow its pattern: `kernels`")
            copy = folder / str(len(self.entries))
            with copy.open("wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
            self.entries.append(Entry(path=path, mode=member.mode, size=member.size, source=copy))


def _members(deb: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            with tarfile.open(fileobj=cast("IO[bytes]", process.stdout), mode="r|", bufsize=1 << 20) as archive:
                for member in archive:
                    yield member, archive.extractfile(member) if member.isreg() else None
                    # tarfile remembers every member it has seen.
                    archive.members.clear()  # type: ignore[attr-defined]
        except tarfile.TarError as error:
            raise HostError(f"{deb.name} cannot be unpacked: {error}", hint="fetch it again") from None
        finally:
            process.kill()


def unlisted(entries: Iterable[Entry], kernels: Mapping[str, str]) -> list[str]:
    """Packages that keep files where ``kernels`` has a pattern, and are none of its packages: those files would be in
    no layer. ``entries`` are a base's; dpkg lists there what it left packed, too.
    """
    patterns = re.compile("|".join(fnmatch.translate(p) for p in kernels.values()))
    found = []
    for entry in entries:
        name = _LIST.fullmatch(entry.path)
        if name and name[1] not in kernels:
            text = b"".join(entry.chunks()).decode("utf-8", "replace")
            if any(patterns.match(line) for line in text.splitlines() if "gfx" in line):
                found.append(name[1])
    return sorted(found)
