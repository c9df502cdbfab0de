"""Each Python package of the image finds the packages that it requires, in accepted versions.

pip ensures this for wheels that the lock resolved. A package that is built from source states its
requirements only in the wheel that the build makes.
"""

from collections.abc import Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from primus_images.gates.contents import PATTERNS, Stated
from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.terminal import counted
from primus_images.versions.lock import normalised, upstream


def judge(examined: Examined) -> GateReport:
    """Compare the requirements of the image's wheels with its wheels and Debian packages."""
    resolved = examined.image.plan.resolved
    wheels = []
    for layer, facts in examined.facts.items():
        wheels += [(layer, stated) for stated in facts.stated if stated.kind == "wheel"]
    debs = {}
    for deb in resolved.debs:
        if deb.name.startswith("python3-"):
            name = normalised(deb.name.removeprefix("python3-"))
            debs[name] = upstream(deb.version)
    return unmet(wheels, others=debs, python=examined.python)


def unmet(
    wheels: Sequence[tuple[str, Stated]], *, others: Mapping[str, str], python: str
) -> GateReport:
    """Return one error per unmet requirement.

    ``wheels`` are layer and wheel, ``others`` packages of other origin (name → version).
    Requirements of extras and those for another Python than ``python`` or another platform are
    ignored.
    """
    versions = {**others, **{wheel.name: wheel.version for _, wheel in wheels}}
    minor = ".".join(python.split(".")[:2])
    environment = PATTERNS["markers"] | {"python_full_version": python, "python_version": minor}
    findings = []
    count = 0
    for layer, wheel in wheels:
        for text in wheel.requires:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            if requirement.marker is not None and not requirement.marker.evaluate(environment):
                continue
            count += 1
            name = requirement.name
            version = versions.get(normalised(name))
            if version is None:
                lack = "which the image lacks"
            elif not _accepts(requirement, version):
                lack = f"the image has {name} {version}"
            else:
                continue
            need = f"{wheel.name} {wheel.version} requires {name}{requirement.specifier}"
            findings.append(Finding("error", f"{need}, {lack}", layer, wheel.path))
    summary = f"{counted(count, 'requirement')} of {counted(len(wheels), 'package')}"
    return GateReport(summary=summary, findings=findings)


def _accepts(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        # Debian versions need not follow PEP 440.
        return True
