"""The versions an image states of itself against those of the lock: a difference means other bytes than were pinned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.version import InvalidVersion, Version

from primus.gates.finding import Finding, GateReport
from primus.versions.components import normalised

__all__ = ["Stated", "stated_in", "states_versions", "versions_inside"]

_GATE = "versions"

Kind = Literal["wheel", "deb", "header"]

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


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A version that a file of the image states. ``name`` is normalised for wheels, the component for headers."""

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


def versions_inside(
    layers: Iterable[tuple[str, Iterable[Stated]]],
    *,
    wheels: Mapping[str, str],
    debs: Mapping[str, str],
    components: Mapping[str, str] | None = None,
) -> GateReport:
    """One error per difference, naming both versions.

    ``wheels`` and ``debs`` are the lock's, name → version; ``components`` are pins (``rccl`` → version), against
    which library headers are held. A header without a pin of its own is noted, so that its version is on record.
    """
    locked: dict[Kind, Mapping[str, str]] = {"wheel": wheels, "deb": debs, "header": components or {}}
    seen: dict[Kind, dict[str, str]] = {"wheel": {}, "deb": {}, "header": {}}
    findings: list[Finding] = []

    def find(layer: str, item: Stated, message: str, *, note: bool = False) -> None:
        severity: Literal["note", "error"] = "note" if note else "error"
        findings.append(Finding(gate=_GATE, severity=severity, layer=layer, path=item.path, message=message))

    for layer, stated in layers:
        for item in stated:
            want = locked[item.kind].get(item.name)
            before = seen[item.kind].get(item.name)
            seen[item.kind][item.name] = item.version
            if item.kind == "header" and want is None:
                find(layer, item, f"{item.name} {item.version} by its header; no pin says which it must be", note=True)
            elif want is None:
                find(layer, item, f"{item.name} {item.version} is in the image, the lock has no such {item.kind}")
            elif not _same(item.kind, item.version, want):
                find(layer, item, f"{item.name} is {item.version} in the image, {want} in the lock")
            elif item.kind == "wheel" and before is not None:
                find(layer, item, f"{item.name} is in the image twice, as {before} and {item.version}")
    for kind in ("wheel", "deb"):
        for name in sorted(set(locked[kind]) - set(seen[kind])):
            message = f"{name} {locked[kind][name]} is in the lock, the image has no such {kind}"
            findings.append(Finding(gate=_GATE, severity="error", message=message))
    counted = ", ".join(f"{len(found)} {kind}{'s' if len(found) != 1 else ''}" for kind, found in seen.items() if found)
    return GateReport(gate=_GATE, summary=counted or "no versions stated", findings=tuple(findings))


def _same(kind: Kind, stated: str, locked: str) -> bool:
    if kind == "header":
        # A pin may say more than three numbers: a commit, a build.
        return re.split(r"[.+~-]", locked)[:3] == stated.split(".")
    if kind == "wheel":
        # PEP 440 reads `1.0-1`, `1.0.post1` and `1.0.POST1` as one version.
        try:
            return Version(stated) == Version(locked)
        except InvalidVersion:
            return stated == locked
    return stated == locked
