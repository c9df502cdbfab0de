"""The gates, one module for each. The module's name is the gate's, and its docstring says what the
gate looks at.

To add a gate, add a module here with a function ``judge``: it gets an
:class:`~primus_images.gates.examined.Examined`, and returns a
:class:`~primus_images.gates.examined.GateReport`. No other list names the gates: builds, ``primus
check`` and docs/gates.md take them from this folder.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType


@cache
def gates() -> Mapping[str, ModuleType]:
    """Return every gate by name, in alphabetical order."""
    names = sorted(
        path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__"
    )
    return {name: import_module(f"{__name__}.{name}") for name in names}


@cache
def rules_hash() -> str:
    """Return a hash of the code that reads GPU code and judges it. A verdict is valid only for the
    same hash.
    """
    code = hashlib.sha256()
    package = Path(__file__).parent.parent
    paths = (
        path for folder in (package, package.with_name("gpucode")) for path in folder.rglob("*")
    )
    for path in sorted(path for path in paths if path.suffix in (".py", ".yaml")):
        code.update(path.read_bytes())
    return code.hexdigest()
