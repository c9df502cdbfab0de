"""Compile the catalogue for one architecture into a folder that an image carries.

Started in the image's own root file system while it is built: ``python -m primus.turbo.bake ARCH UNITS ROOT OUT
COMPONENT…`` writes below OUT what will lie below ROOT, in a folder for Triton's version and one for ARCH. The outcome
has the same bytes each time: of each kernel its code and what Triton notes of it, with the paths they will have in the
image, and ``index.json`` that says what was asked for.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import triton

from primus.errors import CheckFailed, PrimusError
from primus.turbo import ask
from primus.turbo.catalogue import Case, load_catalogue
from primus.turbo.pretend import Gpu

__all__ = ["INDEX", "bake"]

INDEX = "index.json"
_CODE = (".hsaco", ".cubin")


def bake(
    cases: Sequence[Case], gpu: Gpu, out: Path, root: str, *, say: Callable[[str], None] = lambda _: None
) -> ask.Answer:
    """Compile everything that ``cases`` ask for; what is below ``out`` will lie below ``root``.

    Raises CheckFailed naming each kernel that does not compile, and the architecture.
    """
    inside = f"{triton.__version__}/{gpu.arch}"
    folder, to = out / inside, f"{root}/{inside}"
    with triton.knobs.compilation.scope(), triton.knobs.cache.scope():
        # Nothing may be taken from elsewhere, and the intermediate forms are six times the code.
        triton.knobs.cache.manager_class = None
        triton.knobs.compilation.store_binary_only = True
        answer = ask.ask_pretending(cases, gpu, say=say, keep=lambda cache, key: _copy(cache / key, folder / key, to))
    if answer.failures:
        raise CheckFailed("\n".join(answer.failures), hint="pin another version, or take it out of the catalogue")
    index = {
        "arch": gpu.arch,
        "units": gpu.units,
        "triton": triton.__version__,
        "kernels": [
            {k: v for k, v in asdict(one).items() if k != "compiled"}
            for one in sorted(answer.asked, key=lambda a: (a.kernel, a.function, a.key))
        ],
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return answer


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
    """ARCH UNITS ROOT OUT COMPONENT…"""
    arch, units, root, out, *components = words
    gpu = Gpu(arch=arch, units=int(units))
    catalogue = load_catalogue()
    try:
        cases = list(catalogue.cases(catalogue.of(components, gpu.vendor)))
        answer = bake(cases, gpu, Path(out), root, say=lambda line: print(line, flush=True))
    except PrimusError as error:
        print(f"✗ {error}", file=sys.stderr)
        return error.exit_code
    print(f"{len(answer.asked)} kernels for {arch}, asked for by {len(cases)} calls")
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main(sys.argv[1:]))
