"""The published releases as data, and the current pins in the same form, so that both can be
compared.

``None`` always means "not published". Nothing is inferred from neighbouring releases.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, cast

from packaging.version import Version

from primus_images.errors import InputError, did_you_mean
from primus_images.plan.resolve import ResolvedTarget
from primus_images.schema import build
from primus_images.system.drivers import amdgpu_drivers
from primus_images.versions.components import Versions
from primus_images.yamlfile import read

# The repository of AMD's images.
AMDS = "rocm/primus"
# This name always means the pins, even if the history has a release with the name of the pinned
# one.
PINS = "versions.yaml"
_FILE = Path(__file__).with_name("history.yaml")
_NAME = re.compile(r"v[0-9]+(?:\.[0-9]+)+")


@dataclass(frozen=True, kw_only=True)
class Release:
    """One published image tag, or pins or an image in the same form, with their ``origin``. See
    fields.yaml.
    """

    image: str
    tag: str
    date: str | None = None
    digest: str | None = None
    image_id: str | None = None
    gpus: tuple[str, ...] | None = None
    gfx: tuple[str, ...] | None = None
    size_gb: float | None = None
    content_size_bytes: int | None = None
    confidence: Literal["published", "draft", "image"] | None = None
    same_as: str | None = None
    supported_until: str | None = None
    drivers: str | None = None
    components: Mapping[str, str | None]
    validated: str | None = None
    notes: tuple[str, ...] = ()
    origin: str = ""
    locked: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.origin and _NAME.search(self.tag) is None:
            raise ValueError(f"the tag {self.tag!r} contains no release name like v26.8")

    @property
    def reference(self) -> str:
        """``image:tag``, or ``image@digest``."""
        return f"{self.image}{'@' if ':' in self.tag else ':'}{self.tag}"

    @property
    def name(self) -> str:
        """The name without image and variant: ``v25.9`` for ``rocm/primus:v25.9_gfx942``."""
        return cast(re.Match[str], _NAME.search(self.tag))[0]


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything known about the published images."""

    deprecations: tuple[str, ...]
    releases: tuple[Release, ...]


@cache
def load_history() -> History:
    """Read the history that ships with this package."""
    return build(History, read(_FILE, _FILE.name))


def newest_first(releases: Sequence[Release]) -> tuple[Release, ...]:
    """By release number (v25.10 is newer than v25.9), then by image and tag."""
    by_reference = sorted(releases, key=lambda release: (release.image, release.tag))
    return tuple(sorted(by_reference, key=lambda release: Version(release.name), reverse=True))


def select(history: History, word: str) -> tuple[Release, ...]:
    """Return the releases that ``word`` names: ``v25.9``, ``v25.9_gfx942``, ``rocm/primus:v25.10``,
    ``primus:v25.10``.

    A name can match several tags. Raises InputError if there is none, with the most similar names.
    """
    image, colon, tag = word.rpartition(":")
    if colon:
        releases = tuple(r for r in history.releases if r.tag == tag and image in _names(r.image))
    else:
        # A release name means the training images, because maxtext-v26.5 has another numbering.
        releases = tuple(r for r in history.releases if r.name == word and r.tag.startswith(word))
        releases = releases or tuple(r for r in history.releases if r.tag == word)
    if releases:
        return releases
    names: dict[str, None] = {}
    for release in history.releases:
        tags = [f"{image}:{release.tag}" for image in _names(release.image)]
        names |= dict.fromkeys([release.name, release.tag, *tags])
    hint = did_you_mean(word, names, most=3) or "primus releases lists the releases"
    raise InputError(f"no release is called {word!r}", hint=hint)


def namesake(versions: Versions, history: History) -> str:
    """Return that AMD has a release of the pinned one's name; "" if it has none on record."""
    published = [r for r in history.releases if r.image == AMDS and r.name == versions.release]
    if not published:
        return ""
    theirs = published[0].reference
    if published[0].date:
        theirs += f" of {published[0].date}"
    if versions.image.name == AMDS:
        remedy = "give `release` or `image.name` in versions.yaml another name"
    else:
        remedy = f"this one is {versions.image.name}"
    return f"AMD has a release {versions.release}, {theirs}: {remedy}"


def _names(image: str) -> tuple[str, str]:
    return image, image.rpartition("/")[2]


def pin_names(versions: Versions, targets: Iterable[str]) -> tuple[str, ...]:
    """Return the names that :func:`pins` accepts: those of the release, of each target and of the
    file.
    """
    return (versions.release, PINS, *(f"{versions.release}-{target}" for target in targets))


def pins(
    versions: Versions,
    shown: Sequence[ResolvedTarget],
    tag: str,
    *,
    origin: str = f"pins of {PINS}",
) -> Release:
    """Return the pins of the targets ``shown`` as a release called ``tag``."""
    pinned = []
    locked = []
    drivers = []
    gpus = {}
    for target in shown:
        if target.choice.base is not None:
            pinned.append(("python", versions.bases[target.choice.base].python, target.name))
        for component, pin in {**target.pins, **target.inside}.items():
            version = pin.version or f"{pin.path} of this repository"
            pinned.append((key_of(component), version, target.name))
        rocm = {**target.inside, **target.pins}.get("rocm")
        if rocm and rocm.version:
            listed = f"amdgpu {' '.join(amdgpu_drivers(rocm.version))}"
            drivers.append(("drivers", listed, target.name))
        if target.gpu:
            gpus[target.gpu.name] = target.gpu.arch
        if target.lock:
            for file in target.lock.of("wheel"):
                locked.append((key_of(file.name), file.version, target.name))
    components = spread(pinned)
    locked_versions = spread(locked)
    # The published tables call ROCm's wheels ``rocm_sdk``.
    if "rocm_sdk_core" in components:
        locked_versions["rocm_sdk"] = components["rocm_sdk_core"]
    names = ", ".join(target.name for target in shown) or "no target"
    return Release(
        image=versions.image.name,
        tag=tag,
        date=versions.created,
        supported_until=versions.supported_until,
        drivers=spread(drivers).get("drivers"),
        gpus=tuple(gpus),
        gfx=tuple(dict.fromkeys(gpus.values())),
        components=components,
        locked=locked_versions,
        notes=(f"The {origin} for {names}.",),
        origin=origin,
    )


def key_of(component: str) -> str:
    """Return the name of a component as the published tables write it."""
    return component.replace("-", "_")


def spread(rows: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """Return name → value for rows of (name, value, target), sorted by name.

    Targets are named where their values differ.
    """
    uses: dict[str, dict[str, list[str]]] = {}
    for name, value, target in rows:
        uses.setdefault(name, {}).setdefault(value, []).append(target)
    result = {}
    for name, values in sorted(uses.items()):
        words = list(values)
        if len(values) > 1:
            words = [f"{value} ({', '.join(targets)})" for value, targets in values.items()]
        result[name] = ", ".join(words)
    return result
