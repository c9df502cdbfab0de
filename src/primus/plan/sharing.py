"""Which layers images share, and how many bytes belong to one image alone. A layer that is not built has no size, and
neither has any sum that includes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from primus.oci.store import Store
from primus.plan.action import ImagePlan
from primus.terminal import PLAIN, Screen, bytes_text


@dataclass(frozen=True, kw_only=True)
class LayerOf:
    """A layer for comparison between images: the digest of its blob if it is built, else its action's key. ``size``
    is compressed.
    """

    name: str
    identity: str
    size: int | None


@dataclass(frozen=True, kw_only=True)
class Image:
    """A target and its layers, bottom first."""

    target: str
    layers: tuple[LayerOf, ...]

    @property
    def size(self) -> int | None:
        """The compressed bytes of all layers; None if one is not built."""
        return _sum(self.layers)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Compressed bytes of a target's image: all, those shared with other images, and its own."""

    target: str
    size: int | None
    shared: int | None
    own: int | None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What two images have in common; ``share`` is the common fraction of the larger one, 0 to 1."""

    targets: tuple[str, str]
    shared: int | None
    share: float | None


def sharing_of(store: Store, plans: Sequence[ImagePlan]) -> list[Image]:
    """Return the images of the plans with the layers that the store has."""
    images = []
    for plan in plans:
        layers = []
        for action in plan.layers:
            layer = store.layer(action.key)
            identity, size = (layer.blob.digest, layer.blob.size) if layer else (action.key, None)
            layers.append(LayerOf(name=action.name, identity=identity, size=size))
        images.append(Image(target=plan.target, layers=tuple(layers)))
    return images


def parts(images: Sequence[Image]) -> list[Part]:
    """Return the shared and own bytes of each of the images."""
    result = []
    for image in images:
        elsewhere = {layer.identity for other in images if other is not image for layer in other.layers}
        shared = _sum([layer for layer in image.layers if layer.identity in elsewhere])
        own = _sum([layer for layer in image.layers if layer.identity not in elsewhere])
        if image.size is None:
            # A layer that is not built may turn out to be the same blob as another image's.
            shared = own = None
        result.append(Part(target=image.target, size=image.size, shared=shared, own=own))
    return result


def pairs(images: Sequence[Image]) -> list[Pair]:
    """Return a row for every two images."""
    result = []
    for a, b in combinations(images, 2):
        common = {layer.identity for layer in b.layers}
        shared = _sum([layer for layer in a.layers if layer.identity in common])
        if a.size is None or b.size is None or shared is None:
            result.append(Pair(targets=(a.target, b.target), shared=None, share=None))
        else:
            share = shared / max(a.size, b.size, 1)
            result.append(Pair(targets=(a.target, b.target), shared=shared, share=share))
    return result


def _sum(layers: Sequence[LayerOf]) -> int | None:
    sizes = {layer.identity: layer.size for layer in layers}
    total = 0
    for size in sizes.values():
        if size is None:
            return None
        total += size
    return total


def sharing_json(images: Sequence[Image]) -> dict[str, dict[str, Any]]:
    """Return each target's bytes, and what it shares with each other target, as JSON data; None means unknown."""
    result: dict[str, dict[str, Any]] = {
        part.target: {"bytes": part.size, "shared": part.shared, "own": part.own, "with": {}} for part in parts(images)
    }
    for pair in pairs(images):
        for one, other in (pair.targets, pair.targets[::-1]):
            result[one]["with"][other] = {"shared": pair.shared, "share": pair.share}
    return {target: {"sharing": row} for target, row in result.items()}


def sharing_text(images: Sequence[Image], screen: Screen = PLAIN, *, full: bool = True) -> str:
    """Return tables: layers × targets (= shared, + own; only with ``full``), bytes per target, share per pair.

    Without ``full``, images that are not built are listed in one line instead of in rows of unknown figures.
    """
    lines = [*_layers(images, screen), ""] if full else []
    shown = [part for part in parts(images) if full or part.size is not None]
    if shown:
        rows = [(part.target, _text(part.size), _text(part.shared), _text(part.own)) for part in shown]
        lines += [*screen.table(rows, head=("image", "size", "shared", "own"), right=(1, 2, 3)), ""]
    known = [pair for pair in pairs(images) if full or pair.shared is not None]
    if known:
        both = [(" ↔ ".join(pair.targets), _text(pair.shared), share_text(pair.share)) for pair in known]
        lines += [*screen.table(both, head=("pair", "shared", "of the larger"), right=(1, 2)), ""]
    unbuilt = [image.target for image in images if image.size is None]
    if unbuilt and not full:
        lines += screen.wrap(f"What these share is known once they are built: {', '.join(unbuilt)}")
    return "\n".join(lines).rstrip("\n")


def _layers(images: Sequence[Image], screen: Screen) -> list[str]:
    targets = [image.target for image in images]
    owners: dict[str, set[str]] = {}
    layers: dict[str, LayerOf] = {}
    for image in images:
        for layer in image.layers:
            owners.setdefault(layer.identity, set()).add(image.target)
            layers.setdefault(layer.identity, layer)
    rows = []
    for identity, layer in sorted(layers.items(), key=lambda item: -(item[1].size or 0)):
        sign = "=" if len(owners[identity]) > 1 else "+"
        rows.append([layer.name, _text(layer.size), *(sign if t in owners[identity] else "" for t in targets)])
    return screen.table(rows, head=("layer", "bytes", *targets), right=range(1, len(targets) + 2))


def share_text(share: float | None) -> str:
    """Return a fraction as a percentage, rounded down, so that "100 %" means every byte."""
    return "unknown" if share is None else f"{math.floor(10_000 * share) / 100:.2f} %"


def _text(size: int | None) -> str:
    return "unknown" if size is None else bytes_text(size)
