"""The published releases as data, and the current pins in the same form, so that both can be compared.

``None`` always means "not published". Nothing is inferred from neighbouring releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from primus.errors import InputError, did_you_mean
from primus.schema import build, described
from primus.system.preflight import amdgpu_drivers
from primus.yamlfile import read

if TYPE_CHECKING:
    from primus.plan.resolve import ResolvedTarget
    from primus.versions.components import Pin, Versions

IMAGE = "rocm/primus"
# This name always means the pins, even if the history has a release with the name of the pinned one.
PINS = "versions.yaml"
_FILE = Path(__file__).with_name("history.yaml")
_CPU = "cpu"
_DIGEST = r"sha256:[0-9a-f]{64}"
_NAME = re.compile(r"v[0-9]+(?:\.[0-9]+)+")


@dataclass(frozen=True, kw_only=True)
class Alternate:
    """Another table, or a part of one, that ``source`` published for the same tag. It differs from the best known one.

    ``digest_prefix`` are the first 8 digits, and ``content_size_bytes`` is compressed.
    """

    source: str
    digest_prefix: str | None = None
    image_id: str | None = None
    content_size_bytes: int | None = None
    components: Mapping[str, str] = field(default_factory=dict)
    other_packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Release:
    """One published image tag, or pins or an image in the same form, with their ``origin``.

    ``date_kind`` is "built" for the date inside the image, and "created" for that of the pins. ``size_gb`` is unpacked,
    ``content_size_bytes`` compressed. ``confidence`` is "published" for a page, its data or a release note, "draft" for
    a README or unpublished data, and "image" if AMD read it from inside the image. ``image_verified`` are components
    confirmed in the image although the table as a whole is not. ``same_as`` is another tag with an identical table.
    ``locked`` are the versions of unpinned packages in the locks of the current pins.
    ``drivers`` are the kernel drivers that support it.
    """

    image: str
    tag: str
    date: str | None = None
    date_kind: Literal["built", "created"] | None = None
    digest: str | None = described("Digest on Docker Hub.", pattern=_DIGEST, shape="sha256:<64 hex>", default=None)
    image_id: str | None = described("Short image id.", pattern=r"[0-9a-f]{12}", shape="12 hex digits", default=None)
    gpus: tuple[str, ...] | None = None
    gfx: tuple[str, ...] | None = None
    size_gb: float | None = None
    content_size_bytes: int | None = None
    confidence: Literal["published", "draft", "image"] | None = None
    image_verified: tuple[str, ...] = ()
    same_as: str | None = None
    supported_until: str | None = None
    drivers: str | None = None
    components: Mapping[str, str | None]
    alternates: tuple[Alternate, ...] = ()
    notes: tuple[str, ...] = ()
    origin: str = field(default="", metadata={"hidden": True})
    locked: Mapping[str, str] = field(default_factory=dict, metadata={"hidden": True})

    def __post_init__(self) -> None:
        if not self.origin and _NAME.search(self.tag) is None:
            raise ValueError(f"the tag {self.tag!r} contains no release name like v26.8")

    @property
    def reference(self) -> str:
        """``image:tag``, or ``image@digest``."""
        return f"{self.image}{'@' if ':' in self.tag else ':'}{self.tag}"

    @property
    def pinned(self) -> bool:
        """Whether it was not published by AMD."""
        return bool(self.origin)

    @property
    def name(self) -> str:
        """The release's name without image and variant: ``v25.9`` for ``rocm/primus:v25.9_gfx942``."""
        return cast(re.Match[str], _NAME.search(self.tag))[0]

    @property
    def missing(self) -> str:
        """The text shown for a component without a version."""
        return "not pinned" if self.pinned else "not published"


@dataclass(frozen=True, kw_only=True)
class UnconfirmedTag:
    """A tag that some file names but no table, page or history lists, and what is known of it (``status``)."""

    image: str
    tag: str
    named_by: str
    status: str

    @property
    def reference(self) -> str:
        """``image:tag``."""
        return f"{self.image}:{self.tag}"


@dataclass(frozen=True, kw_only=True)
class DocumentationError:
    """One error in the published version tables: the page, the printed text, and the correct one."""

    where: str
    printed: str
    right: str


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything known about the published images. ``gpu_arch`` maps a GPU to its architecture."""

    gpu_arch: Mapping[str, str]
    deprecations: tuple[str, ...]
    releases: tuple[Release, ...]
    related_images: tuple[Release, ...]
    unconfirmed_tags: tuple[UnconfirmedTag, ...]
    documentation_errors: tuple[DocumentationError, ...]

    @property
    def every(self) -> tuple[Release, ...]:
        """All releases, also those of related images."""
        return (*self.releases, *self.related_images)


@cache
def load_history() -> History:
    """Read the history that ships with this package."""
    return build(History, read(_FILE, _FILE.name))


def newest_first(releases: Sequence[Release]) -> tuple[Release, ...]:
    """By release number (v25.10 is newer than v25.9), then by image and tag."""

    def number(release: Release) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"[0-9]+", release.name)))

    by_reference = sorted(releases, key=lambda release: (release.image, release.tag))
    return tuple(sorted(by_reference, key=number, reverse=True))


def of_image(history: History, image: str | None) -> tuple[Release, ...]:
    """The releases of one image (``rocm/primus`` or ``primus``), or those of the training line when none is named.

    Raises InputError for an image that the history does not know.
    """
    if image is None:
        return history.releases
    releases = tuple(release for release in history.every if image in _names(release.image))
    if not releases:
        images = sorted({release.image for release in history.every})
        raise InputError(f"no release of an image called {image!r} is known", hint=_near(image, images))
    return releases


def select(history: History, word: str, *, also: Sequence[str] = ()) -> tuple[Release, ...]:
    """Return the releases that ``word`` names: ``v25.9``, ``v25.9_gfx942``, ``rocm/primus:v25.10``, ``primus:v25.10``.

    A name can match several tags. Raises InputError if there is none, with the most similar names of the history and
    of ``also``.
    """
    image, colon, tag = word.rpartition(":")
    if colon:
        releases = tuple(r for r in history.every if image in _names(r.image) and r.tag == tag)
    else:
        # A release name means the training images, because related images have their own numbering.
        releases = tuple(r for r in history.releases if r.name == word)
        releases = releases or tuple(r for r in history.every if r.tag == word)
    if releases:
        return releases
    if doubtful := unconfirmed(history, word):
        reason = "; ".join(f"{t.reference} is named by {t.named_by} ({t.status})" for t in doubtful)
        raise InputError(f"nothing was published for {word}: {reason}", hint="primus releases lists the published ones")
    names = dict.fromkeys(
        name for r in history.every for name in (r.name, r.tag, *(f"{image}:{r.tag}" for image in _names(r.image)))
    )
    raise InputError(f"no release is called {word!r}", hint=_near(word, [*names, *also]))


def unconfirmed(history: History, word: str) -> tuple[UnconfirmedTag, ...]:
    """Return the unconfirmed tags that ``word`` names."""
    image, colon, tag = word.rpartition(":")
    if colon:
        return tuple(t for t in history.unconfirmed_tags if t.tag == tag and image in _names(t.image))
    return tuple(t for t in history.unconfirmed_tags if t.tag == tag or t.tag.startswith(tag + "_"))


def errors_about(history: History, release: Release) -> tuple[DocumentationError, ...]:
    """Return the known errors of published pages about the release with this name.

    The image is not compared, because the names of pages are not those of images.
    """
    pattern = re.compile(re.escape(release.name) + r"(?![0-9]|\.[0-9])")
    return tuple(error for error in history.documentation_errors if pattern.search(error.where))


def _names(image: str) -> tuple[str, str]:
    return image, image.rpartition("/")[2]


def _near(word: str, names: Sequence[str]) -> str:
    return did_you_mean(word, names, most=3) or "primus releases lists the releases"


def pin_names(versions: Versions, targets: Iterable[str]) -> tuple[str, ...]:
    """Return the names that :func:`pins` accepts: those of the release, of each target and of the file."""
    return (versions.release, PINS, *(f"{versions.release}-{target}" for target in targets))


def pins(
    versions: Versions,
    targets: Mapping[str, ResolvedTarget],
    name: str,
    gpu_arch: Mapping[str, str],
    *,
    origin: str = "pins of versions.yaml",
) -> Release:
    """Return the pins of versions.yaml as a release: all of them, or those of one target (``v26.11-cpu``)."""
    name = versions.release if name == PINS else name
    target = name.removeprefix(versions.release).removeprefix("-")
    shown = [targets[target]] if target else [*targets.values()]
    pythons = [(versions.bases[t.choice.base].python, t.name) for t in shown if t.choice.base is not None]
    components: dict[str, str | None] = {"python": _joined(pythons)} if pythons else {}
    if target:
        for component, pin in {**targets[target].pins, **targets[target].inside}.items():
            components[key_of(component)] = _version(pin)
    else:
        components |= {key_of(component): _versions(item.pins) for component, item in versions.components.items()}
    gpus = tuple(resolved.name for resolved in shown if resolved.name != _CPU)
    inside = {t.name: {**t.inside, **t.pins}.get("rocm") for t in shown}
    rocm = [(target, pin.version) for target, pin in inside.items() if pin and pin.version]
    return Release(
        image=IMAGE,
        tag=name,
        date=versions.created,
        date_kind="created",
        supported_until=versions.supported_until,
        drivers=_joined((f"amdgpu {' '.join(amdgpu_drivers(v))}", target) for target, v in rocm) if rocm else None,
        gpus=gpus,
        gfx=tuple(dict.fromkeys(gpu_arch[gpu] for gpu in gpus if gpu in gpu_arch)),
        components=components,
        locked={
            **spread((key_of(f.name), f.version, t.name) for t in shown if t.lock for f in t.lock.of("wheel")),
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
    """Return name → value for rows of (name, value, target); targets are named where their values differ."""
    uses: dict[str, list[tuple[str, str]]] = {}
    for name, value, target in rows:
        uses.setdefault(name, []).append((value, target))
    return {name: _joined(values) for name, values in sorted(uses.items())}


def _version(pin: Pin) -> str:
    return pin.version if pin.version is not None else f"{pin.path} of this repository"


def _versions(pins: Sequence[Pin]) -> str:
    several = len({pin.channel for pin in pins}) > 1
    return _joined(
        (_version(pin), target)
        for pin in pins
        for target in pin.targets or (f"channel {pin.channel}" if several else "every other target",)
    )


def _joined(uses: Iterable[tuple[str, str]]) -> str:
    """Return the only value of (value, user) pairs, or all values with their users in parentheses."""
    users: dict[str, dict[str, None]] = {}
    for value, user in uses:
        users.setdefault(value, {})[user] = None
    if len(users) == 1:
        return next(iter(users))
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in users.items())
