"""One unit of build work. Its key is a hash of all that can affect its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from primus.oci.canonical import key_of
from primus.plan.resolve import ResolvedTarget
from primus.versions.lock import LockedFile

Kind = Literal["image", "debs", "kernels", "wheels", "files", "build", "turbo"]


@dataclass(frozen=True, kw_only=True)
class Input:
    """One thing that decides bytes: ``value`` is a version and hash, ``where`` the line that set it."""

    name: str
    value: str
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Action:
    """What to do, from what. ``spec`` holds the instructions for the kind's executor as plain JSON data.

    ``files`` are the locked files it reads, ``tree`` the local files (path, kind, sha256) of a folder at ``root``;
    they enter the key through ``inputs``, by hash. ``needs`` are the actions whose outcome decides its bytes,
    ``tools`` those it only runs in: their own key stays out, what matters of them is among the inputs. ``job_bytes``
    is the memory that one compiler of a ``build`` may need; how many run at once changes no bytes.
    """

    name: str
    kind: Kind
    inputs: tuple[Input, ...]
    spec: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[Action, ...] = ()
    tools: tuple[Action, ...] = ()
    files: tuple[LockedFile, ...] = ()
    root: str = ""
    tree: tuple[tuple[str, str, str], ...] = ()
    job_bytes: int = 0

    @cached_property
    def key(self) -> str:
        """SHA-256 over kind, inputs, instructions and the keys of what it needs."""
        return key_of(
            {
                "kind": self.kind,
                "inputs": {i.name: i.value for i in self.inputs},
                "spec": self.spec,
                "needs": [a.key for a in self.needs],
            }
        )

    @property
    def makes_layer(self) -> bool:
        """Whether the outcome is a layer of the image (a ``build`` makes a wheel instead)."""
        return self.kind != "build"


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """All of one image: its layers' actions bottom first, and what its config and manifest say besides layers.

    ``resolved`` is what it was planned from. No later step looks anything up elsewhere.
    """

    resolved: ResolvedTarget = field(repr=False, compare=False)
    layers: tuple[Action, ...]
    config: Mapping[str, object]
    annotations: Mapping[str, str]

    @property
    def target(self) -> str:
        """The target's name."""
        return self.resolved.name

    @property
    def ref(self) -> str:
        """The image's name in the store."""
        return self.resolved.ref

    @property
    def state(self) -> str:
        """The name under which the store remembers what was built last."""
        return f"{self.target}{self.resolved.choice.suffix}"

    @cached_property
    def key(self) -> str:
        """SHA-256 over all that decides the image's bytes."""
        return key_of({"layers": [a.key for a in self.layers], "config": self.config, "annotations": self.annotations})

    def actions(self) -> list[Action]:
        """Every action once, each after those it needs."""
        found: dict[str, Action] = {}

        def visit(action: Action) -> None:
            if action.key not in found:
                for needed in (*action.needs, *action.tools):
                    visit(needed)
                found[action.key] = action

        for action in self.layers:
            visit(action)
        return list(found.values())


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
