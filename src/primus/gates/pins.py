"""The gate that needs nothing built: what the pins and the lock say belongs together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.errors import CheckFailed
from primus.gates.coherence import Package, coherence
from primus.versions.components import normalised
from primus.versions.suites import name_of

if TYPE_CHECKING:
    from primus.plan.resolve import ResolvedTarget
    from primus.versions.lock import Lock, LockedFile

__all__ = ["check_pins", "pinned_packages", "python_packages"]


def python_packages(lock: Lock) -> tuple[LockedFile, ...]:
    """The Python packages of the image: wheels, and what is built into them."""
    return (*lock.of("wheel"), *lock.of("sdist"), *lock.of("git"))


def _built_with(lock: Lock) -> tuple[LockedFile, ...]:
    """Wheels that only lie in the roots of builds: what is built with another ROCm belongs to that one."""
    own = {f.name for f in python_packages(lock)}
    found = {(f.name, f.version): f for f in lock.files if f.kind == "wheel" and f.base and f.name not in own}
    return tuple(found.values())


def pinned_packages(resolved: ResolvedTarget) -> list[Package]:
    """Every package of the image, with the line of versions.yaml or of the lock that set its version."""
    pinned = {
        normalised(pin.wheel or pin.source or pin.deb or ""): resolved.pin_place(component, pin)
        for component, pin in resolved.pins.items()
    }
    lock = resolved.lock
    rows = resolved.lock_path.read_text(encoding="utf-8").splitlines() if lock else []
    lines = {row.strip(): number for number, row in enumerate(rows, 1)}
    base = resolved.choice.base
    debs = lock.of("deb", base) if lock and base else ()
    listed = {name_of(p) for p in resolved.versions.bases[base].packages} if base else set()
    result = []
    for file in (*python_packages(lock), *_built_with(lock), *debs) if lock else ():
        number = next((n for row, n in lines.items() if f'"sha256": "{file.sha256}"' in row), 1)
        where = f"{resolved.lock_name}:{number}:1"
        if file.kind == "deb":
            where = resolved.base_place(base or "") if file.name in listed else where
            result.append(Package(name=file.name, version=file.version, where=where, kind="deb"))
        else:
            result.append(Package(name=file.name, version=file.version, where=pinned.get(file.name, where)))
    return result


def check_pins(resolved: ResolvedTarget) -> None:
    """Raise CheckFailed when the target's packages do not belong together; needs nothing that is built."""
    report = coherence(pinned_packages(resolved), resolved.arch)
    errors = [f for f in report.findings if f.severity == "error"]
    if errors:
        raise CheckFailed(
            f"{resolved.name}: " + "; ".join(f.message for f in errors[:5]),
            where=errors[0].path or None,
            hint="pin one ROCm version, and device packages of this target's GPU",
        )
