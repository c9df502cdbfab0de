"""Find the fastest solution for every GEMM of a recipe (`gemm`), or its fastest settings (`throughput`).

`throughput` tries optimizations, activation checkpointing and micro batches that fit into memory, each in a short
training run (15 steps by default). --output names the recipe file to write. After an interruption, run the same command
again: finished runs are not repeated.

`gemm` has three stages; --stage runs one of them. `dump` trains a few steps and records the GEMMs, `tune` measures each
GEMM on all GPUs with PyTorch's TunableOp, `use` trains with the result. `tune` can be interrupted: results are kept.
A result is valid for one version of PyTorch, one GPU architecture and one recipe, and is refused for another.
Exit code 0: done; 1: the recipe failed, or GEMMs could not be measured; 3: PyTorch or the GPUs are missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from primus.cli.arguments import folder, whole
from primus.cli.image import tune_throughput
from primus.cli.image.common import add_choices, add_recipe, resolved
from primus.errors import HostError, InputError
from primus.gpus.detect import detect, visible
from primus.gpus.table import generation
from primus.recipes.choose import CPU
from primus.recipes.recipe import Recipe
from primus.terminal import counted
from primus.tuning.gemm import Place, check, dumping, measure, merge, read_shapes
from primus.tuning.results import Key, alone

EXAMPLE = "primus tune gemm llama2-7b --stage tune"
_STAGES = ("dump", "tune", "use")
_OF_GEMM = ("stage", "dump_steps", "workers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=("gemm", "throughput"), help="what to tune")
    add_recipe(parser)
    add_choices(parser)
    parser.add_argument(
        "--folder",
        type=folder("--folder"),
        metavar="DIR",
        help="folder of results (default: output/tune_gemm or output/tune_throughput)",
    )
    gemm = parser.add_argument_group("gemm")
    gemm.add_argument("--stage", choices=(*_STAGES, "all"), default="all", help="one stage (default: all)")
    gemm.add_argument(
        "--dump-steps", type=whole(least=1), default=3, metavar="N", help="steps of the stage dump (default: 3)"
    )
    gemm.add_argument("--workers", type=whole(least=1), metavar="N", help="GPUs to measure on (default: all)")
    tune_throughput.add_arguments(parser.add_argument_group("throughput"))
    parser.add_argument("--json", action="store_true", help="print one JSON document and no progress")


def run(options: argparse.Namespace) -> int:
    """Run the requested stages. Returns an exit code. Raises InputError, HostError and CheckFailed."""
    _check_options(options)
    recipe = resolved(options)
    if options.what == "throughput":
        return tune_throughput.tune(recipe, options)
    place = Place.of(recipe.name, options.folder or Path("output/tune_gemm"))
    for stage in _stages(options):
        if code := _RUN[stage](recipe, place, options):
            return code
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Raise InputError for an option that belongs to the other of the two subcommands."""
    defaults = argparse.ArgumentParser()
    add_arguments(defaults)
    for name in _OF_GEMM if options.what == "throughput" else tune_throughput.OPTIONS:
        if getattr(options, name) != defaults.get_default(name):
            raise InputError(f"--{name.replace('_', '-')} cannot be used with primus tune {options.what}")


def _stages(options: argparse.Namespace) -> Sequence[str]:
    return _STAGES if options.stage == "all" else (options.stage,)


def _dump(recipe: Recipe, place: Place, options: argparse.Namespace) -> int:
    place.shapes.mkdir(parents=True, exist_ok=True)
    steps = f"{recipe.knows.key('steps')}={options.dump_steps}"
    return _train(recipe, steps, dumping(place, os.environ.get("NODE_RANK", "0")), options)


def _tune(recipe: Recipe, place: Place, options: argparse.Namespace) -> int:
    return tune(recipe, place, workers=options.workers, as_json=options.json)


def _use(recipe: Recipe, place: Place, options: argparse.Namespace) -> int:
    return _train(recipe, None, check(place, key_here(recipe)), options)


_RUN = {"dump": _dump, "tune": _tune, "use": _use}


def tune(recipe: Recipe, place: Place, *, workers: int | None = None, as_json: bool = False) -> int:
    """Measure the recorded GEMMs of ``recipe`` on all GPUs, or ``workers``, and write the result. Returns 0."""
    shapes, gpus, key = read_shapes(place.shapes), _gpus(workers), key_here(recipe)
    work = place.work(key)
    with alone(work.parent):
        if not as_json:
            print(f"{counted(len(shapes), 'shape')}; {counted(len(gpus), 'GPU')}", file=sys.stderr)
        result = measure(shapes, work, gpus)
        merge(place, key, result)
    if as_json:
        document = {"tuned": str(place.tuned), "shapes": list(result.rows), "changed": result.changed}
        print(json.dumps(document, indent=2))
    else:
        print(f"{result.changed} of {len(result.rows)} GEMMs are faster with another implementation than the default")
        print(f"→ {place.tuned}")
    return 0


def key_here(recipe: Recipe) -> Key:
    """Return the key of ``recipe`` with this machine's PyTorch. Raises HostError if there is none."""
    if recipe.gpu == CPU:
        raise InputError("TunableOp tunes GEMMs of GPUs only", hint="--gpu mi300x")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise HostError("PyTorch is not installed here", hint="run it in an image") from None
    return Key.of(recipe, version, generation(recipe.gpu).arch)


def _train(recipe: Recipe, steps: str | None, environment: Mapping[str, str], options: argparse.Namespace) -> int:
    overrides = [
        word
        for word in recipe.overrides
        if steps is None or word.partition("=")[0] not in ("steps", steps.partition("=")[0])
    ]
    words = [recipe.name, *recipe.choices.words(), *overrides, *([steps] if steps else [])]
    if not options.json:
        variables = " ".join(f"{name}={value}" for name, value in environment.items())
        print(f"primus tune: {variables} primus train {' '.join(words)}", file=sys.stderr)
    # With several stages, the document is that of the stage "tune".
    ours = options.json and len(_stages(options)) > 1
    command = [sys.executable, "-m", "primus.cli.main", "train", *words, *(["--json"] if options.json else [])]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_TUNABLEOP_")}
    return subprocess.run(
        command, env={**inherited, **environment}, stdout=sys.stderr if ours else None, check=False
    ).returncode


def _gpus(workers: int | None) -> list[str]:
    """Return the devices to measure on, as in HIP_VISIBLE_DEVICES: all that this process may use, or ``workers``."""
    devices = list(visible(len(detect().names), os.environ))
    if workers is not None and workers > len(devices):
        # The kernel may not list every device, so a larger --workers is accepted.
        devices = [str(number) for number in range(workers)]
    if not devices:
        raise HostError("there is no GPU on this machine", hint="--workers N measures on N devices")
    return devices[:workers]
