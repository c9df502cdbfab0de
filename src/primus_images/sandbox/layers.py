"""Layers that are unpacked into folders, once, and compared with what they were made from.

Two comparisons find a file that was changed since, by hand or by a power cut. Before each
container, a *listing* (size, owner, mode and times of every file) is compared with that of
the moment after unpacking: this reads no file. Before evidence is made, GNU tar compares every byte
with the layer's blob, whose digest is checked as it is read. What differs is unpacked again.
"""

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

from primus_images.errors import HostError
from primus_images.files import json_if_readable, text_if_readable
from primus_images.programs import captured, stop_all, tracked
from primus_images.sandbox.container import LayerRef, RootFs, layer_folder
from primus_images.sandbox.engine import ENGINE
from primus_images.sandbox.state import State, locked, remove_tree, write_own
from primus_images.terminal import counted, say

# What a listing is kept in, beside the folder of its layer.
LISTING = ".listing"
# The suffix of a folder that is not a layer: one that is being unpacked, or that was set aside.
PARTIAL = ".tmp"
# A shell script that runs in the workspace. GNU tar does not write through a link of its own
# archive, and no folder gets the files of two archives.
_UNPACK = (
    'umask 022 && mkdir "$1" && exec tar --extract --file=- --directory="$1" '
    "--preserve-permissions --numeric-owner --xattrs --xattrs-include='*'"
)
_COMPARE = (
    'exec tar --compare --verbose --file=- --directory="$1" --numeric-owner --quoting-style=literal'
)
# A name may contain every character but NUL.
_LIST = r"%H\t%P\t%y %s %m %U %G %C@ %T@ %l\0"


def unpacked_layers(root: RootFs, state: State) -> list[str]:
    """Return the names of the image's layers in the workspace, top first.

    Those that are absent, or have changed since they were unpacked, are unpacked. Raises HostError
    if that fails, or if a blob is damaged.
    """
    layers = _layers_of(root)
    changed = _changed(layers, state)
    if changed:
        with locked(state.workspace):
            # Another command may have unpacked them meanwhile.
            changed = _changed(layers, state)
            _unpack_all(root, state, {name: layers[name] for name in changed})
    return list(layers)


def compare(root: RootFs, state: State) -> None:
    """Compare every byte of the image's unpacked layers with their blobs.

    Layers that were compared or unpacked since this machine started, and have not changed since,
    are left out. Those that differ are unpacked again, with a message. Raises HostError if that
    fails, or if a blob is damaged.
    """
    layers = _layers_of(root)
    unpacked_layers(root, state)
    compared = json_if_readable(_compared_path(state))
    equal = {}
    differing = {}
    for name, layer in layers.items():
        listing = _kept_listing(name, state)
        if listing and compared.get(name) == listing:
            continue
        difference = _difference(root, state, name, layer)
        if difference:
            say(f"an unpacked layer of {root.name} differs from its blob ({difference})")
            differing[name] = layer
        elif listing:
            equal[name] = listing
    with locked(state.workspace):
        _note_compared(equal, state)
        _unpack_all(root, state, differing)


def _compared_path(state: State) -> Path:
    """Return the path of the listings of layers whose bytes are known to be those of their blobs.

    The folder is private, and the machine forgets it when it starts anew.
    """
    return state.place.parent / "compared"


def _note_compared(listings: Mapping[str, str], state: State) -> None:
    noted = json_if_readable(_compared_path(state))
    write_own(_compared_path(state), json.dumps({**noted, **listings}))


def _layers_of(root: RootFs) -> dict[str, LayerRef]:
    """Return the layers by the names of their folders, top first."""
    # What an image contains twice counts where it is higher.
    layers = {}
    for layer in reversed(root.layers):
        layers[layer_folder(layer.digest)] = layer
    return layers


def _changed(layers: Iterable[str], state: State) -> list[str]:
    """Return the layers whose folders are absent, or are not as they were after unpacking."""
    present = [name for name in layers if (state.workspace / "layers" / name).is_dir()]
    listings = _listings(present, state)
    changed = []
    for name in layers:
        kept = _kept_listing(name, state)
        if not kept or kept != listings.get(name):
            changed.append(name)
    return changed


def _listings(names: Sequence[str], state: State) -> dict[str, str]:
    """Return the hash of the listing of each layer."""
    if not names:
        return {}
    folders = [f"layers/{name}" for name in names]
    argv = [*state.inside(), "find", *folders, "-printf", _LIST]
    listed = captured(argv, ENGINE, env=state.environment())
    if listed.returncode != 0:
        # A file vanished, or cannot be read: nothing is known about any of them.
        return {}
    lines: dict[str, list[str]] = {name: [] for name in names}
    for line in listed.stdout.split("\0")[:-1]:
        folder, _, rest = line.partition("\t")
        lines[folder.removeprefix("layers/")].append(rest)
    listings = {}
    for name, rows in lines.items():
        text = "\n".join(sorted(rows))
        listings[name] = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    return listings


def _kept_listing(name: str, state: State) -> str:
    """Return the hash of the layer's listing of when it was unpacked; empty if it has none."""
    return text_if_readable(_listing_path(name, state)).strip()


def _listing_path(name: str, state: State) -> Path:
    return state.workspace / "layers" / f"{name}{LISTING}"


def _unpack_all(root: RootFs, state: State, layers: Mapping[str, LayerRef]) -> None:
    if not layers:
        return
    folder = state.workspace / "layers"
    again = [name for name in layers if (folder / name).exists()]
    for name in again:
        # A container may still use it; a sweep removes it afterwards.
        (folder / name).rename(folder / f"{name}-{os.urandom(4).hex()}{PARTIAL}")
    megabytes = sum(layer.size for layer in layers.values()) / 1e6
    number = counted(len(layers), "layer")
    why = "once"
    if again:
        why = f"{len(again)} of them again: not as they were unpacked"
    say(f"unpacking {number} ({megabytes:.0f} MB compressed) of {root.name}, {why}")
    # The largest decides how long it takes.
    largest_first = sorted(layers, key=lambda name: -layers[name].size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            list(pool.map(lambda name: _unpack(root, state, name, layers[name]), largest_first))
        except BaseException:
            stop_all()
            raise
    listings = _listings(list(layers), state)
    for name, listing in listings.items():
        write_own(_listing_path(name, state), listing + "\n")
    _note_compared(listings, state)


def _unpack(root: RootFs, state: State, name: str, layer: LayerRef) -> None:
    path = state.workspace / "layers" / name
    partial = path.with_name(name + PARTIAL)
    remove_tree(partial)
    argv = [*state.inside(), "sh", "-c", _UNPACK, "sh", f"layers/{partial.name}"]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        code = _tar(argv, state, root, layer, log)
        log.seek(0)
        if code != 0:
            reason = log.readline().strip() or "tar was stopped"
            hint = "free some space: primus clean" if "No space left" in reason else None
            raise HostError(f"a layer of {root.name} cannot be unpacked: {reason}", hint=hint)
    partial.rename(path)


def _difference(root: RootFs, state: State, name: str, layer: LayerRef) -> str:
    """Return in what the unpacked layer differs from its blob; empty if in nothing."""
    argv = [*state.inside(), "sh", "-c", _COMPARE, "sh", f"layers/{name}"]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        code = _tar(argv, state, root, layer, log)
        log.seek(0)
        lines = log.read().split("\n")[:-1]
    if code != 0:
        differences = [line for line in lines if ": " in line and not line.endswith("/")]
        return "; ".join(differences[-1:]) or f"tar ended with exit code {code}"
    expected = set()
    for line in lines:
        path = PurePosixPath(line)
        expected |= {str(path), *map(str, path.parents)}
    argv = [*state.inside(), "find", f"layers/{name}", "-mindepth", "1", "-printf", r"%P\0"]
    present = captured(argv, ENGINE, env=state.environment()).stdout.split("\0")[:-1]
    added = sorted(set(present) - expected)
    if added:
        return f"{added[0]} is not in it"
    return ""


def _tar(argv: Sequence[str], state: State, root: RootFs, layer: LayerRef, log: IO[str]) -> int:
    """Run tar on the bytes of the layer, and return its exit code. Its output goes to ``log``.

    Raises HostError if the blob is damaged.
    """
    process: Any = subprocess.Popen(
        argv,
        env=state.environment(),
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
    )
    with tracked(process):
        with suppress(BrokenPipeError), process.stdin:  # its message follows
            process.stdin.writelines(root.tar(layer))
        code: int = process.wait()
    return code
