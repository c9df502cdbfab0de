"""The self-test of every optimization that some recipe can use on this GPU.

``python -m primus_images.turbo.every GPU FOLDER`` tests each with the sizes of the first recipe
that can use it, in processes of their own, and prints one JSON document.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from primus_images.errors import InputError, PrimusError
from primus_images.gpus.detect import detect
from primus_images.recipes import load
from primus_images.recipes.choose import supported
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.turbo import optimizations as catalogue, trial


def users(gpu: str) -> dict[str, Recipe]:
    """Return optimization → the first recipe that can use it on ``gpu``."""
    found: dict[str, Recipe] = {}
    for name in load.names():
        for (backend, mode), precisions in supported(load.read(load.find(name)).settings).items():
            for precision in precisions:
                choices = Choices(backend=backend, mode=mode, precision=precision, gpu=gpu)
                try:
                    recipe = resolve(name, (), choices)
                except InputError:  # the GPU does not compute it
                    continue
                for optimization in catalogue.usable(recipe):
                    found.setdefault(optimization, recipe)
    return found


def tested(gpu: str, folder: Path) -> dict[str, object]:
    """Test all of them. Returns the document: faults, and what is missing."""
    faults: dict[str, str] = {}
    missing: dict[str, str] = {}
    passed: list[str] = []
    gpus = detect()
    for name, recipe in users(gpu).items():
        packages = ", ".join(catalogue.missing_packages((name,)))
        if packages:
            missing[name] = f"{packages} not installed"
            continue
        shapes = asdict(catalogue.shapes_of(recipe))
        fault = trial.test((name,), shapes, [gpus.driver, gpus.names[:1]], folder, os.environ)
        if name in fault:
            faults[name] = fault[name]
        else:
            passed.append(name)
    return {"passed": not faults, "tested": passed, "faults": faults, "missing": missing}


def main() -> int:
    """Print the document. Exit code 1: an optimization failed; 3: there is no GPU."""
    gpu, folder = sys.argv[1:3]
    if not detect().names:
        print("primus self-tests: there is no GPU on this machine", file=sys.stderr)
        return 3
    try:
        document = tested(gpu, Path(folder))
    except PrimusError as error:
        print(f"primus self-tests: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(document, indent=1))
    return int(bool(document["faults"]))


if __name__ == "__main__":
    sys.exit(main())
