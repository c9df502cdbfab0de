"""The units of build work, and the image that a plan makes of their layers.

The key of an action is a hash of everything that can affect its bytes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from primus_images.oci.store import (
    MANIFEST_TYPE,
    Blob,
    Layer,
    Store,
    canonical_json,
    digest_of,
    key_of,
    manifest_of,
)
from primus_images.plan.resolve import ResolvedTarget
from primus_images.versions.lock import LockedFile

Kind = Literal["image", "debs", "kernels", "wheels", "files", "build"]


# The files of a local folder: path, ``file``/``exec``/``link``, and the content's sha256 or the
# link's target.
Tree = tuple[tuple[str, str, str], ...]


class Input(NamedTuple):
    """One thing that affects the bytes: a version and hash, and the line that set it."""

    name: str
    value: str
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Action:
    """One unit of work. Its result is a layer of the image, or a wheel for kind ``build``.

    ``spec`` are the instructions for the kind's executor, as JSON data. ``files`` are the locked
    files that it reads. ``tree`` are the local files (path, kind, sha256) of the folder ``root``.
    Both enter the key as hashes in ``inputs``. ``needs`` are the actions whose result affects its
    bytes. ``tools`` are the actions in whose result it runs. Their keys are not part of its key,
    because what matters of them is among the inputs.
    """

    name: str
    kind: Kind
    inputs: tuple[Input, ...]
    spec: Mapping[str, object] = field(default_factory=dict)
    needs: "tuple[Action, ...]" = ()
    tools: "tuple[Action, ...]" = ()
    files: tuple[LockedFile, ...] = ()
    root: str = ""
    tree: Tree = ()

    @cached_property
    def key(self) -> str:
        """SHA-256 over the kind, the inputs, the instructions and the keys of ``needs``."""
        return key_of(
            {
                "kind": self.kind,
                "inputs": {i.name: i.value for i in self.inputs},
                "spec": self.spec,
                "needs": [a.key for a in self.needs],
            }
        )


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """The plan of one image: the actions of its layers, bottom first, its config and annotations.

    Later steps look nothing up elsewhere.
    """

    resolved: ResolvedTarget = field(repr=False, compare=False)
    layers: tuple[Action, ...]
    config: Mapping[str, object]
    annotations: Mapping[str, str]

    @property
    def ref(self) -> str:
        """The image's name in the store."""
        return self.resolved.ref

    @property
    def state(self) -> str:
        """The name under which the store records the last build."""
        return f"{self.resolved.name}{self.resolved.choice.suffix}"

    @cached_property
    def key(self) -> str:
        """SHA-256 over everything that affects the image's bytes."""
        layers = [action.key for action in self.layers]
        return key_of({"layers": layers, "config": self.config, "annotations": self.annotations})

    def actions(self) -> list[Action]:
        """Return every action once, each after those that it needs."""
        return ordered(self.layers, lambda _: False)


def ordered(actions: Iterable[Action], done: Callable[[Action], bool]) -> list[Action]:
    """Return ``actions`` and those that they need, each once and after its own needs.

    Those that are ``done``, and those that only these need, are left out.
    """
    result: dict[str, Action] = {}

    def visit(action: Action) -> None:
        if action.key not in result and not done(action):
            for needed in (*action.needs, *action.tools):
                visit(needed)
            result[action.key] = action

    for action in actions:
        visit(action)
    return list(result.values())


def tree_record(plan: ImagePlan) -> dict[str, Any]:
    """Return everything that the plan was made from, for a later ``explain``."""
    return {
        "actions": {
            action.name: {
                "key": action.key,
                "kind": action.kind,
                "inputs": {i.name: [i.value, i.where] for i in action.inputs},
                "tree": {name: f"{kind} {value}" for name, kind, value in action.tree},
            }
            for action in plan.actions()
        },
        "config": dict(plan.config),
        "annotations": dict(plan.annotations),
    }


class Composed(NamedTuple):
    """An image without a name, with all its layers in the store, and the bytes of the rest."""

    plan: ImagePlan
    layers: tuple[Layer, ...]
    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        """The digest of the manifest, which identifies the image."""
        return digest_of(self.manifest)

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
    history = []
    for action in plan.layers:
        layer = store.layer(action.key)
        if layer is None:
            return None
        layers.append(layer)
        created_by = f"primus {action.kind} {action.name}"
        history.append({"created_by": created_by, "comment": action.key})
    diff_ids = [layer.diff_id for layer in layers]
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    config = canonical_json({**plan.config, "rootfs": rootfs, "history": history})
    manifest = manifest_of(config, [layer.blob for layer in layers], plan.annotations)
    return Composed(plan=plan, layers=tuple(layers), config=config, manifest=manifest)


def stored(store: Store, plan: ImagePlan) -> Composed | None:
    """Return the image of the plan if the store holds all of it under its name, else None.

    Layers must exist with their full size. Index, manifest and config are small, so their bytes are
    compared.
    """
    image = compose(store, plan)
    if image is None or not store.names(plan.ref, Blob.of(image.manifest, MANIFEST_TYPE)):
        return None
    if store.check(image.digest) or store.check(digest_of(image.config)):
        return None
    return image


class Built(NamedTuple):
    """An image with a name in the store. ``changed`` tells whether this build named it.

    ``failed`` has one sentence for each gate that the image failed, and ``ran`` the seconds of the
    actions that this build ran, by key.
    """

    image: Composed
    changed: bool
    failed: tuple[str, ...]
    ran: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return the image as data. ``content`` does not depend on how layers are compressed."""
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
        return {
            "target": plan.resolved.name,
            "ref": plan.ref,
            "digest": self.image.digest,
            "content": digest_of(self.image.config),
            "changed": self.changed,
            "layers": layers,
            "failed": self.failed,
        }


def finished(store: Store, plan: ImagePlan, rules: str) -> Built | None:
    """Return the plan's image if the store holds it and the gates of ``rules`` have judged it."""
    image = stored(store, plan)
    record = store.record("targets", plan.state) or {}
    if image is None or record.get("digest") != image.digest:
        return None
    if record.get("judged") != judged_by(plan, rules):
        return None
    return Built(image=image, changed=False, failed=tuple(record.get("failed", ())), ran={})


def judged_by(plan: ImagePlan, rules: str) -> str:
    """Return what the gates' verdict depends on besides the image's bytes."""
    return f"{rules} budget {plan.resolved.budget_gb} arch {plan.resolved.arch}"
