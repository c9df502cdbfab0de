"""Run a command of older documents: find the recipe it asks for and train it.

COMMAND is the name of the script, followed by its own options; the scripts in the image call this. These options
of primus can be added: --dry-run, --proxy, --gpu NAME, --precision NAME, --output DIR, --json, and --allow-unmapped,
which leaves out what no recipe can express. The environment variables PRIMUS_PROXY=1, PRIMUS_GPU and PRIMUS_DRY_RUN=1
have the same effect as the options.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from primus.cli.image import train, tune
from primus.compat import benchmark, pretrain, setup, workloads
from primus.compat.request import Request, switched_on
from primus.errors import HostError, InputError, nearest
from primus.gpus.detect import detect
from primus.recipes.backends import backend
from primus.recipes.resolve import resolve
from primus.report import sheets
from primus.report.run import read
from primus.tuning import store

EXAMPLE = "primus compat pytorch_benchmark_report.sh -t pretrain -m Llama-3.1-8B -p FP8 -s 8192 --dry-run"

# Variables that torchrun sets. If torchrun starts primus, only one of its ranks goes on, and starts primus's own ranks
# without these variables.
_OF_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
# The commands that the shell completes.
_COMPLETED = (
    "run_pretrain.sh", "run_local_pretrain.sh", "run_slurm_pretrain.sh", "run_k8s_pretrain.sh",
    "pytorch_benchmark_report.sh", "pytorch_benchmark_setup.sh", "download_assets", "train_fsdp.py", "launcher.py",
    "run_llama_train.sh", "madengine",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command = parser.add_argument("command", metavar="COMMAND", help="name of a script, such as run_pretrain.sh")
    command.completer = lambda **_: _COMPLETED  # type: ignore[attr-defined]
    # Without a default, argparse names it among the arguments that are required.
    parser.add_argument("words", metavar="WORD", nargs=argparse.REMAINDER, default=[], help="the command's own options")


def _own(command: str) -> argparse.ArgumentParser:
    """Return a parser for primus's options among the command's words, except those that the command has itself."""
    parser = argparse.ArgumentParser(prog=command, add_help=False, allow_abbrev=False)
    for flag in ("--dry-run", "--proxy", "--json", "--allow-unmapped"):
        parser.add_argument(flag, action="store_true")
    for option in ("--precision", "--output", *(() if command == "run_k8s_pretrain.sh" else ("--gpu",))):
        parser.add_argument(option)
    parser.set_defaults(gpu=None)
    return parser


def requested(
    command: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    allow_unmapped: bool = False,
    precision: str | None = None,
) -> Request:
    """Translate a command to a request. Raises InputError and HostError if it cannot be trained here."""
    name = command.rpartition("/")[2]
    known: dict[str, Callable[[], Request]] = {
        **dict.fromkeys(
            ("run_pretrain.sh", "run_local_pretrain.sh", "run_slurm_pretrain.sh"),
            lambda: pretrain.pretrain(words, environment, allow_unmapped=allow_unmapped, precision=precision),
        ),
        "run_k8s_pretrain.sh": lambda: pretrain.kubernetes(words, environment, allow_unmapped=allow_unmapped),
        "pytorch_benchmark_report.sh": lambda: benchmark.report(words),
        "train_fsdp.py": lambda: benchmark.fsdp(words, environment),
        "launcher.py": lambda: benchmark.program(name, words),
        "run_llama_train.sh": lambda: benchmark.program(name, words),
        "madengine": lambda: benchmark.tag(words),
    }
    if name not in known:
        raise InputError(f"there is no command {name!r}" + nearest(name, known), hint=f"commands: {', '.join(known)}")
    request = known[name]()
    return replace(request, choices=replace(request.choices, precision=precision)) if precision else request


def run(options: argparse.Namespace) -> int:
    """Translate the command, print the equivalent ``primus train``, and run it. Returns its exit code."""
    environment = dict(os.environ)
    if _STARTED_BY_TORCHRUN in environment and environment.get("LOCAL_RANK", "0") != "0":
        return 0
    command = options.command.rpartition("/")[2]
    if command in ("pytorch_benchmark_setup.sh", "download_assets"):
        return _set_up(options.words, environment, downloads=command == "download_assets")
    own, words = _own(command).parse_known_args(options.words)
    own.dry_run |= switched_on(environment, "PRIMUS_DRY_RUN")
    if command == "run_k8s_pretrain.sh" and not own.dry_run:
        return _ask_service(words, environment)
    own.proxy |= switched_on(environment, "PRIMUS_PROXY")
    own.gpu = own.gpu or environment.get("PRIMUS_GPU")
    request = requested(command, words, environment, allow_unmapped=own.allow_unmapped, precision=own.precision)
    if command == "run_slurm_pretrain.sh" and "SLURM_NODEID" not in environment and find_spec("primus.launch"):
        return _launch_slurm(request, environment, own)
    request = _for_this_machine(request, own)
    for sentence in request.says:
        print(f"{command}: {sentence}", file=sys.stderr)
    print(f"{command}: → primus train {' '.join(request.train())}", file=sys.stderr)
    if not own.dry_run:
        _startable(command, environment, request)
        if environment.get("PRIMUS_HIPBLASLT_TUNING_STAGE") in ("2", "3"):
            code = _tuning(request, own, use=environment["PRIMUS_HIPBLASLT_TUNING_STAGE"] == "3")
            if code is not None:
                return code
        for name in _OF_TORCHRUN if _STARTED_BY_TORCHRUN in environment else ():
            os.environ.pop(name, None)
        os.environ.update(request.environment)
    parser = argparse.ArgumentParser(prog=f"primus compat {command}")
    train.add_arguments(parser)
    more = [*(["--dry-run"] if own.dry_run else []), *(["--json"] if own.json else [])]
    options = parser.parse_args([*request.train(), *more, *(["--output", own.output] if own.output else [])])
    code = train.run(options)
    if request.benchmark and not own.dry_run:
        _write_csv(command, *request.benchmark, options.output)
    return code


def _tuning(request: Request, own: argparse.Namespace, *, use: bool) -> int | None:
    """Run stage 2 (measure the GEMMs that stage 1 logged) and return its exit code.

    For stage 3 (``use``), only check the result and return None. Raises InputError if the result does not fit.
    """
    recipe = resolve(request.recipe, request.words, request.choices)
    folder = store.Folder.of(request.recipe, Path("output/tune_hipblaslt"))
    if not use:
        return tune.tune(recipe, folder, as_json=own.json)
    if folder.key.is_file():
        store.check(folder, tune.key_here(recipe))
    else:
        print(f"{folder.tuned} does not name its hipBLASLt version; it is used unchecked", file=sys.stderr)
    return None


def _ask_service(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Send the command to the workload service and print the answer as JSON."""
    command = next((word for word in words if word in workloads.COMMANDS), None)
    if command is None:
        known = ", ".join(workloads.COMMANDS)
        near = next((text for word in words if (text := nearest(word, workloads.COMMANDS))), "")
        raise InputError(f"no command is given{near}", where="run_k8s_pretrain.sh", hint=f"commands: {known}")
    rest = list(words)
    rest.remove(command)
    if command == "create":
        # A workload that cannot be trained is refused here, before it waits for its nodes.
        request = pretrain.kubernetes(words, environment)
        for sentence in request.says:
            print(f"run_k8s_pretrain.sh: {sentence}", file=sys.stderr)
    print(json.dumps(workloads.ask(command, rest, environment), indent=2, ensure_ascii=False))
    return 0


def _launch_slurm(request: Request, environment: Mapping[str, str], own: argparse.Namespace) -> int:
    """Submit the request as a job of Slurm and wait for it, as the script did. Returns the job's exit code."""
    if own.proxy:
        knows = backend(request.choices.backend or "torchtitan")
        request = pretrain.for_proxy(request, [knows.key("steps"), knows.key("seed")])
    gpu = own.gpu or request.choices.gpu or request.gpu_of_path
    request = replace(request, choices=replace(request.choices, gpu=gpu))
    words = ["launch", "slurm", *request.train()]
    words += ["--image", environment["DOCKER_IMAGE"]] if environment.get("DOCKER_IMAGE") else ["--container", "none"]
    words += [word for name, value in request.environment.items() for word in ("--env", f"{name}={value}")]
    words += ["--output", own.output] if own.output else []
    words += ["--dry-run"] if own.dry_run else ["--wait"]
    words += ["--json"] if own.json else []
    for sentence in request.says:
        if not sentence.startswith("DOCKER_IMAGE "):
            print(f"run_slurm_pretrain.sh: {sentence}", file=sys.stderr)
    print(f"run_slurm_pretrain.sh: → primus {shlex.join(words)}", file=sys.stderr)
    # A separate process, because code that ships inside the image must not import code that starts jobs from outside.
    return subprocess.run([sys.executable, "-m", "primus.cli.main", *words], check=False).returncode


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
    """List the installed libraries; with ``--download``, download models and data sets."""
    if [word for word in words if word != "--download"]:
        raise InputError(f"there is no option {words[0]!r}", hint="--download also downloads models and data sets")
    if not downloads:
        found = setup.libraries()
        for one in found:
            state = one.version or (f"not needed: {one.because}" if one.because else "missing")
            print(f"{one.name:<24}{state}")
        missing = [one.name for one in found if one.missing]
        if missing:
            raise HostError(
                f"{', '.join(missing)} cannot be imported here", hint="the images for CPU and H200 have all of them"
            )
    if downloads or "--download" in words:
        for folder in setup.download(environment):
            print(folder)
    return 0


def _for_this_machine(request: Request, own: argparse.Namespace) -> Request:
    choices = request.choices if own.gpu is None else replace(request.choices, gpu=own.gpu)
    request = replace(request, choices=choices)
    if own.proxy:
        knows = backend(choices.backend or "torchtitan")
        return pretrain.for_proxy(request, [knows.key("steps"), knows.key("seed")])
    if own.gpu or request.gpu_of_path is None:
        return request
    found = detect()
    if not found.names and own.dry_run:
        says = f"this machine has no GPU: resolved for {request.gpu_of_path}, which the path names"
        return replace(request, choices=replace(choices, gpu=request.gpu_of_path), says=(*request.says, says))
    if found.generation and found.generation != request.gpu_of_path:
        says = f"the path names {request.gpu_of_path}; this machine's {found.generation} decides the settings"
        return replace(request, says=(*request.says, says))
    return request


def _startable(command: str, environment: Mapping[str, str], request: Request) -> None:
    """Check that the command can start here.

    Raises HostError for commands that only the host can run, InputError for a tuning stage without its predecessor.
    """
    if command == "run_slurm_pretrain.sh" and "SLURM_NODEID" not in environment:
        raise HostError(
            "a Slurm job cannot be started inside the image",
            hint="use `primus launch slurm` or `primus compat run_slurm_pretrain.sh` on a login node",
        )
    if command == "madengine":
        raise HostError(
            f"{command} starts containers, which is not possible inside the image", hint="--dry-run shows the run"
        )
    tuned = request.environment.get("HIPBLASLT_TUNING_OVERRIDE_FILE")
    if tuned is not None and not Path(tuned).is_file():
        raise InputError(f"there is no {tuned}", where="PRIMUS_HIPBLASLT_TUNING_STAGE=3", hint="stage 2 creates it")
    if shapes := request.environment.get("HIPBLASLT_LOG_FILE"):
        Path(shapes).parent.mkdir(parents=True, exist_ok=True)
