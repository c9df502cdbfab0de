"""An image in the store: its config, its manifest, and the record of how it was built."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from primus.oci import canonical
from primus.oci.store import CONFIG_TYPE, MANIFEST_TYPE, NOTHING, Blob, Layer, LeftOut, Store
from primus.plan.action import tree_record

if TYPE_CHECKING:
    from primus.plan.action import ImagePlan


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

    ``content`` is the config's digest, which does not depend on how layers are compressed. ``changed`` tells whether
    this build named the image. ``failed`` has one sentence for each gate that the image failed.
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


def compose(store: Store, plan: ImagePlan) -> Composed | None:
    """Return the image of the plan, or None if one of its layers is not in the store."""
    layers = []
    for action in plan.layers:
        if (layer := store.layer(action.key)) is None:
            return None
        layers.append(layer)
    config = canonical.dumps(
        {
            **plan.config,
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
            "history": [{"created_by": f"primus {a.kind} {a.name}", "comment": a.key} for a in plan.layers],
        }
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": Blob.of(config, CONFIG_TYPE).descriptor,
        "layers": [layer.blob.descriptor for layer in layers],
        "annotations": dict(plan.annotations),
    }
    return Composed(plan=plan, layers=tuple(layers), config=config, manifest=canonical.dumps(manifest))


def stored(store: Store, plan: ImagePlan) -> Composed | None:
    """Return the image of the plan if the store holds all of it under its name, else None.

    Layers must exist with their full size. Index, manifest and config are small, so their bytes are compared.
    """
    image = compose(store, plan)
    if image is None or not store.names(plan.ref, Blob.of(image.manifest, MANIFEST_TYPE)):
        return None
    intact = all(store.check(canonical.digest_of(data)) is None for data in (image.manifest, image.config))
    return image if intact else None


def finished(store: Store, plan: ImagePlan, rules: str) -> Built | None:
    """Return the plan's image if the store holds it and the gates with the hash ``rules`` have judged it, else None."""
    image = stored(store, plan)
    record = store.record("targets", plan.state) or {}
    if image is None or (record.get("digest"), record.get("judged")) != (image.digest, judged_by(plan, rules)):
        return None
    sentences = record.get("failed")
    failed = tuple(map(str, sentences)) if isinstance(sentences, list) else ()
    return _built(image, failed, changed=False, built=())


def judged_by(plan: ImagePlan, rules: str) -> str:
    """Return what the verdict on an image depends on besides its bytes: the gates' code and the limits of the
    target.
    """
    return f"{rules} budget {plan.resolved.budget_gb} arch {plan.resolved.arch}"


def name_image(
    store: Store, image: Composed, *, failed: tuple[str, ...], built: Collection[str], about: Mapping[str, Any]
) -> Built:
    """Store config and manifest, let the image's name point to the manifest, and record the build.

    ``failed`` has one sentence for each failed gate, ``built`` the keys of the actions that this build ran, and
    ``about`` what else the record contains.
    """
    plan = image.plan
    store.put(image.config, CONFIG_TYPE)
    store.tag(plan.ref, store.put(image.manifest, MANIFEST_TYPE))
    record = {"digest": image.digest, "failed": list(failed), "inputs": tree_record(plan), **about}
    store.save("targets", plan.state, record)
    return _built(image, failed, changed=True, built=built)


def _built(image: Composed, failed: tuple[str, ...], *, changed: bool, built: Collection[str]) -> Built:
    plan = image.plan
    return Built(
        target=plan.target,
        ref=plan.ref,
        digest=image.digest,
        content=canonical.digest_of(image.config),
        changed=changed,
        layers=tuple(
            LayerLine(
                name=action.name,
                digest=layer.blob.digest,
                size=layer.blob.size,
                unpacked=layer.unpacked,
                built=action.key in built,
                seconds=layer.seconds if action.key in built else 0.0,
                left_out=layer.left_out,
            )
            for action, layer in zip(plan.layers, image.layers, strict=True)
        ),
        failed=failed,
    )


def actions_of(record: Mapping[str, Any]) -> set[str] | None:
    """Return the keys of the actions of a recorded build; None for a record that another version wrote."""
    try:
        return {str(action["key"]) for action in record["inputs"]["actions"].values()}
    except (AttributeError, KeyError, TypeError):
        return None
