"""Each Python package of the image finds the packages that it requires, in versions that it
accepts.

pip ensures this for wheels that the lock resolved. A package that is built from source states its
requirements only in the wheel that the build makes.
"""

from collections.abc import Iterable, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from primus_images.gates.contents import PATTERNS, Stated
from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.versions.lock import normalised, upstream


def judge(examined: Examined) -> GateReport:
    """Compare the requirements in the metadata of the image's wheels with its wheels and Debian
    packages.
    """
    resolved = examined.image.plan.resolved
    request = resolved.request
    base = resolved.choice.base
    if base is not None and base in request.bases:
        python = request.bases[base].python
    else:
        python = request.python
    wheels = [
        (layer, item)
        for layer, facts in examined.facts.items()
        for item in facts.stated
        if item.kind == "wheel"
    ]
    debs = (
        (f.name.removeprefix("python3-"), f.version)
        for f in resolved.debs
        if f.name.startswith("python3-")
    )
    return unmet(
        wheels,
        others={normalised(name): upstream(version) for name, version in debs},
        python=python,
    )


def unmet(
    wheels: Iterable[tuple[str, Stated]], *, others: Mapping[str, str], python: str
) -> GateReport:
    """Return one error per unmet requirement.

    ``wheels`` are layer and wheel, ``others`` packages of other origin (name → version).
    Requirements of extras and those for another Python than ``python`` or another platform are
    ignored.
    """
    rows = list(wheels)
    versions = {**others, **{wheel.name: wheel.version for _, wheel in rows}}
    minor = ".".join(python.split(".")[:2])
    environment = PATTERNS["markers"] | {"python_full_version": python, "python_version": minor}
    findings = []
    count = 0
    for layer, wheel in rows:
        for text in wheel.requires:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            if requirement.marker is not None and not requirement.marker.evaluate(environment):
                continue
            count += 1
            version = versions.get(normalised(requirement.name))
            if version is not None and _accepts(requirement, version):
                continue
            need = (
                f"{wheel.name} {wheel.version} requires {requirement.name}{requirement.specifier}"
            )
            if version:
                message = f"{need}, the image has {requirement.name} {version}"
            else:
                message = f"{need}, which the image lacks"
            findings.append(
                Finding(severity="error", layer=layer, path=wheel.path, message=message)
            )
    return GateReport(
        summary=f"{count} requirements of {len(rows)} packages", findings=tuple(findings)
    )


def _accepts(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        # Debian versions need not follow PEP 440.
        return True
