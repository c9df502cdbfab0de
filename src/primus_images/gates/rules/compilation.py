"""Packages that compile kernels at the first step find their compilers in the image.

Without its compiler, a run ends at its first step. With it, the step takes up to minutes longer,
unless kernels of an earlier run are kept.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from primus_images.gates.contents import Stated
from primus_images.gates.examined import Examined, Finding, GateReport, Severity
from primus_images.terminal import counted
from primus_images.yamlfile import read_values


class _Compiling(NamedTuple):
    """What a package compiles, and the packages that it needs for it: one of each list."""

    compiles: str
    needs: Sequence[Sequence[str]]


_FILE = Path(__file__).parent.parent / "compiled.yaml"
_COMPILING: Mapping[str, _Compiling] = {
    name: _Compiling(**row) for name, row in read_values(_FILE, _FILE.name).data.items()
}


def judge(examined: Examined) -> GateReport:
    """Name what is compiled at the first step, and what it lacks."""
    if examined.arch is None:
        return GateReport(summary="no GPU, for which packages would compile kernels")
    stated = []
    for layer, facts in examined.facts.items():
        stated += [(layer, package) for package in facts.stated]
    return compiled(stated, python=examined.python)


def compiled(stated: Sequence[tuple[str, Stated]], *, python: str) -> GateReport:
    """Return a note for each package that compiles kernels, or an error for what it lacks.

    ``stated`` are layer and package. ``python`` is the image's version of it.
    """
    names = {package.name for _, package in stated if package.kind in ("wheel", "deb")}
    minor = ".".join(python.split(".")[:2])
    findings = []
    for layer, package in stated:
        row = _COMPILING.get(package.name)
        if row is None or package.kind != "wheel":
            continue
        sentence = f"{package.name} {package.version} compiles {row.compiles}"
        severity: Severity = "note"
        for needed in row.needs:
            choices = [name.format(python=minor) for name in needed]
            if names.isdisjoint(choices):
                severity = "error"
                sentence += f"; it needs {' or '.join(choices)}, which the image lacks"
        findings.append(Finding(severity, sentence, layer, package.path))
    summary = f"compiled at the first step: kernels of {counted(len(findings), 'package')}"
    return GateReport(summary=summary, findings=findings)
