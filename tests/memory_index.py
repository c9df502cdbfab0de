"""A Python index in memory: what it offers and what fits together, without uv or a socket."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Literal

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from primus_images.errors import HostError
from primus_images.release import bump
from primus_images.versions import relock
from primus_images.versions.lock import BaseRequest, LockedFile, Request

# The wheels of the pins in fixtures/versions/followed.yaml.
FOLLOWED = """
    frame==1.0+cpu frame==1.1+cpu frame==1.2+cpu frame==1.0<jit==3.0 frame==1.1<jit==3.1
    jit==3.0 jit==3.1 jit==3.2 jit==3.3+cu130 trainer==1.0 trainer==2.0
    kernels==5.0 kernels==6.0<frame>=1.1
"""


class MemoryIndex:
    """Wheels as ``name==version``, or ``name==version<requirement`` for one that needs another.

    ``silent`` are packages about which it does not answer.
    """

    def __init__(self, words: str) -> None:
        self.silent: set[str] = set()
        self.wheels: dict[str, dict[str, str]] = {}
        for word in words.split():
            wheel, _, needs = word.partition("<")
            name, _, version = wheel.partition("==")
            self.wheels.setdefault(name, {})[version] = needs

    def offered(self, name: str, request: Request, kind: str) -> set[Version]:
        if name in self.silent:
            raise HostError(f"the index of {name} does not answer")
        return {Version(version) for version in self.wheels.get(name, {})}

    def fits_together(
        self, request: Request, loose: Collection[str], constraints: Sequence[str]
    ) -> dict[str, str] | None:
        """As uv: the pins, of which those in ``loose`` may be newer, with what they need."""
        excluded = {tuple(line.split("!=")) for line in constraints}
        choices = []
        for name, pinned in request.wheels.items():
            versions = [pinned]
            if name in loose:
                newer = sorted(v for v in map(Version, self.wheels[name]) if v > Version(pinned))
                versions += [str(v) for v in newer if (name, str(v)) not in excluded]
            choices.append([(name, version) for version in versions])
        for chosen in product(*choices):
            versions_of = dict(chosen)
            if any(version not in self.wheels[name] for name, version in chosen):
                continue
            needs = [self.wheels[name][version] for name, version in chosen]
            asked = [Requirement(need) for need in needs if need]
            for one in asked:
                if one.name not in versions_of:
                    versions_of[one.name] = str(max(one.specifier.filter(self.wheels[one.name])))
            if all(one.specifier.contains(versions_of[one.name]) for one in asked):
                return versions_of
        return None

    def resolve_wheels(self, request: Request, keep: Mapping[str, str]) -> tuple[LockedFile, ...]:
        versions = self.fits_together(request, (), ()) or {}
        return tuple(locked(name, version) for name, version in versions.items())


def locked(name: str, version: str, kind: Literal["wheel", "deb"] = "wheel") -> LockedFile:
    """A file that nobody has."""
    file = f"{name}-{version}-py3-none-any.whl" if kind == "wheel" else f"{name}_{version}_all.deb"
    sha256 = hashlib.sha256(file.encode()).hexdigest()
    return LockedFile(kind=kind, name=name, version=version, file=file, size=1000, sha256=sha256)


def connect(monkeypatch: pytest.MonkeyPatch, index: MemoryIndex) -> MemoryIndex:
    """Let every question of this test go to ``index``. A base has the packages it asks for."""

    def packages(name: str, base: BaseRequest, status: str) -> tuple[LockedFile, ...]:
        return tuple(locked(package, f"{base.python}-1", "deb") for package in base.packages)

    monkeypatch.setattr(bump, "offered", index.offered)
    monkeypatch.setattr(bump, "fits_together", index.fits_together)
    monkeypatch.setattr(relock, "resolve_wheels", index.resolve_wheels)
    monkeypatch.setattr(relock, "resolve_debs", packages)
    return index
