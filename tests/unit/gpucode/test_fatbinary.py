"""Libraries with the GPU code of one architecture: what is written, byte by byte, and what a reader
finds in it.
"""

import hashlib
import io
import struct
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import zstandard
from hypothesis import given, strategies as st

from gpu_files import HOST, bundle, code_object, compressed, elf, entry, pages
from primus_images.gates.contents import code_in
from primus_images.gpucode.bundles import bundles_in, keep_only
from primus_images.gpucode.elf import read_elf, runs_on

GFX942, GFX950 = 0x4C, 0x4F
FORMS = ["plain", "zstd 2", "zstd 3", "zlib 2", "zlib 3"]


@dataclass(frozen=True)
class Read:
    """A bundle as a loader sees it: where it lies, its form and its code."""

    offset: int
    form: tuple[int, int]
    code: tuple[tuple[str, bytes], ...]


def packed(plain: bytes, form: str) -> bytes:
    if form == "plain":
        return plain
    name, version = form.split()
    return compressed(plain, version=int(version), method=1 if name == "zstd" else 0)


def bundle_of(code: Sequence[tuple[str, bytes]], align: int = 4096) -> bytes:
    """A plain bundle with the host's empty entry and these."""
    rows, body = [(HOST, b""), *((entry(t), data) for t, data in code)], b""
    size = 32 + sum(24 + len(name) for name, _ in rows)
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(rows))
    for name, data in rows:
        body += b"\0" * (-(size + len(body)) % align)
        head += struct.pack("<QQQ", size + len(body), len(data), len(name)) + name.encode()
        body += data
    return head + body


def pruned(data: bytes, arch: str) -> bytes:
    source = io.BytesIO(data)
    # Whoever looked at the file before may have left the stream anywhere.
    source.seek(0, io.SEEK_END)
    with tempfile.TemporaryFile() as out:
        assert keep_only(arch, source, len(data), out)
        out.seek(0)
        return out.read()


def read(data: bytes) -> list[Read]:
    """What the file's bundles hold, by a reader of the test's own."""
    stream = io.BytesIO(data)
    offset, size = read_elf(stream).places()[".hip_fatbin"]
    found = []
    for one in bundles_in(stream, offset, size):
        part = data[one.offset : one.offset + one.length]
        plain, form = part, (0, 0)
        if part.startswith(b"CCOB"):
            version, method = struct.unpack_from("<HH", part, 4)
            at = {2: 24, 3: 32}[version]
            amount = struct.unpack_from({2: "<4xI", 3: "<8xQ"}[version], part, 8)[0]
            if method == 0:
                plain = zlib.decompressobj().decompress(part[at:])
            else:
                plain = zstandard.ZstdDecompressor().decompressobj().decompress(part[at:])
            assert len(plain) == amount
            assert hashlib.md5(plain).digest()[:8] == part[at - 8 : at]
            form = (version, method)
        (count,) = struct.unpack_from("<Q", plain, 24)
        at, code = 32, []
        for _ in range(count):
            start, length, name = struct.unpack_from("<QQQ", plain, at)
            code.append((plain[at + 24 : at + 24 + name].decode(), plain[start : start + length]))
            at += 24 + name
        found.append(Read(offset=one.offset, form=form, code=tuple(code)))
    return found


def test_what_is_taken_out_leaves_zeros() -> None:
    kept, gone = b"KEPT" * 100, bytes(range(1, 200)) * 50
    section = bundle_of([("gfx942", gone), ("gfx950", kept), ("gfx90a", gone)], align=64)
    small = pruned(elf({".hip_fatbin": section}), "gfx950")
    offset, size = read_elf(io.BytesIO(small)).places()[".hip_fatbin"]
    rest = small[offset : offset + size].replace(kept, b"")
    assert len(rest.rstrip(b"\0")) < 32 + 2 * 24 + len(HOST) + len(entry("gfx950")) + 1


def test_a_bundle_alone_is_a_file_too_and_other_files_are_none() -> None:
    whole = bundle_of([("gfx942", b"kept"), ("gfx950", b"gone")])
    small = pruned(whole, "gfx942")
    assert len(small) == len(whole)
    code = code_in("x.hsaco", io.BytesIO(small), len(small))
    assert code is not None
    assert code.targets == ("gfx942",)
    for data in (
        b"",
        b"text",
        elf({".text": b"x"}),
        code_object(GFX942),
        elf({".hip_fatbin": b"\0" * 99}),
    ):
        out = io.BytesIO()
        assert keep_only("gfx942", io.BytesIO(data), len(data), out) is False
        assert out.getvalue() == b""


def test_a_bundle_may_have_no_entries() -> None:
    empty = b"__CLANG_OFFLOAD_BUNDLE__" + bytes(8)
    second = bundle(["gfx942"])
    data = empty + second
    offsets = [one.offset for one in bundles_in(io.BytesIO(data), 0, len(data))]
    assert offsets == [0, len(empty)]
    (alone,) = bundles_in(io.BytesIO(empty), 0, len(empty))
    assert (alone.length, alone.parts) == (len(empty), ())


@pytest.mark.parametrize("end", [31, 40, 60, 120])
def test_a_bundle_whose_list_is_cut_is_damaged(end: int) -> None:
    data = bundle(["gfx942"])[:end]
    with pytest.raises(ValueError, match="an offload bundle is cut short"):
        list(bundles_in(io.BytesIO(data), 0, len(data)))


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (bundle(["gfx942", "gfx950"], payload=b"c" * 4096)[:-1], "reaches beyond its place"),
        (packed(bundle(["gfx942", "gfx950"]), "zstd 3")[:-9], "is damaged"),
        (packed(bundle_of([("gfx942", b"x"), ("gfx950", b"y" * 99)])[:-9], "zstd 3"), "cut short"),
        (
            packed(bundle_of([("gfx950", b"x" * 99)]), "zstd 2").replace(
                b"\x02\0\x01\0", b"\x02\0\x09\0", 1
            ),
            "method 9",
        ),
    ],
)
def test_damage_is_said(section: bytes, sentence: str) -> None:
    library = elf({".hip_fatbin": section})
    with pytest.raises(ValueError, match=sentence):
        keep_only("gfx950", io.BytesIO(library), len(library), io.BytesIO())


def test_a_bundle_larger_than_a_window_is_read_piece_by_piece() -> None:
    # 40 MB whose last part repeats the first: a decoder must look back that far.
    block = hashlib.shake_128(b"seed").digest(1 << 20)
    plain = bundle_of([("gfx942", block + b"\0" * (40 << 20)), ("gfx950", block)])
    params = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
    data = zstandard.ZstdCompressor(compression_params=params).compress(plain)
    head = struct.pack(
        "<4sHHQQ8s", b"CCOB", 3, 1, 32 + len(data), len(plain), hashlib.md5(plain).digest()[:8]
    )
    assert len(data) < 1.5 * len(block)
    (one,) = read(pruned(elf({".hip_fatbin": head + data}), "gfx950"))
    assert one.code == ((HOST, b""), (entry("gfx950"), block))


def test_a_bundle_that_would_be_longer_stays_as_it_is() -> None:
    plain = bundle_of(
        [("gfx942", b"\0"), ("gfx950", " ".join(str(n * n) for n in range(9999)).encode())]
    )
    tight = zstandard.ZstdCompressor(level=19).compress(plain)
    head = struct.pack(
        "<4sHHII8s", b"CCOB", 2, 1, 24 + len(tight), len(plain), hashlib.md5(plain).digest()[:8]
    )
    two = pages(head + tight, packed(bundle(["gfx942", "gfx950"]), "zstd 2"))
    library = elf({".hip_fatbin": two})
    small = pruned(library, "gfx950")
    assert [len(one.code) for one in read(small)] == [3, 2]
    assert read(small)[0] == read(library)[0]


_TARGETS = [
    "gfx803",
    "gfx90a",
    "gfx90a:xnack+",
    "gfx942",
    "gfx942:xnack+",
    "gfx950",
    "gfx9-4-generic",
    "amdgcnspirv",
]
# No two targets have the same code: a copy costs a compressed bundle next to nothing, and taking it
# out gains nothing.
_PART = st.builds(
    lambda target, seed, size: (target, hashlib.shake_128(target.encode() + seed).digest(size)),
    st.sampled_from(_TARGETS),
    st.binary(),
    st.just(0) | st.integers(64, 3000),
)
_CODE = st.lists(_PART, max_size=5, unique_by=lambda part: part[0])


@given(
    st.lists(
        st.tuples(_CODE, st.sampled_from(FORMS), st.sampled_from([1, 8, 4096])),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["gfx942", "gfx950"]),
)
def test_any_library_keeps_all_and_only_what_runs(
    bundles: list[tuple[list[tuple[str, bytes]], str, int]], arch: str
) -> None:
    section = pages(*(packed(bundle_of(code, align), form) for code, form, align in bundles))
    library = elf({".text": b"host code", ".hip_fatbin": section, ".data": b"after"})
    small = pruned(library, arch)
    assert len(small) == len(library)
    offset, size = read_elf(io.BytesIO(library)).places()[".hip_fatbin"]
    assert small[:offset] + small[offset + size :] == library[:offset] + library[offset + size :]
    assert pruned(small, arch) == small, "what remains stays as it is"
    read_back = read(small)
    assert [(one.offset, one.form[0]) for one in read_back] == [
        (one.offset, one.form[0]) for one in read(library)
    ]
    code = code_in("lib.so", io.BytesIO(small), len(small))
    assert code is not None
    wanted = {
        target
        for part, _, _ in bundles
        for target, data in part
        if data and runs_on([target], arch)
    }
    assert {target for target in code.targets if runs_on([target], arch)} == wanted
    for one, (code, _, _) in zip(read_back, bundles, strict=True):
        lost = [(t, data) for t, data in code if not runs_on([t], arch)]
        stays = [c for c in code if c not in lost] if any(data for _, data in lost) else code
        assert one.code == ((HOST, b""), *((entry(t), data) for t, data in stays))


@pytest.mark.parametrize("before", [30, 24, 12, 1, 0])
def test_a_bundle_is_found_where_two_pieces_meet(before: int) -> None:
    first = bundle(["gfx942"])
    (one,) = bundles_in(io.BytesIO(first), 0, len(first))
    # The search goes on at the end of a bundle, in pieces of 1 MiB.
    place = one.length + (1 << 20) - before
    data = first.ljust(place, b"\0") + bundle(["gfx950"])
    assert [found.offset for found in bundles_in(io.BytesIO(data), 0, len(data))] == [0, place]


def test_more_sections_than_a_header_can_count() -> None:
    data = bytearray(elf({".text": b"x", ".data": b"y"}))
    (table,) = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    struct.pack_into("<HH", data, 60, 0, 0xFFFF)
    # The first, empty section has the number of sections and the index of their names.
    struct.pack_into("<QI", data, table + 32, count, names)
    assert read_elf(io.BytesIO(bytes(data))).places().keys() >= {".text", ".data"}
