"""The versions that files of an image state: wheels, Debian packages, headers, libraries."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import IO, Literal

from primus.versions.lock import normalised

Kind = Literal["wheel", "deb", "header", "library"]

# A package vendored in another one (setuptools/_vendor) does not count; one from a deb is judged as a deb.
_METADATA = r"(?!usr/lib/python3).*/(?:site|dist)-packages/[^/]+\.dist-info/METADATA"
# Nine of ten requirements are for an extra, and parsing them is slow. Markers with `or` are left to the parser.
_OF_EXTRA = r"^(?!.*\sor\s).*;.*\bextra\s*==\s*[\"']"
_STATUS = "var/lib/dpkg/status"
# One file per package, in images whose dpkg database belongs to another layer.
_STATUS_OF_ONE = f"{_STATUS}.d/"
# File name → (component, the three macros of its version).
_HEADERS = {
    "hipblaslt-version.h": (
        "hipblaslt",
        "HIPBLASLT_VERSION_MAJOR",
        "HIPBLASLT_VERSION_MINOR",
        "HIPBLASLT_VERSION_PATCH",
    ),
    "rccl.h": ("rccl", "NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"),
    "nccl.h": ("nccl", "NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"),
    "rocm_version.h": ("rocm", "ROCM_VERSION_MAJOR", "ROCM_VERSION_MINOR", "ROCM_VERSION_PATCH"),
}


# Library → (component, how its own text states the version). Libraries are installed without headers. hipBLASLt and
# MIOpen contain no such text; a distribution's file name ends with their version.
_LIBRARIES = {
    "librccl.so": ("rccl", rb"(?:RCCL version ?:? ?|NCCL version )([0-9]+\.[0-9]+\.[0-9]+)"),
    "librocblas.so": ("rocblas", rb"(?<![0-9.])([0-9]+\.[0-9]+\.[0-9]+)\.[0-9a-f]{7,40}(?:-dirty)?\x00"),
}
_NAMED = r"lib(hipblaslt|MIOpen)\.so\.([0-9]+\.[0-9]+(?:\.[0-9]{1,3})?)(?:\..*)?"


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A version that a file of the image states.

    ``name`` is normalised for wheels, the component for headers and libraries. ``requires`` are a wheel's
    requirements (PEP 508) without those of its extras.
    """

    kind: Kind
    name: str
    version: str
    path: str
    requires: tuple[str, ...] = ()


def states_versions(path: str) -> bool:
    """Whether :func:`stated_in` reads files with this name."""
    return (
        path == _STATUS or path.startswith(_STATUS_OF_ONE) or path.rpartition("/")[2] in _HEADERS or _is_metadata(path)
    )


def _is_metadata(path: str) -> bool:
    """Whether this is the metadata of an installed Python package."""
    return path.endswith(".dist-info/METADATA") and re.fullmatch(_METADATA, path) is not None


def stated_in(path: str, text: str) -> list[Stated]:
    """Return the versions in the file's text; none for other files."""
    if path == _STATUS or path.startswith(_STATUS_OF_ONE):
        return [
            Stated(kind="deb", name=fields["Package"], version=fields["Version"], path=path)
            for block in text.split("\n\n")
            if (fields := dict(re.findall(r"^(Package|Version|Status): (.+)$", block, re.M)))
            .get("Status", "")
            .endswith(" installed")
        ]
    if _is_metadata(path):
        rows = re.findall(r"^(Name|Version|Requires-Dist): (.+?)\s*$", text.partition("\n\n")[0], re.M)
        head = dict(rows)
        if not {"Name", "Version"} <= set(head):
            return []
        requires = tuple(value for name, value in rows if name == "Requires-Dist" and not re.search(_OF_EXTRA, value))
        return [
            Stated(kind="wheel", name=normalised(head["Name"]), version=head["Version"], path=path, requires=requires)
        ]
    if names := _HEADERS.get(path.rpartition("/")[2]):
        numbers = [re.search(rf"^\s*#\s*define\s+{macro}\s+(\d+)", text, re.M) for macro in names[1:]]
        if all(numbers):
            version = ".".join(n[1] for n in numbers if n)
            return [Stated(kind="header", name=names[0], version=version, path=path)]
    return []


def stated_in_library(path: str, file: IO[bytes]) -> list[Stated]:
    """Return the version in a library's own text; none for other libraries, and if the text has no version or two."""
    stem = path.rpartition("/")[2]
    if named := re.fullmatch(_NAMED, stem):
        return [Stated(kind="library", name=named[1].lower(), version=named[2], path=path)]
    name, pattern = _LIBRARIES.get(stem[: stem.find(".so") + 3], ("", None))
    if pattern is None:
        return []
    found: set[bytes] = set()
    file.seek(0)
    rest = b""
    # Libraries have gigabytes; a version is short.
    while block := file.read(8 << 20):
        found |= set(re.findall(pattern, rest + block))
        rest = block[-128:]
    if len(found) != 1:
        return []
    return [Stated(kind="library", name=name, version=found.pop().decode(), path=path)]
