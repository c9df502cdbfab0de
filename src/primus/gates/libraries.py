"""Files as the dynamic loader sees them: shared libraries, extension modules, programs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import IO

from primus.gpucode.elf import AMDGPU, DYN, linked_in, read_elf

_LIBRARY = r"lib[^/]*\.so(\.[0-9.]+)?"
# Python opens an extension module by its path and keeps its symbols private.
_MODULE = r".*\.(?:cpython-[^/]+|abi3)\.so"
_SITE = r".*/(?:site|dist)-packages/([^/]+)"


@dataclass(frozen=True, kw_only=True)
class Library:
    """A file that the dynamic loader can load: a shared library, an extension module, or a program.

    ``soname`` is its DT_SONAME (empty without one), ``needed`` its DT_NEEDED names, ``machine`` the ELF number of
    its processor, ``size`` its size in bytes.
    """

    path: str
    soname: str = ""
    needed: tuple[str, ...] = ()
    machine: int = 0
    size: int = 0

    @property
    def names(self) -> set[str]:
        """The names by which a loader may find it: its soname and, if it is named like a library, its file name."""
        file = self.path.rpartition("/")[2]
        return {
            n for n in (self.soname, file if re.fullmatch(_LIBRARY, file) else "") if n and not re.fullmatch(_MODULE, n)
        }


def library_of(path: str, stream: IO[bytes], size: int) -> Library | None:
    """Return the ELF file as the loader sees it; None for a kernel or an object file, which it does not load.

    Raises ValueError if the file is damaged.
    """
    elf = read_elf(stream)
    if elf.kind != DYN or elf.machine == AMDGPU:
        return None
    linked = linked_in(elf, stream)
    return Library(path=path, soname=linked.soname, needed=linked.needed, machine=elf.machine, size=size)


def owner_of(layer: str, path: str) -> str:
    """Return the owner of a path: its layer or, in site-packages, its top folder."""
    found = re.match(_SITE, path)
    return f"{layer} ({found[1]})" if found else layer
