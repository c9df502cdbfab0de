"""One library name, two owners: whichever is loaded first serves both, and the other's callers crash.

An upstream image crashed because two components shipped a ``libmha_bwd.so`` of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

from primus.gates.finding import Finding, GateReport
from primus.gpucode.elf import AMDGPU, DYN, linked_in, read_elf

__all__ = ["Library", "library_of", "owner_of", "shared_names"]

_GATE = "overlap"
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


def shared_names(layers: Iterable[tuple[str, Iterable[Library]]]) -> GateReport:
    """One warning per library name that two owners ship, with all its places."""
    places: dict[str, dict[str, tuple[str, str]]] = {}
    count = 0
    for layer, libraries in layers:
        for library in libraries:
            count += bool(library.names)
            for name in library.names:
                places.setdefault(name, {}).setdefault(owner_of(layer, library.path), (layer, library.path))
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name in sorted(places):
        if len(places[name]) > 1:
            groups.setdefault(tuple(places[name].values()), []).append(name)
    findings = tuple(
        Finding(
            gate=_GATE,
            severity="warning",
            layer=where[0][0],
            path=where[0][1],
            message=f"{' and '.join(names)} is also in "
            + ", ".join(f"{layer} as /{path}" for layer, path in where[1:])
            + ": a process that loads both gets one of them for both",
        )
        for where, names in groups.items()
    )
    return GateReport(gate=_GATE, summary=f"{count} shared libraries", findings=findings)
