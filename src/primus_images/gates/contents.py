"""What a file of a layer contains: versions, what does not belong into an image, GPU code, and
libraries.

``patterns.yaml`` says what to look for.

Versions are stated by wheels, Debian packages, headers and libraries. Secrets, insecure apt
settings, caches and paths of the build machine do not belong into an image. Forms of GPU code and
their sources:

- AMDGPU ELF (``.co``, ``.hsaco``): ``e_machine`` 224, processor in ``e_flags`` (LLVM's
  AMDGPUUsage).
- Offload bundles, plain (``__CLANG_OFFLOAD_BUNDLE__``) and compressed (``CCOB``), as a file or
  page-aligned one after
  the other in ``.hip_fatbin`` of a host library (clang's ClangOffloadBundler documentation).
- Kernel packs (``KPAK``) and the host libraries that name them in ``.rocm_kpack_ref``: AMD's wheels
  split GPU code
  off the host libraries that way (ROCm/rocm-systems, rocm-kpack).
- Files that say it by name: Tensile's and hipBLASLt's ``.dat``, and MIOpen's databases.
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from mmap import MADV_DONTNEED, mmap
from pathlib import Path
from typing import IO, Any, Literal

import msgpack

from primus_images.gpucode.bundles import COMPRESSED, PLAIN, bundles_in
from primus_images.gpucode.elf import (
    AMDGPU,
    DYN,
    in_entry_id,
    in_path,
    linked_in,
    of_flags,
    read_elf,
)
from primus_images.versions.lock import normalised
from primus_images.yamlfile import read_values

Kind = Literal["wheel", "deb", "header", "library"]
Rule = Literal["secret", "insecure apt", "credentials", "cache", "build path"]
Form = Literal[
    "fat binary", "code object", "bundle", "kernel file", "kernel pack", "host of a pack"
]

PATTERNS: Mapping[str, Any] = read_values(Path(__file__).with_name("patterns.yaml")).data
NAMES = {name: re.compile(pattern) for name, pattern in PATTERNS["names"].items()}
ELF = b"\x7fELF"
_PART = 1 << 20
# The longest match: a private key with header lines before its body.
_AHEAD = 1 << 14
_PACK = b"KPAK"


def _matches(pattern: re.Pattern[bytes], data: bytes | mmap) -> Iterator[re.Match[bytes]]:
    """Yield all matches. A search keeps all other threads from running, so each one is for a part
    of the data.
    """
    for begin in range(0, len(data), _PART):
        for match in pattern.finditer(data, begin, begin + _PART + _AHEAD):
            if match.start() < begin + _PART:
                yield match
        if isinstance(data, mmap):
            # Without it, all of a file of gigabytes that was searched would stay in the memory of
            # this process.
            data.madvise(MADV_DONTNEED, begin, min(_PART, len(data) - begin))


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A version that a file of the image states.

    ``name`` is normalised for wheels, the component for headers and libraries. ``requires`` are a
    wheel's requirements (PEP 508) without those of its extras, ``licence`` the rows about it in a
    wheel's metadata, ``source`` name and version of a Debian source package.
    """

    kind: Kind
    name: str
    version: str
    path: str
    requires: tuple[str, ...] = ()
    licence: tuple[tuple[str, str], ...] = ()
    source: str = ""


def states_versions(path: str) -> bool:
    """Whether :func:`stated_in` reads files with this name."""
    known = NAMES["status"].fullmatch(path) or NAMES["metadata"].fullmatch(path)
    return known is not None or _file_name(path) in PATTERNS["headers"]


def stated_in(path: str, text: str) -> list[Stated]:
    """Return the versions in the file's text; none for other files."""
    if NAMES["status"].fullmatch(path):
        packages = [
            dict(re.findall(r"^(Package|Version|Status|Source): (.+)$", block, re.M))
            for block in text.split("\n\n")
        ]
        return [
            Stated(
                kind="deb", name=p["Package"], version=p["Version"], path=path, source=_source(p)
            )
            for p in packages
            if p.get("Status", "").endswith(" installed")
        ]
    if NAMES["metadata"].fullmatch(path):
        rows = re.findall(PATTERNS["metadata_rows"], text.partition("\n\n")[0], re.M)
        head = dict(rows)
        if not {"Name", "Version"} <= set(head):
            return []
        of_extra = PATTERNS["of_extra"]
        requires = tuple(
            value
            for name, value in rows
            if name == "Requires-Dist" and not re.search(of_extra, value)
        )
        licence = tuple(
            (n, v) for n, v in rows if n.startswith("License") or v.startswith("License ::")
        )
        name = normalised(head["Name"])
        version = head["Version"]
        return [
            Stated(
                kind="wheel",
                name=name,
                version=version,
                path=path,
                requires=requires,
                licence=licence,
            )
        ]
    component, prefix = PATTERNS["headers"].get(_file_name(path), ("", ""))
    if prefix:
        numbers = dict(
            re.findall(rf"^\s*#\s*define\s+{prefix}_(MAJOR|MINOR|PATCH)\s+(\d+)", text, re.M)
        )
    else:
        numbers = {}
    if len(numbers) < 3:
        return []
    version = f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}"
    return [Stated(kind="header", name=component, version=version, path=path)]


def _source(package: Mapping[str, str]) -> str:
    """Return name and version: a binary package that was built again has another version than its
    source.
    """
    name, _, other = package.get("Source", package["Package"]).rstrip(")").partition(" (")
    return f"{name} {other or package['Version']}"


def stated_in_library(path: str, data: bytes | mmap) -> list[Stated]:
    """Return the version in a library's own text; none for other libraries, and if the text has no
    version or two.
    """
    file_name = _file_name(path)
    match = NAMES["library_version"].fullmatch(file_name)
    if match:
        return [Stated(kind="library", name=match[1].lower(), version=match[2], path=path)]
    name, pattern = PATTERNS["libraries"].get(file_name[: file_name.find(".so") + 3], ("", None))
    if pattern:
        versions = {match[1].decode() for match in _matches(re.compile(pattern.encode()), data)}
    else:
        versions = set()
    if len(versions) == 1:
        return [Stated(kind="library", name=name, version=v, path=path) for v in versions]
    return []


def _file_name(path: str) -> str:
    return path.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What does not belong into an image: the rule, the path, and what was seen. Of a secret, only
    its kind.
    """

    rule: Rule
    path: str
    seen: str


def traces_in(path: str, data: bytes | mmap, machine_paths: Sequence[bytes] = ()) -> list[Trace]:
    """Return the secrets and build paths in a file, each once. ``machine_paths`` are folders of the
    build machine.
    """
    seen: dict[tuple[Rule, str], None] = {("secret", kind): None for kind in secrets_in(data)}
    for match in _matches(_path_pattern(tuple(machine_paths), data[:4] == ELF), data):
        text = match[0][:120].decode("utf-8", "replace")
        # Of temporary and home folders, one trace per file is enough; others are usually below the
        # same folder.
        is_new = not any(rule == "build path" and other[:6] == text[:6] for rule, other in seen)
        if match["machine"] is not None or is_new:
            seen["build path", text] = None
    return [Trace(rule=rule, path=path, seen=what) for rule, what in seen]


@cache
def _path_pattern(machine_paths: tuple[bytes, ...], elf: bool) -> re.Pattern[bytes]:
    # The longest path first: a folder of this machine may lie in another one.
    machine = (
        b"|".join(re.escape(path[1:]) for path in sorted(machine_paths, key=len, reverse=True))
        or rb"(?!)"
    )
    others = [PATTERNS["build_paths"][kind].encode() for kind in ("temporary", "homes")[: 1 + elf]]
    return re.compile(rb"/(?:(?P<machine>" + machine + rb")|" + b"|".join(others) + rb")")


def secrets_in(data: bytes | mmap) -> list[str]:
    """Return the kind of each secret in ``data``."""
    return [
        kind
        for kind, pattern in PATTERNS["secrets"].items()
        for match in _matches(re.compile(pattern.encode()), data)
        # Placeholders repeat themselves or call themselves examples.
        if b"EXAMPLE" not in (body := next(filter(None, match.groups()))).upper()
        and len(set(body)) >= 8
    ]


def reads_text(path: str) -> bool:
    """Whether :func:`text_traces` has a rule for files with this name."""
    return path.startswith("etc/apt/") or _may_hold_login(path)


def _may_hold_login(path: str) -> bool:
    return NAMES["apt_login"].fullmatch(path) is not None or f"/{path}".endswith(
        tuple(PATTERNS["login_files"])
    )


def text_traces(path: str, text: str) -> list[Trace]:
    """Return what the settings in a small file allow or reveal."""
    traces = [
        Trace(rule="insecure apt", path=path, seen=match[0].strip()[:120])
        for pattern in (PATTERNS["insecure_apt"] if path.startswith("etc/apt/") else ())
        for match in re.finditer(pattern, text)
        if "false" not in match[0].lower() or "verify-peer" in match[0].lower()
    ]
    if _may_hold_login(path) and re.search(PATTERNS["login"], text):
        traces.append(Trace(rule="credentials", path=path, seen="a login"))
    return traces


def path_traces(path: str, kind: str) -> list[Trace]:
    """Return the litter that a path's name alone identifies; empty folders do not count."""
    if kind == "dir" or re.fullmatch(PATTERNS["no_cache"], path):
        return []
    caches = (
        meaning for pattern, meaning in PATTERNS["caches"].items() if re.fullmatch(pattern, path)
    )
    return [Trace(rule="cache", path=path, seen=meaning) for meaning in caches][:1]


@dataclass(frozen=True, kw_only=True)
class Code:
    """GPU code that one file contains or refers to.

    ``targets`` are target ids (``gfx942``, ``gfx90a:xnack-``). A host library whose code is in a
    kernel pack has none: its code is ``kernel`` in one of ``packs``, paths relative to its folder
    with ``@GFXARCH@`` for the architecture. For a pack, ``kernels`` lists the targets of each such
    library.
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
    return path.endswith(tuple(PATTERNS["kernel_files"]))


def code_in(path: str, stream: IO[bytes], size: int) -> Code | None:
    """Return the GPU code of a seekable file, or None if it has none.

    Raises ValueError if the file begins like one of the forms but is damaged.
    """
    try:
        stream.seek(0)
        head = stream.read(64)
        if head.startswith(ELF):
            return _of_elf(path, stream, size)
        if head.startswith((PLAIN, COMPRESSED)):
            return Code(
                path=path, form="bundle", targets=_bundle_targets(stream, 0, size), size=size
            )
        if head.startswith(_PACK):
            return _of_pack(path, stream, size)
    except (OverflowError, struct.error) as error:
        # Offsets in a damaged file may exceed the largest offset of a file.
        raise ValueError(f"a damaged file: {error}") from None
    if is_kernel_file(path) and (named := in_path(path)):
        return Code(path=path, form="kernel file", targets=named[-1:], size=size)
    return None


def _of_elf(path: str, stream: IO[bytes], size: int) -> Code | None:
    elf = read_elf(stream)
    if elf.machine == AMDGPU:
        return Code(
            path=path, form="code object", targets=(of_flags(elf.flags, elf.abi),), size=size
        )
    sections = elf.places()
    reference = sections.get(".rocm_kpack_ref")
    if reference:
        return _of_host(path, stream, *reference, size)
    fat = sections.get(".hip_fatbin")
    if fat:
        return Code(path=path, form="fat binary", targets=_bundle_targets(stream, *fat), size=size)
    return None


def _bundle_targets(stream: IO[bytes], offset: int, size: int) -> tuple[str, ...]:
    parts = (
        part for bundle in bundles_in(stream, offset, size) for part in bundle.parts if part.size
    )
    return tuple(dict.fromkeys(target for part in parts if (target := in_entry_id(part.id))))


def _of_host(path: str, stream: IO[bytes], offset: int, size: int, file_size: int) -> Code:
    stream.seek(offset)
    about = _unpacked(stream.read(min(size, 1 << 20)))
    if not isinstance(about, dict) or not isinstance(about.get("kpack_search_paths"), list):
        raise ValueError("its .rocm_kpack_ref names no kernel packs")
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
        raise ValueError("a kernel pack has no table")
    kernels = {
        str(name): tuple(sorted(map(str, by)))
        for name, by in table["toc"].items()
        if isinstance(by, dict)
    }
    targets = table.get("gfx_arches") or sorted({t for by in kernels.values() for t in by})
    return Code(
        path=path, form="kernel pack", targets=tuple(map(str, targets)), size=size, kernels=kernels
    )


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

    ``soname`` is its DT_SONAME (empty without one), ``needed`` its DT_NEEDED names, ``machine`` the
    ELF number of its processor, ``size`` its size in bytes.
    """

    path: str
    soname: str = ""
    needed: tuple[str, ...] = ()
    machine: int = 0
    size: int = 0

    @property
    def names(self) -> set[str]:
        """The names by which a loader may find it: its soname and, if it is named like a library,
        its file name.
        """
        file = self.path.rpartition("/")[2]
        names = (self.soname, file if NAMES["library"].fullmatch(file) else "")
        return {name for name in names if name and not NAMES["module"].fullmatch(name)}


def library_of(path: str, stream: IO[bytes], size: int) -> Library | None:
    """Return the ELF file as the loader sees it; None for one that it does not load. ValueError if
    it is damaged.
    """
    elf = read_elf(stream)
    if elf.kind != DYN or elf.machine == AMDGPU:
        return None
    soname, needed = linked_in(elf, stream)
    return Library(path=path, soname=soname, needed=needed, machine=elf.machine, size=size)


def owner_of(layer: str, path: str) -> str:
    """Return the owner of a path: its layer or, in site-packages, its top folder."""
    match = NAMES["site"].match(path)
    if match:
        return f"{layer} ({match[1]})"
    return layer
