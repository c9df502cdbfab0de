"""Layers of the store as a root file system for the sandbox: of some layers, or of a whole image."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primus.errors import InputError
from primus.oci import canonical
from primus.oci.store import Layer, Store
from primus.sandbox.container import LayerRef, RootFs


def reference(layer: Layer) -> LayerRef:
    """Return the layer as the sandbox and the gates refer to it."""
    blob = layer.blob
    return LayerRef(digest=blob.digest, diff_id=layer.diff_id, size=blob.size, media_type=blob.media_type)


def root_of_layers(store: Store, cache: Path, layers: Sequence[Layer]) -> RootFs:
    """Return a root file system of these layers, bottom first, without an image's settings."""
    refs = tuple(map(reference, layers))
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [ref.diff_id for ref in refs]},
    }
    data = canonical.dumps(config)
    return RootFs(layers=refs, config=config, blob=store.blob_path, cache=cache, name="layers", config_bytes=data)


def root_of_image(store: Store, cache: Path, target: str, *, ref: str | None = None) -> RootFs:
    """Return the image of ``target`` (the one named ``ref``, or else the newest).

    Raises InputError, which lists the existing images, if it is not built; HostError if its manifest or config is
    damaged.
    """
    images = store.images()
    if ref is None:
        names = sorted(name for name in images if name.removesuffix("-preview").endswith(f"-{target}"))
        ref = next(reversed(names), "")
    if ref not in images:
        names = sorted(images) or ["no image"]
        raise InputError(
            f"{ref or target} is not built; the store has {', '.join(names)}", hint=f"primus build {target}"
        )
    manifest = store.read(str(images[ref]["digest"]))
    data = json.loads(manifest)
    config_bytes = store.read(data["config"]["digest"])
    config: dict[str, Any] = json.loads(config_bytes)
    diff_ids = config["rootfs"]["diff_ids"]
    refs = tuple(
        LayerRef(digest=entry["digest"], diff_id=diff_id, size=entry["size"], media_type=entry["mediaType"])
        for entry, diff_id in zip(data["layers"], diff_ids, strict=True)
    )
    return RootFs(
        layers=refs,
        config=config,
        blob=store.blob_path,
        cache=cache,
        name=ref,
        config_bytes=config_bytes,
        manifest=manifest,
    )
