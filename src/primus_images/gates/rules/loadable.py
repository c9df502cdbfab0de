"""The image can load each of its libraries.

A package for several CUDA versions brings a library for each and loads the one that fits. The image
holds one CUDA, so the others only make every download longer.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from primus_images.gates.contents import PATTERNS, Library, owner_of
from primus_images.gates.examined import Examined, Finding, GateReport, Severity
from primus_images.terminal import bytes_text

_CUDA_RUNTIME = re.compile(PATTERNS["cuda_runtime"])
_CUDA_VERSION = re.compile(PATTERNS["cuda_version"])
_DRIVER_LIBRARIES = re.compile(PATTERNS["driver_libraries"])
_X86_64 = 62
_SEVERITIES = ("error", "warning", "note")


class _Problem(NamedTuple):
    severity: Severity
    owner: str
    message: str


def judge(examined: Examined) -> GateReport:
    """Return what cannot be loaded, one finding for all libraries of an owner with one problem.

    It is an error for a variant for another CUDA than the image's, next to the right variant; a
    warning for a library for another processor; a note for a library that needs one which the image
    does not have.
    """
    libraries = []
    for layer, facts in examined.facts.items():
        libraries += [(layer, library) for library in facts.libraries]
    names = set()
    for _, library in libraries:
        names |= {library.soname, library.file_name}
    cuda = _cuda_of_image(names)
    # The paths of the image's own variants, without the version.
    variants = set()
    for _, library in libraries:
        if cuda in cuda_versions(library.path):
            variants.add(_without_version(library.path))
    affected: dict[_Problem, list[tuple[str, Library]]] = {}
    for layer, library in libraries:
        owner = owner_of(layer, library.path)
        versions = cuda_versions(library.path)
        missing = _missing(library, names)
        if library.machine not in (_X86_64, 0):
            processor = PATTERNS["processors"].get(str(library.machine), library.machine)
            problem = _Problem("warning", owner, f"is for {processor} processors")
        elif versions and cuda not in versions and _without_version(library.path) in variants:
            message = (
                f"is for CUDA {min(versions)}, this image has CUDA {cuda} and loads the library "
                "for it"
            )
            problem = _Problem("error", owner, message)
        elif missing:
            message = f"needs {', '.join(missing)}, which the image does not have"
            problem = _Problem("note", owner, message)
        else:
            continue
        affected.setdefault(problem, []).append((layer, library))
    findings = [_finding(problem, of_owner) for problem, of_owner in affected.items()]
    findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    summary = f"{len(libraries)} libraries, modules and programs"
    if cuda:
        summary += f"; CUDA {cuda}"
    return GateReport(summary=summary, findings=findings)


def cuda_versions(path: str) -> set[int]:
    """Return the major versions of CUDA that the path names: 12 for cu12 and cuda124."""
    return {int(match[2]) for match in _CUDA_VERSION.finditer(path)}


def _without_version(path: str) -> str:
    return _CUDA_VERSION.sub(r"\1*", path)


def _cuda_of_image(names: Iterable[str]) -> int:
    """Return the major version of CUDA in the image; 0 if there is none, or more than one."""
    runtimes = filter(None, map(_CUDA_RUNTIME.match, names))
    versions = {int(runtime[1]) for runtime in runtimes}
    if len(versions) == 1:
        return versions.pop()
    return 0


def _missing(library: Library, names: set[str]) -> list[str]:
    absent = set(library.needed) - names
    return sorted(name for name in absent if not _DRIVER_LIBRARIES.fullmatch(name))


def _finding(problem: _Problem, libraries: list[tuple[str, Library]]) -> Finding:
    layer, largest = libraries[0]
    size = 0
    for other_layer, library in libraries:
        size += library.size
        if library.size > largest.size:
            layer = other_layer
            largest = library
    message = problem.message
    others = len(libraries) - 1
    if others:
        message += f" (and {others} more beside it)"
    message += f"; {bytes_text(size)} unpacked"
    return Finding(problem.severity, message, layer, largest.path)
