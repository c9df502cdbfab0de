"""The input of the gates: an image and the contents of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from primus.engine.image import stored
from primus.errors import InputError
from primus.gates.examiner import LayerFacts
from primus.gates.facts import facts_of, known
from primus.gates.needles import needles_of
from primus.oci.left_out import LeftOut
from primus.oci.roots import reference

if TYPE_CHECKING:
    from threading import Event

    from primus.engine.image import Composed
    from primus.gates.codeobjects import Code
    from primus.oci.store import Layer
    from primus.plan.action import ImagePlan
    from primus.plan.workspace import Workspace
    from primus.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Examined:
    """An image, the facts about its layers by name (bottom first), and the workspace with its store."""

    image: Composed
    facts: Mapping[str, LayerFacts]
    workspace: Workspace

    @property
    def arch(self) -> str | None:
        """The GPU architecture that the image is for; None for an image without one."""
        return self.image.plan.resolved.arch

    @property
    def code(self) -> list[tuple[str, tuple[Code, ...]]]:
        """The GPU code of each layer."""
        return [(layer, facts.code) for layer, facts in self.facts.items()]

    @property
    def left_out(self) -> LeftOut:
        """The GPU code that the build left out of the image."""
        return LeftOut.sum(layer.left_out for layer in self.image.layers)


def look_into(workspace: Workspace, layer: Layer, stop: Event | None = None) -> LayerFacts:
    """Return the facts about a layer, which is read once; see :func:`primus.gates.facts.facts_of` for the
    exceptions.
    """
    blob = workspace.store.blob_path(layer.blob.digest)
    return facts_of(reference(layer), blob, workspace.facts, needles_of(workspace), stop)


def examine(plan: ImagePlan, workspace: Workspace, progress: Progress) -> Examined:
    """Examine every layer of the plan's image, bottom first.

    Raises InputError if the store does not hold exactly this image, HostError if a layer is damaged.
    """
    store = workspace.store
    image = stored(store, plan)
    if image is None:
        raise InputError(
            f"{plan.ref} is not built from the current versions.yaml and lock", hint=f"primus build {plan.target}"
        )
    facts: dict[str, LayerFacts] = {}
    for action, layer in zip(plan.layers, image.layers, strict=True):
        new = not known(layer.blob.digest, workspace.facts, needles_of(workspace))
        if new:
            progress.start(layer.blob.digest, f"examine {action.name}", None)
        facts[action.name] = look_into(workspace, layer)
        if new:
            progress.finish(layer.blob.digest)
    return Examined(image=image, facts=facts, workspace=workspace)
