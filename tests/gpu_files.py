"""Files with GPU code, byte by byte: ELF, offload bundles, kernel packs. No compiler is needed."""

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgpack
import zstandard

from primus_images.gates.examined import LayerFacts
from primus_images.oci.tar import Member

HOST = "host-x86_64-unknown-linux-gnu-"


def elf(
    sections: Mapping[str, bytes] | None = None,
    *,
    machine: int = 62,
    flags: int = 0,
    abi: int = 0,
    kind: int = 3,
    soname: str = "",
    needed: Sequence[str] = (),
) -> bytes:
    """A 64-bit ELF file (by default an x86-64 shared object) with these sections."""
    parts: list[tuple[str, int, bytes, int]] = [
        (name, 1, data, 0) for name, data in (sections or {}).items()
    ]
    if soname or needed:
        strings, entries = b"\0", b""
        for tag, name in [(1, one) for one in needed] + ([(14, soname)] if soname else []):
            entries += struct.pack("<2Q", tag, len(strings))
            strings += name.encode() + b"\0"
        parts.append((".dynstr", 3, strings, 0))
        parts.append((".dynamic", 6, entries + struct.pack("<2Q", 0, 0), len(parts)))
    names = b"\0"
    offsets = []
    for name, *_ in (*parts, (".shstrtab",)):
        offsets.append(len(names))
        names += name.encode() + b"\0"
    parts.append((".shstrtab", 3, names, 0))
    body, headers = b"", struct.pack("<IIQQQQIIQQ", *[0] * 10)
    for (_, section, data, link), name_at in zip(parts, offsets, strict=True):
        body += b"\0" * (-len(body) % 16)
        entry = 16 if section == 6 else 0
        headers += struct.pack(
            "<IIQQQQIIQQ", name_at, section, 0, 0, 64 + len(body), len(data), link, 0, 16, entry
        )
        body += data
    body += b"\0" * (-len(body) % 16)
    ident = b"\x7fELF" + bytes([2, 1, 1, 64 if machine == 224 else 0, abi]) + b"\0" * 7
    head = struct.pack(
        "<HHIQQQIHHHHHH",
        kind,
        machine,
        1,
        0,
        0,
        64 + len(body),
        flags,
        64,
        56,
        0,
        64,
        len(parts) + 1,
        len(parts),
    )
    return ident + head + body + headers


def code_object(mach: int, *, features: int = 0) -> bytes:
    """What clang makes for one AMD GPU: an ELF file for EM_AMDGPU, code object V5."""
    return elf({".text": b"kernel"}, machine=224, flags=mach | features, abi=3)


def entry(target: str) -> str:
    """The bundle entry id of a HIP target."""
    return f"hipv4-amdgcn-amd-amdhsa--{target}"


def bundle(
    targets: Sequence[str], payload: bytes = b"code" * 64, empty: Sequence[str] = ()
) -> bytes:
    """An offload bundle with an empty entry for the host and one entry per target, each on a page
    of its own.
    """
    entries = [(HOST, b""), *((entry(t), b"" if t in empty else payload) for t in targets)]
    size = 32 + sum(24 + len(name) for name, _ in entries)
    head, body = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries)), b""
    for name, data in entries:
        start = size + (-size % 4096) + len(body)
        head += struct.pack("<QQQ", start, len(data), len(name)) + name.encode()
        body += data + b"\0" * (-len(data) % 4096)
    return head + b"\0" * (-len(head) % 4096) + body


def compressed(plain: bytes, *, version: int = 2, method: int = 1) -> bytes:
    """The compressed form of a bundle (CCOB), as clang writes it in these versions."""
    data = zstandard.ZstdCompressor().compress(plain) if method == 1 else zlib.compress(plain)
    digest = hashlib.md5(plain).digest()[:8]
    form, size = ("<HHII", 24) if version == 2 else ("<HHQQ", 32)
    return (
        b"CCOB" + struct.pack(form, version, method, size + len(data), len(plain)) + digest + data
    )


def pages(*bundles: bytes) -> bytes:
    """Bundles one after the other as the linker lays them into .hip_fatbin."""
    return b"".join(b + b"\0" * (-len(b) % 4096) for b in bundles)


def kernel_pack(kernels: Mapping[str, Sequence[str]]) -> bytes:
    """A kernel pack (KPAK) that holds for each library code for the targets."""
    arches = sorted({t for targets in kernels.values() for t in targets})
    table = {
        "format_version": 1,
        "gfx_arches": arches,
        "toc": {
            name: {t: {"type": "hsaco", "ordinal": 0} for t in by} for name, by in kernels.items()
        },
    }
    blob = b"K" * 128
    return (
        struct.pack("<4sIQ", b"KPAK", 1, 64 + len(blob)) + b"\0" * 48 + blob + msgpack.packb(table)
    )


def pack_host(kernel: str, *packs: str) -> bytes:
    """A host library whose GPU code lies in kernel packs."""
    return elf(
        {
            ".rocm_kpack_ref": msgpack.packb(
                {"kernel_name": kernel, "kpack_search_paths": list(packs)}
            )
        }
    )


def member(path: str, data: bytes | str = b"", kind: str = "file") -> Member:
    """A file as a gate sees it."""
    content = data.encode() if isinstance(data, str) else data
    return Member(path=path, kind=kind, size=len(content), chunks=[content])  # type: ignore[arg-type]


def image_with(layers: Mapping[str, LayerFacts], arch: str | None = None) -> Any:
    """An image as a gate sees it: layer → facts."""
    return SimpleNamespace(facts=layers, arch=arch)
