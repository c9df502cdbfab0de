"""The gates, one module for each.

The module's name is the gate's, and its docstring says what the gate looks at.

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
    modules = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        modules[path.stem] = import_module(f"{__name__}.{path.stem}")
    return modules


@cache
def rules_hash() -> str:
    """Return a hash of the code that reads GPU code and judges it.

    A verdict is valid only for the same hash.
    """
    code = hashlib.sha256()
    gates_folder = Path(__file__).parent.parent
    for folder in (gates_folder, gates_folder.with_name("gpucode")):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".yaml"):
                code.update(path.read_bytes())
    return code.hexdigest()
