"""What a file of a layer contains: versions, litter, GPU code and libraries.

``patterns.yaml`` says what to look for.

Versions are stated by wheels, Debian packages, headers and libraries. Secrets, logins, caches and
paths of the build machine do not belong into an image. Forms of GPU code and their sources:

- AMDGPU ELF (``.co``, ``.hsaco``): ``e_machine`` 224, processor in ``e_flags`` (LLVM's
  AMDGPUUsage).
- Offload bundles, plain (``__CLANG_OFFLOAD_BUNDLE__``) and compressed (``CCOB``), as a file or
  page-aligned one after the other in ``.hip_fatbin`` of a host library (clang's
  ClangOffloadBundler documentation).
- Kernel packs (``KPAK``) and the host libraries that name them in ``.rocm_kpack_ref``: AMD's wheels
  split GPU code off the host libraries that way (ROCm/rocm-systems, rocm-kpack).
- Files that say it by name: Tensile's and hipBLASLt's ``.dat``, and MIOpen's databases.
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

Kind = Literal["wheel", "deb", "header", "library", "vendored"]
Rule = Literal["secret", "credentials", "cache", "build path"]
Form = Literal[
    "fat binary", "code object", "bundle", "kernel file", "kernel pack", "host of a pack"
]

PATTERNS: Mapping[str, Any] = read_values(Path(__file__).with_name("patterns.yaml")).data
NAMES = {name: re.compile(pattern) for name, pattern in PATTERNS["names"].items()}
_METADATA_ROW = re.compile(PATTERNS["metadata_rows"], re.M)
_OF_EXTRA = re.compile(PATTERNS["of_extra"])
_LOGIN = re.compile(PATTERNS["login"])
_HEADERS = PATTERNS["headers"]
_LIBRARIES = {
    name: (component, re.compile(pattern.encode()))
    for name, (component, pattern) in PATTERNS["libraries"].items()
}
_SECRETS = {kind: re.compile(pattern.encode()) for kind, pattern in PATTERNS["secrets"].items()}
_TEMPORARY = PATTERNS["build_paths"]["temporary"].encode()
_HOMES = PATTERNS["build_paths"]["homes"].encode()
ELF = b"\x7fELF"
_PART = 1 << 20
# The longest match: a private key with header lines before its body.
_AHEAD = 1 << 14
_PACK = b"KPAK"


def _matches(pattern: re.Pattern[bytes], data: bytes | mmap) -> Iterator[re.Match[bytes]]:
    """Yield all matches.

    A search keeps all other threads from running, so each one is for a part of the data.
    """
    for begin in range(0, len(data), _PART):
        for match in pattern.finditer(data, begin, begin + _PART + _AHEAD):
            if match.start() < begin + _PART:
                yield match
        if isinstance(data, mmap):
            # Without it, all of a file of gigabytes that was searched would stay in the memory of
            # this process.
            data.madvise(MADV_DONTNEED, begin, min(_PART, len(data) - begin))


def _file_name(path: str) -> str:
    return path.rpartition("/")[2]


def named(kind: str, path: str) -> re.Match[str] | None:
    """Return the match if ``path`` is named like ``kind`` of ``patterns.yaml``."""
    return NAMES[kind].fullmatch(path)


@dataclass(frozen=True)
class Stated:
    """A version that a file of the image states.

    ``name`` is normalised for wheels, the component for headers and libraries. ``requires`` are a
    wheel's requirements (PEP 508) without those of its extras, or the packages that a Debian one
    depends on. ``licence`` are the rows about it in a wheel's metadata, ``source`` name and version
    of a Debian source package, or the package that brings a vendored one along.
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
    kinds = ("status", "metadata", "vendored")
    return any(named(kind, path) for kind in kinds) or _file_name(path) in _HEADERS


def stated_in(path: str, text: str) -> list[Stated]:
    """Return the versions in the file's text; none for other files."""
    if named("status", path):
        return _installed_debs(path, text)
    if named("metadata", path):
        return _wheel(path, text)
    vendored = named("vendored", path)
    if vendored:
        owner = vendored["owner"]
        return [replace(item, kind="vendored", source=owner) for item in _wheel(path, text)]
    if _file_name(path) in _HEADERS:
        return _component_of_header(path, text)
    return []


def _installed_debs(path: str, text: str) -> list[Stated]:
    debs = []
    for block in text.split("\n\n"):
        package: dict[str, str] = dict(
            re.findall(r"^(Package|Version|Status|Source|Depends): (.+)$", block, re.M)
        )
        if not package.get("Status", "").endswith(" installed"):
            continue
        name = package["Package"]
        version = package["Version"]
        # A binary package that was built again has another version than its source.
        source_row = package.get("Source") or name
        source, _, source_version = source_row.rstrip(")").partition(" (")
        source = f"{source} {source_version or version}"
        needs = tuple(re.findall(r"(?:^|[,|]) *([a-z0-9][a-z0-9.+-]+)", package.get("Depends", "")))
        debs.append(Stated("deb", name, version, path, requires=needs, source=source))
    return debs


def _wheel(path: str, text: str) -> list[Stated]:
    head = text.partition("\n\n")[0]
    rows = _METADATA_ROW.findall(head)
    values = dict(rows)
    name = values.get("Name")
    version = values.get("Version")
    if name is None or version is None:
        return []
    requires = []
    licence = []
    for row in rows:
        key, value = row
        if key == "Requires-Dist" and not _OF_EXTRA.search(value):
            requires.append(value)
        if key.startswith("License") or value.startswith("License ::"):
            licence.append(row)
    wheel = Stated(
        kind="wheel",
        name=normalised(name),
        version=version,
        path=path,
        requires=tuple(requires),
        licence=tuple(licence),
    )
    return [wheel]


def _component_of_header(path: str, text: str) -> list[Stated]:
    component, prefix = _HEADERS[_file_name(path)]
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        macro = rf"^\s*#\s*define\s+{prefix}_{part}\s+(\d+)"
        match = re.search(macro, text, re.M)
        if match is None:
            return []
        numbers.append(match[1])
    return [Stated("header", component, ".".join(numbers), path)]


def stated_in_library(path: str, data: bytes | mmap) -> list[Stated]:
    """Return the version in a library's file name or own text; none if the text has no one version.

    ``data`` are the library's bytes.
    """
    file_name = _file_name(path)
    versioned = named("library_version", file_name)
    if versioned:
        return [Stated("library", versioned[1].lower(), versioned[2], path)]
    name = file_name.partition(".so")[0]
    if name not in _LIBRARIES:
        return []
    component, pattern = _LIBRARIES[name]
    versions = {match[1].decode() for match in _matches(pattern, data)}
    if len(versions) != 1:
        return []
    return [Stated("library", component, versions.pop(), path)]


@dataclass(frozen=True)
class Trace:
    """What does not belong into an image: the rule, the path, and what was seen.

    Of a secret, only its kind is recorded.
    """

    rule: Rule
    path: str
    seen: str


def traces_in(path: str, data: bytes | mmap, machine_paths: Sequence[bytes] = ()) -> list[Trace]:
    """Return the secrets and build paths in a file, each once.

    ``machine_paths`` are folders of the build machine.
    """
    traces = [Trace("secret", path, kind) for kind in secrets_in(data)]
    top_folders = set()
    for match in _matches(_path_pattern(tuple(machine_paths), data[:4] == ELF), data):
        text = match[0][:120].decode("utf-8", "replace")
        # As long as "/home/" and "/root/"; of "/tmp/…", it includes the first letter of the tool.
        top_folder = text[:6]
        # Of temporary and home folders, one trace per file is enough; others are usually below the
        # same folder.
        if match["machine"] is not None or top_folder not in top_folders:
            traces.append(Trace("build path", path, text))
        top_folders.add(top_folder)
    return list(dict.fromkeys(traces))


@cache
def _path_pattern(machine_paths: tuple[bytes, ...], elf: bool) -> re.Pattern[bytes]:
    # The longest path first: a folder of this machine may lie in another one.
    longest_first = sorted(machine_paths, key=len, reverse=True)
    escaped = [re.escape(path[1:]) for path in longest_first]
    machine = b"|".join(escaped) or rb"(?!)"
    forms = [b"(?P<machine>%b)" % machine, _TEMPORARY]
    if elf:
        forms.append(_HOMES)
    return re.compile(b"/(?:%b)" % b"|".join(forms))


def secrets_in(data: bytes | mmap) -> list[str]:
    """Return the kind of each secret in ``data``."""
    kinds = []
    for kind, pattern in _SECRETS.items():
        for match in _matches(pattern, data):
            body = next(filter(None, match.groups()))
            # Placeholders repeat themselves or call themselves examples.
            if b"EXAMPLE" not in body.upper() and len(set(body)) >= 8:
                kinds.append(kind)
    return kinds


def may_hold_login(path: str) -> bool:
    """Whether :func:`login_in` looks into files with this name."""
    if named("apt_login", path):
        return True
    return f"/{path}".endswith(tuple(PATTERNS["login_files"]))


def login_in(path: str, text: str) -> list[Trace]:
    """Return the trace of a login in a file that may hold one."""
    if may_hold_login(path) and _LOGIN.search(text):
        return [Trace("credentials", path, "a login")]
    return []


def path_traces(path: str, kind: str) -> list[Trace]:
    """Return the litter that a path's name alone identifies; empty folders do not count."""
    if kind == "dir" or re.fullmatch(PATTERNS["no_cache"], path):
        return []
    for pattern, meaning in PATTERNS["caches"].items():
        if re.fullmatch(pattern, path):
            return [Trace("cache", path, meaning)]
    return []


@dataclass(frozen=True)
class Code:
    """GPU code that one file contains or refers to.

    ``targets`` are target ids (``gfx942``, ``gfx90a:xnack-``). A host library whose code is in a
    kernel pack has none: its code is ``kernel`` in one of ``packs``, paths relative to its folder
    with ``@GFXARCH@`` for the architecture. For a pack, ``kernels`` lists the targets of each such
    library.
    """

    path: str
    form: Form
    size: int
    targets: tuple[str, ...] = ()
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
            return _code_of_elf(path, stream, size)
        if head.startswith((PLAIN, COMPRESSED)):
            return Code(path, "bundle", size, _bundle_targets(stream, 0, size))
        if head.startswith(_PACK):
            return _code_of_pack(path, stream, size)
    except (OverflowError, TypeError, struct.error) as error:
        # Offsets in a damaged file may exceed the largest offset of a file.
        raise ValueError(f"a damaged file: {error}") from None
    architectures = in_path(path)
    if architectures and is_kernel_file(path):
        return Code(path, "kernel file", size, architectures[-1:])
    return None


def _code_of_elf(path: str, stream: IO[bytes], size: int) -> Code | None:
    elf = read_elf(stream)
    if elf.machine == AMDGPU:
        target = of_flags(elf.flags, elf.abi)
        return Code(path, "code object", size, (target,))
    sections = elf.places()
    if ".rocm_kpack_ref" in sections:
        offset, length = sections[".rocm_kpack_ref"]
        stream.seek(offset)
        reference = _unpacked(stream.read(min(length, 1 << 20)))
        return _host_of_pack(path, size, reference)
    if ".hip_fatbin" in sections:
        offset, length = sections[".hip_fatbin"]
        targets = _bundle_targets(stream, offset, length)
        return Code(path, "fat binary", size, targets)
    return None


def _bundle_targets(stream: IO[bytes], offset: int, size: int) -> tuple[str, ...]:
    targets: dict[str, None] = {}
    for bundle in bundles_in(stream, offset, size):
        for part in bundle.parts:
            target = in_entry_id(part.id)
            if target and part.size:
                targets[target] = None
    return tuple(targets)


def _host_of_pack(path: str, size: int, reference: object) -> Code:
    if isinstance(reference, dict):
        packs = reference.get("kpack_search_paths")
        if isinstance(packs, list):
            kernel = str(reference.get("kernel_name", ""))
            return Code(path, "host of a pack", size, packs=tuple(map(str, packs)), kernel=kernel)
    raise ValueError("its .rocm_kpack_ref names no kernel packs")


def _code_of_pack(path: str, stream: IO[bytes], size: int) -> Code:
    stream.seek(0)
    head = stream.read(16)
    _, _, start = struct.unpack("<4sIQ", head)
    if not 16 <= start < size:
        raise ValueError("a kernel pack has its table outside the file")
    stream.seek(start)
    table = _unpacked(stream.read())
    if not isinstance(table, dict) or "toc" not in table:
        raise ValueError("a kernel pack has no table")
    libraries = dict(table["toc"])
    kernels = {}
    targets: set[str] = set()
    for name, by_target in libraries.items():
        library = str(name)
        kernels[library] = tuple(sorted(map(str, by_target)))
        targets.update(kernels[library])
    in_order = tuple(sorted(targets))
    return Code(path, "kernel pack", size, in_order, kernels=kernels)


def _unpacked(data: bytes) -> Any:
    """Return the first MessagePack value in ``data``; padding may follow it. Raises ValueError."""
    try:
        return msgpack.unpackb(data, strict_map_key=False, unicode_errors="replace")
    except msgpack.ExtraData as error:
        return error.unpacked
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not MessagePack: {error}") from None


@dataclass(frozen=True)
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
    def file_name(self) -> str:
        """The last part of its path."""
        return _file_name(self.path)

    @property
    def names(self) -> set[str]:
        """The names by which a loader may find it.

        They are its soname and, if it is named like a library, its file name.
        """
        names = set()
        for name in (self.soname, self.file_name):
            is_library = name == self.soname or named("library", name)
            if name and is_library and not named("module", name):
                names.add(name)
        return names


def library_of(path: str, stream: IO[bytes], size: int) -> Library | None:
    """Return the ELF file as the loader sees it; None for one that it does not load.

    Raises ValueError if it is damaged.
    """
    elf = read_elf(stream)
    if elf.kind != DYN or elf.machine == AMDGPU:
        return None
    soname, needed = linked_in(elf, stream)
    return Library(path, soname, needed, elf.machine, size)


def owner_of(layer: str, path: str) -> str:
    """Return the owner of a path: its layer or, in site-packages, its top folder."""
    match = NAMES["site"].match(path)
    if match:
        return f"{layer} ({match[1]})"
    return layer
