"""The versions an image states of itself against those of the lock: a difference means other bytes than were pinned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Literal

from packaging.version import InvalidVersion, Version

from primus.gates.finding import Finding, GateReport
from primus.versions.components import normalised

__all__ = ["Stated", "stated_in", "stated_in_library", "states_versions", "versions_inside"]

_GATE = "versions"
_PLURALS = {"wheel": "wheels", "deb": "debs", "header": "headers", "library": "libraries"}

Kind = Literal["wheel", "deb", "header", "library"]

# A package inside another one (setuptools/_vendor) is no package of the image; one of a deb is judged as a deb.
_METADATA = re.compile(r"(?!usr/lib/python3).*/(?:site|dist)-packages/[^/]+\.dist-info/METADATA")
_STATUS = "var/lib/dpkg/status"
# One file per package, in images whose database belongs to another layer.
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


# Library → (component, how its own text states the version). Libraries come without their headers. hipBLASLt and MIOpen
# state theirs in no text; a distribution's file name ends in it.
_LIBRARIES = {
    "librccl.so": ("rccl", re.compile(rb"(?:RCCL version ?:? ?|NCCL version )([0-9]+\.[0-9]+\.[0-9]+)")),
    "librocblas.so": ("rocblas", re.compile(rb"(?<![0-9.])([0-9]+\.[0-9]+\.[0-9]+)\.[0-9a-f]{7,40}(?:-dirty)?\x00")),
}
_NAMED = re.compile(r"lib(hipblaslt|MIOpen)\.so\.([0-9]+\.[0-9]+(?:\.[0-9]{1,3})?)(?:\..*)?")


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A version that a file of the image states. ``name`` is normalised for wheels, the component for headers and
    libraries.
    """

    kind: Kind
    name: str
    version: str
    path: str


def states_versions(path: str) -> bool:
    """Whether :func:`stated_in` reads files of this name."""
    return (
        path == _STATUS
        or path.startswith(_STATUS_OF_ONE)
        or path.rpartition("/")[2] in _HEADERS
        or _METADATA.fullmatch(path) is not None
    )


def stated_in(path: str, text: str) -> list[Stated]:
    """The versions in the file's text; none for a file of another name."""
    if path == _STATUS or path.startswith(_STATUS_OF_ONE):
        return [
            Stated(kind="deb", name=fields["Package"], version=fields["Version"], path=path)
            for block in text.split("\n\n")
            if (fields := dict(re.findall(r"^(Package|Version|Status): (.+)$", block, re.M)))
            .get("Status", "")
            .endswith(" installed")
        ]
    if _METADATA.fullmatch(path):
        head = dict(re.findall(r"^(Name|Version): (.+?)\s*$", text.partition("\n\n")[0], re.M))
        if len(head) == 2:
            return [Stated(kind="wheel", name=normalised(head["Name"]), version=head["Version"], path=path)]
        return []
    if names := _HEADERS.get(path.rpartition("/")[2]):
        numbers = [re.search(rf"^\s*#\s*define\s+{macro}\s+(\d+)", text, re.M) for macro in names[1:]]
        if all(numbers):
            version = ".".join(n[1] for n in numbers if n)
            return [Stated(kind="header", name=names[0], version=version, path=path)]
    return []


def stated_in_library(path: str, file: IO[bytes]) -> list[Stated]:
    """The version that a library's own text states; none for other libraries, and for one that states none or two."""
    stem = path.rpartition("/")[2]
    if named := _NAMED.fullmatch(stem):
        return [Stated(kind="library", name=named[1].lower(), version=named[2], path=path)]
    name, pattern = _LIBRARIES.get(stem[: stem.find(".so") + 3], ("", None))
    if pattern is None:
        return []
    found: set[bytes] = set()
    file.seek(0)
    rest = b""
    # Libraries weigh gigabytes; a version is short.
    while block := file.read(8 << 20):
        found |= set(pattern.findall(rest + block))
        rest = block[-128:]
    if len(found) != 1:
        return []
    return [Stated(kind="library", name=name, version=found.pop().decode(), path=path)]


def versions_inside(
    layers: Iterable[tuple[str, Iterable[Stated]]],
    *,
    wheels: Mapping[str, str],
    debs: Mapping[str, str],
    components: Mapping[str, str] | None = None,
    inside: Mapping[str, str] | None = None,
) -> GateReport:
    """One error per difference, naming both versions.

    ``wheels`` and ``debs`` are the lock's, name → version; ``components`` are pins (``rccl`` → version), against
    which library headers and libraries are held. One without a pin of its own is noted, so that its version is on
    record. ``inside`` maps components without files of their own to what holds them; one whose version no header and no
    library states is noted, too.
    """
    pins = components or {}
    locked: dict[Kind, Mapping[str, str]] = {"wheel": wheels, "deb": debs, "header": pins, "library": pins}
    seen: dict[Kind, dict[str, str]] = {"wheel": {}, "deb": {}, "header": {}, "library": {}}
    findings: list[Finding] = []

    def find(layer: str, item: Stated, message: str, *, note: bool = False) -> None:
        severity: Literal["note", "error"] = "note" if note else "error"
        findings.append(Finding(gate=_GATE, severity=severity, layer=layer, path=item.path, message=message))

    for layer, stated in layers:
        for item in stated:
            want = locked[item.kind].get(item.name)
            before = seen[item.kind].get(item.name)
            seen[item.kind][item.name] = item.version
            if item.kind in ("header", "library") and want is None:
                by = f"{item.name} {item.version} by its {item.kind}"
                find(layer, item, f"{by}; no pin says which it must be", note=True)
            elif want is None:
                find(layer, item, f"{item.name} {item.version} is in the image, the lock has no such {item.kind}")
            elif not _same(item.kind, item.version, want):
                where = "in versions.yaml" if item.kind in ("header", "library") else "in the lock"
                find(layer, item, f"{item.name} is {item.version} in the image, {want} {where}")
            elif item.kind == "wheel" and before is not None:
                find(layer, item, f"{item.name} is in the image twice, as {before} and {item.version}")
    for kind in ("wheel", "deb"):
        for name in sorted(set(locked[kind]) - set(seen[kind])):
            message = f"{name} {locked[kind][name]} is in the lock, the image has no such {kind}"
            findings.append(Finding(gate=_GATE, severity="error", message=message))
    for name in sorted(set(inside or {}) - set(seen["header"]) - set(seen["library"])):
        message = f"{name} is pinned inside {(inside or {})[name]}, and no file of it states a version"
        findings.append(Finding(gate=_GATE, severity="note", message=message))
    counted = ", ".join(
        f"{len(found)} {_PLURALS[kind] if len(found) != 1 else kind}" for kind, found in seen.items() if found
    )
    return GateReport(gate=_GATE, summary=counted or "no versions stated", findings=tuple(findings))


def _same(kind: Kind, stated: str, locked: str) -> bool:
    if kind in ("header", "library"):
        # A pin may say more than three numbers: a commit, a build.
        numbers = stated.split(".")
        return re.split(r"[.+~-]", locked)[: len(numbers)] == numbers
    if kind == "wheel":
        # PEP 440 reads `1.0-1`, `1.0.post1` and `1.0.POST1` as one version.
        try:
            return Version(stated) == Version(locked)
        except InvalidVersion:
            return stated == locked
    return stated == locked
