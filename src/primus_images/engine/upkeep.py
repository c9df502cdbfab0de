"""Upkeep of a store and its workspace: remove damaged blobs, and what nothing needs.

A workspace contains no input, so removing a file by mistake costs time but never a result.
"""

import errno
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primus_images.engine.workshop import wheel_of
from primus_images.errors import HostError
from primus_images.files import remove_path
from primus_images.oci.store import DiskFull, Store
from primus_images.plan.project import Workspace
from primus_images.sandbox.container import layer_folder
from primus_images.sandbox.layers import LISTING
from primus_images.sandbox.state import remove_tree

_PARTIAL = ".tmp"
_BLOBS = "layers and manifests"
_RECORDS = "records of builds"


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Files and folders of one kind that nothing needs, with their size on disk in bytes."""

    kind: str
    paths: tuple[Path, ...]
    size: int


def _name(path: Path) -> str:
    return path.name


def _stem(path: Path) -> str:
    return path.stem


def _judged_blob(path: Path) -> str:
    return path.name.partition("-")[0]


def _layer_name(path: Path) -> str:
    return path.name.removesuffix(LISTING)


def _logged_key(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def find_waste(
    workspace: Workspace,
    locked: Iterable[str],
    *,
    without: Collection[str] = (),
    caches: bool = False,
    more: Mapping[str, Sequence[Path]] | None = None,
) -> list[Waste]:
    """Return what can be removed, in the order in which it is safe to remove it.

    ``locked`` are the SHA-256 hashes of the files in all locks, ``without`` the names of images to
    remove as well. ``caches`` adds downloaded files, unpacked layers and results of gates, and
    ``more`` has other paths by their kind.

    Raises HostError if the index, a manifest or a config is damaged, because the layers it needs
    are then unknown.
    """
    root = workspace.store.root
    needed = _needed(workspace.store, without)
    blobs = {digest.removeprefix("sha256:") for digest in needed.blobs}
    logs = {key[:12] for key in needed.actions}
    # What a workspace needs in addition to the store.
    files = {*locked, *needed.wheels}
    judged = blobs
    layers = {layer_folder(digest) for digest in needed.blobs}
    hashes: list[Path] = []
    if caches:
        files = set()
        judged = set()
        layers = set()
        hashes = sorted((workspace.folder / "cache").glob("stats*"))
    paths_of = {
        _RECORDS: [
            *_others(root / "targets", needed.targets, _stem),
            *_others(root / "actions", needed.actions, _stem),
        ],
        _BLOBS: _others(root / "blobs" / "sha256", blobs),
        "unpacked layers": list(_unneeded_layers(workspace.unpacked, layers)),
        "downloaded files": _others(workspace.files.root / "sha256", files),
        "findings of gates": _others(workspace.facts, judged, _judged_blob),
        "logs": _others(workspace.logs, logs, _logged_key),
        # `primus verify` was killed, or was asked to keep a store that differs.
        "stores of verify": sorted(workspace.folder.glob("verify-*")),
        "hashes of files": hashes,
        **(more or {}),
    }
    return [
        Waste(kind=kind, paths=tuple(paths), size=sum(map(_size, paths)))
        for kind, paths in paths_of.items()
        if paths
    ]


def _others(
    folder: Path, needed: Collection[str], name_of: Callable[[Path], str] = _name
) -> list[Path]:
    return [path for path in _inside(folder) if name_of(path) not in needed]


def _unneeded_layers(folder: Path, needed: Collection[str]) -> Iterator[Path]:
    for storage in _inside(folder):
        if not needed or not (storage / "layers").exists():
            yield storage
        else:
            yield from _others(storage / "layers", needed, _layer_name)
            # After a power failure, the files of a container are still there.
            yield from _inside(storage / "containers")


def remove(waste: Sequence[Waste], store: Store, images: Iterable[str] = ()) -> None:
    """Remove the names of ``images`` from the store, and the files. An interrupt leaves a valid
    store.

    Raises OSError or HostError if one cannot be removed.
    """
    # An image that is named needs its blobs. Without the others, it is whole, and a full disk has
    # room for the new index.
    of_images = [kind for kind in waste if kind.kind in (_BLOBS, _RECORDS)]
    for kind in waste:
        if kind not in of_images:
            _remove_paths(kind.paths)
    for name in images:
        _untag(store, name, of_images)
    for kind in of_images:
        _remove_paths(kind.paths)


def _untag(store: Store, name: str, waste: Iterable[Waste]) -> None:
    """Remove the name of an image.

    On a full disk, what only this image needs makes room for the new index, or for its file.
    """
    records = [path for kind in waste if kind.kind == _RECORDS for path in kind.paths]
    # From here on, and until the index is written, the image counts as damaged.
    blobs = [path for kind in waste if kind.kind == _BLOBS for path in kind.paths]
    for path in [*records, *sorted(blobs, key=_size, reverse=True)]:
        try:
            store.untag(name)
            return
        except DiskFull:
            path.unlink()
    store.untag(name)


def _remove_paths(paths: Iterable[Path]) -> None:
    for path in paths:
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
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        raise HostError(
            f"{path} cannot be removed", hint="run this as the user whose files it contains"
        )


@dataclass
class _Needed:
    """What the images of a store consist of: digests, names of records, keys, SHA-256 of wheels."""

    images: set[str] = field(default_factory=set)
    blobs: set[str] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)
    actions: set[str] = field(default_factory=set)
    wheels: set[str] = field(default_factory=set)


def _needed(store: Store, without: Collection[str]) -> _Needed:
    needed = _Needed()
    for name, entry in store.images().items():
        if name not in without:
            digest = str(entry["digest"])
            needed.images.add(digest)
            needed.blobs |= {digest, *_parts(store, digest)}
    for name, record in _records(store, "targets"):
        keys = _actions_of(record)
        if record.get("digest") in needed.images and keys is not None:
            needed.targets.add(name)
            needed.actions |= keys
    for key, _ in _records(store, "actions"):
        layer = store.layer(key)
        if layer and layer.blob.digest in needed.blobs:
            needed.actions.add(key)
        if key not in needed.actions:
            continue
        if layer:
            needed.blobs |= {layer.blob.digest, layer.paths}
        wheel = wheel_of(store, key)
        if wheel:
            needed.wheels.add(wheel.sha256)
    return needed


def _parts(store: Store, digest: str) -> list[str]:
    """Return the digests of the config and layers of an image."""
    manifest = json.loads(store.read(digest))
    return [str(blob["digest"]) for blob in (manifest["config"], *manifest["layers"])]


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
        size = path.lstat().st_blocks * 512
        if path.is_dir() and not path.is_symlink():
            size += sum(map(_size, path.iterdir()))
    except OSError:
        return 0  # owned by another user, or gone
    return size


def remove_damage(store: Store) -> Iterator[str]:
    """Remove the damaged blobs of the store, and the names of images that lack one.

    Yields one sentence for each. The build then makes again what is missing.
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
    return all(store.blob_path(part).is_file() for part in _parts(store, digest))


def _actions_of(record: Mapping[str, Any]) -> set[str] | None:
    # None for a record that another version wrote.
    try:
        return {str(action["key"]) for action in record["inputs"]["actions"].values()}
    except (AttributeError, KeyError, TypeError):
        return None
