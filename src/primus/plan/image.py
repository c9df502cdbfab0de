"""The image that a plan makes of the layers in a store: its config, its manifest, and whether it is built."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from primus.oci import canonical
from primus.oci.store import MANIFEST_TYPE, Blob, Layer, Store, manifest_of
from primus.plan.action import Action, ImagePlan


class Composed(NamedTuple):
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
    def rows(self) -> list[tuple[Action, Layer]]:
        """Each action of the plan with its layer."""
        return list(zip(self.plan.layers, self.layers, strict=True))

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
    manifest = manifest_of(config, [layer.blob for layer in layers], plan.annotations)
    return Composed(plan=plan, layers=tuple(layers), config=config, manifest=manifest)


def stored(store: Store, plan: ImagePlan) -> Composed | None:
    """Return the image of the plan if the store holds all of it under its name, else None.

    Layers must exist with their full size. Index, manifest and config are small, so their bytes are compared.
    """
    image = compose(store, plan)
    if image is None or not store.names(plan.ref, Blob.of(image.manifest, MANIFEST_TYPE)):
        return None
    intact = all(store.check(canonical.digest_of(data)) is None for data in (image.manifest, image.config))
    return image if intact else None


class Built(NamedTuple):
    """An image with a name in the store. ``changed`` tells whether this build named it. ``failed`` has one sentence for
    each gate that the image failed, and ``ran`` the seconds of the actions that this build ran, by key.
    """

    image: Composed
    changed: bool
    failed: tuple[str, ...]
    ran: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return the image as JSON data. Its ``content`` does not depend on how layers are compressed."""
        plan = self.image.plan
        layers = [
            {
                "name": action.name,
                "digest": layer.blob.digest,
                "size": layer.blob.size,
                "unpacked": layer.unpacked,
                "built": action.key in self.ran,
                "seconds": self.ran.get(action.key, 0.0),
            }
            for action, layer in self.image.rows
        ]
        names = {"target": plan.resolved.name, "ref": plan.ref, "digest": self.image.digest}
        content = canonical.digest_of(self.image.config)
        return {**names, "content": content, "changed": self.changed, "layers": layers, "failed": self.failed}


def finished(store: Store, plan: ImagePlan, rules: str) -> Built | None:
    """Return the plan's image if the store holds it and the gates with the hash ``rules`` have judged it, else None."""
    image = stored(store, plan)
    record = store.record("targets", plan.state) or {}
    if image is None or (record.get("digest"), record.get("judged")) != (image.digest, judged_by(plan, rules)):
        return None
    return Built(image=image, changed=False, failed=tuple(record.get("failed", ())), ran={})


def judged_by(plan: ImagePlan, rules: str) -> str:
    """Return what the gates' verdict depends on besides the image's bytes."""
    return f"{rules} budget {plan.resolved.budget_gb} arch {plan.resolved.arch}"
