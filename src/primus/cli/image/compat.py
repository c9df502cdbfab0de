"""Run a command of older documents: find the recipe it asks for and train it.

COMMAND is the name of the script, followed by its own options; the scripts in the image call this. These options
of primus can be added: --dry-run, --proxy, --gpu NAME, --precision NAME, --output DIR, --json, and --allow-unmapped,
which leaves out what no recipe can express. The environment variables PRIMUS_PROXY=1, PRIMUS_GPU and PRIMUS_DRY_RUN=1
have the same effect as the options.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from primus.cli.image import train, tune
from primus.compat.commands import TUNING, Request, requested, switched_on
from primus.compat.translate import table
from primus.errors import HostError, InputError
from primus.gpus.detect import detect
from primus.recipes.resolve import resolve
from primus.report import sheets
from primus.report.run import read
from primus.tuning import gemm

EXAMPLE = "primus compat pytorch_benchmark_report.sh -t pretrain -m Llama-3.1-8B -p FP8 -s 8192 --dry-run"

# Variables that torchrun sets. If torchrun starts primus, only one of its ranks goes on, and starts primus's own ranks
# without these variables.
_OF_TORCHRUN = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
_DOWNLOAD = "download_assets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command = parser.add_argument("command", metavar="COMMAND", help="name of a script, such as run_pretrain.sh")
    command.completer = lambda **_: [*table("commands")["scripts"], _DOWNLOAD]  # type: ignore[attr-defined]
    # Without a default, argparse names it among the arguments that are required.
    parser.add_argument("words", metavar="WORD", nargs=argparse.REMAINDER, default=[], help="the command's own options")


def run(options: argparse.Namespace) -> int:
    """Translate the command, print the equivalent ``primus train``, and run it. Returns its exit code."""
    environment = dict(os.environ)
    if _STARTED_BY_TORCHRUN in environment and environment.get("LOCAL_RANK", "0") != "0":
        return 0
    command = options.command.rpartition("/")[2]
    if command in ("pytorch_benchmark_setup.sh", _DOWNLOAD):
        return _set_up(options.words, environment, downloads=command == _DOWNLOAD)
    choices, words = _primus_options(command).parse_known_args(options.words)
    choices.dry_run |= switched_on(environment, "PRIMUS_DRY_RUN")
    choices.proxy |= switched_on(environment, "PRIMUS_PROXY")
    choices.gpu = choices.gpu or environment.get("PRIMUS_GPU")
    request = requested(command, words, environment, allow_unmapped=choices.allow_unmapped, precision=choices.precision)
    if command == "run_slurm_pretrain.sh" and "SLURM_NODEID" not in environment and find_spec("primus.launch"):
        return _launch_slurm(request, environment, choices)
    request = _for_this_machine(request, choices)
    for sentence in request.says:
        print(f"{command}: {sentence}", file=sys.stderr)
    print(f"{command}: → primus train {' '.join(request.train())}", file=sys.stderr)
    if not choices.dry_run:
        _check_startable(command, environment)
        if environment.get(TUNING) in ("1", "2", "3"):
            recipe = resolve(request.recipe, request.words, request.choices)
            place = gemm.Place.of(request.recipe, Path("output/tune_gemm"))
            place.shapes.mkdir(parents=True, exist_ok=True)
            if environment[TUNING] == "2":
                return tune.tune(recipe, place, as_json=choices.json)
            if environment[TUNING] == "3":
                gemm.check(place, tune.key_here(recipe))
        for name in _OF_TORCHRUN if _STARTED_BY_TORCHRUN in environment else ():
            os.environ.pop(name, None)
        os.environ.update(request.environment)
    parser = argparse.ArgumentParser(prog=f"primus compat {command}")
    train.add_arguments(parser)
    more = [*(["--dry-run"] if choices.dry_run else []), *(["--json"] if choices.json else [])]
    options = parser.parse_args([*request.train(), *more, *(["--output", choices.output] if choices.output else [])])
    code = train.run(options)
    if request.benchmark and not choices.dry_run:
        _write_csv(command, *request.benchmark, options.output)
    return code


def _primus_options(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=command, add_help=False, allow_abbrev=False)
    for flag in ("--dry-run", "--proxy", "--json", "--allow-unmapped"):
        parser.add_argument(flag, action="store_true")
    for option in ("--precision", "--output", *(() if command == "run_k8s_pretrain.sh" else ("--gpu",))):
        parser.add_argument(option)
    parser.set_defaults(gpu=None)
    return parser


def _launch_slurm(request: Request, environment: Mapping[str, str], choices: argparse.Namespace) -> int:
    """Submit the request as a job of Slurm and wait for it, as the script did. Returns the job's exit code."""
    request = request.for_proxy() if choices.proxy else request
    gpu = choices.gpu or request.choices.gpu or request.gpu_of_path
    request = replace(request, choices=replace(request.choices, gpu=gpu))
    words = ["launch", "slurm", *request.train()]
    words += ["--image", environment["DOCKER_IMAGE"]] if environment.get("DOCKER_IMAGE") else ["--container", "none"]
    words += [word for name, value in request.environment.items() for word in ("--env", f"{name}={value}")]
    words += ["--output", choices.output] if choices.output else []
    words += ["--dry-run"] if choices.dry_run else ["--wait"]
    words += ["--json"] if choices.json else []
    for sentence in request.says:
        if not sentence.startswith("DOCKER_IMAGE "):
            print(f"run_slurm_pretrain.sh: {sentence}", file=sys.stderr)
    print(f"run_slurm_pretrain.sh: → primus {shlex.join(words)}", file=sys.stderr)
    # A separate process, because code that ships inside the image must not import code that starts jobs from outside.
    return subprocess.run([sys.executable, "-m", "primus.cli.main", *words], check=False).returncode


def _for_this_machine(request: Request, choices: argparse.Namespace) -> Request:
    if choices.gpu is not None:
        request = replace(request, choices=replace(request.choices, gpu=choices.gpu))
    if choices.proxy:
        return request.for_proxy()
    if choices.gpu or request.gpu_of_path is None:
        return request
    machine = detect()
    if not machine.names and choices.dry_run:
        says = f"this machine has no GPU: resolved for {request.gpu_of_path}, which the path names"
        gpu = replace(request.choices, gpu=request.gpu_of_path)
        return replace(request, choices=gpu, says=(*request.says, says))
    if machine.generation and machine.generation != request.gpu_of_path:
        says = f"the path names {request.gpu_of_path}; this machine's {machine.generation} decides the settings"
        return replace(request, says=(*request.says, says))
    return request


def _check_startable(command: str, environment: Mapping[str, str]) -> None:
    if command == "run_slurm_pretrain.sh" and "SLURM_NODEID" not in environment:
        raise HostError(
            "a Slurm job cannot be started inside the image",
            hint="use `primus launch slurm` or `primus compat run_slurm_pretrain.sh` on a login node",
        )
    if command == "run_k8s_pretrain.sh":
        raise HostError("the workload service is not asked", hint="--dry-run shows the run; use `primus launch k8s`")
    if command == "madengine":
        raise HostError(
            f"{command} starts containers, which is not possible inside the image", hint="--dry-run shows the run"
        )


def _write_csv(command: str, model: str, mode: str, output: Path) -> None:
    """Append the figures to ``../perf_MODEL.csv``, as MAD's script does, or else to a file in the run's folder."""
    try:
        rows = sheets.benchmark_rows(read(output), model=model, mode=mode)
    except InputError as error:
        print(f"{command}: no figures to write: {error}", file=sys.stderr)
        return
    for file in (Path("..") / f"perf_{model}.csv", output / f"perf_{model}.csv"):
        try:
            new = not file.exists() or not file.stat().st_size
            with file.open("a", encoding="utf-8", newline="") as out:
                out.write(sheets.benchmark_csv(rows, header=new))
        except OSError as error:
            print(f"{command}: cannot write {file}: {error.strerror}", file=sys.stderr)
            continue
        print(f"{command}: → {file}", file=sys.stderr)
        return


def _set_up(words: Sequence[str], environment: Mapping[str, str], *, downloads: bool) -> int:
    if [word for word in words if word != "--download"]:
        raise InputError(f"there is no option {words[0]!r}", hint="--download also downloads models and data sets")
    if not downloads:
        missing = [name for name, row in table("commands")["setup"].items() if not _listed(name, row)]
        if missing:
            raise HostError(
                f"{', '.join(missing)} cannot be imported here", hint="the images for CPU and H200 have all of them"
            )
    if downloads or "--download" in words:
        _download(environment)
    return 0


def _listed(name: str, row: Mapping[str, str]) -> bool:
    """Print one library: its version, or why it is not needed. Returns whether it is there or not needed."""
    state = f"not needed: {row.get('because')}"
    try:
        state = version(row["needs"]) if "needs" in row else state
    except PackageNotFoundError:
        state = "missing"
    print(f"{name:<24}{state}")
    return state != "missing"


def _download(environment: Mapping[str, str]) -> None:
    if not environment.get("HF_TOKEN"):
        raise InputError("HF_TOKEN is not set, and two of the models are gated", hint="export HF_TOKEN=…")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise HostError("huggingface_hub is not installed", hint="pip install huggingface_hub") from error
    for kind, names in table("commands")["downloads"].items():
        for name in names:
            try:
                print(snapshot_download(name, repo_type=kind.removesuffix("s")))
            except (OSError, ValueError) as error:
                raise HostError(f"{name} cannot be downloaded: {str(error).splitlines()[0]}") from error
