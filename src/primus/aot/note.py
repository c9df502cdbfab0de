"""Recording the kernels that the catalogue's calls request, without compiling them.

Triton derives the key of each kernel and its first intermediate representation (TTIR) as for a launch. The later stages
need only this representation and the options, but neither the library nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import triton

from primus.aot.catalogue import Case
from primus.aot.gpu import Gpu
from primus.aot.requested import Noted, folder_of
from primus.aot.requests import call_all, empty_cache


class _FirstForm(Exception):
    """Stops a compilation. ``form`` is the input of the first stage."""

    def __init__(self, form: Any, digest: str) -> None:
        super().__init__()
        self.form = form
        self.digest = digest


def note(
    cases: Iterable[Case], gpu: Gpu, folder: Path, *, progress: Callable[[str], None] = lambda _: None
) -> tuple[tuple[Noted, ...], dict[str, str]]:
    """Record every kernel that ``cases`` request, and write its first representation to ``folder``.

    Returns the kernels, and the functions for which Triton failed, each with a message. ``progress`` is called with
    each case.
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
        # Triton keeps this object as the kernel for further launches with the same kind of arguments.
        return object()

    with empty_cache():
        # Each kernel looks up this function when it is first launched.
        triton.compiler.compile = begin
        backend.add_stages = lambda _, stages, *__: stages.update(ttir=stop)
        try:
            failures = call_all(cases, gpu, current, progress)
        finally:
            triton.compiler.compile, backend.add_stages = compile_, add_stages
    return tuple(noted.values()), failures
