"""Triton kernels compiled while the image is built, in its own root file system, into a layer for its GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import primus
from primus.errors import InputError
from primus.plan.action import Action, Input, tree_value
from primus.plan.prefix import Prefix
from primus.versions.components import Pin

if TYPE_CHECKING:
    from primus.plan.resolve import ResolvedTarget
    from primus.plan.stats import StatIndex

# The same as in primus.aot.cache, which requires Triton to be imported.
BAKED = "/opt/primus/triton"
_PACKAGE = Path(primus.__file__).parent
# All modules that compile the catalogue. The compiler sees no other module of this package, so no other can affect it.
_SOURCES = (
    "__init__.py",
    "errors.py",
    "files.py",
    "schema.py",
    "yamlfile.py",
    *(f"aot/{name}" for name in ("__init__.py", "requests.py", "requested.py", "bake.py", "catalogue.py")),
    *(f"aot/{name}" for name in ("catalogue.yaml", "gpu.py", "note.py", "pages.py", "pretend.py", "workloads.py")),
)
# Variables that Triton or the libraries read when they compile, except the path of the cache.
_DECIDE = ("AMDGCN_", "DISABLE_", "FLASH_ATTENTION_", "LIGER_", "LLVM_", "MLIR_", "TRITON_")
_PLACES = ("TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER", "TRITON_HOME")


def turbo_action(
    resolved: ResolvedTarget,
    stats: StatIndex,
    layers: Sequence[Action],
    prefix: Prefix,
    tool: str,
) -> Action:
    """Return the action that compiles the kernels listed under ``turbo`` in ``images/NAME.yaml``, in the root of
    ``layers``.

    Raises InputError if the target has no GPU, or lacks Triton or a listed component.
    """
    components, gpu, pins = resolved.target.turbo, resolved.gpu, resolved.pins
    where = resolved.place("turbo")
    if gpu is None:
        raise InputError("kernels are compiled for a GPU, and this target has none", where=where, hint="set `gpu`")
    for component in ("triton", *components):
        if component not in pins:
            raise InputError(
                f"kernels of {', '.join(components)} need {component}, which is not among the components", where=where
            )
    built = {layer.name: layer for layer in layers}
    base = [i for layer in layers if layer.kind in ("image", "debs") for i in layer.inputs]
    tree = tuple(stats.tree(_PACKAGE, _SOURCES))
    environment = {k: v for k, v in resolved.environment.items() if k.startswith(_DECIDE) and k not in _PLACES}
    inputs = [
        Input(name="assembler", value=tool),
        Input(name="gpu", value=f"{gpu.arch}, {gpu.compute_units} compute units", where=resolved.place("gpu")),
        Input(name="catalogue", value=tree_value(tree)),
        *(Input(name=k, value=v, where=resolved.place("environment")) for k, v in environment.items()),
        # The interpreter affects how Triton reads a kernel's source.
        *(i for i in base if i.name.startswith(("python3.", "libpython3."))),
    ]
    for component in dict.fromkeys(("triton", "pytorch", *components)):
        if component in pins:
            inputs += _of(pins[component], built.get(component), base)
    return Action(
        name=f"turbo {gpu.arch}",
        kind="turbo",
        inputs=tuple(inputs),
        spec={
            "python": prefix.interpreter,
            "arch": gpu.arch,
            "units": gpu.compute_units,
            "components": list(components),
            "environment": environment,
        },
        # Kernel files of the base's own libraries are not needed here.
        tools=tuple(layer for layer in layers if layer.kind != "kernels"),
        root=str(_PACKAGE),
        tree=tree,
    )


def _of(pin: Pin, layer: Action | None, base: Sequence[Input]) -> Iterator[Input]:
    """Yield what affects a component's bytes: its files, what it is built from, or its package in the base."""
    if pin.deb is not None:
        yield from (i for i in base if i.name == pin.deb)
    if layer is not None:
        names = {f.name for f in layer.files}
        yield from (i for i in layer.inputs if i.name in names)
        yield from (Input(name=needed.name, value=needed.key) for needed in layer.needs)


def command_of(action: Action) -> list[str]:
    """Return the command to run in the sandbox. Below /out it writes the files that the image has below
    :data:`BAKED`.
    """
    spec = action.spec
    components = spec["components"]
    assert isinstance(components, list)
    module = ["-P", "-m", "primus.aot.bake"]
    return [str(spec["python"]), *module, str(spec["arch"]), str(spec["units"]), BAKED, "/out", *components]
