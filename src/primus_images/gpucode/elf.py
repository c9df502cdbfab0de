"""Names of GPU architectures in files and paths, which code runs where, and ELF files.

Of an ELF file, the gates need its processor, the positions of its sections, and the names of
libraries. A general reader creates an object per field and would take a third of the time of a
whole check; this one reads two tables.
"""

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from primus_images.yamlfile import read_values

AMDGPU = 224
DYN = 3
_NOBITS = 8
_DYNAMIC = 6
_DT_NEEDED = 1
_DT_SONAME = 14
# Class → formats of the header after e_ident, of a section header, and of an entry of the dynamic
# section.
_FORMS = {1: ("HHIIIIIHHHHHH", "IIIIIIIIII", "iI"), 2: ("HHIQQQIHHHHHH", "IIQQQQIIQQ", "qQ")}
# Unsupported, any, off, on.
_FEATURES = ("", "", ":{}-", ":{}+")
_ORDERS = {1: "<", 2: ">"}
# The limit for tables of section names and dynamic entries; the largest seen is far smaller.
_MOST_BYTES = 64 << 20
_TABLE = cast("dict[str, Any]", read_values(Path(__file__).with_name("archs.yaml")).data)
# EF_AMDGPU_MACH of e_flags → processor.
MACH: Mapping[int, str] = {int(number, 16): name for number, name in _TABLE["mach"].items()}
# A generic processor's code runs on each of these.
_GENERIC: Mapping[str, Sequence[str]] = _TABLE["generic"]
# Longest first: in MIOpen's names digits of the compute unit count follow the arch directly
# (gfx942130, gfx90a6e).
_NAME = "|".join(sorted(set(MACH.values()), key=lambda n: (-len(n), n)))
_ENTRY = r"(gfx[0-9a-f]+(?:(?:-[0-9]+)*-generic)?|amdgcnspirv)((?::[a-z]+[+-])*)$"


class Section(NamedTuple):
    """One section: its name, ``sh_type``, ``sh_link``, and the position of its bytes."""

    name: str
    kind: int
    link: int
    offset: int
    size: int


class Elf(NamedTuple):
    """An ELF file's header and sections.

    ``form`` is the struct format of an entry of its dynamic section.
    """

    kind: int
    machine: int
    flags: int
    abi: int
    form: str
    sections: tuple[Section, ...]

    def places(self) -> dict[str, tuple[int, int]]:
        """Name → offset and size of each section that has bytes in the file."""
        places = {}
        for section in self.sections:
            if section.kind != _NOBITS:
                places[section.name] = (section.offset, section.size)
        return places


def read_elf(stream: IO[bytes]) -> Elf:
    """Read the file's header and sections. Raises ValueError if the file is damaged."""
    try:
        return _read(stream)
    except (struct.error, KeyError, IndexError) as error:
        raise ValueError(f"a damaged ELF file: {error}") from None


def _read(stream: IO[bytes]) -> Elf:
    stream.seek(0)
    ident = stream.read(16)
    order = _ORDERS[ident[5]]
    head, row, entry = (order + form for form in _FORMS[ident[4]])
    fields = struct.unpack(head, stream.read(struct.calcsize(head)))
    kind, machine, _, _, _, at, flags, *_, size, count, names_index = fields
    rows: list[tuple[int, ...]] = []
    names = b""
    if at:
        if size != struct.calcsize(row):
            raise ValueError(f"a damaged ELF file: section headers of {size} bytes")
        data = _bytes(stream, at, size)
        first = struct.unpack(row, data)
        # If there are more sections than the header's field can hold, the first, empty section has
        # the number.
        count = count or first[5]
        if names_index == 0xFFFF:
            names_index = first[6]
        data = _bytes(stream, at, count * size)
        rows = list(struct.iter_unpack(row, data))
        if names_index:
            _, _, _, _, offset, length, *_ = rows[names_index]
            names = _bytes(stream, offset, length)
    sections = []
    for name_at, section_kind, _, _, offset, length, link, *_ in rows:
        name = ""
        if names:
            name = _text(names, name_at)
        section = Section(name, section_kind, link, offset, length)
        sections.append(section)
    abi = ident[8]
    return Elf(kind, machine, flags, abi, entry, tuple(sections))


def linked_in(elf: Elf, stream: IO[bytes]) -> tuple[str, tuple[str, ...]]:
    """Return a library's own soname (empty without one) and the names that it needs.

    Raises ValueError if it is damaged.
    """
    soname = ""
    needed = []
    for section in elf.sections:
        if section.kind != _DYNAMIC:
            continue
        if section.link >= len(elf.sections):
            raise ValueError("a damaged ELF file: its dynamic section has no names")
        strings = elf.sections[section.link]
        names = _bytes(stream, strings.offset, strings.size)
        data = _bytes(stream, section.offset, section.size)
        size = struct.calcsize(elf.form)
        whole = len(data) - len(data) % size
        for tag, value in struct.iter_unpack(elf.form, data[:whole]):
            if tag == _DT_SONAME:
                soname = _text(names, value)
            elif tag == _DT_NEEDED:
                needed.append(_text(names, value))
    return soname, tuple(needed)


def _bytes(stream: IO[bytes], at: int, size: int) -> bytes:
    if size > _MOST_BYTES:
        raise ValueError(f"a damaged ELF file: a table of {size} bytes")
    try:
        stream.seek(at)
    except OverflowError as error:
        raise ValueError(f"a damaged ELF file: {error}") from None
    data = stream.read(size)
    if len(data) != size:
        raise ValueError(f"a damaged ELF file: it ends before byte {at + size}")
    return data


def _text(data: bytes, at: int) -> str:
    if at >= len(data):
        raise ValueError("a damaged ELF file: a name lies outside its table")
    end = data.find(b"\0", at)
    if end < 0:
        end = len(data)
    return data[at:end].decode("utf-8", "replace")


def in_path(path: str) -> tuple[str, ...]:
    """Return the architectures in a path, in order. ``gfx94X``, a family, stands for gfx942."""
    if "gfx" not in path:
        return ()
    path = re.sub("gfx94[xX]", "gfx942", path)
    names = re.findall(_NAME, path)
    return tuple(dict.fromkeys(names))


def in_entry_id(entry: str) -> str | None:
    """Return the target of a bundle's entry, or None.

    It is ``gfx942:xnack-`` of ``hip-amdgcn-amd-amdhsa--gfx942:xnack-``.
    """
    match = re.search(_ENTRY, entry)
    if match is None or entry.startswith("host"):
        return None
    return match[0]


def of_flags(flags: int, abi: int) -> str:
    """Return the target of an AMDGPU ELF with these ``e_flags`` and this ABI version.

    It includes required features.
    """
    mach = flags & 0xFF
    name = MACH.get(mach, f"unknown mach {mach:#x}")
    if abi >= 2:
        # Two bits each since code object V4.
        name += _FEATURES[flags >> 10 & 3].format("sramecc")
        name += _FEATURES[flags >> 8 & 3].format("xnack")
    return name


def runs_on(targets: Iterable[str], arch: str) -> bool:
    """Whether code for one of ``targets`` runs on a GPU of ``arch``.

    Instinct GPUs have ECC memory and, by default, XNACK off. Code that requires the opposite is not
    loaded. SPIR-V is compiled when it is loaded.
    """
    for target in targets:
        name, _, features = target.partition(":")
        if name == "amdgcnspirv" and arch.startswith("gfx"):
            return True
        fits = name == arch or arch in _GENERIC.get(name, ())
        if fits and not {"xnack+", "sramecc-"} & set(features.split(":")):
            return True
    return False
