"""Compiling the catalogue for one architecture to a folder that becomes a layer of the image.

The build runs it in the image's own root file system: ``python -m primus.aot.bake ARCH UNITS ROOT OUT COMPONENT…``. It
writes to OUT/<Triton version>/ARCH the files that the image will have below ROOT: the code and metadata of each kernel,
with their paths in the image, and ``index.json``, which lists the requested kernels. The output is reproducible.

One process requests the kernels from the libraries, and then another one compiles them. The libraries need PyTorch,
which takes as much memory as the compiler.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from primus.aot.catalogue import Case, load_catalogue
from primus.aot.gpu import Gpu
from primus.aot.pages import load
from primus.aot.requested import Noted, Requested, folder_of, refused
from primus.errors import CheckFailed, PrimusError

INDEX = "index.json"
_CODE = (".hsaco", ".cubin")
T = TypeVar("T")


def bake(
    cases: Sequence[Case], gpu: Gpu, out: Path, root: str, *, progress: Callable[[str], None] = lambda _: None
) -> tuple[Requested, ...]:
    """Compile everything that ``cases`` request to ``out``, for an image that will have these files in ``root``.

    ``progress`` is called with each case, in the requesting process, and with each kernel before it is compiled. Raises
    CheckFailed, with each kernel that does not compile and the architecture.
    """
    with tempfile.TemporaryDirectory(prefix="primus-turbo-") as scratch:
        noted, failures = _elsewhere(lambda: _note(cases, gpu, Path(scratch), progress))
        import triton

        inside = f"{triton.__version__}/{gpu.arch}"
        folder, to = out / inside, f"{root}/{inside}"
        requested: list[Requested] = []
        with triton.knobs.compilation.scope(), triton.knobs.cache.scope():
            # Use no other cache, and store no intermediate forms, which are six times as large as the code.
            triton.knobs.cache.manager_class = None
            triton.knobs.compilation.store_binary_only = True
            triton.knobs.cache.dir = f"{scratch}/cache"
            for one in noted:
                progress(f"  {one.function}")
                try:
                    requested.append(_compile(one, gpu))
                except Exception as error:  # noqa: BLE001 - whatever the compiler raises, the kernel is named
                    reason = f"{one.function}: {type(error).__name__}: {error}"
                    failures.setdefault(one.function, refused(one.kernel, gpu.arch, reason, one.case))
                else:
                    _copy(Path(scratch, "cache", one.key), folder / one.key, to)
    if failures:
        raise CheckFailed("\n".join(failures.values()), hint="pin another version, or remove it from the catalogue")
    index = {
        "arch": gpu.arch,
        "units": gpu.units,
        "triton": triton.__version__,
        "kernels": [
            {k: v for k, v in asdict(one).items() if k != "compiled"}
            for one in sorted(requested, key=lambda a: (a.kernel, a.function, a.key))
        ],
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return tuple(requested)


def _elsewhere(work: Callable[[], T]) -> T:
    """Run ``work`` in another process, which frees its memory when it ends. Returns its result or raises its error."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send((work(), None))
        except (PrimusError, ImportError) as error:
            sender.send((None, error))

    child = context.Process(target=run)
    child.start()
    sender.close()
    try:
        value, error = receiver.recv()
    except EOFError:
        child.join()
        raise CheckFailed(f"the process that requests the kernels ended with exit code {child.exitcode}") from None
    child.join()
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _note(
    cases: Sequence[Case], gpu: Gpu, folder: Path, progress: Callable[[str], None]
) -> tuple[tuple[Noted, ...], dict[str, str]]:
    load("triton", "torch")
    from primus.aot.note import note

    return note(cases, gpu, folder, progress=progress)


def _compile(noted: Noted, gpu: Gpu) -> Requested:
    """Compile a kernel from its first intermediate representation, under the key of its source."""
    from triton import compiler
    from triton._C.libtriton import ir

    class Source(compiler.ASTSource):  # type: ignore[misc]
        """Replaces the library's source."""

        def __init__(self) -> None:
            # Once the source was read, Triton uses only the function's name.
            super().__init__(SimpleNamespace(__name__=noted.function), signature={})

        def hash(self) -> str:
            return noted.source

        def make_ir(self, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any) -> Any:
            module = ir.parse_mlir_module(str(noted.form), context)
            module.context = context
            return module

    found = compiler.compile(Source(), target=gpu.target, options=dict(noted.options)).metadata
    if folder_of(found.hash) != noted.key:
        raise ValueError(f"its key is {folder_of(found.hash)}, but was {noted.key} when the library requested it")
    return Requested(
        kernel=noted.kernel,
        function=noted.function,
        key=noted.key,
        case=noted.case,
        compiled=True,
        warps=found.num_warps,
        stages=found.num_stages,
        shared_bytes=found.shared,
    )


def _copy(folder: Path, out: Path, to: str) -> None:
    out.mkdir(parents=True)
    names = sorted(p.name for p in folder.iterdir() if p.suffix in _CODE or _is_metadata(p))
    for name in names:
        shutil.copyfile(folder / name, out / name)
    (metadata,) = (name for name in names if name.endswith(".json"))
    group = {"child_paths": {name: f"{to}/{out.name}/{name}" for name in names}}
    (out / f"__grp__{metadata}").write_text(json.dumps(group), encoding="utf-8")


def _is_metadata(path: Path) -> bool:
    return path.suffix == ".json" and not path.name.startswith("__grp__")


def main(words: Sequence[str]) -> int:
    """Run with the arguments ARCH UNITS ROOT OUT COMPONENT…. Returns the exit code."""
    arch, units, root, out, *components = words
    gpu = Gpu(arch=arch, units=int(units))
    catalogue = load_catalogue()
    try:
        cases = list(catalogue.cases(catalogue.of(components, gpu.vendor)))
        requested = bake(cases, gpu, Path(out), root, progress=lambda line: print(line, flush=True))
    except PrimusError as error:
        print(f"✗ {error}", file=sys.stderr)
        return error.exit_code
    print(f"{len(requested)} kernels for {arch}, requested by {len(cases)} calls")
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main(sys.argv[1:]))
