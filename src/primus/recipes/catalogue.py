"""All recipes with their backends and modes, and the GPUs that support each precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from primus.errors import InputError
from primus.gpus.table import load_table
from primus.recipes import load
from primus.recipes.architecture import Architecture, Size, architecture, size
from primus.recipes.backends import backends
from primus.recipes.choose import computes, supported


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One recipe with one backend in one mode.

    ``precisions``: precision of the full model → GPUs that support it. ``proxy``: precisions of the proxy on a CPU.
    ``only_proxy``: there is no full model.
    """

    recipe: str
    path: Path
    description: str
    architecture: Architecture
    size: Size
    backend: str
    mode: str
    precisions: Mapping[str, tuple[str, ...]]
    proxy: tuple[str, ...]
    only_proxy: bool

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPUs that support at least one of the precisions."""
        able = {gpu for some in self.precisions.values() for gpu in some}
        return tuple(gpu for gpu in gpus() if gpu in able)


def gpus() -> tuple[str, ...]:
    """Return every GPU that a recipe can be resolved for, in the order of the table."""
    return tuple(generation.name for generation in load_table().generations)


def entries() -> Iterator[Entry]:
    """Yield all entries, sorted by recipe. Raises InputError for a recipe file that cannot be read."""
    for name in load.names():
        path = load.find(name)
        settings = load.read(path).settings
        for key in ("model.family", "description"):
            if key not in settings:
                raise InputError(f"{key} is missing", where=f"{path}:1:1")
        model = architecture({k.removeprefix("model."): s.value for k, s in settings.items() if k.startswith("model.")})
        for (backend, mode), precisions in supported(settings).items():
            yield Entry(
                recipe=name, path=path, description=str(settings["description"].value), architecture=model,
                size=size(model), backend=backend, mode=mode,
                precisions={p: tuple(gpu for gpu in gpus() if computes(gpu, p, backend)) for p in precisions},
                only_proxy="default.proxy" in settings and settings["default.proxy"].value is True,
                proxy=tuple(p for p in backends()[backend].cpu if p == "fp32" or p in precisions),
            )  # fmt: skip


def check(folder: Path) -> None:
    """Raise InputError, with the place, for a recipe in ``folder`` that does not load."""
    for name in load.names(folder):
        supported(load.read(load.find(name, folder)).settings)
