"""Which GPU code an image of one GPU never loads."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, cast

from primus.gates.codeobjects import Code, code_in, is_kernel_file
from primus.gates.contents import Member
from primus.gates.finding import Finding, GateReport
from primus.gpucode.archs import in_path, runs_on
from primus.oci.left_out import NOTHING, LeftOut
from primus.terminal import bytes_text

__all__ = ["Pruning", "prunable", "pruning"]

_GATE = "pruning"
# Only files of kernels are read, and those without an architecture in their name are small.
_READ = 64 << 20
_FORMS = ("code object", "bundle", "kernel pack")


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """Paths that hold GPU code for other architectures only, in order, and their bytes together."""

    paths: tuple[str, ...]
    size: int

    @property
    def count(self) -> int:
        """How many files."""
        return len(self.paths)


def prunable(files: Iterable[Member], arch: str) -> Pruning:
    """The kernel files among ``files`` of no use on ``arch``.

    The name decides where it names architectures, the content of code objects, bundles and packs where it names none.
    A library is never among them, whatever its fat binary holds: its host code is needed, and what else it holds is
    taken out where the image is built. Nor is a file that cannot be read, or one that says nothing.
    """
    paths: list[str] = []
    size = 0
    for file in files:
        if file.kind == "file" and is_kernel_file(file.path) and not _useful(file, arch):
            paths.append(file.path)
            size += file.size
    return Pruning(paths=tuple(sorted(paths)), size=size)


def pruning(layers: Iterable[tuple[str, Iterable[Code]]], arch: str | None, left_out: LeftOut = NOTHING) -> GateReport:
    """One warning per layer that carries kernel files of other architectures, with their number and bytes, and one per
    library whose fat binary holds code for them. CUDA's fat binaries count as they are: nothing here takes them apart.

    ``left_out`` is what stayed out of the image.
    """
    if arch is None:
        return GateReport(gate=_GATE, summary="no GPU architecture to prune for")
    findings, total, size, libraries = [], 0, 0, 0
    for layer, codes in layers:
        idle = [c for c in codes if _is_for_others(c, arch)]
        if idle:
            total, size = total + len(idle), size + sum(c.size for c in idle)
            message = f"{len(idle)} kernel files, {bytes_text(sum(c.size for c in idle))}, are not for {arch}"
            findings.append(
                Finding(gate=_GATE, severity="warning", layer=layer, path=min(c.path for c in idle), message=message)
            )
        for code in codes:
            if code.form == "fat binary" and (others := [t for t in code.targets if not runs_on([t], arch)]):
                libraries += 1
                message = f"it also holds code for {', '.join(others)}"
                findings.append(Finding(gate=_GATE, severity="warning", layer=layer, path=code.path, message=message))
    summary = f"{total} kernel files for other architectures, {bytes_text(size)}"
    if libraries:
        summary += f"; code for them in {libraries} {'library' if libraries == 1 else 'libraries'}"
    if text := left_out.text():
        summary += f"; {text}"
    return GateReport(gate=_GATE, summary=summary, findings=tuple(findings))


def _is_for_others(code: Code, arch: str) -> bool:
    targets = in_path(code.path) or (code.targets if code.form in _FORMS else ())
    return is_kernel_file(code.path) and bool(targets) and not runs_on(targets, arch)


def _useful(file: Member, arch: str) -> bool:
    if named := in_path(file.path):
        return runs_on(named, arch)
    if file.size > _READ:
        return True
    with file.open() as stream:
        data = stream.read(_READ)
    try:
        code = code_in(file.path, cast("IO[bytes]", io.BytesIO(data)), len(data))
    except ValueError:
        return True
    return code is None or code.form not in _FORMS or not code.targets or runs_on(code.targets, arch)
