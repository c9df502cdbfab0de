"""The image can load each of its libraries.

A package for several CUDA versions brings a library for each and loads the one that fits. The image
holds one CUDA, so the others only make every download longer.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from primus_images.gates.contents import PATTERNS, Library, owner_of
from primus_images.gates.examined import Examined, Finding, GateReport, Severity
from primus_images.terminal import bytes_text

_TOOLKITS = {name: tuple(map(re.compile, pair)) for name, pair in PATTERNS["toolkits"].items()}
_IMAGE = 62
_SEVERITIES = ("error", "warning", "note")


def judge(examined: Examined) -> GateReport:
    """Return an error for a variant for another major version of the image's own toolkit, next to
    the right variant; a warning for a library for another processor; a note for a library that
    needs one which the image does not have.
    """
    rows = [
        (layer, library) for layer, facts in examined.facts.items() for library in facts.libraries
    ]
    names = {
        name for _, library in rows for name in (library.soname, library.path.rpartition("/")[2])
    }
    toolkits = _toolkits(names)
    of_the_host = re.compile(PATTERNS["driver_libraries"])
    paths = {library.path for _, library in rows}
    groups: dict[tuple[Severity, str, str], list[tuple[str, Library]]] = {}
    for layer, library in rows:
        severity: Severity
        if library.machine not in (_IMAGE, 0):
            severity = "warning"
            name = PATTERNS["processors"].get(str(library.machine), library.machine)
            message = f"is for {name} processors"
        elif variant := _other_variant(library.path, toolkits, paths):
            severity = "error"
            message = (
                f"is for {variant[0]}, this image has {variant[1]} and loads the library for it"
            )
        elif missing := [
            n for n in library.needed if n not in names and not of_the_host.fullmatch(n)
        ]:
            severity = "note"
            message = f"needs {', '.join(sorted(missing))}, which the image does not have"
        else:
            continue
        groups.setdefault((severity, owner_of(layer, library.path), message), []).append(
            (layer, library)
        )
    findings = [
        _finding(severity, libraries, message)
        for (severity, _, message), libraries in groups.items()
    ]
    findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    summary = f"{len(rows)} libraries, modules and programs" + "".join(
        f"; {k} {v}" for k, v in toolkits.items()
    )
    return GateReport(summary=summary, findings=tuple(findings))


def toolkit_of(path: str) -> dict[str, set[int]]:
    """Return toolkit → major versions that the path names."""
    return {
        name: {_major(name, match[2]) for match in pattern.finditer(path)}
        for name, (_, pattern) in _TOOLKITS.items()
        if pattern.search(path)
    }


def _toolkits(names: Iterable[str]) -> dict[str, int]:
    """Return toolkit → its major version in the image. A toolkit with several versions is left out."""
    versions = {
        toolkit: {int(match[1]) for name in names if (match := runtime.match(name))}
        for toolkit, (runtime, _) in _TOOLKITS.items()
    }
    return {toolkit: majors.pop() for toolkit, majors in versions.items() if len(majors) == 1}


def _other_variant(
    path: str, toolkits: Mapping[str, int], paths: set[str]
) -> tuple[str, str] | None:
    """Return for example ("CUDA 12", "CUDA 13") if the path names the first and a sibling the
    image's version.
    """
    for toolkit, ours in toolkits.items():
        theirs = toolkit_of(path).get(toolkit, set())
        if not theirs or ours in theirs:
            continue
        pattern = _TOOLKITS[toolkit][1]
        generic = pattern.sub(r"\1*", path)
        if any(
            ours in toolkit_of(p).get(toolkit, ()) and pattern.sub(r"\1*", p) == generic
            for p in paths
        ):
            return f"{toolkit} {min(theirs)}", f"{toolkit} {ours}"
    return None


def _major(toolkit: str, digits: str) -> int:
    """Return the major version: 12 for cu12 and cuda124; 7 for rocm72, 10 for rocm10 and rocm101."""
    if toolkit == "ROCm" and digits[0] > "4":
        return int(digits[0])
    return int(digits[:2])


def _finding(severity: Severity, group: Sequence[tuple[str, Library]], what: str) -> Finding:
    (layer, first), *rest = sorted(group, key=lambda pair: -pair[1].size)
    size = sum(library.size for _, library in group)
    more = ""
    if rest:
        more = f" (and {len(rest)} more beside it)"
    message = f"{what}{more}; {bytes_text(size)} unpacked"
    return Finding(severity=severity, layer=layer, path=first.path, message=message)
