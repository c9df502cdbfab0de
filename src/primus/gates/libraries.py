"""What the dynamic loader sees of a file: shared libraries, extension modules, programs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import IO

from primus.gpucode.elf import AMDGPU, DYN, linked_in, read_elf

_LIBRARY = re.compile(r"lib[^/]*\.so(\.[0-9.]+)?")
# Python opens an extension module by its path and keeps its symbols apart.
_MODULE = re.compile(r".*\.(?:cpython-[^/]+|abi3)\.so")
_SITE = re.compile(r".*/(?:site|dist)-packages/([^/]+)")


@dataclass(frozen=True, kw_only=True)
class Library:
    """A file that the dynamic loader can load: a shared library, an extension module, or a program.

    ``soname`` is the name it gives itself (empty when it gives none), ``needed`` are the names it needs, ``machine``
    is the ELF number of its processor, ``size`` its bytes.
    """

    path: str
    soname: str = ""
    needed: tuple[str, ...] = ()
    machine: int = 0
    size: int = 0

    @property
    def names(self) -> set[str]:
        """The names by which a loader may find it: its soname, and its file name when that is a library's."""
        file = self.path.rpartition("/")[2]
        return {n for n in (self.soname, file if _LIBRARY.fullmatch(file) else "") if n and not _MODULE.fullmatch(n)}


def library_of(path: str, stream: IO[bytes], size: int) -> Library | None:
    """The ELF file as the loader sees it; None for a kernel or an object file, which it does not load.

    Raises ValueError when the file is damaged.
    """
    elf = read_elf(stream)
    if elf.kind != DYN or elf.machine == AMDGPU:
        return None
    linked = linked_in(elf, stream)
    return Library(path=path, soname=linked.soname, needed=linked.needed, machine=elf.machine, size=size)


def owner_of(layer: str, path: str) -> str:
    """Who ships a path: the layer, and in site-packages the top folder below it."""
    found = _SITE.match(path)
    return f"{layer} ({found[1]})" if found else layer
