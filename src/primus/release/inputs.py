"""The inputs of the newest published images: indexes, wheels, commits, build environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from primus.schema import build, described
from primus.yamlfile import read

_FILE = Path(__file__).with_name("inputs.yaml")
_COMMIT = r"[0-9a-f]{40}"


@dataclass(frozen=True, kw_only=True)
class Index:
    """A package index or archive that an image was made from. Its host is not part of this data."""

    id: str = described("Its name in this file.")
    path: str | None = described("Path below its host, if recorded.", default=None)
    kind: Literal["wheel", "apt"] = described("Kind of packages.")
    used_by: tuple[str, ...] = described("Releases made from it.", default=())
    carries: tuple[str, ...] = described("Packages taken from it.")
    notes: str | None = described("Caveats.", default=None)


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel of a published image."""

    name: str = described("Package.")
    version: str = described("Its version.")
    pinned: bool = described("Whether the published Dockerfile pins it.")
    index: str | None = described("Where it came from: an index's id, or PyPI.", default=None)
    note: str | None = described("Caveat.", default=None)


@dataclass(frozen=True, kw_only=True)
class GitSource:
    """One git checkout that is part of a published image."""

    repo: str = described("Repository.")
    commit: str | None = described("Commit.", pattern=_COMMIT, shape="a 40-hex commit", default=None)
    other_build_commit: str | None = described("Commit in another build of the same tag.", default=None)
    date: str | None = described("Date of the commit.", default=None)
    tag: str | None = described("Tag of the commit.", default=None)
    branch: str | None = described("Branch it was taken from.", default=None)
    ref: str | None = described("Name that was checked out.", default=None)
    on_ref: str | None = described("Ref that contains the commit.", default=None)
    version: str | None = described("Version that it reports.", default=None)
    build: str | None = described("How it was built.", default=None)
    build_env: str | None = described("Environment of its build.", default=None)
    reason: str | None = described("Why this source.", default=None)
    use: str | None = described("Purpose.", default=None)
    submodules: Mapping[str, str] = described("Submodule → commit.", default_factory=dict)
    patches: tuple[str, ...] = described("Changes made to it.", default=())


@dataclass(frozen=True, kw_only=True)
class Stack:
    """All inputs of one published image."""

    release: str = described("The release.")
    dockerfile: str = described("Its published Dockerfile.")
    dockerfile_matches_image: bool = described("Whether the image was built from that Dockerfile.")
    base_image: str = described("Base image.")
    base_pinned_by_digest: bool = described("Whether the base is pinned by digest.")
    builder_images: tuple[str, ...] = described("Images of its build stages.")
    installer: str = described("Installer of the wheels.")
    wheels: tuple[Wheel, ...] = described("Wheels.")
    git: Mapping[str, GitSource | None] = described("Component → checkout; null if it came as a wheel.")
    build_rocm_version_env: str = described("ROCm version in the build environment.")
    private_inputs: tuple[str, ...] = described("Files that no public repository contains.")
    extra_env: tuple[str, ...] = described("Environment that only this release sets.", default=())
    sed_in_place_commands: int = described("Edits that its Dockerfile makes in place.")
    apt: str = described("How Debian packages were installed.")
    python_packages_in_image: Mapping[str, str] = described("Package → version found in the image.")

    def __post_init__(self) -> None:
        names = [w.name for w in self.wheels]
        if len(names) != len(set(names)):
            raise ValueError("duplicate wheel")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of the newest images."""

    indexes: tuple[Index, ...] = described("Package indexes and archives.")
    stacks: tuple[Stack, ...] = described("Inputs of each image.")

    def __post_init__(self) -> None:
        known = {index.id for index in self.indexes} | {"PyPI"}
        for stack in self.stacks:
            for wheel in stack.wheels:
                if wheel.index is not None and wheel.index not in known:
                    raise ValueError(f"{stack.release}: {wheel.name} names an unknown index: {wheel.index!r}")


@cache
def load_inputs() -> Inputs:
    """Read the inputs that ship with this package."""
    return build(Inputs, read(_FILE, _FILE.name))


def stack_of(inputs: Inputs, reference: str) -> Stack | None:
    """Return the inputs of the image, or None if they are not recorded. Only images of ``rocm/primus`` are."""
    return next((s for s in inputs.stacks if f"rocm/primus:{s.release}" == reference), None)
