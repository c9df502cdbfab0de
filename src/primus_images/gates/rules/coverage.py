"""Every GPU library has code for the image's GPU.

A library without it fails at its first kernel, hours after the job started.
"""

import posixpath
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from primus_images.gates.contents import Code
from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.gpucode.elf import in_path, runs_on

# Such a folder counts as one library: each file is for one architecture, or for all.
_PARTS = ("code object", "bundle", "kernel file")


class GpuLibrary(NamedTuple):
    """A file with GPU code, or a folder of kernel files.

    ``problem`` is why its code cannot be found, if it cannot.
    """

    layer: str
    path: str
    form: str
    targets: tuple[str, ...]
    problem: str = ""


class _Part(NamedTuple):
    layer: str
    code: Code


def gpu_libraries(examined: Examined) -> list[GpuLibrary]:
    """Return the image's GPU libraries. The code of host libraries is looked up in their packs."""
    parts = []
    packs = {}
    for layer, facts in examined.facts.items():
        for code in facts.code:
            if code.form == "kernel pack":
                packs[code.path] = code
            else:
                parts.append(_Part(layer, code))
    libraries = []
    folders: dict[str, list[_Part]] = {}
    for part in parts:
        layer, code = part
        if code.form in _PARTS:
            folder = _kernel_folder(code.path)
            folders.setdefault(folder, []).append(part)
            continue
        targets = code.targets
        problem = ""
        if code.form == "host of a pack":
            targets, problem = _in_packs(code, packs, examined.arch)
        library = GpuLibrary(layer, code.path, code.form, targets, problem)
        libraries.append(library)
    for folder, inside in folders.items():
        libraries.append(_folder_library(folder, inside))
    return sorted(libraries)


def _folder_library(folder: str, parts: Sequence[_Part]) -> GpuLibrary:
    # If the folder has code, only the code counts: a catalogue (`.dat`) alone runs nothing.
    with_code = [part for part in parts if part.code.form != "kernel file"]
    targets: dict[str, None] = {}
    for part in with_code or parts:
        targets |= dict.fromkeys(part.code.targets)
    layers = ", ".join(dict.fromkeys(part.layer for part in parts))
    return GpuLibrary(layers, f"{folder}/", "kernel files", tuple(targets))


def _kernel_folder(path: str) -> str:
    """Return the folder whose files belong together: what precedes the architecture's name."""
    folders = []
    for name in path.split("/")[:-1]:
        if in_path(name):
            break
        folders.append(name)
    return "/".join(folders)


def _in_packs(
    code: Code, packs: Mapping[str, Code], arch: str | None
) -> tuple[tuple[str, ...], str]:
    """Return the targets for which a host library's packs contain code, or why they have none."""
    if arch is None:
        return (), ""
    folder = posixpath.dirname(code.path)
    candidates = []
    for pack in code.packs:
        path = posixpath.join(folder, pack.replace("@GFXARCH@", arch))
        candidates.append(posixpath.normpath(path))
    present = [path for path in candidates if path in packs]
    for path in present:
        targets = packs[path].kernels.get(code.kernel, ())
        if targets:
            return targets, ""
    if present:
        return (), f"/{present[0]} has no kernels of {code.kernel}"
    listed = ", ".join(f"/{path}" for path in candidates)
    return (), f"its kernel pack {listed} is not in the image"


def judge(examined: Examined) -> GateReport:
    """Return one error per GPU library without code for the image's GPU.

    A file that cannot be read is a warning. CUDA libraries are not judged: they also contain code
    in forms that are not read here (compressed entries, link-time code), and PTX runs on later
    GPUs. HIP has neither.
    """
    arch = examined.arch
    libraries = gpu_libraries(examined)
    findings = []
    for layer, facts in examined.facts.items():
        for path, reason in facts.unreadable.items():
            findings.append(Finding("warning", f"could not be examined: {reason}", layer, path))
    if arch is None:
        summary = "no GPU architecture to cover"
        if libraries:
            summary += f"; {len(libraries)} GPU libraries are in it all the same"
        return GateReport(summary=summary, findings=findings)
    if not arch.startswith("gfx"):
        return GateReport(summary=f"code for {arch} is not judged", findings=findings)
    if not libraries:
        message = f"no GPU library is in the image, and it is meant for {arch}"
        findings.append(Finding("error", message))
    covered = 0
    for library in libraries:
        if runs_on(library.targets, arch):
            covered += 1
            continue
        targets = ", ".join(library.targets) or "no GPU code"
        problem = library.problem or f"it has {targets}"
        message = f"no code for {arch}: {problem} ({library.form})"
        findings.append(Finding("error", message, library.layer, library.path))
    summary = f"{covered} of {len(libraries)} GPU libraries cover {arch}"
    return GateReport(summary=summary, findings=findings)
