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
from primus_images.system.preflight import amdgpu_drivers
from primus_images.versions.components import Versions
from primus_images.yamlfile import read

IMAGE = "rocm/primus"
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
    names = dict.fromkeys(
        name
        for r in history.releases
        for name in (r.name, r.tag, *(f"{image}:{r.tag}" for image in _names(r.image)))
    )
    hint = did_you_mean(word, names, most=3) or "primus releases lists the releases"
    raise InputError(f"no release is called {word!r}", hint=hint)


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
    python = [
        ("python", versions.bases[t.choice.base].python, t.name)
        for t in shown
        if t.choice.base is not None
    ]
    pinned = [
        (key_of(component), pin.version or f"{pin.path} of this repository", t.name)
        for t in shown
        for component, pin in {**t.pins, **t.inside}.items()
    ]
    components = spread([*python, *pinned])
    rocm = [
        (t.name, pin.version)
        for t in shown
        if (pin := {**t.inside, **t.pins}.get("rocm")) and pin.version
    ]
    drivers = spread(
        ("drivers", f"amdgpu {' '.join(amdgpu_drivers(version))}", target)
        for target, version in rocm
    )
    gpus = {t.gpu.name: t.gpu.arch for t in shown if t.gpu}
    return Release(
        image=IMAGE,
        tag=tag,
        date=versions.created,
        supported_until=versions.supported_until,
        drivers=drivers.get("drivers"),
        gpus=tuple(gpus),
        gfx=tuple(dict.fromkeys(gpus.values())),
        components=components,
        locked={
            **spread(
                (key_of(f.name), f.version, t.name)
                for t in shown
                if t.lock
                for f in t.lock.of("wheel")
            ),
            # The published tables call ROCm's wheels ``rocm_sdk``.
            **({"rocm_sdk": core} if (core := components.get("rocm_sdk_core")) else {}),
        },
        notes=(f"The {origin} for {', '.join(t.name for t in shown) or 'no target'}.",),
        origin=origin,
    )


def key_of(component: str) -> str:
    """Return the name of a component as the published tables write it."""
    return component.replace("-", "_")


def spread(rows: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """Return name → value for rows of (name, value, target); targets are named where their values
    differ.
    """
    uses: dict[str, dict[str, list[str]]] = {}
    for name, value, target in rows:
        uses.setdefault(name, {}).setdefault(value, []).append(target)
    return {
        name: ", ".join(
            f"{value} ({', '.join(users)})" if len(values) > 1 else value
            for value, users in values.items()
        )
        for name, values in sorted(uses.items())
    }
