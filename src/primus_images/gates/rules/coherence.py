"""All packages are for one ROCm version, and device packages are for the image's GPU.

PEP 440 compares alphanumeric local segments as text, so ``+rocm10.1`` sorts below ``+rocm7.15``.
Versions are compared here by their numbers.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from packaging.version import Version

from primus_images.errors import CheckFailed
from primus_images.gates.contents import PATTERNS
from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.plan.resolve import ResolvedTarget
from primus_images.terminal import counted, some
from primus_images.versions.lock import LockedFile, name_of, normalised, upstream

# Names and versions of packages of the ROCm train.
_TRAIN = {name: re.compile(pattern) for name, pattern in PATTERNS["train"].items()}
_ARCH_PREFIXES = {"cu": "sm_", "rocm": "gfx"}


class Package(NamedTuple):
    """A package of the image, its exact version, and the line that sets the version."""

    name: str
    version: str
    where: str = ""
    kind: Literal["wheel", "deb"] = "wheel"

    @property
    def rocm(self) -> Version | None:
        """The ROCm version in the package's version; None if there is none."""
        if self.kind == "wheel":
            return rocm_version(self.name, self.version)
        if _TRAIN["debs"].fullmatch(self.name):
            return _version_of(_TRAIN["own"].match(upstream(self.version)))
        return None

    @property
    def stem(self) -> str:
        """The name of a Debian library package without the number of its soname."""
        return _TRAIN["soname"].sub("", self.name)


class _OfTrain(NamedTuple):
    """A package of the ROCm train, and its ROCm version."""

    package: Package
    rocm: Version


def rocm_version(name: str, version: str) -> Version | None:
    """Return the ROCm version in a package's own number or local segment, or None."""
    public, _, local = version.partition("+")
    if _TRAIN["itself"].fullmatch(name):
        return _version_of(_TRAIN["own"].match(public))
    if _TRAIN["binding"].fullmatch(name):
        return _version_of(_TRAIN["first"].match(public))
    return _version_of(_TRAIN["local"].search(local))


def _version_of(match: re.Match[str] | None) -> Version | None:
    if match is None:
        return None
    return Version(match[1] + (match[2] or ""))


def agree(version: Version, other: Version) -> bool:
    """Whether both may be the same ROCm version: ``7.2`` leaves the patch open."""
    shared = min(len(version.release), len(other.release))
    if version.release[:shared] != other.release[:shared]:
        return False
    return version.pre == other.pre or len(version.release) != len(other.release)


def judge(examined: Examined) -> GateReport:
    """Judge the packages that the pins and the lock name."""
    resolved = examined.image.plan.resolved
    return coherence(pinned_packages(resolved), resolved.arch)


def coherence(packages: Sequence[Package], arch: str | None) -> GateReport:
    """Return one error per package that differs from the others, where its version is set."""
    train = []
    for package in packages:
        rocm = package.rocm
        if rocm is not None:
            train.append(_OfTrain(package, rocm))
    if train:
        summary = counted(len(train), "package")
        newest = max(member.rocm for member in train)
        summary = f"{summary} of the ROCm train, newest {newest}"
        findings = _other_versions(train)
    else:
        summary = "no package of the ROCm train"
        findings = []
    for package in packages:
        if package.kind == "wheel":
            difference = _other_device(package, arch)
            if difference:
                message = f"{package.name} {package.version} {difference}"
                findings.append(Finding("error", message, path=package.where))
    return GateReport(summary=summary, findings=findings)


def check_pins(resolved: ResolvedTarget) -> None:
    """Raise CheckFailed if the packages of a release contradict each other.

    It needs no built layer.
    """
    if resolved.choice.preview:
        return
    errors = coherence(pinned_packages(resolved), resolved.arch).errors
    if errors:
        findings = "; ".join(finding.message for finding in errors[:5])
        raise CheckFailed(
            f"{resolved.name}: {findings}",
            where=errors[0].path or None,
            hint="pin one ROCm version, and device packages of this target's GPU",
        )


def pinned_packages(resolved: ResolvedTarget) -> list[Package]:
    """Return every package of the image, and the place that sets its version.

    The place is a line of versions.yaml, or else the lock. Wheels that only the roots of builds
    contain are among them: what is built with another ROCm belongs to that ROCm.
    """
    lock = resolved.lock
    if lock is None:
        return []
    pins = {}
    for component, pin in resolved.pins.items():
        name = pin.wheel or pin.source or pin.deb or ""
        pins[normalised(name)] = resolved.pin_place(component, pin)
    wheels = {(file.name, file.version): file for file in lock.python_packages}
    names = {file.name for file in lock.python_packages}
    for file in lock.files:
        if file.kind == "wheel" and file.name not in names:
            wheels[file.name, file.version] = file
    packages = []
    for wheel in wheels.values():
        where = pins.get(wheel.name, resolved.lock_name)
        packages.append(Package(wheel.name, wheel.version, where))
    packages += [_debian(resolved, deb) for deb in resolved.debs]
    return packages


def _debian(resolved: ResolvedTarget, deb: LockedFile) -> Package:
    where = resolved.lock_name
    base = resolved.choice.base
    if base:
        listed = resolved.versions.bases[base].packages
        if deb.name in map(name_of, listed):
            where = resolved.base_place(base)
    return Package(deb.name, deb.version, where, "deb")


def _other_versions(train: Sequence[_OfTrain]) -> list[Finding]:
    expected = _expected_version(train)
    agreeing = [member.package for member in train if agree(member.rocm, expected)]
    names = [package.name for package in agreeing]
    # Debian's libraries of the expected version. An older one beside it, with another soname, is
    # only used by what Debian linked against it.
    stems = {package.stem for package in agreeing if package.kind == "deb"}
    findings = []
    for package, rocm in train:
        made_for = _TRAIN["major"].search(package.name)
        if not agree(rocm, expected):
            others = some(names, 3)
            message = f"{package.name} {package.version} is of ROCm {rocm}, {others} of {expected}"
            is_older_soname = (
                package.kind == "deb"
                and rocm < expected
                and package.stem != package.name
                and package.stem in stems
            )
            severity: Literal["warning", "error"] = "error"
            if is_older_soname:
                severity = "warning"
            findings.append(Finding(severity, message, path=package.where))
        elif made_for and int(made_for[1]) != expected.major:
            message = f"{package.name} is made for ROCm {made_for[1]}, the image has {expected}"
            findings.append(Finding("error", message, path=package.where))
    return findings


def _expected_version(train: Sequence[_OfTrain]) -> Version:
    """Return the version of the majority or, without a majority, that of ROCm itself."""
    versions = [member.rocm for member in train]
    of_rocm_itself = set()
    for package, rocm in train:
        if _TRAIN["itself"].fullmatch(package.name):
            of_rocm_itself.add(rocm)

    def rank(version: Version) -> tuple[int, bool, int, str]:
        votes = sum(agree(version, other) for other in versions)
        return votes, version in of_rocm_itself, len(version.release), str(version)

    return max(versions, key=rank)


def _other_device(package: Package, arch: str | None) -> str:
    device = _TRAIN["device"].search(package.name)
    if device:
        if arch is None:
            return f"is for {device[1]}, the target names no GPU architecture"
        if device[1] != arch:
            return f"is for {device[1]}, the target for {arch}"
        return ""
    flavour = _TRAIN["flavour"].match(package.version.partition("+")[2])
    if flavour is None:
        return ""
    if flavour[1] == "cpu":
        fits = arch is None
    else:
        prefix = _ARCH_PREFIXES[flavour[1].rstrip("0123456789")]
        fits = arch is not None and arch.startswith(prefix)
    if fits:
        return ""
    return f"is built for {flavour[1]}, the target for {arch or 'no GPU'}"
