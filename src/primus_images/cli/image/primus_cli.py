"""AMD's ``primus-cli``: each command is translated, printed in one line, and run."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from primus_images.cli.image.own import OwnOptions, own_options
from primus_images.cli.image.request import set_variables
from primus_images.cli.verb import installed_verbs, parser_of, run
from primus_images.compat.commands import Request
from primus_images.compat.primus_cli import (
    NAME,
    Call,
    config_of,
    parsed,
    usage,
    work_of,
)
from primus_images.errors import HostError
from primus_images.gpus.detect import detect
from primus_images.gpus.table import load_table
from primus_images.system.banner import beside_amds

# Starts the run of a request, by the name of the old command and primus's own options.
Starter: TypeAlias = Callable[[str, Request, OwnOptions], int]
# Folders of a checkout of AMD's repository, whose models an experiment file names.
_CHECKOUT = Path("primus/configs")


def primus_cli(words: Sequence[str], start: Starter) -> int:
    """Run ``primus-cli WORDS``, whose training runs ``start`` starts. Raises PrimusError."""
    call = parsed(words)
    if call.help:
        print("\n".join(usage()))
        return 0
    if beside_amds():
        _say([beside_amds()])
    is_host = "run" in installed_verbs()
    if call.mode == "container" and is_host:
        return _in_container(call)
    if call.mode == "slurm" and "SLURM_NODEID" not in os.environ:
        return _on_slurm(call, start, is_host=is_host)
    if call.mode == "container":
        sentence = "this is inside a container, so the command runs here"
        call = replace(call, says=(*call.says, sentence))
    return _here(call, start)


def _here(call: Call, start: Starter) -> int:
    """Run the command on this machine."""
    os.environ.update(call.environment)
    chosen, words = _own_options(call)
    work = work_of(
        replace(call, command=tuple(words)), os.environ, allow_unmapped=chosen.allow_unmapped
    )
    chosen = replace(chosen, dry_run=chosen.dry_run or call.dry_run)
    if work.request:
        request = replace(work.request, says=(*call.says, *work.says, *work.request.says))
        if chosen.precision:
            request = replace(request, choices=replace(request.choices, precision=chosen.precision))
        return start(NAME, request, chosen)
    _say([*call.says, *work.says])
    code = 0
    for verb, *arguments in work.commands:
        _say([f"→ primus {shlex.join([verb, *arguments])}"])
        if not call.dry_run:
            parsed_arguments = parser_of(verb, f"primus compat {NAME}").parse_args(arguments)
            code = max(code, run(verb, parsed_arguments))
    return code


def _own_options(call: Call) -> tuple[OwnOptions, list[str]]:
    """Return primus's own options among those of ``train``, and the other words."""
    words = list(call.command)
    if words[0] != "train":
        chosen, _ = own_options(NAME, [])
        return chosen, words
    chosen, words = own_options(NAME, words)
    set_variables(chosen.primus_root, allow_unmapped=chosen.allow_unmapped)
    return chosen, words


def _say(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        print(f"{NAME}: {sentence}", file=sys.stderr)


def _in_container(call: Call) -> int:
    """Run the command in an image of this project, by ``primus run``."""
    chosen, words = _own_options(call)
    gpus = detect()
    target = _target(call, chosen.gpu, proxy=chosen.proxy)
    arguments = [target, *call.options]
    if gpus.names and not any(option.startswith("--gpus") for option in call.options):
        arguments.append("--gpus=all")
    arguments += [f"--env={name}" for name in call.environment]
    config = config_of(words)
    inside = list(call.command)
    if config and Path(config).is_file():
        root = _root_of(Path(config).absolute())
        arguments.append(f"--volume={root}:{root}:ro")
        inside = [str(Path(word).absolute()) if word == config else word for word in inside]
    runs = Path("runs").absolute()
    arguments.append(f"--volume={runs}:/workspace/runs")
    arguments += ["--", "primus", "compat", NAME, "direct", "--", *inside]
    says = list(call.says)
    if os.environ.get("DOCKER_IMAGE"):
        says.append(f"DOCKER_IMAGE is left out: the image is that of {target}")
    _say([*says, f"→ primus run {shlex.join(arguments)}"])
    if call.dry_run or chosen.dry_run:
        return 0
    runs.mkdir(exist_ok=True)
    os.environ.update(call.environment)
    return run("run", parser_of("run", f"primus compat {NAME}").parse_args(arguments))


def _target(call: Call, gpu: str | None, *, proxy: bool) -> str:
    """Return the image to run: of the GPU that is named, of this machine, or of the path."""
    imaged = load_table().imaged
    here = detect().generation
    path = [part.lower() for part in Path(config_of(call.command)).parts]
    candidates = [gpu, *call.image.lower().split("-"), here]
    if proxy:
        candidates.append("cpu")
    for name in (*candidates, *path):
        if name == "cpu" or name in imaged:
            return str(name)
    return "cpu"


def _root_of(config: Path) -> Path:
    """Return the checkout that the file is in, which has the models, or its own folder."""
    for folder in config.parents:
        if (folder / _CHECKOUT).is_dir():
            return folder
    return config.parent


def _on_slurm(call: Call, start: Starter, *, is_host: bool) -> int:
    """Submit a training run, or run another command on each node."""
    chosen, words = _own_options(call)
    if words[0] == "projection" or (chosen.proxy and not is_host):
        sentence = "this needs no other nodes, so it runs here"
        return _here(replace(call, says=(*call.says, sentence)), start)
    if words[0] != "train":
        return _on_each_node(call, words)
    os.environ.update(call.environment)
    request = _requested(call, chosen, words)
    arguments = _of_launch(call, chosen, request)
    _say([*call.says, *request.says, f"→ primus launch {shlex.join(arguments)}"])
    if not is_host:
        raise HostError(
            "the job is not submitted from inside the image",
            hint=f"on a login node: primus launch {shlex.join(arguments)}; --proxy trains a small "
            "model here",
        )
    if call.dry_run or chosen.dry_run:
        arguments.append("--dry-run")
    return run("launch", parser_of("launch", f"primus compat {NAME}").parse_args(arguments))


def _requested(call: Call, chosen: OwnOptions, words: Sequence[str]) -> Request:
    """Translate ``train`` to a request for the GPUs that are named, or that are here."""
    work = work_of(
        replace(call, command=tuple(words)), os.environ, allow_unmapped=chosen.allow_unmapped
    )
    assert work.request
    request = work.request
    choices = replace(
        request.choices,
        precision=chosen.precision or request.choices.precision,
        proxy=chosen.proxy or None,
        gpu=chosen.gpu or detect().generation or request.gpu_of_path,
    )
    request = replace(request, choices=choices)
    if chosen.proxy:
        return request.for_proxy()
    return request


def _of_launch(call: Call, chosen: OwnOptions, request: Request) -> list[str]:
    """Return the arguments of ``primus launch`` for a run."""
    _, *of_run = request.arguments()
    arguments = ["slurm", *of_run]
    # The run's own arguments have the number of nodes.
    arguments += [option for option in call.options if not option.startswith("--nodes=")]
    arguments += [f"--env={name}" for name in call.environment]
    if call.image:
        arguments.append(f"--image={call.image}")
    if chosen.output:
        arguments.append(f"--output={chosen.output}")
    if call.launcher == "srun":
        arguments.append("--wait")
    return arguments


def _on_each_node(call: Call, words: Sequence[str]) -> int:
    work = work_of(replace(call, command=tuple(words)), os.environ)
    _say([*call.says, *work.says])
    program = shutil.which("srun")
    for command in work.commands:
        argv = ["srun", *call.flags]
        if not any(flag.startswith("--ntasks-per-node") for flag in call.flags):
            argv.append("--ntasks-per-node=1")
        argv += ["primus", *command]
        _say([f"→ {shlex.join(argv)}"])
        if call.dry_run:
            continue
        if program is None:
            raise HostError(
                "srun is not installed here", hint=f"on a login node: {shlex.join(argv)}"
            )
        os.execv(program, argv)
    return 0
