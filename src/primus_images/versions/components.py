"""The contents of versions.yaml, the file of pins, which fields.yaml describes.

References that can mean other bytes tomorrow are refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Literal, Self

from packaging.requirements import Requirement
from packaging.version import Version

from primus_images.files import path_fault
from primus_images.schema import WrongValue, notes_of
from primus_images.versions.lock import name_of, normalised, suites_of

_NAME = r"[a-z0-9]+([.-][a-z0-9]+)*"
_NEED = rf"{_NAME} *[<>=!~][^;@]+"
_MOVING_SUITES = {"stable", "oldstable", "testing", "unstable", "latest"}
_KINDS = ("wheel", "sdist", "git", "deb", "path", "inside")


@dataclass(frozen=True, kw_only=True)
class Build:
    """How a source is built to a wheel: what its root file system adds to the target's base."""

    debs: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: str = ""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One exact version of a component, and its source.

    The source is exactly one of wheel, sdist, git, deb, path and inside. ``{arch}`` in a package
    name or in a build stands for the target's GPU architecture.
    """

    wheel: str | None = None
    sdist: str | None = None
    git: str | None = None
    commit: str | None = None
    package: str | None = None
    deb: str | None = None
    inside: str | None = None
    path: str | None = None
    version: str | None = None
    channel: Literal["amd", "debian", "pypi", "local"]
    targets: tuple[str, ...] = ()
    to: str | None = None
    include: tuple[str, ...] = ()
    build: Build | None = None
    requires: tuple[str, ...] = ()
    pure: bool = False
    without: tuple[str, ...] = ()
    place: int = field(default=-1, compare=False, metadata={"hidden": True})

    def __post_init__(self) -> None:
        kinds = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"a pin needs exactly one of {', '.join(_KINDS)}; this one has {len(kinds)}"
            )
        self._check_keys(kinds[0])
        self._check_channel(kinds[0])
        self._check_paths()

    def _check_keys(self, kind: str) -> None:
        for key, notes in notes_of(Pin).items():
            present = getattr(self, key) not in (None, (), False)
            owners = notes.get("of", _KINDS)
            if present and kind not in owners:
                names = " or ".join(f"`{owner}`" for owner in owners)
                raise ValueError(f"`{key}` goes with {names} only")
            if not present and kind in owners and notes.get("needed"):
                raise ValueError(f"a {kind} pin needs `{key}`")

    def _check_channel(self, kind: str) -> None:
        if (kind == "path") != (self.channel == "local"):
            raise ValueError("channel local is for path pins, and path pins are for it alone")
        if kind != "inside" and (kind == "deb") != (self.channel == "debian"):
            raise ValueError(
                "channel debian is for deb pins and for what is inside packages, and deb pins "
                "are for it alone"
            )

    def _check_paths(self) -> None:
        folder = (self.to or "/opt").strip("/")
        if not folder:
            raise WrongValue("to must be a folder below /, not / itself", "to")
        paths = [*self.include, *self.without, folder.replace("{site}", "site")]
        if self.path is not None:
            paths.append(self.path)
        for path in paths:
            fault = path_fault(path)
            if fault:
                raise ValueError(f"path {path!r} cannot be used: {fault}")

    @property
    def source(self) -> str | None:
        """The Python package that is built from source."""
        return self.sdist or self.package

    @property
    def text(self) -> str:
        """The pin in a few words, as in the output of plan and explain."""
        if self.path is not None:
            return f"{self.path} → {self.to}"
        package = self.wheel or self.source or self.deb or f"in {self.inside}"
        return f"{package} {self.version}"

    @property
    def python_package(self) -> str | None:
        """The Python package that the pin installs."""
        if self.deb and self.deb.startswith("python3-"):
            return self.deb.removeprefix("python3-")
        return self.wheel or self.source

    def loaded_as(self, component: str) -> str:
        """Return the Python package or library that a user of ``component`` has loaded."""
        return normalised(self.python_package or f"lib{component}")

    def resolved(self, place: int, arch: str | None) -> Self:
        """Return the pin with its position in the component and ``{arch}`` replaced.

        Raises ValueError for ``{arch}`` without an architecture.
        """

        def fill(text: str) -> str:
            if arch is None and "{arch}" in text:
                raise ValueError(f"{text} is for one GPU architecture, and the target has none")
            return text.replace("{arch}", arch or "")

        build = self.build
        if build:
            build = replace(
                build,
                wheels=tuple(map(fill, build.wheels)),
                environment={name: fill(text) for name, text in build.environment.items()},
                prepare=fill(build.prepare),
            )
        wheel = self.wheel and fill(self.wheel)
        sdist = self.sdist and fill(self.sdist)
        return replace(self, wheel=wheel, sdist=sdist, build=build, place=place)


@dataclass(frozen=True, kw_only=True)
class Component:
    """One pinned component. It can have one pin per channel and target."""

    name: str
    pins: tuple[Pin, ...]
    held: bool = False
    follows: str | None = None
    needs: Mapping[str, str] = field(default_factory=dict)
    behind: str | None = None
    tool: str | None = None


@dataclass(frozen=True, kw_only=True)
class Base:
    """A root file system of Debian packages, which the lock lists with versions and hashes.

    With ``image``, the packages are added to an image from a registry, whose own layers stay
    unchanged.
    """

    suite: str
    python: str
    packages: tuple[str, ...]
    image: str | None = None
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def python_minor(self) -> str:
        """Python's version, such as 3.12."""
        return self.python.rpartition(".")[0]

    def __post_init__(self) -> None:
        for suite in suites_of(self.suite, self.packages):
            if suite in _MOVING_SUITES:
                raise ValueError(
                    f"suite {suite!r} will move to another release; write the codename"
                )
        names = [name_of(package) for package in self.packages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is named twice under `packages`")
        for extra in self.extras:
            # "NAME build" is the root file system of a build.
            if not re.fullmatch(_NAME, extra) or extra == "build":
                raise ValueError(
                    f"extras: {extra!r} is not a name of lower-case letters, digits and hyphens"
                )
        if self.image and self.kernels:
            raise ValueError("`kernels` goes with a base of packages alone, not with `image`")
        for package, patterns in self.kernels.items():
            if package not in names:
                raise ValueError(f"{package} is listed under `kernels` but not under `packages`")
            for pattern in patterns:
                if not re.fullmatch(r"/(.*/)?[^/]*[^/*?][^/]*", pattern):
                    raise ValueError(
                        f"{pattern!r} is not an absolute pattern that ends in a file name"
                    )


@dataclass(frozen=True, kw_only=True)
class Index:
    """A Python index that belongs to a channel, in addition to those of pip's configuration."""

    channel: Literal["amd"]
    url: str


@dataclass(frozen=True, kw_only=True)
class Image:
    """What images are called: the repository ``name``, to which a tag is added."""

    name: str = "rocm/primus"


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The pins of the release."""

    release: str
    created: str
    supported_until: str | None = None
    image: Image = field(default_factory=Image)
    bases: Mapping[str, Base]
    components: Mapping[str, Component]
    indexes: Mapping[str, Index] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Zip archives, such as wheels, cannot store an earlier date.
        _check_date("created", self.created, "1980-01-01")
        _check_date("supported_until", self.supported_until or self.created, self.created)
        for name in (*self.bases, *self.components, *self.indexes):
            if not re.fullmatch(_NAME, name):
                raise ValueError(
                    f"{name!r} is not a name: use lower-case letters, digits and hyphens"
                )
        for name, component in self.components.items():
            self._check_pins(name, component)
            self._check_known(name, component.follows or name)
            for first, text in component.needs.items():
                self._check_need(name, Version(first), text)

    def _check_known(self, name: str, other: str) -> None:
        if other not in self.components:
            raise ValueError(f"{name}: no component is called {other!r}")

    def _check_pins(self, name: str, component: Component) -> None:
        seen = set[tuple[str, str]]()
        for index, pin in enumerate(component.pins):
            if pin.build:
                for other in pin.build.built:
                    self._check_known(name, other)
            for target in pin.targets or ("",):
                if (pin.channel, target) in seen:
                    place = f"target {target}" if target else "all targets"
                    message = f"{name} has two pins for channel {pin.channel}, {place}"
                    raise WrongValue(message, "components", name, "pins", index)
                seen.add((pin.channel, target))

    def _check_need(self, name: str, first: Version, text: str) -> None:
        """Compare the requirement ``text`` of the pins of version ``first`` and later."""
        if not re.fullmatch(_NEED, text):
            raise ValueError(f"{name}: {text!r} is not a requirement like pytorch>=2.14")
        need = Requirement(text)
        self._check_known(name, need.name)
        for index, pin in enumerate(self.components[name].pins):
            if not pin.version or Version(pin.version) < first:
                continue
            for other in self.components[need.name].pins:
                fits = need.specifier.contains(other.version or "0", prereleases=True)
                if other.version and _share_target(pin, other) and not fits:
                    reason = (
                        f"{name} {pin.version} needs {need}, and a target may have {other.version}"
                    )
                    raise WrongValue(reason, "components", name, "pins", index)


def _check_date(key: str, day: str, earliest: str) -> None:
    try:
        date.fromisoformat(day)
    except ValueError:
        raise WrongValue(f"{key}: {day} is not a valid date", key) from None
    if day < earliest:
        raise WrongValue(f"{key} must be {earliest} or later, not {day}", key)


def _share_target(pin: Pin, other: Pin) -> bool:
    if pin.targets and other.targets:
        return not set(pin.targets).isdisjoint(other.targets)
    return True
