"""What is read of an ELF file, and which damage is named."""

import io
import struct

import pytest

from gpu_files import elf
from primus_images.gpucode.elf import linked_in, read_elf

# The bytes of the header's fields.
SECTION_SIZE, SECTION_COUNT, NAMES_INDEX = 58, 60, 62
# The bytes of a section header's fields, and its size.
OFFSET, SIZE, LINK, ROW = 24, 32, 40, 64

LIBRARY = elf({".text": b"code"}, soname="libx.so.1", needed=["liba.so", "libb.so"])
TEXT, STRINGS, DYNAMIC = 1, 2, 3


def patched(data: bytes, at: int, form: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into("<" + form, changed, at, value)
    return bytes(changed)


def in_section(number: int, field: int, data: bytes = LIBRARY) -> int:
    """The byte of a field of the header of a section."""
    (table,) = struct.unpack_from("<Q", data, 40)
    return int(table + number * ROW + field)


def links(data: bytes) -> tuple[str, tuple[str, ...]]:
    stream = io.BytesIO(data)
    return linked_in(read_elf(stream), stream)


def test_a_library_has_sections_a_name_and_what_it_needs() -> None:
    sections = read_elf(io.BytesIO(LIBRARY)).sections
    assert [section.name for section in sections] == [
        "",
        ".text",
        ".dynstr",
        ".dynamic",
        ".shstrtab",
    ]
    assert links(LIBRARY) == ("libx.so.1", ("liba.so", "libb.so"))
    assert links(elf({".text": b"code"})) == ("", ())


def test_the_first_section_has_the_numbers_that_the_header_cannot_hold() -> None:
    (count,) = struct.unpack_from("<H", LIBRARY, SECTION_COUNT)
    data = patched(LIBRARY, SECTION_COUNT, "H", 0)
    data = patched(data, in_section(0, SIZE), "Q", count)
    data = patched(data, NAMES_INDEX, "H", 0xFFFF)
    data = patched(data, in_section(0, LINK), "I", count - 1)
    sections = read_elf(io.BytesIO(data)).sections
    assert [section.name for section in sections][1:3] == [".text", ".dynstr"]


def test_a_section_without_bytes_in_the_file_has_no_place() -> None:
    places = read_elf(io.BytesIO(LIBRARY)).places()
    offset, size = places[".text"]
    assert LIBRARY[offset : offset + size] == b"code"
    empty = patched(LIBRARY, in_section(TEXT, 4), "I", 8)
    assert ".text" not in read_elf(io.BytesIO(empty)).places()


def test_a_file_without_section_headers_or_names_is_read() -> None:
    assert read_elf(io.BytesIO(patched(LIBRARY, 40, "Q", 0))).sections == ()
    nameless = patched(LIBRARY, NAMES_INDEX, "H", 0)
    counted = patched(nameless, SECTION_COUNT, "H", 0)
    counted = patched(counted, in_section(0, SIZE), "Q", 5)
    for data in (nameless, counted):
        assert [section.name for section in read_elf(io.BytesIO(data)).sections] == [""] * 5


def test_a_name_ends_with_its_table_at_the_latest() -> None:
    size = in_section(STRINGS, SIZE)
    (length,) = struct.unpack_from("<Q", LIBRARY, size)
    assert links(patched(LIBRARY, size, "Q", length - 1)) == links(LIBRARY)


@pytest.mark.parametrize(
    ("at", "form", "value", "said"),
    [
        (SECTION_SIZE, "H", 63, "section headers of 63 bytes"),
        (NAMES_INDEX, "H", 99, "list index out of range"),
        (in_section(DYNAMIC, LINK), "I", 5, "its dynamic section has no names"),
        (in_section(STRINGS, SIZE), "Q", 17, "a name lies outside its table"),
        (in_section(STRINGS, SIZE), "Q", (64 << 20) + 1, "a table of 67108865 bytes"),
        (in_section(STRINGS, SIZE), "Q", 64 << 20, "it ends before byte "),
        (in_section(STRINGS, OFFSET), "Q", 1 << 63, "too large"),
        (in_section(STRINGS, OFFSET), "Q", len(LIBRARY), "it ends before byte "),
        (4, "B", 3, "3"),
        (5, "B", 0, "0"),
    ],
)
def test_damage_of_an_elf_file_is_named(at: int, form: str, value: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"a damaged ELF file: .*{said}"):
        links(patched(LIBRARY, at, form, value))
