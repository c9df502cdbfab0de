"""The contents of versions.yaml, the file of pins, which fields.yaml describes. Moving references
are refused.
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
from primus_images.versions.lock import name_of, suites_of

_NAME = r"[a-z0-9]+([.-][a-z0-9]+)*"
_NEED = rf"{_NAME} *[<>=!~][^;@]+"
_MOVING_SUITES = {"stable", "oldstable", "testing", "unstable", "latest"}
_KINDS = ("wheel", "sdist", "git", "deb", "path", "inside")


@dataclass(frozen=True, kw_only=True)
class Build:
    """How a source is built to a wheel: what its root file system contains in addition to the
    target's base.
    """

    debs: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: str = ""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One exact version of a component, and its source: exactly one of wheel, sdist, git, deb, path
    and inside.

    ``{arch}`` in a package name or in a build stands for the target's GPU architecture.
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
        self._check_paths()
        kind = kinds[0]
        for key, notes in notes_of(Pin).items():
            present = getattr(self, key) not in (None, (), False)
            owners = notes.get("of", _KINDS)
            if present and kind not in owners:
                raise ValueError(
                    f"`{key}` goes with {' or '.join(f'`{owner}`' for owner in owners)} only"
                )
            if not present and kind in owners and notes.get("needed"):
                raise ValueError(f"a {kind} pin needs `{key}`")
        if (kind == "path") != (self.channel == "local"):
            raise ValueError("channel local is for path pins, and path pins are for it alone")
        if kind != "inside" and (kind == "deb") != (self.channel == "debian"):
            raise ValueError(
                "channel debian is for deb pins and for what is inside packages, and deb pins "
                "are for it alone"
            )

    def _check_paths(self) -> None:
        if self.path is not None and (fault := path_fault(self.path)):
            raise ValueError(f"path {self.path!r} cannot be used: {fault}")
        if self.to is not None and not self.to.strip("/"):
            raise WrongValue("to must be a folder below /, not / itself", "to")
        to = (self.to or "/").replace("{site}", "site").strip("/")
        named = {"to": to, **{f"{name!r}": name for name in (*self.include, *self.without)}}
        for what, path in named.items():
            if path and (fault := path_fault(path)):
                raise ValueError(f"{what} cannot be used: {fault}")

    @property
    def source(self) -> str | None:
        """Return the Python package that is built from source, or None."""
        return self.sdist or self.package

    @property
    def text(self) -> str:
        """Return the pin in a few words, as in the output of plan and explain."""
        if self.path is not None:
            return f"{self.path} → {self.to}"
        return f"{self.wheel or self.source or self.deb or f'in {self.inside}'} {self.version}"

    def loaded_as(self, component: str) -> str:
        """Return the Python package or the library that a process has loaded if it uses
        ``component``.
        """
        python = (self.deb or "").startswith("python3-")
        package = (
            self.wheel
            or self.source
            or (self.deb.removeprefix("python3-") if self.deb and python else None)
        )
        return re.sub("[-_.]+", "-", package or f"lib{component}").lower()

    def resolved(self, place: int, arch: str | None) -> Self:
        """Return the pin with its position in the component and ``{arch}`` replaced. ValueError if
        there is none.
        """

        def fill(text: str) -> str:
            if arch is None and "{arch}" in text:
                raise ValueError(f"{text} is for one GPU architecture, and the target has none")
            return text.replace("{arch}", arch or "")

        wheel = self.wheel and fill(self.wheel)
        sdist = self.sdist and fill(self.sdist)
        build = self.build
        if build:
            build = replace(
                build,
                wheels=tuple(map(fill, build.wheels)),
                environment={name: fill(text) for name, text in build.environment.items()},
                prepare=fill(build.prepare),
            )
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
    """A root file system of Debian packages. The lock contains each package's exact version and
    hash.

    With ``image``, the packages are added to an image from a registry, whose own layers stay
    unchanged.
    """

    suite: str
    python: str
    packages: tuple[str, ...]
    image: str | None = None
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for suite in suites_of(self.suite, self.packages):
            if suite in _MOVING_SUITES:
                raise ValueError(
                    f"suite {suite!r} will move to another release; write the codename"
                )
        if self.suite == "experimental":
            raise ValueError(
                "experimental holds only packages that differ from sid: write `suite: sid`"
            )
        names = [name_of(p) for p in self.packages]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"{twice[0]} is named twice under `packages`")
        if self.image and self.kernels:
            raise ValueError("`kernels` goes with a base of packages alone, not with `image`")
        for extra, packages in self.extras.items():
            # "NAME build" is the root file system of a build.
            if not re.fullmatch(_NAME, extra) or extra == "build":
                raise ValueError(
                    f"extras: {extra!r} is not a name of lower-case letters, digits and hyphens"
                )
            deb = notes_of(Base)["packages"]["pattern"]
            wrong = next((p for p in packages if not re.fullmatch(deb, p)), None)
            if wrong:
                raise ValueError(f"extras: {wrong!r} is not a package name, or name/suite")
        for package, patterns in self.kernels.items():
            if package not in names:
                raise ValueError(f"{package} is listed under `kernels` but not under `packages`")
            for pattern in patterns:
                name = pattern.rpartition("/")[2]
                if not pattern.startswith("/") or not name.strip("*?"):
                    raise ValueError(
                        f"{pattern!r} is not an absolute pattern that ends in a file name"
                    )


@dataclass(frozen=True, kw_only=True)
class Index:
    """A Python index that belongs to a channel, in addition to those of pip's configuration."""

    channel: Literal["amd"]
    url: str


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The pins of the release."""

    release: str
    created: str
    supported_until: str | None = None
    bases: Mapping[str, Base]
    components: Mapping[str, Component]
    indexes: Mapping[str, Index] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Zip archives, such as wheels, cannot store an earlier date.
        earliest = "1980-01-01"
        for word, day in (
            ("created", self.created),
            ("supported_until", self.supported_until or self.created),
        ):
            try:
                date.fromisoformat(day)
            except ValueError:
                raise WrongValue(f"{word}: {day} is not a valid date", word) from None
            if day < earliest:
                raise WrongValue(f"{word} must be {earliest} or later, not {day}", word)
            earliest = day
        for name in (*self.bases, *self.components, *self.indexes):
            if not re.fullmatch(_NAME, name):
                raise ValueError(
                    f"{name!r} is not a name: use lower-case letters, digits and hyphens"
                )
        for name, component in self.components.items():
            seen: set[tuple[str, str]] = set()
            for index, pin in enumerate(component.pins):
                for target in pin.targets or ("*",):
                    if (pin.channel, target) in seen:
                        every = "all targets"
                        if pin.targets:
                            every = f"target {target}"
                        key = ("components", name, "pins", index)
                        raise WrongValue(
                            f"{name} has two pins for channel {pin.channel}, {every}", *key
                        )
                    seen.add((pin.channel, target))
                built = ()
                if pin.build:
                    built = pin.build.built
                unknown = next((name for name in built if name not in self.components), None)
                if unknown:
                    raise ValueError(f"{name}: no component is called {unknown!r}")
            self._check_needs(name, component)

    def _check_needs(self, name: str, component: Component) -> None:
        wrong = next(
            (text for text in component.needs.values() if not re.fullmatch(_NEED, text)), None
        )
        if wrong:
            raise ValueError(f"{name}: {wrong!r} is not a requirement like pytorch>=2.14")
        needs = [(Version(first), Requirement(text)) for first, text in component.needs.items()]
        names = {need.name for _, need in needs} | {component.follows or name}
        unknown = next(iter(names - self.components.keys()), None)
        if unknown:
            raise ValueError(f"{name}: no component is called {unknown!r}")
        for first, need in needs:
            for index, pin in enumerate(component.pins):
                for other in (
                    self.components[need.name].pins
                    if pin.version and Version(pin.version) >= first
                    else ()
                ):
                    apart = pin.targets and other.targets and not {*pin.targets} & {*other.targets}
                    if (
                        other.version
                        and not apart
                        and not need.specifier.contains(other.version, prereleases=True)
                    ):
                        reason = (
                            f"{name} {pin.version} needs {need}, and a target may have "
                            f"{other.version}"
                        )
                        raise WrongValue(reason, "components", name, "pins", index)
