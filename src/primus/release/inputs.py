"""What the newest published images were made from: indexes, wheels, commits, build environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from primus.schema import build, described
from primus.yamlfile import read

__all__ = ["Inputs", "Stack", "Wheel", "load_inputs", "stack_of"]

_FILE = Path(__file__).with_name("inputs.yaml")
_COMMIT = r"[0-9a-f]{40}"


@dataclass(frozen=True, kw_only=True)
class Index:
    """A package index or archive that an image's parts came from. Its host is no part of this data."""

    id: str = described("What it is called here.")
    path: str | None = described("Path below its host, where it is on record.", default=None)
    kind: Literal["wheel", "apt"] = described("What it offers.")
    used_by: tuple[str, ...] = described("Releases made from it.", default=())
    carries: tuple[str, ...] = described("Packages taken from it.")
    notes: str | None = described("Caveats.", default=None)


@dataclass(frozen=True, kw_only=True)
class WheelTrain:
    """How ROCm's wheels are divided into shared and per-architecture ones."""

    host: tuple[str, ...] = described("Wheels that every image needs.")
    device: Mapping[str, tuple[str, ...]] = described("Architecture → its wheels.")
    device_content: str = described("What device wheels hold.")
    no_device_wheel: tuple[str, ...] = described("Packages without a device wheel.")
    consequence: str = described("What follows.")


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
    """One git checkout that entered a published image."""

    repo: str = described("Repository.")
    commit: str | None = described("Commit.", pattern=_COMMIT, shape="a 40-hex commit", default=None)
    other_build_commit: str | None = described("Commit in another build of the same tag.", default=None)
    date: str | None = described("Date of the commit.", default=None)
    tag: str | None = described("Tag of the commit.", default=None)
    branch: str | None = described("Branch it was taken from.", default=None)
    ref: str | None = described("Name it was taken by.", default=None)
    on_ref: str | None = described("Where the commit is found.", default=None)
    version: str | None = described("Version it calls itself.", default=None)
    build: str | None = described("How it was built.", default=None)
    build_env: str | None = described("Environment of its build.", default=None)
    reason: str | None = described("Why this source.", default=None)
    use: str | None = described("What it is used for.", default=None)
    submodules: Mapping[str, str] = described("Submodule → commit.", default_factory=dict)
    patches: tuple[str, ...] = described("Changes made to it.", default=())


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Everything that one published image was made from."""

    release: str = described("The release.")
    dockerfile: str = described("Its published Dockerfile.")
    dockerfile_matches_image: bool = described("Whether that Dockerfile made the image.")
    base_image: str = described("Base image.")
    base_pinned_by_digest: bool = described("Whether the base is pinned by digest.")
    builder_images: tuple[str, ...] = described("Images of its build stages.")
    installer: str = described("What installed the wheels.")
    wheels: tuple[Wheel, ...] = described("Wheels.")
    git: Mapping[str, GitSource | None] = described("Component → checkout; null when it came as a wheel.")
    build_rocm_version_env: str = described("ROCm version that the build environment claims.")
    private_inputs: tuple[str, ...] = described("Files that are in no public repository.")
    extra_env: tuple[str, ...] = described("Environment that only this release sets.", default=())
    sed_in_place_commands: int = described("Edits that its Dockerfile makes in place.")
    apt: str = described("How Debian packages were installed.")
    python_packages_in_image: Mapping[str, str] = described("Package → version found in the image.")

    def __post_init__(self) -> None:
        names = [w.name for w in self.wheels]
        if len(names) != len(set(names)):
            raise ValueError("a wheel is named twice")


@dataclass(frozen=True, kw_only=True)
class BranchRef:
    """A component taken from a branch, which moves."""

    component: str = described("The component.")
    repo: str = described("Repository.")
    ref: str = described("The branch.")
    ref_kind: str = described("What kind of name it is.")
    resolved_in_image: str | None = described("Commit found in the image.", default=None)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What all stacks have in common."""

    git: Mapping[str, GitSource] = described("Component → checkout.")
    branch_refs: tuple[BranchRef, ...] = described("Components taken from a branch.")
    image_env: tuple[str, ...] = described("Environment of the images.")
    native: Mapping[str, str] = described("Native library → version.")
    tarballs_without_checksum: tuple[str, ...] = described("Downloads that nothing checked.")


@dataclass(frozen=True, kw_only=True)
class EarlierDockerfile:
    """Pins of an earlier published Dockerfile; the image may hold others."""

    release: str = described("The release.")
    pins: Mapping[str, str] = described("Component → pin.")


@dataclass(frozen=True, kw_only=True)
class TurboBuild:
    """What building Primus Turbo takes."""

    min_rocm: str = described("Oldest ROCm.")
    min_pytorch: str = described("Oldest PyTorch.")
    gpu_archs: str = described("How architectures are named.")
    env: tuple[str, ...] = described("Variables it reads.")
    requires: tuple[str, ...] = described("Packages it needs.")
    wheels_published: bool = described("Whether wheels are published.")
    low_precision: Mapping[str, tuple[str, ...]] = described("Architecture → low-precision types.")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Where the newest images' parts came from."""

    indexes: tuple[Index, ...] = described("Package indexes and archives.")
    wheel_train: WheelTrain = described("How ROCm's wheels are divided.")
    stacks: tuple[Stack, ...] = described("What each image was made from.")
    shared_by_both: Shared = described("What the stacks have in common.")
    earlier_dockerfiles: tuple[EarlierDockerfile, ...] = described("Pins of earlier Dockerfiles.")
    primus_turbo_build: TurboBuild = described("What building Primus Turbo takes.")
    constraints: tuple[str, ...] = described("Traps that the published images met.")

    def __post_init__(self) -> None:
        known = {index.id for index in self.indexes} | {"PyPI"}
        for stack in self.stacks:
            for wheel in stack.wheels:
                if wheel.index is not None and wheel.index not in known:
                    raise ValueError(f"{stack.release}: {wheel.name} names no known index: {wheel.index!r}")


@cache
def load_inputs(path: Path = _FILE) -> Inputs:
    """The inputs that ship with this package, or those of another file in their form."""
    return build(Inputs, read(path, path.name))


def stack_of(inputs: Inputs, reference: str) -> Stack | None:
    """What the image was made from, where it is on record: for ``rocm/primus`` only."""
    return next((s for s in inputs.stacks if f"rocm/primus:{s.release}" == reference), None)
