"""Plan → image: fetch what is missing, run what is not done, write config and manifest, let the name point to it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from primus.errors import CheckFailed
from primus.images import canonical
from primus.images.action import Action, ImagePlan
from primus.images.left_out import NOTHING, LeftOut
from primus.images.store import CONFIG_TYPE, MANIFEST_TYPE, Blob, Layer, Store

if TYPE_CHECKING:
    from primus.images.execute import Workshop
    from primus.images.project import Project
    from primus.images.tar import Watch

__all__ = ["Built", "Composed", "Gates", "LayerLine", "assemble", "compose", "current", "missing", "run_actions"]


@dataclass(frozen=True, kw_only=True)
class LayerLine:
    """One row of the summary: sizes in bytes, seconds as this build spent them (0 when reused); ``left_out`` is
    what stayed out, since it is for other GPUs.
    """

    name: str
    digest: str
    size: int
    unpacked: int
    built: bool
    seconds: float
    left_out: LeftOut = NOTHING


@dataclass(frozen=True, kw_only=True)
class Built:
    """An image in the store. ``content`` is the config's digest: it does not depend on how layers are compressed.
    ``failed`` are the gates that it failed, a sentence each.
    """

    target: str
    ref: str
    digest: str
    content: str
    changed: bool
    layers: tuple[LayerLine, ...]
    failed: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Compressed bytes of all layers."""
        return sum(line.size for line in self.layers)


@dataclass(frozen=True, kw_only=True)
class Composed:
    """An image without a name: all its layers are in the store, and these are the bytes of its config and manifest."""

    plan: ImagePlan
    layers: tuple[Layer, ...]
    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        """The manifest's digest, by which the image is known."""
        return canonical.digest_of(self.manifest)

    @property
    def size(self) -> int:
        """Compressed bytes of all layers."""
        return sum(layer.blob.size for layer in self.layers)


class Gates(Protocol):
    """What an image must pass before its name points to it. ``mark`` changes with the rules."""

    mark: str

    def watch(self) -> Watch:
        """Someone to see a layer while it is written."""

    def look(self, layer: Layer, watch: Watch | None) -> None:
        """Take note of a layer that the build just made; ``watch`` saw it, if anyone did."""

    def judge(self, image: Composed) -> tuple[str, ...]:
        """The failed gates, a sentence each; raises CheckFailed when the image must not get its name."""

    def close(self) -> None:
        """The build is over."""


def current(store: Store, plan: ImagePlan, judged: str | None = None) -> Built | None:
    """The image if the store holds exactly this plan's, whole; the no-op build ends here. With ``judged`` only when
    the gates of this mark judged it.
    """
    state = store.record("targets", plan.state)
    if state is None or state.get("key") != plan.key or judged not in (None, state.get("judged")):
        return None
    blobs = [Blob(**b) for b in state["blobs"]]
    if not all(store.has(blob) for blob in blobs) or store.images().get(plan.ref, {}).get("digest") != state["digest"]:
        return None
    lines = tuple(
        LayerLine(**{**line, "built": False, "seconds": 0.0, "left_out": LeftOut.of(line.get("left_out", ()))})
        for line in state["layers"]
    )
    return Built(
        target=plan.target,
        ref=plan.ref,
        digest=state["digest"],
        content=state["content"],
        changed=False,
        layers=lines,
        failed=tuple(state.get("failed", ())),
    )


def missing(plans: Sequence[ImagePlan], done: Callable[[Action], bool]) -> list[Action]:
    """Actions that must run, each once, those needed first. What is needed only by done work is not run."""
    wanted: dict[str, Action] = {}
    for plan in plans:
        for action in reversed(plan.actions()):
            is_layer = any(action.key == layer.key for layer in plan.layers)
            needed = any(action in (*other.needs, *other.tools) for other in wanted.values())
            if action.key not in wanted and (is_layer or needed) and not done(action):
                wanted[action.key] = action
    return list(reversed(wanted.values()))


def run_actions(workshop: Workshop, actions: Sequence[Action]) -> set[str]:
    """Run the actions, independent ones side by side; returns the keys of those done here.

    The first failure stops what has not begun; what was finished stays.
    """
    from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

    from primus.images.heap import give_back
    from primus.sandbox.running import stop_all

    # Hashing and compressing wait for the interpreter a thousand times per gigabyte, behind gates that search text: for
    # up to 5 ms each time, if it were not told.
    sys.setswitchinterval(0.0005)
    waiting = {a.key: a for a in actions}
    done_here: set[str] = set()
    running: dict[Future[bool], str] = {}
    workers = max(2, os.cpu_count() or 2)
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="action") as pool:
        try:
            while waiting or running:
                busy = set(running.values()) | set(waiting)
                ready = [a for a in waiting.values() if not any(n.key in busy for n in (*a.needs, *a.tools))]
                # The largest first: the long pole decides the whole.
                for action in sorted(ready, key=lambda a: -sum(f.size for f in a.files)):
                    del waiting[action.key]
                    running[pool.submit(workshop.run, action)] = action.key
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    key = running.pop(future)
                    if future.result():
                        done_here.add(key)
                # What runs in the sandbox next needs it.
                give_back()
        except BaseException:
            for future in running:
                future.cancel()
            # Ctrl-C reaches only the main thread, and the pool waits for its workers. One may just be starting another.
            while wait(running, timeout=0.2).not_done:
                stop_all()
            raise
    return done_here


def compose(store: Store, plan: ImagePlan) -> Composed | None:
    """The image of the plan, or None when one of its layers is not in the store."""
    found = [store.layer(action.key) for action in plan.layers]
    layers = tuple(layer for layer in found if layer is not None)
    if len(layers) < len(found):
        return None
    config = canonical.dumps(
        {
            **plan.config,
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
            "history": [{"created_by": f"primus {a.kind} {a.name}", "comment": a.key} for a in plan.layers],
        }
    )
    blob = Blob(digest=canonical.digest_of(config), media_type=CONFIG_TYPE, size=len(config))
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": blob.descriptor,
        "layers": [layer.blob.descriptor for layer in layers],
        "annotations": dict(plan.annotations),
    }
    return Composed(plan=plan, layers=layers, config=config, manifest=canonical.dumps(manifest))


def assemble(project: Project, plan: ImagePlan, built: set[str], gates: Gates | None) -> Built:
    """Overlap rule, gates, config, manifest; then the name. All layers must be in the store.

    Raises CheckFailed when layers overlap or the gates refuse the image; the name then is as before.
    """
    from primus.images.given import stacked
    from primus.images.layer import read_paths
    from primus.images.overlap import check_overlap

    store = project.store
    image = compose(store, plan)
    if image is None:
        raise CheckFailed(f"a layer of {plan.ref} left the store while it was used", hint="build again")
    pairs = list(zip(plan.layers, image.layers, strict=True))
    paths = [(a, read_paths(store, layer)) for a, layer in pairs]
    given = stacked(found for a, found in paths if a.kind == "image")
    check_overlap([("the base image", given), *((a.name, found) for a, found in paths if a.kind != "image")])
    failed = gates.judge(image) if gates else ()
    config_blob = store.put(image.config, CONFIG_TYPE)
    manifest_blob = store.put(image.manifest, MANIFEST_TYPE)
    lines = tuple(
        LayerLine(
            name=a.name,
            digest=layer.blob.digest,
            size=layer.blob.size,
            unpacked=layer.unpacked,
            built=a.key in built,
            seconds=layer.seconds if a.key in built else 0.0,
            left_out=layer.left_out,
        )
        for a, layer in pairs
    )
    platform = {"architecture": str(plan.config["architecture"]), "os": str(plan.config["os"])}
    store.tag(plan.ref, manifest_blob, platform)
    store.save(
        "targets",
        plan.state,
        {
            "key": plan.key,
            "digest": manifest_blob.digest,
            "content": config_blob.digest,
            "blobs": [asdict(b) for b in (manifest_blob, config_blob, *(layer.blob for layer in image.layers))],
            "layers": [asdict(line) for line in lines],
            "judged": gates.mark if gates else None,
            "failed": failed,
            "inputs": tree_record(plan),
            "when": int(time.time()),
        },
    )
    return Built(
        target=plan.target,
        ref=plan.ref,
        digest=manifest_blob.digest,
        content=config_blob.digest,
        changed=True,
        layers=lines,
        failed=failed,
    )


def tree_record(plan: ImagePlan) -> dict[str, Any]:
    """Everything the plan was made from, for a later ``explain``: per action its inputs, and files of local trees."""
    return {
        "actions": {
            a.name: {
                "key": a.key,
                "kind": a.kind,
                "inputs": {i.name: [i.value, i.where] for i in a.inputs},
                "tree": {name: f"{kind} {value}" for name, kind, value in a.tree},
            }
            for a in plan.actions()
        },
        "config": dict(plan.config),
        "annotations": dict(plan.annotations),
    }
