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
from primus_images.gates.examined import Examined, Finding, GateReport, Severity
from primus_images.plan.resolve import ResolvedTarget
from primus_images.terminal import some
from primus_images.versions.lock import name_of, normalised, upstream

_SHA256 = re.compile(r'"sha256": "([0-9a-f]{64})"')
# Names and versions of packages of the ROCm train.
_TRAIN = {name: re.compile(pattern) for name, pattern in PATTERNS["train"].items()}


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
        return _parsed(
            _TRAIN["debs"].fullmatch(self.name) and _TRAIN["own"].match(upstream(self.version))
        )


def rocm_version(name: str, version: str) -> Version | None:
    """Return the ROCm version in a package's own number or in its local segment; None if there is
    none.
    """
    public, _, local = version.partition("+")
    return _parsed(
        _TRAIN["own"].match(public)
        if _TRAIN["itself"].fullmatch(name)
        else _TRAIN["local"].search(local)
    )


def _parsed(match: re.Match[str] | None) -> Version | None:
    if match:
        return Version(match[1] + (match[2] or ""))
    return None


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
    """Return one error per package that differs from the others, with the line that sets its
    version.
    """
    train = [(p, v) for p in packages if (v := p.rocm) is not None]
    findings = _versions(train) + [
        Finding(
            severity="error",
            path=package.where,
            message=f"{package.name} {package.version} {message}",
        )
        for package in packages
        if package.kind == "wheel" and (message := _other_device(package, arch))
    ]
    newest = ""
    if train:
        newest = f", newest {max(v for _, v in train)}"
    summary = f"{len(train) or 'no'} package{'s' if train else ''} of the ROCm train{newest}"
    return GateReport(summary=summary, findings=tuple(findings))


def check_pins(resolved: ResolvedTarget) -> None:
    """Raise CheckFailed if the packages of a release contradict each other. Needs no built layer."""
    if not resolved.choice.preview and (
        errors := coherence(pinned_packages(resolved), resolved.arch).errors
    ):
        findings = "; ".join(finding.message for finding in errors[:5])
        raise CheckFailed(
            f"{resolved.name}: {findings}",
            where=errors[0].path or None,
            hint="pin one ROCm version, and device packages of this target's GPU",
        )


def pinned_packages(resolved: ResolvedTarget) -> list[Package]:
    """Return every package of the image, with the line of versions.yaml or of the lock that sets
    its version.
    """
    pinned = {
        normalised(pin.wheel or pin.source or pin.deb or ""): resolved.pin_place(component, pin)
        for component, pin in resolved.pins.items()
    }
    lock = resolved.lock
    if lock:
        rows = resolved.lock_path.read_text(encoding="utf-8").splitlines()
    else:
        rows = []
    matches = [(number, _SHA256.search(row)) for number, row in enumerate(rows, 1)]
    lines = {match[1]: number for number, match in reversed(matches) if match}
    base = resolved.choice.base
    if base:
        listed = {name_of(p) for p in resolved.versions.bases[base].packages}
    else:
        listed = set()
    if lock:
        wheels = {(f.name, f.version): f for f in lock.python_packages}
    else:
        wheels = {}
    # What only the roots of builds contain. What is built with another ROCm belongs to that ROCm.
    names = {name for name, _ in wheels}
    wheels |= (
        {(f.name, f.version): f for f in lock.files if f.kind == "wheel" and f.name not in names}
        if lock
        else {}
    )
    result = []
    for file in (*wheels.values(), *resolved.debs):
        where = f"{resolved.lock_name}:{lines.get(file.sha256, 1)}:1"
        if file.kind == "deb":
            if file.name in listed:
                where = resolved.base_place(base or "")
            result.append(Package(name=file.name, version=file.version, where=where, kind="deb"))
        else:
            result.append(
                Package(name=file.name, version=file.version, where=pinned.get(file.name, where))
            )
    return result


def _versions(train: list[tuple[Package, Version]]) -> list[Finding]:
    if not train:
        return []
    # The version of the majority is expected or, without a majority, that of ROCm itself.
    itself = {v for p, v in train if _TRAIN["itself"].fullmatch(p.name)}
    meant = max(
        (v for _, v in train),
        key=lambda v: (
            sum(agree(v, other) for _, other in train),
            v in itself,
            len(v.release),
            str(v),
        ),
    )
    like = [p.name for p, v in train if agree(v, meant)]
    findings = []
    for package, version in train:
        severity: Severity = "warning" if _beside(package, version, meant, train) else "error"
        major = _TRAIN["major"].search(package.name)
        if not agree(version, meant):
            message = (
                f"{package.name} {package.version} is of ROCm {version}, {some(like, 3)} of {meant}"
            )
            findings.append(Finding(severity=severity, path=package.where, message=message))
        elif major and int(major[1]) != meant.major:
            message = f"{package.name} is made for ROCm {major[1]}, the image has {meant}"
            findings.append(Finding(severity="error", path=package.where, message=message))
    return findings


def _beside(
    package: Package, version: Version, meant: Version, train: list[tuple[Package, Version]]
) -> bool:
    """Whether the release's own version of this Debian library is present, too. The older one, with
    another soname, is then only used by what Debian linked against it.
    """
    stem = _TRAIN["soname"].sub("", package.name)
    others = (p for p, v in train if p.kind == "deb" and agree(v, meant))
    is_older = package.kind == "deb" and version < meant and stem != package.name
    return is_older and any(_TRAIN["soname"].sub("", other.name) == stem for other in others)


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
    prefix = {"cpu": "", "cu": "sm_", "rocm": "gfx"}[flavour[1].rstrip("0123456789")]
    if not prefix:
        fits = arch is None
    else:
        fits = arch is not None and arch.startswith(prefix)
    if fits:
        return ""
    return f"is built for {flavour[1]}, the target for {arch or 'no GPU'}"
