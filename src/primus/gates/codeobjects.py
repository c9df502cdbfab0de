"""Compiled code in a file: GPU code with the architectures that it is for, and what the dynamic loader can load.

Forms of GPU code and their sources:

- AMDGPU ELF (``.co``, ``.hsaco``): ``e_machine`` 224, processor in ``e_flags`` (LLVM's AMDGPUUsage).
- Offload bundles, plain (``__CLANG_OFFLOAD_BUNDLE__``) and compressed (``CCOB``), as a file or page-aligned one after
  the other in ``.hip_fatbin`` of a host library (clang's ClangOffloadBundler documentation).
- Kernel packs (``KPAK``) and the host libraries that name them in ``.rocm_kpack_ref``: AMD's wheels split GPU code
  off the host libraries that way (ROCm/rocm-systems, rocm-kpack).
- Files that say it by name: Tensile's and hipBLASLt's ``.dat``, and MIOpen's databases.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Literal

import msgpack

from primus.gpucode.archs import in_entry_id, in_path, of_flags
from primus.gpucode.bundles import COMPRESSED, PLAIN, bundles_in
from primus.gpucode.elf import AMDGPU, DYN, linked_in, read_elf

Form = Literal["fat binary", "code object", "bundle", "kernel file", "kernel pack", "host of a pack"]

_PACK = b"KPAK"
_KERNEL_ENDINGS = (
    ".co", ".hsaco", ".dat", ".dat.gz", ".kpack", ".kdb", ".kdb.bz2", ".db", "db.txt", ".tn.model", ".model",
)  # fmt: skip
_LIBRARY = r"lib[^/]*\.so(\.[0-9.]+)?"
# Python opens an extension module by its path and keeps its symbols private.
_MODULE = r".*\.(?:cpython-[^/]+|abi3)\.so"
_SITE = r".*/(?:site|dist)-packages/([^/]+)"


@dataclass(frozen=True, kw_only=True)
class Code:
    """GPU code that one file contains or refers to.

    ``targets`` are target ids (``gfx942``, ``gfx90a:xnack-``). A host library whose code is in a kernel
    pack has none: its code is ``kernel`` in one of ``packs``, paths relative to its folder with ``@GFXARCH@`` for
    the architecture. For a pack, ``kernels`` lists the targets of each such library.
    """

    path: str
    form: Form
    targets: tuple[str, ...] = ()
    size: int = 0
    packs: tuple[str, ...] = ()
    kernel: str = ""
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def is_kernel_file(path: str) -> bool:
    """Whether files with this name contain only GPU code or tuning data for one architecture."""
    return path.endswith(_KERNEL_ENDINGS)


def code_in(path: str, stream: IO[bytes], size: int) -> Code | None:
    """Return the GPU code of a seekable file, or None if it has none.

    Raises ValueError if the file begins like one of the forms but is damaged.
    """
    try:
        return _code(path, stream, size)
    except (OverflowError, struct.error) as error:
        # Offsets in a damaged file may exceed the largest offset of a file.
        raise ValueError(f"a damaged file: {error}") from None


def _code(path: str, stream: IO[bytes], size: int) -> Code | None:
    stream.seek(0)
    head = stream.read(64)
    if head.startswith(b"\x7fELF"):
        return _of_elf(path, stream, size)
    if head.startswith((PLAIN, COMPRESSED)):
        return Code(path=path, form="bundle", targets=_bundle_targets(stream, 0, size), size=size)
    if head.startswith(_PACK):
        return _of_pack(path, stream, size)
    named = in_path(path)
    if named and is_kernel_file(path):
        return Code(path=path, form="kernel file", targets=named[-1:], size=size)
    return None


def _of_elf(path: str, stream: IO[bytes], size: int) -> Code | None:
    elf = read_elf(stream)
    if elf.machine == AMDGPU:
        return Code(path=path, form="code object", targets=(of_flags(elf.flags, elf.abi),), size=size)
    sections = elf.places()
    if reference := sections.get(".rocm_kpack_ref"):
        return _of_host(path, stream, *reference, size)
    if fat := sections.get(".hip_fatbin"):
        return Code(path=path, form="fat binary", targets=_bundle_targets(stream, *fat), size=size)
    return None


def _bundle_targets(stream: IO[bytes], offset: int, size: int) -> tuple[str, ...]:
    parts = (part for bundle in bundles_in(stream, offset, size) for part in bundle.parts if part.size)
    return tuple(dict.fromkeys(target for part in parts if (target := in_entry_id(part.id))))


def _of_host(path: str, stream: IO[bytes], offset: int, size: int, file_size: int) -> Code:
    stream.seek(offset)
    about = _unpacked(stream.read(min(size, 1 << 20)))
    if not isinstance(about, dict) or not isinstance(about.get("kpack_search_paths"), list):
        raise ValueError("its .rocm_kpack_ref names no kernel packs")  # noqa: TRY004 (the file is wrong)
    return Code(
        path=path,
        form="host of a pack",
        size=file_size,
        packs=tuple(map(str, about["kpack_search_paths"])),
        kernel=str(about.get("kernel_name", "")),
    )


def _of_pack(path: str, stream: IO[bytes], size: int) -> Code:
    stream.seek(0)
    _, _, start = struct.unpack("<4sIQ", stream.read(16))
    if not 16 <= start < size:
        raise ValueError("a kernel pack has its table outside the file")
    stream.seek(start)
    table = _unpacked(stream.read())
    if not isinstance(table, dict) or not isinstance(table.get("toc"), dict):
        raise ValueError("a kernel pack has no table")  # noqa: TRY004 (the file is wrong)
    kernels = {str(name): tuple(sorted(map(str, by))) for name, by in table["toc"].items() if isinstance(by, dict)}
    targets = table.get("gfx_arches") or sorted({t for by in kernels.values() for t in by})
    return Code(path=path, form="kernel pack", targets=tuple(map(str, targets)), size=size, kernels=kernels)


def _unpacked(data: bytes) -> Any:
    """Return the first MessagePack value in ``data``; padding may follow it. Raises ValueError."""
    try:
        return msgpack.unpackb(data, strict_map_key=False, unicode_errors="replace")
    except msgpack.ExtraData as error:
        return error.unpacked
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not MessagePack: {error}") from None


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
    """Return the ELF file as the loader sees it; None for one that it does not load. ValueError if it is damaged."""
    elf = read_elf(stream)
    if elf.kind != DYN or elf.machine == AMDGPU:
        return None
    soname, needed = linked_in(elf, stream)
    return Library(path=path, soname=soname, needed=needed, machine=elf.machine, size=size)


def owner_of(layer: str, path: str) -> str:
    """Return the owner of a path: its layer or, in site-packages, its top folder."""
    match = re.match(_SITE, path)
    return f"{layer} ({match[1]})" if match else layer
