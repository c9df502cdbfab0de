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
    """A file with GPU code, or a folder of kernel files. ``problem`` is why its code cannot be
    found, if it cannot.
    """

    layer: str
    path: str
    form: str
    targets: tuple[str, ...]
    problem: str = ""


def gpu_libraries(examined: Examined) -> tuple[GpuLibrary, ...]:
    """Return the image's GPU libraries. The code of host libraries is looked up in their packs."""
    packs = {
        c.path: c
        for facts in examined.facts.values()
        for c in facts.code
        if c.form == "kernel pack"
    }
    libraries: list[GpuLibrary] = []
    folders: dict[str, list[tuple[str, Code]]] = {}
    for layer, facts in examined.facts.items():
        for code in facts.code:
            if code.form in _PARTS:
                folders.setdefault(_folder(code), []).append((layer, code))
            elif code.form != "kernel pack":
                of_pack = code.form == "host of a pack"
                targets, problem = (
                    _follow(code, packs, examined.arch) if of_pack else (code.targets, "")
                )
                library = GpuLibrary(
                    layer=layer, path=code.path, form=code.form, targets=targets, problem=problem
                )
                libraries.append(library)
    libraries += [_folder_library(folder, parts) for folder, parts in folders.items()]
    return tuple(sorted(libraries, key=lambda lib: (lib.layer, lib.path)))


def _folder_library(folder: str, parts: Sequence[tuple[str, Code]]) -> GpuLibrary:
    # If the folder has code, only the code counts: a catalogue (`.dat`) alone runs nothing.
    code = [part for part in parts if part[1].form in ("code object", "bundle")]
    return GpuLibrary(
        layer=", ".join(dict.fromkeys(layer for layer, _ in parts)),
        path=folder + "/",
        form="kernel files",
        targets=tuple(
            dict.fromkeys(target for _, part in code or parts for target in part.targets)
        ),
    )


def _folder(code: Code) -> str:
    """Return the folder whose files belong together: the part of the path above the architecture's
    name.
    """
    parts = code.path.split("/")[:-1]
    return "/".join(parts[: next((i for i, part in enumerate(parts) if in_path(part)), len(parts))])


def _follow(code: Code, packs: Mapping[str, Code], arch: str | None) -> tuple[tuple[str, ...], str]:
    """Return the targets for which a host library's packs contain code, or why they have none."""
    if arch is None:
        return (), ""
    candidates = [
        posixpath.normpath(
            posixpath.join(posixpath.dirname(code.path), path.replace("@GFXARCH@", arch))
        )
        for path in code.packs
    ]
    present = [path for path in candidates if path in packs]
    for path in present:
        targets = packs[path].kernels.get(code.kernel, ())
        if targets:
            return targets, ""
    if present:
        return (), f"/{present[0]} has no kernels of {code.kernel}"
    names = {posixpath.basename(path) for path in candidates}
    astray = next((path for path in packs if posixpath.basename(path) in names), None)
    listed = ", ".join(f"/{path}" for path in candidates)
    return (), f"its kernel pack {listed} is not in the image" + (
        f", /{astray} is" if astray else ""
    )


def judge(examined: Examined) -> GateReport:
    """Return one error per GPU library without code for the image's GPU, and a warning per file
    that cannot be read.

    CUDA libraries are not judged: they also contain code in forms that are not read here
    (compressed entries, link-time code), and PTX runs on later GPUs. HIP has neither.
    """
    arch = examined.arch
    libraries = gpu_libraries(examined)
    findings = [
        Finding(
            severity="warning", layer=layer, path=path, message=f"could not be examined: {reason}"
        )
        for layer, facts in examined.facts.items()
        for path, reason in facts.unreadable.items()
    ]
    if arch is None or not arch.startswith("gfx"):
        with_code = ""
        if libraries:
            with_code = f"; {len(libraries)} GPU libraries are in it all the same"
        if arch:
            summary = f"code for {arch} is not judged"
        else:
            summary = f"no GPU architecture to cover{with_code}"
        return GateReport(summary=summary, findings=tuple(findings))
    uncovered = [library for library in libraries if not runs_on(library.targets, arch)]
    for library in uncovered:
        has = library.problem or f"it has {', '.join(library.targets) or 'no GPU code'}"
        message = f"no code for {arch}: {has} ({library.form})"
        findings.append(
            Finding(severity="error", layer=library.layer, path=library.path, message=message)
        )
    if not libraries:
        message = f"no GPU library is in the image, and it is meant for {arch}"
        findings.append(Finding(severity="error", message=message))
    summary = f"{len(libraries) - len(uncovered)} of {len(libraries)} GPU libraries cover {arch}"
    return GateReport(summary=summary, findings=tuple(findings))
