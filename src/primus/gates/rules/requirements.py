"""Each Python package of the image finds the packages that it requires, in versions that it accepts.

pip ensures this for wheels that the lock resolved. A package that is built from source states its requirements only in
the wheel that the build makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from primus.gates.finding import Finding, GateReport
from primus.versions.lock import normalised
from primus.versions.suites import MACHINES, upstream

if TYPE_CHECKING:
    from primus.gates.examined import Examined
    from primus.gates.stated import Stated


def judge(examined: Examined) -> GateReport:
    """Compare the requirements in the metadata of the image's wheels with its wheels and Debian packages."""
    resolved = examined.image.plan.resolved
    request, base = resolved.request, resolved.choice.base
    python = request.bases[base].python if base is not None and base in request.bases else request.python
    return unmet(
        [(layer, one) for layer, facts in examined.facts.items() for one in facts.stated if one.kind == "wheel"],
        others={
            normalised(f.name.removeprefix("python3-")): upstream(f.version)
            for f in resolved.debs
            if f.name.startswith("python3-")
        },
        python=python,
        machine=MACHINES.get(request.architecture, request.architecture),
    )


def unmet(
    wheels: Iterable[tuple[str, Stated]], *, others: Mapping[str, str], python: str, machine: str = "x86_64"
) -> GateReport:
    """Return one error per unmet requirement.

    ``wheels`` are layer and wheel, ``others`` packages of other origin (name → version). Requirements of extras and
    those for another Python or platform than ``python`` and ``machine`` are ignored.
    """
    rows = list(wheels)
    there = {**others, **{one.name: one.version for _, one in rows}}
    environment = {
        "implementation_name": "cpython", "os_name": "posix", "platform_machine": machine,
        "platform_python_implementation": "CPython", "platform_system": "Linux", "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]), "sys_platform": "linux", "extra": "",
    }  # fmt: skip
    findings, count = [], 0
    for layer, one in rows:
        for text in one.requires:
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            if wanted.marker is not None and not wanted.marker.evaluate(environment):
                continue
            count += 1
            found = there.get(normalised(wanted.name))
            if found is not None and _accepts(wanted, found):
                continue
            asked = f"{one.name} {one.version} requires {wanted.name}{wanted.specifier}"
            message = f"{asked}, the image has {wanted.name} {found}" if found else f"{asked}, which the image lacks"
            findings.append(Finding(severity="error", layer=layer, path=one.path, message=message))
    return GateReport(summary=f"{count} requirements of {len(rows)} packages", findings=tuple(findings))


def _accepts(wanted: Requirement, found: str) -> bool:
    try:
        return wanted.specifier.contains(Version(found), prereleases=True)
    except InvalidVersion:
        # Debian versions need not follow PEP 440.
        return True
