"""The kinds of action, one module each. The module's name is the kind.

To add a kind, add its name to :class:`primus.plan.action.Action` and a module here with the two functions of
:class:`Kind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from primus.engine.execute import Workshop
    from primus.oci.store import Layer
    from primus.oci.tar import Watch
    from primus.plan.action import Action


@dataclass(frozen=True, kw_only=True)
class Made:
    """A layer in the store, and the observer that examined it while it was written."""

    layer: Layer
    watch: Watch | None = None


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel in the file cache; ``size`` is in bytes."""

    file: str
    sha256: str
    size: int


class Kind(Protocol):
    """The interface of a kind's module."""

    def prepare(self, actions: Sequence[Action], shop: Workshop) -> None:
        """Check that this machine can run these actions of the kind. Called once, before long work begins.

        Raises HostError, in one sentence, for missing namespaces or a missing tool.
        """

    def make(self, action: Action, shop: Workshop, scratch: Path) -> Made | Wheel:
        """Run the action; ``scratch`` is an empty folder, removed afterwards.

        Raises CheckFailed, HostError or InputError; the store then has no result for the action.
        """


def load(kind: str) -> Kind:
    """Import and return the module of a kind.

    The import happens here because a build that changes one recipe needs neither the wheel reader nor the sandbox.
    """
    return cast(Kind, import_module(f"{__name__}.{kind}"))
