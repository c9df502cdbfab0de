"""Replace the layers of modified local folders in the last image, without planning.

If only files of local folders differ from the note of the last build (:mod:`primus.engine.unchanged`), another plan
would be the last one with other keys for the layers of these folders. So the folders are read, the layers are made, and
they take their places in the last image's config and manifest, as written in the store. The bytes are those of an
ordinary build.

The gates have judged the last image, and their verdict holds for the new one if the replaced layers are plain
(:attr:`primus.gates.examiner.LayerFacts.plain`) before and after: then no gate judges anything in them but their size.
The note names only folders whose layers were plain. Of the image's settings, only digests and keys change.

Whenever more may have changed, this module gives up and the ordinary build runs: a file was added or removed, a folder
is large, a new layer is not plain, an image exceeds its budget, a recipe does not load, or anything cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.engine.image import Built, LayerLine, Verdict, line_of, name_image
from primus.engine.kinds.files import entries
from primus.engine.note import renew
from primus.engine.summary import say_channel, summarize
from primus.engine.unchanged import marks_of
from primus.errors import PrimusError
from primus.gates.examiner import Examiner
from primus.gates.needles import needles_of
from primus.oci import canonical
from primus.oci.layer import compression_of, write_layer
from primus.oci.left_out import LeftOut
from primus.oci.store import CONFIG_TYPE, Blob, Layer, Store
from primus.oci.tar import Entry
from primus.plan.action import Action, Input, action_record, image_key, tree_value
from primus.plan.channel import Choice
from primus.plan.stats import StatIndex
from primus.plan.workspace import Workspace

if TYPE_CHECKING:
    from primus.engine.unchanged import Builds

# An ordinary build makes larger layers as fast: it compresses and examines them in parallel.
_MOST_BYTES = 4 << 20


class _GaveUp(Exception):
    """An ordinary build must decide."""


def swapped(builds: Builds, checked: Callable[[], bool], began_ns: int) -> bool:
    """Build the images of ``builds``: notes, and the layers whose local folders differ from them. ``checked`` tells
    whether the modified recipes load.

    Returns False if an ordinary build must run. It then finds all finished layers in the store.
    """
    begin, made = time.monotonic(), _Layers()
    try:
        found = [_Swap(note, changed, checked, made) for note, changed in builds]
        # No image gets its name before all layers are there: an ordinary build names none if a folder cannot be read.
        images = [name() for name in [swap.build() for swap in found]]
        for swap, image in zip(found, images, strict=True):
            renew(swap.note, image, swap.trees, began_ns)
        choices = [Choice(**swap.note["choice"]) for swap in found]
    except (_GaveUp, PrimusError, OSError, KeyError, IndexError, TypeError, ValueError, AttributeError):
        # The ordinary build says what is wrong, if anything is.
        return False
    finally:
        # Leave no process behind.
        checked()
    if any(image.changed for image in images):
        for swap, choice in zip(found, choices, strict=True):
            say_channel(swap.note["target"], choice, swap.note["channels"])
    for line in made.lines:
        print(line, file=sys.stderr)
    summarize(list(zip(images, choices, strict=True)), time.monotonic() - begin)
    return True


class _Swap:
    """One image. ``trees`` are the files of each modified folder."""

    def __init__(
        self, note: Mapping[str, Any], changed: Mapping[str, str], checked: Callable[[], bool], made: _Layers
    ) -> None:
        self.note, self._changed, self._checked, self._made = note, changed, checked, made
        self.trees: dict[str, list[str]] = {}
        self.workspace = Workspace(Store(Path(note["store"])), Path(note["root"]) / ".primus")

    def build(self) -> Callable[[], Built]:
        """Make new layers for the modified folders. Returns what names the image with them."""
        store, note = self.workspace.store, self.note
        self.workspace.hold()
        store.prepare()
        state = store.record("targets", note["state"])
        if state is None or state["digest"] != note["digest"] or state["judged"] is None:
            raise _GaveUp
        inputs: dict[str, Any] = state["inputs"]
        actions: dict[str, Any] = dict(inputs["actions"])
        blobs = [Blob(**blob) for blob in state["blobs"][2:]]
        lines = [_reused(line) for line in state["layers"]]
        order = [line.name for line in lines]
        config, manifest = (json.loads(store.read(state[what])) for what in ("content", "digest"))
        for name in self._changed:
            action = self._action(name, actions[name])
            self.trees[name] = [path for path, _, _ in action.tree]
            if action.key == actions[name]["key"]:
                continue
            layer, at = self._made.of(action, self), order.index(name)
            if state["apart"][at][1] != layer.paths:
                raise _GaveUp
            config["rootfs"]["diff_ids"][at] = layer.diff_id
            config["history"][at]["comment"] = action.key
            manifest["layers"][at] = layer.blob.descriptor
            blobs[at], lines[at] = layer.blob, line_of(name, layer, built=True)
            actions[name] = action_record(action)
        if actions == inputs["actions"]:
            return partial(_same, note, state, lines)
        before = sum(line["size"] for line in state["layers"])
        if note["budget"] is not None and max(before, sum(line.size for line in lines)) > note["budget"]:
            raise _GaveUp
        config_bytes = canonical.dumps(config)
        digest = canonical.digest_of(config_bytes)
        manifest["config"] = Blob(digest=digest, media_type=CONFIG_TYPE, size=len(config_bytes)).descriptor
        key = image_key([actions[name]["key"] for name in order], inputs["config"], inputs["annotations"])
        return partial(
            name_image,
            store,
            config_bytes,
            canonical.dumps(manifest),
            target=note["target"],
            ref=note["ref"],
            state=note["state"],
            layers=list(zip(blobs, lines, strict=True)),
            verdict=Verdict(failed=tuple(state["failed"]), plain=tuple(state["plain"])),
            about={
                "key": key,
                "judged": state["judged"],
                "apart": state["apart"],
                "inputs": {**inputs, "actions": actions},
            },
        )

    def require_checked(self) -> None:
        """Give up unless the modified recipes load, and are still what they were when their check began."""
        marks = ((self._changed.get(layer), paths) for layer, paths, _ in self.note["groups"])
        if not self._checked() or any(before and before != marks_of(paths) for before, paths in marks):
            raise _GaveUp

    def _action(self, name: str, known: Mapping[str, Any]) -> Action:
        """Read the folder of a layer, and return its action."""
        local = self.note["local"][name]
        root, rows = str(local["root"]), known["tree"]
        if sum(os.lstat(f"{root}/{path}").st_size for path in rows) > _MOST_BYTES:
            raise _GaveUp
        tree = tuple(StatIndex().tree(Path(root), tuple(local["include"])))
        if {path: kind for path, kind, _ in tree} != {path: row.partition(" ")[0] for path, row in rows.items()}:
            raise _GaveUp
        return Action(
            name=name,
            kind="files",
            inputs=tuple(
                Input(name=one, value=tree_value(tree) if value.startswith("tree:") else value, where=where)
                for one, (value, where) in known["inputs"].items()
            ),
            spec=local["spec"],
            root=root,
            tree=tree,
        )


class _Layers:
    """The layers made by this command. Several images may share one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[str, Layer] = {}

    def of(self, action: Action, swap: _Swap) -> Layer:
        """Return the layer of a folder."""
        store = swap.workspace.store
        if action.key in self._known:
            return self._known[action.key]
        examiner = Examiner(needles_of(swap.workspace))
        with store.lock(action.key), contextlib.closing(examiner):
            if store.layer(action.key) is not None:
                # Its facts, which the gates have cached, are not at hand here.
                raise _GaveUp
            tool = next(i.value for i in action.inputs if i.name == "assembler")
            layer = write_layer(store, entries(action), compression=compression_of(tool), watch=_Watch(examiner))
            # Once it is recorded, an ordinary build takes it as it is.
            if not examiner.facts().plain:
                raise _GaveUp
            swap.require_checked()
            store.save_layer(action.key, layer, {"name": action.name, "kind": action.kind, "tree": action.tree})
        self._known[action.key] = layer
        self.lines.append(f"✓ {action.name}  {layer.blob.size / 1e6:.1f} MB, {layer.seconds:.1f} s")
        return layer


class _Watch:
    """Examines a layer in the thread that writes it."""

    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner

    def begin(self, entry: Entry) -> None:
        """Begin the next entry."""
        self._examiner.begin(entry.path, entry.kind, entry.size)

    def feed(self, chunk: bytes) -> None:
        """Take the entry's next bytes."""
        self._examiner.feed(chunk)

    def close(self) -> None:
        """Do nothing: :meth:`Examiner.facts` ends the last entry."""


def _reused(line: Mapping[str, Any]) -> LayerLine:
    return LayerLine(**{**line, "built": False, "seconds": 0.0, "left_out": LeftOut.of(line["left_out"])})


def _same(note: Mapping[str, Any], state: Mapping[str, Any], lines: Sequence[LayerLine]) -> Built:
    """Return the last image, which is up to date: a folder was touched, and its files are the same."""
    return Built(
        target=note["target"],
        ref=note["ref"],
        digest=state["digest"],
        content=state["content"],
        changed=False,
        layers=tuple(lines),
        failed=tuple(state["failed"]),
    )
