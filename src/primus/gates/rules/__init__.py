"""The gates, one module for each. The module's name is the gate's, and its docstring says what the gate looks at.

To add a gate, add a module here with a function ``judge``, as :class:`Gate` describes it. No other list names the
gates: builds, ``primus check`` and docs/gates.md take them from this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from primus.gates.examined import Examined, GateReport


class Gate(Protocol):
    """The interface of a gate's module."""

    def judge(self, examined: Examined) -> GateReport | None:
        """Return the gate's findings on an image, or None if the gate does not apply to such an image."""


@cache
def gates() -> Mapping[str, Gate]:
    """Return every gate by name, in alphabetical order."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")
    return {name: cast(Gate, import_module(f"{__name__}.{name}")) for name in names}
