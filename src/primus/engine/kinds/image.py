"""``image``: a layer of a registry's image, used unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from primus.engine.workshop import Made, Workshop
from primus.oci.contents import adopt_layer
from primus.plan.action import Action


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Do nothing: the layer is downloaded finished."""


def make(action: Action, shop: Workshop, scratch: Path) -> Made:
    """Verify the layer and add it to the store. Its digest does not change."""
    (layer,) = action.files
    return Made(layer=adopt_layer(shop.workspace.store, shop.file(layer), layer.sha256))
