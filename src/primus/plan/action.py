"""One unit of build work. Its key is a hash of everything that can affect its bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from primus.oci.canonical import key_of
from primus.plan.resolve import ResolvedTarget
from primus.versions.lock import LockedFile

Kind = Literal["image", "debs", "kernels", "wheels", "files", "build"]


Tree = tuple[tuple[str, str, str], ...]
"""The files of a local folder: path, ``file``/``exec``/``link``, and the content's sha256 or the link's target."""


class Input(NamedTuple):
    """One thing that affects the bytes: ``value`` is a version and hash, ``where`` the line that set it."""

    name: str
    value: str
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Action:
    """The inputs of one unit of work, and ``spec``, the instructions for the kind's executor as JSON data. The result
    is a layer of the image, or a wheel if its ``kind`` is ``build``.

    ``files`` are the locked files that it reads. ``tree`` are the local files (path, kind, sha256) of the folder
    ``root``. Both enter the key as hashes in ``inputs``. ``needs`` are the actions whose result affects its bytes.
    ``tools`` are the actions in whose result it runs; their keys are not part of its key, because what matters of
    them is among the inputs.
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
    """The plan of one image: its target, the actions of its layers, bottom first, and what else its config and manifest
    contain. Later steps look nothing up elsewhere.
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
        ordered: dict[str, Action] = {}

        def visit(action: Action) -> None:
            if action.key not in ordered:
                for needed in (*action.needs, *action.tools):
                    visit(needed)
                ordered[action.key] = action

        for action in self.layers:
            visit(action)
        return list(ordered.values())


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
