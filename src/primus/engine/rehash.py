"""Compare everything in a store with its hashes. Damaged blobs are removed, and the next build recreates them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, cast

from primus.errors import HostError
from primus.oci.contents import walk
from primus.oci.roots import reference
from primus.oci.store import Layer, Store
from primus.plan.action import Action


def find_damage(store: Store, actions: Iterable[Action]) -> Iterator[str]:
    """Yield one sentence per damaged blob, and remove it. Afterwards all remaining blobs match their digests.

    Reads every blob that an image of ``index.json`` or one of ``actions`` needs: manifests, configs, layers and
    lists of paths. Layers of local folders are also compared with the file hashes in their keys.
    """
    try:
        images = store.images()
    except HostError as error:
        store.reset_index()
        images = {}
        yield f"{error.message}; begun again"
    faults: dict[str, str | None] = {}
    for ref, manifest in images.items():
        for digest in _blobs(store, str(manifest["digest"]), faults):
            if fault := _fault(store, digest, faults):
                yield f"{ref}: {fault}; build it again"
                store.untag(ref)
                break
    for action in {a.key: a for a in actions if a.makes_layer}.values():
        layer = store.layer(action.key)
        if layer is None:
            continue
        fault = _fault(store, layer.blob.digest, faults) or _fault(store, layer.paths, faults)
        if fault := fault or _differs(store, action, layer):
            store.forget(action.key)
            yield f"{action.name}: {fault}; building it again"


def _fault(store: Store, digest: str, faults: dict[str, str | None]) -> str | None:
    """Return what is wrong with the blob, and remove it from the store. Each blob is read once."""
    if digest not in faults:
        faults[digest] = store.check(digest)
        if faults[digest]:
            store.discard(digest)
    return faults[digest]


def _blobs(store: Store, manifest: str, faults: dict[str, str | None]) -> list[str]:
    if _fault(store, manifest, faults):
        return [manifest]
    # Its bytes are those that were written, so its structure is valid, too.
    data: dict[str, Any] = json.loads(store.read(manifest))
    return [str(entry["digest"]) for entry in (data["config"], *data["layers"])]


def _differs(store: Store, action: Action, layer: Layer) -> str | None:
    """Return the first file of a local folder's layer whose hash is not the one in the action's key."""
    wanted = {name: value for name, kind, value in action.tree if kind != "link"}
    if not wanted or action.kind != "files":
        return None
    to = str(action.spec.get("to", "")).strip("/")
    found: dict[str, str] = {}
    try:
        for member in walk(reference(layer), store.blob_path(layer.blob.digest)):
            if member.kind == "file":
                name = member.path.removeprefix(f"{to}/") if to else member.path
                found[name] = hashlib.file_digest(cast("Any", member.open()), "sha256").hexdigest()
    except HostError as error:
        return f"its layer cannot be read: {error.message}"
    bad = next((name for name, value in wanted.items() if found.get(name) != value), None)
    return f"{bad} in its layer is not the file of its key" if bad else None
