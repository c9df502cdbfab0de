"""Note the kernels that the catalogue's calls ask for, as far as the library's source decides them; compile none.

Triton derives each kernel's key and the first form of its code (TTIR) as it does for a launch. All that follows needs
that form and the options, and no longer the library or PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import triton

from primus.aot.ask import call_all, empty_cache
from primus.aot.asked import Noted, folder_of
from primus.aot.catalogue import Case
from primus.aot.gpu import Gpu

__all__ = ["note"]


class _FirstForm(Exception):
    """Ends a compilation: ``form`` is what the first stage would work on."""

    def __init__(self, form: Any, digest: str) -> None:
        super().__init__()
        self.form = form
        self.digest = digest


def note(
    cases: Iterable[Case], gpu: Gpu, folder: Path, *, say: Callable[[str], None] = lambda _: None
) -> tuple[tuple[Noted, ...], dict[str, str]]:
    """Every kernel that ``cases`` ask for, its first form in ``folder``; and the functions that have none, with a
    sentence. ``say`` hears of each case.
    """
    noted: dict[str, Noted] = {}
    current: list[Case] = []
    backend = type(triton.compiler.make_backend(gpu.target))
    compile_, add_stages = triton.compiler.compile, backend.add_stages

    def stop(form: Any, metadata: dict[str, Any]) -> None:
        raise _FirstForm(form, metadata["hash"])

    def begin(src: Any, target: Any = None, options: Any = None) -> object:
        try:
            compile_(src, target=target, options=options)
        except _FirstForm as first:
            key = folder_of(first.digest)
            path = folder / f"{key}.ttir"
            path.write_text(str(first.form), encoding="utf-8")
            noted[key] = Noted(
                kernel=current[0].kernel.name,
                function=src.name,
                key=key,
                case=current[0].label,
                source=src.hash(),
                options=dict(options),
                form=path,
            )
        # Triton keeps it as the kernel for the next launch with such arguments.
        return object()

    with empty_cache():
        # Each kernel takes this function when it is first launched.
        triton.compiler.compile = begin
        backend.add_stages = lambda _, stages, *__: stages.update(ttir=stop)
        try:
            failures = call_all(cases, gpu, current, say)
        finally:
            triton.compiler.compile, backend.add_stages = compile_, add_stages
    return tuple(noted.values()), failures
