"""Which layers images share, and how many bytes belong to one image alone. A layer that is not built has no size, and
neither has any sum that includes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from primus.oci.store import Store
from primus.plan.action import ImagePlan
from primus.terminal import PLAIN, Screen, bytes_text


class SharedLayer(NamedTuple):
    """A layer for comparison between images. ``size`` is compressed; None if it is not built."""

    name: str
    size: int | None


Images = Mapping[str, Mapping[str, SharedLayer]]
"""Target → its layers, bottom first, by the digest of the blob or, if it is not built, the key of the action."""


def images_of(store: Store, plans: Sequence[ImagePlan]) -> Images:
    """Return the images of the plans with the layers that the store has."""
    images: dict[str, dict[str, SharedLayer]] = {plan.target: {} for plan in plans}
    for plan in plans:
        for action in plan.layers:
            layer = store.layer(action.key)
            identity, size = (layer.blob.digest, layer.blob.size) if layer else (action.key, None)
            images[plan.target][identity] = SharedLayer(action.name, size)
    return images


def sharing(images: Images) -> dict[str, dict[str, Any]]:
    """Return each target's ``bytes``, those ``shared`` with other images and its ``own``, and ``with`` each other
    target the shared bytes and their ``share`` of the larger image, 0 to 1. None means unknown.
    """
    result: dict[str, dict[str, Any]] = {}
    for target, layers in images.items():
        elsewhere = {identity for other in images if other != target for identity in images[other]}
        size = _sum(layers.values())
        # A layer that is not built may turn out to be the same blob as another image's.
        shared = None if size is None else _sum(layers[identity] for identity in layers if identity in elsewhere)
        alone = None if size is None or shared is None else size - shared
        result[target] = {"bytes": size, "shared": shared, "own": alone, "with": {}}
    for target, other in combinations(images, 2):
        shared = _sum(layer for identity, layer in images[target].items() if identity in images[other])
        sizes = [result[target]["bytes"], result[other]["bytes"]]
        row: dict[str, Any] = {"shared": None, "share": None}
        if shared is not None and None not in sizes:
            row = {"shared": shared, "share": shared / max(*sizes, 1)}
        result[target]["with"][other] = result[other]["with"][target] = row
    return result


def _sum(layers: Iterable[SharedLayer]) -> int | None:
    sizes = [layer.size for layer in layers]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def sharing_text(images: Images, screen: Screen = PLAIN, *, full: bool = True) -> str:
    """Return tables: layers × targets (= shared, + own; only with ``full``), bytes per target, share per pair.

    Without ``full``, images that are not built are listed in one line instead of in rows of unknown figures.
    """
    rows = sharing(images)
    lines = [*_layers(images, screen), ""] if full else []
    parts = [
        (target, *(_text(row[name]) for name in ("bytes", "shared", "own")))
        for target, row in rows.items()
        if full or row["bytes"] is not None
    ]
    if parts:
        lines += [*screen.table(parts, head=("image", "size", "shared", "own"), right=(1, 2, 3)), ""]
    pairs = [(f"{target} ↔ {other}", rows[target]["with"][other]) for target, other in combinations(images, 2)]
    table = [
        (names, _text(row["shared"]), _share(row["share"])) for names, row in pairs if full or row["share"] is not None
    ]
    if table:
        lines += [*screen.table(table, head=("pair", "shared", "of the larger"), right=(1, 2)), ""]
    unbuilt = [target for target, row in rows.items() if row["bytes"] is None]
    if unbuilt and not full:
        lines += screen.wrap(f"What these share is known once they are built: {', '.join(unbuilt)}")
    return "\n".join(lines).rstrip("\n")


def _layers(images: Images, screen: Screen) -> list[str]:
    layers: dict[str, SharedLayer] = {}
    for image in images.values():
        layers = {**layers, **{identity: layer for identity, layer in image.items() if identity not in layers}}
    rows = []
    for identity, layer in sorted(layers.items(), key=lambda item: -(item[1].size or 0)):
        owners = [target for target in images if identity in images[target]]
        sign = "=" if len(owners) > 1 else "+"
        rows.append([layer.name, _text(layer.size), *(sign if target in owners else "" for target in images)])
    return screen.table(rows, head=("layer", "bytes", *images), right=range(1, len(images) + 2))


def _share(share: float | None) -> str:
    """Return a fraction as a percentage, rounded down, so that "100 %" means every byte."""
    return "unknown" if share is None else f"{math.floor(10_000 * share) / 100:.2f} %"


def _text(size: int | None) -> str:
    return "unknown" if size is None else bytes_text(size)
