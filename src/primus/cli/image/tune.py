"""Find the fastest solution for every GEMM of a recipe (`gemm`), or its fastest settings (`throughput`).

`throughput` tries optimizations, activation checkpointing and micro batches that fit into memory, each in a short
training run (15 steps by default). --output names the recipe file to write. After an interruption, run the same command
again: finished runs are not repeated.

`gemm` has three stages; --stage runs one of them. `dump` trains a few steps and records the GEMMs, `tune` measures each
GEMM on all GPUs, `use` trains with the result. `tune` can be interrupted: results are kept.
--engine hipblaslt measures with hipblaslt-bench; --engine tunableop needs only PyTorch.
A result is valid for one version of the library, one GPU architecture and one recipe, and is refused for another.
Exit code 0: done; 1: the recipe failed, or a shape could not be measured or is slower than --against allows;
3: hipblaslt-bench, PyTorch or the GPUs are missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from primus.cli.arguments import folder, whole
from primus.cli.image import tune_throughput
from primus.cli.image.common import add_choices, add_recipe, resolved
from primus.errors import CheckFailed, HostError, InputError
from primus.gpus.detect import detect, visible
from primus.gpus.table import generation
from primus.recipes.known import CPU
from primus.recipes.recipe import Recipe
from primus.system.finding import Host
from primus.terminal import counted
from primus.tuning import bench, store, tunableop
from primus.tuning.shapes import read_shapes

EXAMPLE = "primus tune gemm llama2-7b --stage tune"
_STAGES = ("dump", "tune", "use")
_OF_GEMM = ("stage", "engine", "dump_steps", "bench", "workers", "hipblaslt", "against", "tolerance")
_BENCH = "hipblaslt-bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=("gemm", "throughput"), help="what to tune")
    add_recipe(parser)
    add_choices(parser)
    parser.add_argument(
        "--folder",
        type=folder("--folder"),
        metavar="DIR",
        help="folder of results (default: output/tune_ENGINE, or tune_throughput)",
    )
    gemm = parser.add_argument_group("gemm")
    gemm.add_argument("--stage", choices=(*_STAGES, "all"), default="all", help="one stage (default: all)")
    gemm.add_argument(
        "--engine", choices=("hipblaslt", "tunableop"), default="hipblaslt",
        help="hipblaslt-bench, or PyTorch's TunableOp (default: hipblaslt)",
    )  # fmt: skip
    gemm.add_argument(
        "--dump-steps", type=whole(least=1), default=3, metavar="N", help="steps of the stage dump (default: 3)"
    )
    gemm.add_argument("--bench", default=None, metavar="PROGRAM", help="hipblaslt-bench (default: the image's)")
    gemm.add_argument("--workers", type=whole(least=1), metavar="N", help="GPUs to measure on (default: all)")
    gemm.add_argument("--hipblaslt", metavar="VERSION", help="version of hipBLASLt (default: the image's)")
    gemm.add_argument(
        "--against", type=Path, metavar="FILE", help="times.json of another tuning: fail if a shape is slower"
    )
    gemm.add_argument("--tolerance", type=_share, default=0.1, metavar="SHARE", help="for --against (default: 0.1)")
    tune_throughput.add_arguments(parser.add_argument_group("throughput"))
    parser.add_argument("--json", action="store_true", help="print one JSON document and no progress")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text[:40]!r}")
    return share


def run(options: argparse.Namespace) -> int:
    """Run the requested stages. Returns an exit code. Raises InputError, HostError and CheckFailed."""
    _check_options(options)
    recipe = resolved(options)
    if options.what == "throughput":
        return tune_throughput.tune(recipe, options)
    below = options.folder or Path("output") / f"tune_{options.engine}"
    if options.engine == "tunableop":
        return _tunableop(recipe, tunableop.Place.of(recipe.name, below), options)
    place = store.Folder.of(recipe.name, below)
    code = 0
    for stage in _stages(options):
        if stage == "dump":
            log = place.dump(_node())
            log.parent.mkdir(parents=True, exist_ok=True)
            code = _dump(recipe, {"HIPBLASLT_LOG_MASK": "32", "HIPBLASLT_LOG_FILE": str(log)}, options)
        elif stage == "tune":
            code = tune(
                recipe, place, program=options.bench, workers=options.workers, hipblaslt=options.hipblaslt,
                as_json=options.json, against=options.against, tolerance=options.tolerance,
            )  # fmt: skip
        else:
            tuned = store.check(place, key_here(recipe, options.hipblaslt))
            code = _train(recipe, [], {"HIPBLASLT_TUNING_OVERRIDE_FILE": str(tuned)}, options)
        if code:
            return code
    return code


def _check_options(options: argparse.Namespace) -> None:
    """Raise InputError for an option that belongs to the other of the two subcommands."""
    defaults = argparse.ArgumentParser()
    add_arguments(defaults)
    for name in _OF_GEMM if options.what == "throughput" else tune_throughput.OPTIONS:
        if getattr(options, name) != defaults.get_default(name):
            raise InputError(f"--{name.replace('_', '-')} cannot be used with primus tune {options.what}")


def _stages(options: argparse.Namespace) -> Sequence[str]:
    return _STAGES if options.stage == "all" else (options.stage,)


def _node() -> str:
    return os.environ.get("NODE_RANK", "0")


def _tunableop(recipe: Recipe, place: tunableop.Place, options: argparse.Namespace) -> int:
    for name in ("bench", "hipblaslt", "against"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name} cannot be used with --engine tunableop", hint="it is of --engine hipblaslt")
    code = 0
    for stage in _stages(options):
        if stage == "dump":
            place.shapes.mkdir(parents=True, exist_ok=True)
            code = _dump(recipe, tunableop.dumping(place, _node()), options)
        elif stage == "tune":
            _tune_with_pytorch(recipe, place, options)
        else:
            code = _train(recipe, [], tunableop.check(place, _pytorch_key(recipe)), options)
        if code:
            return code
    return code


def _tune_with_pytorch(recipe: Recipe, place: tunableop.Place, options: argparse.Namespace) -> None:
    shapes, gpus, key = tunableop.read_shapes(place.shapes), _gpus(options.workers), _pytorch_key(recipe)
    work = place.work(key)
    with bench.alone(work.parent):
        if not options.json:
            print(f"{counted(len(shapes), 'shape')}; {counted(len(gpus), 'GPU')}", file=sys.stderr)
        result = tunableop.measure(shapes, work, gpus)
        tunableop.merge(place, key, result)
    if options.json:
        document = {"tuned": str(place.tuned), "shapes": list(result.rows), "changed": result.changed}
        print(json.dumps(document, indent=2))
    else:
        print(f"{result.changed} of {len(result.rows)} GEMMs use another solution than the default")
        print(f"→ {place.tuned}")


def _pytorch_key(recipe: Recipe) -> store.Key:
    if recipe.gpu == CPU:
        raise InputError("TunableOp tunes GEMMs of GPUs only", hint="--gpu mi300x")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise HostError("PyTorch is not installed here", hint="run it in an image") from None
    return store.Key.of(recipe, version, generation(recipe.gpu).arch, "pytorch")


def _dump(recipe: Recipe, environment: dict[str, str], options: argparse.Namespace) -> int:
    steps = recipe.knows.key("steps")
    return _train(recipe, [f"{steps}={options.dump_steps}"], environment, options)


def _train(recipe: Recipe, more: Sequence[str], environment: Mapping[str, str], options: argparse.Namespace) -> int:
    words = [recipe.name, *recipe.choices.words(), *(w for w in recipe.overrides if w.partition("=")[0] not in
             {m.partition("=")[0] for m in more}), *more]  # fmt: skip
    if not options.json:
        given = " ".join(f"{name}={value}" for name, value in environment.items())
        print(f"primus tune: {given} primus train {' '.join(words)}", file=sys.stderr)
    # With several stages, the document is that of the stage "tune".
    ours = options.json and len(_stages(options)) > 1
    command = [sys.executable, "-m", "primus.cli.main", "train", *words, *(["--json"] if options.json else [])]
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HIPBLASLT_", "PYTORCH_TUNABLEOP_"))
    }
    return subprocess.run(
        command, env={**kept, **environment}, stdout=sys.stderr if ours else None, check=False
    ).returncode


def tune(
    recipe: Recipe,
    folder: store.Folder,
    *,
    program: str | None = None,
    workers: int | None = None,
    hipblaslt: str | None = None,
    as_json: bool = False,
    against: Path | None = None,
    tolerance: float = 0.1,
) -> int:
    """Measure the logged GEMMs of ``recipe`` and write its tuning file.

    Returns 0, or 1 if a GEMM is slower than in ``against`` by more than ``tolerance`` (a fraction).
    """
    shapes, torn = read_shapes(folder.shapes)
    # Before hours of measuring: the file may not exist.
    before = store.baseline(against) if against else None
    found = program or shutil.which(_BENCH) or _of_rocm()
    if program and Path(program).is_file() and not os.access(program, os.X_OK):
        raise InputError(f"--bench {program} is not executable", hint=f"chmod +x {shlex.quote(program)}")
    if found is None or shutil.which(found) is None:
        raise HostError(f"{program or _BENCH} is not installed", hint="use an Instinct image, or pass --bench PROGRAM")
    gpus = _gpus(workers)
    key = key_here(recipe, hipblaslt)
    work = folder.work(key)
    with bench.alone(work.parent):
        if not as_json:
            left = f", {torn} lines without a GEMM ignored" if torn else ""
            print(
                f"{counted(len(shapes), 'shape')}, {counted(sum(one.count for one in shapes), 'call')}{left}; "
                f"{counted(len(gpus), 'GPU')}",
                file=sys.stderr,
            )
        bench.measure(shapes, work, found, gpus)
        measured, missing = bench.results(shapes, work)
        if missing:
            for shape in missing:
                (work / f"{shape.key}.search.txt").unlink(missing_ok=True)
            raise CheckFailed(
                f"{len(missing)} of {counted(len(shapes), 'shape')} without a usable result; "
                f"the first: {missing[0].title}",
                hint=f"the logs are in {work}; run it again to measure these once more",
            )
        store.merge(folder, key, measured)
    step, shape_gain = store.speedups(measured)
    worse = store.slower(measured, before, tolerance) if before is not None else []
    if as_json:
        rows = json.loads(folder.times.read_text(encoding="utf-8"))
        document = {"tuned": str(folder.tuned), "shapes": rows, "gemm_speedup": step, "slower": worse}
        print(json.dumps(document, indent=2))
    else:
        for one in measured[:10]:
            print(f"  {one.shape.title}: {one.default:.1f} → {one.best:.1f} µs, {one.shape.count} calls")
        print(f"expected: GEMMs of a step {step:.3f} times as fast, a shape {shape_gain:.3f} times (weighted by FLOPs)")
        print(f"→ {folder.tuned}")
        print("\n".join(f"✗ slower than {against}: {one}" for one in worse), end="\n" if worse else "")
    return 1 if worse else 0


def key_here(recipe: Recipe, hipblaslt: str | None = None) -> store.Key:
    """Return the key of ``recipe`` on this machine. Raises HostError if the hipBLASLt version is unknown."""
    if recipe.gpu == CPU:
        raise InputError("hipBLASLt computes on AMD GPUs only", hint="--gpu mi300x")
    version = hipblaslt or Host().component("hipBLASLt")
    if not version:
        raise HostError(
            "the version of the installed hipBLASLt is unknown", hint="run it in an image, or pass --hipblaslt VERSION"
        )
    return store.Key.of(recipe, version, generation(recipe.gpu).arch)


def _of_rocm() -> str | None:
    """Find hipblaslt-bench in ROCm's folders, which may not be on PATH."""
    roots = [
        os.environ.get("ROCM_PATH", ""),
        "/opt/rocm",
        *map(str, Path("/opt/venv/lib").glob("python*/site-packages/_rocm_sdk_*")),
    ]
    return next((str(path) for root in roots if root and (path := Path(root) / "bin" / _BENCH).is_file()), None)


def _gpus(workers: int | None) -> list[str]:
    """Return the devices to measure on, as in HIP_VISIBLE_DEVICES: all that this process may use, or ``workers``."""
    found = list(visible(len(detect().names), os.environ))
    if workers is not None and workers > len(found):
        # The kernel may not list every device, so a larger --workers is accepted.
        found = [str(number) for number in range(workers)]
    if not found:
        raise HostError("there is no GPU on this machine", hint="--workers N measures on N devices")
    return found[:workers]
