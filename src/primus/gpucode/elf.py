"""The parts of ELF files that the gates need: processor, positions of sections, and the names of libraries.

A general reader creates an object per field and would take a third of the time of a whole check; this one reads two
tables.
"""

import struct
from typing import IO, NamedTuple

AMDGPU = 224
DYN = 3
_NOBITS = 8
_DYNAMIC = 6
_DT_NEEDED = 1
_DT_SONAME = 14
# Class → formats of the header after e_ident, of a section header, and of an entry of the dynamic section.
_FORMS = {1: ("HHIIIIIHHHHHH", "IIIIIIIIII", "iI"), 2: ("HHIQQQIHHHHHH", "IIQQQQIIQQ", "qQ")}
_ORDERS = {1: "<", 2: ">"}
# The limit for tables of section names and dynamic entries; the largest seen is far smaller.
_TABLE = 64 << 20


class Section(NamedTuple):
    """One section: its name, ``sh_type`` and ``sh_link``, and the position of its bytes in the file."""

    name: str
    kind: int
    link: int
    offset: int
    size: int


class Elf(NamedTuple):
    """An ELF file's header and sections; ``form`` is the struct format of an entry of its dynamic section."""

    kind: int
    machine: int
    flags: int
    abi: int
    form: str
    sections: tuple[Section, ...]

    def places(self) -> dict[str, tuple[int, int]]:
        """Name → offset and size of each section that has bytes in the file."""
        return {s.name: (s.offset, s.size) for s in self.sections if s.kind != _NOBITS}


def read_elf(stream: IO[bytes]) -> Elf:
    """Read the file's header and sections. Raises ValueError if the file is damaged."""
    try:
        return _read(stream)
    except (struct.error, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"a damaged ELF file: {error}") from None


def _read(stream: IO[bytes]) -> Elf:
    stream.seek(0)
    ident = stream.read(16)
    head, row, entry = (_ORDERS[ident[5]] + form for form in _FORMS[ident[4]])
    fields = struct.unpack(head, stream.read(struct.calcsize(head)))
    kind, machine, at, flags = fields[0], fields[1], fields[5], fields[6]
    size, count, names_at = fields[10], fields[11], fields[12]
    rows: list[tuple[int, ...]] = []
    if at:
        if size != struct.calcsize(row):
            raise ValueError(f"a damaged ELF file: section headers of {size} bytes")
        first = struct.unpack(row, _bytes(stream, at, size))
        # If there are more sections than the header's field can hold, the first, empty section has the number.
        count, names_at = count or first[5], first[6] if names_at == 0xFFFF else names_at
        rows = list(struct.iter_unpack(row, _bytes(stream, at, count * size)))
    names = _bytes(stream, rows[names_at][4], rows[names_at][5]) if rows and names_at else b""
    sections = tuple(
        Section(name=_text(names, r[0]) if names else "", kind=r[1], offset=r[4], size=r[5], link=r[6]) for r in rows
    )
    return Elf(kind=kind, machine=machine, flags=flags, abi=ident[8], form=entry, sections=sections)


def linked_in(elf: Elf, stream: IO[bytes]) -> tuple[str, tuple[str, ...]]:
    """Return a library's own soname (empty without one) and the names that it needs. ValueError if it is damaged."""
    soname, needed = "", []
    try:
        for section in elf.sections:
            if section.kind == _DYNAMIC:
                strings = elf.sections[section.link]
                data = _bytes(stream, section.offset, section.size)
                data = data[: len(data) - len(data) % struct.calcsize(elf.form)]
                names = _bytes(stream, strings.offset, strings.size)
                for tag, value in struct.iter_unpack(elf.form, data):
                    if tag == _DT_SONAME:
                        soname = _text(names, value)
                    elif tag == _DT_NEEDED:
                        needed.append(_text(names, value))
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError(f"a damaged ELF file: {error}") from None
    return soname, tuple(needed)


def _bytes(stream: IO[bytes], at: int, size: int) -> bytes:
    if size > _TABLE:
        raise ValueError(f"a damaged ELF file: a table of {size} bytes")
    stream.seek(at)
    data = stream.read(size)
    if len(data) != size:
        raise ValueError(f"a damaged ELF file: it ends before byte {at + size}")
    return data


def _text(data: bytes, at: int) -> str:
    if at >= len(data):
        raise ValueError("a damaged ELF file: a name lies outside its table")
    end = data.find(b"\0", at)
    return data[at : end if end >= 0 else None].decode("utf-8", "replace")
