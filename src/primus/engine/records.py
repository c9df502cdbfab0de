"""What the store's records say. One that another version wrote, in another shape, counts as missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus.engine.kinds import Wheel
from primus.errors import InputError
from primus.oci.store import Store
from primus.schema import build
from primus.yamlfile import Document


def wheel_of(store: Store, key: str) -> Wheel | None:
    """Return the wheel that the action ``key`` created; None if it has none in the store's records."""
    try:
        fields = (store.record("actions", key) or {})["wheel"]
        return build(Wheel, Document(name=key, data=fields, places={}, typed=True))
    except (KeyError, InputError):
        return None


def actions_of(state: Mapping[str, Any]) -> set[str] | None:
    """Return the keys of the actions of an image's last build."""
    try:
        return {str(action["key"]) for action in state["inputs"]["actions"].values()}
    except (AttributeError, KeyError, TypeError):
        return None
