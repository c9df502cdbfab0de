"""An image in the store: its config, its manifest, and the record of how it was built."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from primus.oci import canonical
from primus.oci.left_out import NOTHING, LeftOut
from primus.oci.store import CONFIG_TYPE, MANIFEST_TYPE, Blob, Layer, Store

if TYPE_CHECKING:
    from primus.plan.action import ImagePlan


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a build.

    ``locked``: a stale lock is an error. ``offline``: use downloaded files only. ``rehash``: read all files and
    layers again. ``engine``: the engine that runs build actions. ``quiet``: show no progress.
    """

    locked: bool = False
    offline: bool = False
    rehash: bool = False
    engine: str = "auto"
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerLine:
    """One row of the summary. Sizes are in bytes; ``seconds`` is the time this build spent on the layer (0 if
    reused); ``left_out`` counts GPU code for other GPUs that the layer does not contain.
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
    """An image in the store.

    ``content`` is the config's digest, which does not depend on how layers are compressed. ``failed`` has one
    sentence for each gate that the image failed.
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
    """An image without a name. All its layers are in the store; the fields hold the bytes of its config and
    manifest.
    """

    plan: ImagePlan
    layers: tuple[Layer, ...]
    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        """The digest of the manifest, which identifies the image."""
        return canonical.digest_of(self.manifest)

    @property
    def size(self) -> int:
        """Compressed bytes of all layers."""
        return sum(layer.blob.size for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the gates say of an image: one sentence for each gate that it fails, and the names of its ``plain`` layers.

    Of a plain layer, the gates know only the sizes of its files. Two images that differ in plain layers alone get the
    same verdict, as long as both stay within the budget.
    """

    failed: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


def judged_by(plan: ImagePlan, rules: str) -> str:
    """Return what the verdict on an image depends on besides its bytes: the gates' code and the limits of the
    target.
    """
    return f"{rules} budget {plan.resolved.budget_gb} arch {plan.resolved.arch}"


def current(store: Store, plan: ImagePlan, judged: str | None = None) -> Built | None:
    """Return the image if the store holds all of this plan's image, else None. A no-op build ends here.

    With ``judged``, the image must have been judged by the gates with this hash.
    """
    state = store.record("targets", plan.state)
    if state is None or state.get("key") != plan.key:
        return None
    if judged is not None and state.get("judged") != judged_by(plan, judged):
        return None
    try:
        return _current(store, plan, state)
    except (KeyError, TypeError, ValueError):
        # Treat a record written by another version as missing.
        return None


def _current(store: Store, plan: ImagePlan, state: Mapping[str, Any]) -> Built | None:
    blobs = [Blob(**b) for b in state["blobs"]]
    if not all(store.has(blob) for blob in blobs):
        return None
    entry = store.images().get(plan.ref, {})
    if (entry.get("digest"), entry.get("size")) != (state["digest"], blobs[0].size):
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


def compose(store: Store, plan: ImagePlan) -> Composed | None:
    """Return the image of the plan, or None if one of its layers is not in the store."""
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


def line_of(name: str, layer: Layer, *, built: bool) -> LayerLine:
    """Return the row of the summary for a layer."""
    return LayerLine(
        name=name,
        digest=layer.blob.digest,
        size=layer.blob.size,
        unpacked=layer.unpacked,
        built=built,
        seconds=layer.seconds if built else 0.0,
        left_out=layer.left_out,
    )


def name_image(
    store: Store,
    config: bytes,
    manifest: bytes,
    *,
    target: str,
    ref: str,
    state: str,
    layers: Sequence[tuple[Blob, LayerLine]],
    verdict: Verdict,
    about: Mapping[str, object],
) -> Built:
    """Store config and manifest, let ``ref`` point to the manifest, and record the image under the name ``state``.

    The gates must have accepted the image. ``about`` is what else the record holds: what the image was made from.
    """
    config_blob, manifest_blob = store.put(config, CONFIG_TYPE), store.put(manifest, MANIFEST_TYPE)
    store.tag(ref, manifest_blob, {"architecture": "amd64", "os": "linux"})
    blobs = (manifest_blob, config_blob, *(blob for blob, _ in layers))
    lines = tuple(line for _, line in layers)
    record = {
        **about,
        "digest": manifest_blob.digest,
        "content": config_blob.digest,
        "blobs": [asdict(blob) for blob in blobs],
        "layers": [asdict(line) for line in lines],
        "failed": verdict.failed,
        "plain": verdict.plain,
        "when": int(time.time()),
    }
    store.save("targets", state, record)
    return Built(
        target=target,
        ref=ref,
        digest=manifest_blob.digest,
        content=config_blob.digest,
        changed=True,
        layers=lines,
        failed=verdict.failed,
    )
