"""Upkeep of a store and its workspace: remove damaged blobs, and what no image, build or lock
needs.

A workspace contains no input, so removing a file by mistake costs time but never a result.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_images.engine.workshop import wheel_of
from primus_images.errors import HostError
from primus_images.files import remove_path
from primus_images.oci.store import Store
from primus_images.plan.project import Workspace
from primus_images.sandbox.container import layer_folder
from primus_images.sandbox.engines import remove_tree

_PARTIAL = ".tmp"


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Files and folders of one kind that nothing needs, with their size on disk in bytes."""

    kind: str
    paths: tuple[Path, ...]
    size: int


def find_waste(
    workspace: Workspace,
    locked: Iterable[str],
    *,
    without: Collection[str] = (),
    caches: bool = False,
) -> list[Waste]:
    """Return what can be removed, in the order in which it is safe to remove it.

    ``locked`` are the SHA-256 hashes of the files in all locks, ``without`` the names of images to
    remove as well. ``caches`` adds downloaded files, unpacked layers and results of gates.

    Raises HostError if the index, a manifest or a config is damaged, because the layers it needs
    are then unknown.
    """
    store = workspace.store
    digests, targets, actions, wheels = _needed(store, without)
    if caches:
        files = set()
    else:
        files = {*locked, *wheels}
    blobs = {digest.partition(":")[2] for digest in digests}
    if caches:
        judged = set()
    else:
        judged = blobs
    logs = {key[:12] for key in actions}
    folder = workspace.folder
    root = store.root
    layers = {layer_folder(digest) for digest in digests}
    storages = _inside(workspace.unpacked)
    # After a power failure, the files of a container are still there.
    unpacked = [
        p
        for s in storages
        if not caches
        for name in ("layers", "containers")
        for p in _inside(s / name)
    ]
    paths_of = {
        "records of builds": [
            *(p for p in _inside(root / "targets") if p.stem not in targets),
            *(p for p in _inside(root / "actions") if p.stem not in actions),
        ],
        "layers and manifests": [
            p for p in _inside(root / "blobs" / "sha256") if p.name not in blobs
        ],
        "unpacked layers": [
            *(p for p in storages if caches or not (p / "layers").exists()),
            *(p for p in unpacked if p.parent.name == "containers" or p.name not in layers),
        ],
        "downloaded files": [
            p for p in _inside(workspace.files.root / "sha256") if p.name not in files
        ],
        "findings of gates": [
            p for p in _inside(workspace.facts) if p.name.partition("-")[0] not in judged
        ],
        "logs": [p for p in _inside(workspace.logs) if p.stem.rpartition("-")[2] not in logs],
        # `primus verify` was killed, or was asked to keep a store that differs.
        "stores of verify": [p for p in _inside(folder) if p.name.startswith("verify-")],
    }
    if caches:
        paths_of["hashes of files"] = [
            p for p in _inside(folder / "cache") if p.name.startswith("stats")
        ]
    return [
        Waste(kind=kind, paths=tuple(paths), size=sum(map(_size, paths)))
        for kind, paths in paths_of.items()
        if paths
    ]


def remove(waste: Sequence[Waste]) -> None:
    """Remove the files. Raises OSError or HostError if one cannot be removed. An interrupt leaves a
    valid store.
    """
    for path in (path for kind in waste for path in kind.paths):
        if path.is_dir() and not path.is_symlink():
            _remove_folder(path)
        else:
            path.unlink(missing_ok=True)


def _remove_folder(path: Path) -> None:
    if path.suffix != _PARTIAL:
        # What has this suffix never counts as complete.
        partial = path.with_name(f"{path.name}{_PARTIAL}")
        remove_tree(partial)
        path = path.rename(partial)
    remove_tree(path)
    if path.exists():
        raise HostError(
            f"{path} cannot be removed", hint="run this as the user whose files it contains"
        )


def _needed(
    store: Store, without: Collection[str]
) -> tuple[set[str], set[str], set[str], set[str]]:
    """Return the digests of blobs, the names of records of targets, the keys of actions, and the
    wheels' SHA-256.
    """
    blobs = set[str]()
    targets = set[str]()
    actions = set[str]()
    wheels = set[str]()
    images = {str(entry["digest"]) for name, entry in store.images().items() if name not in without}
    for digest in images:
        manifest = json.loads(store.read(digest))
        config = str(manifest["config"]["digest"])
        blobs |= {digest, config, *(layer["digest"] for layer in manifest["layers"])}
    for name, record in _records(store, "targets"):
        if str(record.get("digest")) in images and (keys := _actions_of(record)) is not None:
            targets.add(name)
            actions |= keys
    for key, _ in _records(store, "actions"):
        layer = store.layer(key)
        if key not in actions and not (layer and layer.blob.digest in blobs):
            continue
        actions.add(key)
        if layer:
            blobs |= {layer.blob.digest, layer.paths}
        wheel = wheel_of(store, key)
        if wheel:
            wheels.add(wheel.sha256)
    return blobs, targets, actions, wheels


def _records(store: Store, room: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path in _inside(store.root / room):
        record = store.record(room, path.stem)
        if record is not None:
            yield path.stem, record


def _inside(folder: Path) -> list[Path]:
    if folder.is_dir():
        return sorted(folder.iterdir())
    return []


def _size(path: Path) -> int:
    try:
        status = path.lstat()
        if path.is_dir() and not path.is_symlink():
            inside = sorted(path.iterdir())
        else:
            inside = []
    except OSError:
        return 0  # owned by another user, or gone
    return status.st_blocks * 512 + sum(map(_size, inside))


def remove_damage(store: Store) -> Iterator[str]:
    """Read every blob of the store and remove the damaged ones, with the names of images that lack
    one. Yields one sentence for each. The build then makes again what is missing.
    """
    try:
        images = store.images()
    except HostError as error:
        store.reset_index()
        images = {}
        yield f"{error.message}; begun again"
    for path in _inside(store.root / "blobs" / "sha256"):
        fault = store.check(f"sha256:{path.name}")
        if fault:
            remove_path(path)
            yield f"{fault}; removed"
    for ref, entry in images.items():
        if not _is_whole(store, str(entry["digest"])):
            store.untag(ref)
            yield f"{ref} has lost a blob; build it again"


def _is_whole(store: Store, digest: str) -> bool:
    if not store.blob_path(digest).is_file():
        return False
    manifest = json.loads(store.read(digest))
    return all(
        store.blob_path(entry["digest"]).is_file()
        for entry in (manifest["config"], *manifest["layers"])
    )


def _actions_of(record: Mapping[str, Any]) -> set[str] | None:
    # None for a record that another version wrote.
    try:
        return {str(action["key"]) for action in record["inputs"]["actions"].values()}
    except (AttributeError, KeyError, TypeError):
        return None
