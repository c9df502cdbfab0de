"""The contents of versions.yaml, the file of pins. Moving references are refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain
from typing import Any, Literal, Self

from primus.files import path_fault
from primus.schema import WrongValue, described
from primus.versions.lock import name_of, suites_of

# A PEP 440 public version with an optional local part.
_VERSION = r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9]+([._-][a-z0-9]+)*)?"
_DEB = r"[a-z0-9][a-z0-9.+-]+(/[a-z]+)?"
_DEBS: Any = {"pattern": _DEB, "shape": "a package name, or name/suite"}
# A name on a Python index, in which {arch} may stand for the GPU architecture.
_PACKAGE: Any = {"pattern": r"[A-Za-z0-9{]([A-Za-z0-9._{}-]*[A-Za-z0-9}])?", "shape": "a package name"}
_DATE: Any = {"pattern": r"[0-9]{4}-[0-9]{2}-[0-9]{2}", "shape": "a date like 2026-11-20"}
_NAME = r"[a-z0-9]+([.-][a-z0-9]+)*"
_MOVING_SUITES = {"stable", "oldstable", "testing", "unstable", "latest"}
# Kind of a pin → the keys that it has, and whether it must.
_KEYS = {
    "wheel": {"version": True, "pure": False, "without": False},
    "sdist": {"version": True, "build": True, "requires": False},
    "git": {"version": True, "build": True, "requires": False, "commit": True, "package": True},
    "deb": {"version": True},
    "path": {"to": True, "include": False},
    "inside": {"version": True},
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """How a source is built to a wheel: what its root file system contains in addition to the target's base."""

    debs: tuple[str, ...] = described("Packages besides the base's own, such as a compiler.", **_DEBS, default=())
    wheels: tuple[str, ...] = described(
        "Wheels to install there with their dependencies: NAME for the image's version, NAME==VERSION for another.",
        pattern=rf"[A-Za-z0-9._{{}}-]+(=={_VERSION})?",
        shape="a package name, or NAME==VERSION",
        default=(),
    )
    built: tuple[str, ...] = described("Components to build first and install there.", default=())
    environment: Mapping[str, str] = described("Environment of the build.", default_factory=dict)
    prepare: str = described("Shell commands in the unpacked source before it is built.", default="")


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One exact version of a component, and its source: exactly one of wheel, sdist, git, deb, path and inside.

    ``{arch}`` in a package name or in a build stands for the target's GPU architecture.
    """

    wheel: str | None = described("Package on a Python index, taken as a wheel.", **_PACKAGE, default=None)
    sdist: str | None = described(
        "Package on a Python index, built from source in the sandbox.", **_PACKAGE, default=None
    )
    git: str | None = described(
        "Repository, built into a wheel in the sandbox.",
        pattern=r"(https|ssh|file)://[^ ]+",
        shape="a URL that git fetches from",
        default=None,
    )
    commit: str | None = described(
        "Commit of the repository, with its submodules.",
        pattern=r"[0-9a-f]{40}",
        shape="a full commit of 40 digits (a branch, a tag or a short commit can mean other bytes tomorrow)",
        default=None,
    )
    package: str | None = described("Python package that the repository builds.", **_PACKAGE, default=None)
    deb: str | None = described(
        "Package of the base, with this upstream version. pip treats `python3-NAME` as NAME.",
        pattern=r"[a-z0-9][a-z0-9.+-]+",
        default=None,
    )
    inside: str | None = described(
        "Component, or package of the base, whose files contain this one. It has no files of its own. If a library "
        "states its version, a gate compares it.",
        pattern=r"[a-z0-9][a-z0-9.+-]+",
        shape="a component, or a package of the base",
        default=None,
    )
    path: str | None = described("Folder of this repository, copied unchanged.", default=None)
    version: str | None = described(
        "Exact version: no range, no branch, no `latest`.",
        pattern=_VERSION,
        shape="one exact version like 2.13.0 or 2.13.0+cpu (a range, a branch, `latest` or a short commit can "
        "mean other bytes tomorrow)",
        default=None,
    )
    channel: Literal["amd", "debian", "pypi", "local"] = described("Where the files come from.")
    targets: tuple[str, ...] = described("Targets that use this pin; default: all.", least=1, default=())
    to: str | None = described(
        "Folder in the image that `path` is copied to; `{site}` is the folder of its Python packages.",
        pattern=r"(\{site\})?/[^ ]*",
        shape="an absolute path, or {site}/NAME",
        default=None,
    )
    include: tuple[str, ...] = described("Children of `path` to copy; default: all.", least=1, default=())
    build: Build | None = described("How the source becomes a wheel, in the sandbox.", default=None)
    requires: tuple[str, ...] = described(
        "Run-time dependencies of the built wheel that no other pin provides. The lock chooses compatible versions.",
        pattern=r"[A-Za-z0-9._-]+",
        shape="a package name",
        default=(),
    )
    pure: bool = described(
        "Use the platform-independent wheel, because the one for this platform has code for another GPU.", default=False
    )
    without: tuple[str, ...] = described(
        "Folders of the wheel to omit, because another component provides the same files or they are for another "
        "vendor's GPUs.",
        pattern=r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*",
        shape="a folder's path in the wheel",
        default=(),
    )
    place: int = field(default=-1, compare=False, metadata={"hidden": True})

    def __post_init__(self) -> None:
        kinds = [kind for kind in _KEYS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"a pin needs exactly one of {', '.join(_KEYS)}; this one has {len(kinds)}")
        self._check_paths()
        kind = kinds[0]
        for key in chain(*_KEYS.values()):
            present = getattr(self, key) not in (None, (), False)
            if present and key not in _KEYS[kind]:
                owners = " or ".join(f"`{owner}`" for owner, keys in _KEYS.items() if key in keys)
                raise ValueError(f"`{key}` goes with {owners} only")
            if not present and _KEYS[kind].get(key):
                raise ValueError(f"a {kind} pin needs `{key}`")
        if (kind == "path") != (self.channel == "local"):
            raise ValueError("channel local is for path pins, and path pins are for it alone")
        if kind != "inside" and (kind == "deb") != (self.channel == "debian"):
            raise ValueError(
                "channel debian is for deb pins and for what is inside packages, and deb pins are for it alone"
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
        """Return the Python package or the library that a process has loaded if it uses ``component``."""
        python = (self.deb or "").startswith("python3-")
        package = self.wheel or self.source or (self.deb.removeprefix("python3-") if self.deb and python else None)
        return re.sub("[-_.]+", "-", package or f"lib{component}").lower()

    def resolved(self, place: int, arch: str | None) -> Self:
        """Return the pin with its position in the component and ``{arch}`` replaced. ValueError if there is none."""

        def fill(text: str) -> str:
            if arch is None and "{arch}" in text:
                raise ValueError(f"{text} is for one GPU architecture, and the target has none")
            return text.replace("{arch}", arch or "")

        wheel, sdist, build = self.wheel and fill(self.wheel), self.sdist and fill(self.sdist), self.build
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

    name: str = described("Name as its makers write it.")
    pins: tuple[Pin, ...] = described("Its exact pins.")
    held: bool = described(
        "`pip install` in the image keeps this version: a constraints file names it. For PyTorch and what is compiled "
        "for it or for the GPU.",
        default=False,
    )
    tool: str | None = described(
        "Why no training run loads it, such as a program or files that another library reads. A release needs a "
        "validation that has loaded each of the others.",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class Base:
    """A root file system of Debian packages. The lock contains each package's exact version and hash.

    With ``image``, the packages are added to an image from a registry, whose own layers stay unchanged.
    """

    suite: str = described("Codename of the suite (a codename stays; `stable` moves).", pattern=r"[a-z]+")
    python: str = described("Python version in the suite.", pattern=r"3\.[0-9]+\.[0-9]+", shape="like 3.11.2")
    packages: tuple[str, ...] = described(
        "Packages, installed with their dependencies. `name/suite` takes one from another suite.", **_DEBS
    )
    image: str | None = described(
        "Image below the packages, by digest.",
        pattern=r"[a-z0-9][a-z0-9./:_-]*@sha256:[0-9a-f]{64}",
        shape="NAME@sha256:DIGEST (a tag can mean other bytes tomorrow)",
        default=None,
    )
    kernels: Mapping[str, tuple[str, ...]] = described(
        "Package → patterns of its GPU-specific files: files whose paths name one architecture, and libraries with "
        "code for several, with the links to them. The base omits them. A separate layer holds the files for the "
        "target's architecture, and the libraries reduced to its code.",
        default_factory=dict,
    )
    extras: Mapping[str, tuple[str, ...]] = described(
        "Optional layers: name → packages that are laid over the base if a target lists the name under `extras`. "
        "Packages that the base already has are left out.",
        default_factory=dict,
    )

    def __post_init__(self) -> None:
        for suite in suites_of(self.suite, self.packages):
            if suite in _MOVING_SUITES:
                raise ValueError(f"suite {suite!r} will move to another release; write the codename")
        if self.suite == "experimental":
            raise ValueError("experimental holds only packages that differ from sid: write `suite: sid`")
        names = [name_of(p) for p in self.packages]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"{twice[0]} is named twice under `packages`")
        if self.image and self.kernels:
            raise ValueError("`kernels` goes with a base of packages alone, not with `image`")
        for extra, packages in self.extras.items():
            # "NAME build" is the root file system of a build.
            if not re.fullmatch(_NAME, extra) or extra == "build":
                raise ValueError(f"extras: {extra!r} is not a name of lower-case letters, digits and hyphens")
            if wrong := next((p for p in packages if not re.fullmatch(_DEB, p)), None):
                raise ValueError(f"extras: {wrong!r} is not a package name, or name/suite")
        for package, patterns in self.kernels.items():
            if package not in names:
                raise ValueError(f"{package} is listed under `kernels` but not under `packages`")
            for pattern in patterns:
                name = pattern.rpartition("/")[2]
                if not pattern.startswith("/") or not name.strip("*?"):
                    raise ValueError(f"{pattern!r} is not an absolute pattern that ends in a file name")


@dataclass(frozen=True, kw_only=True)
class Index:
    """A Python index that belongs to a channel, in addition to those of pip's configuration."""

    channel: Literal["amd"] = described("Channel whose wheels and sdists it offers.")
    url: str = described("Its address.", pattern=r"https?://[^ ]+", shape="an http or https address")


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The pins of the release."""

    release: str = described("Name of the release.", pattern=r"v[0-9]{2}\.[0-9]+", shape="like v26.11")
    created: str = described("Date written into the images; the clock is never used.", **_DATE)
    supported_until: str | None = described("Last day on which the release gets fixes.", **_DATE, default=None)
    bases: Mapping[str, Base] = described("Root file systems.")
    components: Mapping[str, Component] = described("Everything that is pinned.")
    indexes: Mapping[str, Index] = described("Python indexes of the channels' own.", default_factory=dict)

    def __post_init__(self) -> None:
        try:
            year = date.fromisoformat(self.created).year
        except ValueError:
            raise WrongValue(f"created: {self.created} is not a valid date", "created") from None
        # Zip archives, such as wheels, cannot store an earlier date.
        if year < 1980:
            raise WrongValue(f"created must be 1980-01-01 or later, not {self.created}", "created")
        for name in (*self.bases, *self.components, *self.indexes):
            if not re.fullmatch(_NAME, name):
                raise ValueError(f"{name!r} is not a name: use lower-case letters, digits and hyphens")
        for name, component in self.components.items():
            seen: set[tuple[str, str]] = set()
            for index, pin in enumerate(component.pins):
                for target in pin.targets or ("*",):
                    if (pin.channel, target) in seen:
                        every = f"target {target}" if pin.targets else "all targets"
                        key = ("components", name, "pins", index)
                        raise WrongValue(f"{name} has two pins for channel {pin.channel}, {every}", *key)
                    seen.add((pin.channel, target))
                built = pin.build.built if pin.build else ()
                if unknown := next((name for name in built if name not in self.components), None):
                    raise ValueError(f"{name}: no component is called {unknown!r}")
