"""Commands of older documents, and the import of Primus's experiment files."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from primus_images.cli.image.own import OwnOptions, own_options
from primus_images.cli.image.primus_cli import primus_cli
from primus_images.cli.image.request import set_variables
from primus_images.cli.image.train import COMPILED, default_output
from primus_images.cli.verb import Options, answer, parser_of, run
from primus_images.compat import workloads
from primus_images.compat.commands import Request, requested
from primus_images.errors import HostError, InputError
from primus_images.gpus.detect import detect
from primus_images.recipes.choose import CPU, computes
from primus_images.recipes.experiments.source import import_experiment, text_of
from primus_images.recipes.published import another_model
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.report import sheets
from primus_images.report.run import read
from primus_images.terminal import harmless
from primus_images.training.run.job import Job
from primus_images.training.run.ranks import files

# Variables that torchrun sets. If torchrun starts primus, only one of its ranks goes on, and starts
# primus's own ranks without these variables.
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


@dataclass(frozen=True, kw_only=True)
class CompatOptions:
    """The options of ``compat``."""

    command: str
    words: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Options):
    """The options of ``import-exp``."""

    file: Path
    out: Path | None
    nodes: int | None
    allow_unmapped: bool
    primus_root: Path | None


def compat(options: CompatOptions) -> int:
    """Run a command of older documents: find the recipe it asks for and train it."""
    environment = dict(os.environ)
    command = options.command.rpartition("/")[2]
    by_torchrun = _STARTED_BY_TORCHRUN in environment
    if by_torchrun and environment.get("LOCAL_RANK", "0") != "0":
        return 0
    if command == "primus-cli":
        return primus_cli(options.words, start)
    if command == workloads.NAME:
        return _ask_service(options.words)
    chosen, words = own_options(command, options.words)
    if command == "pytorch_benchmark_setup.sh" and not words:
        print("nothing to install: the image has the libraries of all its recipes")
        return 0
    set_variables(chosen.primus_root, allow_unmapped=chosen.allow_unmapped)
    request = requested(
        command,
        words,
        dict(os.environ),
        allow_unmapped=chosen.allow_unmapped,
        precision=chosen.precision,
    )
    return start(command, request, chosen)


def _ask_service(words: Sequence[str]) -> int:
    """Send a command to the workload service and print its answer."""
    others = [word for word in words if word != "--dry-run"]
    query = workloads.query(others, os.environ)
    if len(others) < len(words):
        print(query.shown())
        return 0
    answer = workloads.answer_of(query)
    print(harmless(json.dumps(answer, indent=2, ensure_ascii=False)))
    return 0


def start(command: str, request: Request, chosen: OwnOptions) -> int:
    """Print what the old ``command`` runs here, run it, and return the exit code.

    ``chosen`` are primus's own options among those of the command.
    """
    environment = dict(os.environ)
    by_torchrun = _STARTED_BY_TORCHRUN in environment
    request = _for_this_machine(request, chosen)
    verb, *arguments = request.arguments()
    for sentence in (*request.says, f"→ primus {' '.join([verb, *arguments])}"):
        print(f"{command}: {sentence}", file=sys.stderr)
    if chosen.dry_run and request.stage:  # `tune gemm` has no --dry-run
        resolve(request.recipe, request.words, request.choices)
        return 0
    if not chosen.dry_run:
        _check_startable(command, request, environment)
        if by_torchrun:
            for name in _OF_TORCHRUN:
                os.environ.pop(name, None)
    arguments += _arguments_of_primus(request, chosen)
    parsed = parser_of(verb, f"primus compat {command}").parse_args(arguments)
    code = run(verb, parsed)
    if request.benchmark and not chosen.dry_run:
        _write_csv(command, *request.benchmark, parsed.output)
    return code


def _arguments_of_primus(request: Request, chosen: OwnOptions) -> list[str]:
    """Return the arguments that pass on primus's own options among those of an old command."""
    arguments = []
    if chosen.dry_run:
        arguments.append("--dry-run")
    if chosen.json:
        arguments.append("--json")
    if chosen.output:
        arguments += ["--output", chosen.output]
    elif request.benchmark:
        # The figures of the run are read from there.
        output = default_output(request.recipe)
        arguments += ["--output", str(output), "--compile-cache", str(COMPILED)]
    return arguments


def _for_this_machine(request: Request, chosen: OwnOptions) -> Request:
    if chosen.gpu:
        request = replace(request, choices=replace(request.choices, gpu=chosen.gpu))
    if chosen.proxy:
        return _in_precision_of_cpu(request.for_proxy())
    if chosen.dry_run and not chosen.gpu and not detect().names:
        gpu = request.gpu_of_path or "mi300x"
        says = f"this machine has no GPU: resolved for {gpu}; --gpu NAME names another"
        return replace(
            request, choices=replace(request.choices, gpu=gpu), says=(*request.says, says)
        )
    return request


def _in_precision_of_cpu(request: Request) -> Request:
    """Return the request of a proxy in BF16, if this machine's CPU is to train and lacks its FP8.

    A document's command can be tried anywhere then, and says what it leaves out.
    """
    gpu = request.choices.gpu
    if gpu not in (None, CPU) or (gpu is None and detect().names):
        return request
    on_gpu = replace(request.choices, gpu="mi355x")
    recipe = resolve(request.recipe, request.words, on_gpu)
    if computes(CPU, recipe.precision, recipe.backend):
        return request
    says = (
        f"the proxy is trained in bf16: {recipe.backend} does not compute {recipe.precision} on a "
        "CPU"
    )
    choices = replace(request.choices, precision="bf16")
    return replace(request, choices=choices, says=(*request.says, says))


def _check_startable(command: str, request: Request, environment: Mapping[str, str]) -> None:
    name, *words = request.arguments()
    if command == "run_slurm_pretrain.sh" and "SLURM_NODEID" not in environment:
        if request.stage == "use":
            trained = replace(request, stage="").arguments()[1:]
            raise HostError(
                "the job is not submitted from here",
                hint=f"on a login node: primus launch slurm {shlex.join(trained)} --tuned-gemms "
                "output/tune_gemm",
            )
        if request.stage:
            raise HostError(
                "GEMMs are tuned on one node, and not by a job that is submitted",
                hint=f"in the image, on a node with GPUs: primus {name} {shlex.join(words)}",
            )
        image = environment.get("DOCKER_IMAGE")
        if image:
            words += ["--image", image]
        else:
            words += ["--container", "none"]
        raise HostError(
            "the job is not submitted from here",
            hint=f"on a login node: primus launch slurm {shlex.join(words)}",
        )
    if command == "madengine":
        raise HostError(
            f"{command} starts containers, which is not possible inside the image",
            hint=f"run it on the host; here: primus {name} {shlex.join(words)}",
        )


def _write_csv(command: str, model: str, mode: str, output: Path) -> None:
    """Append the figures to ``../perf_MODEL.csv``, as MAD's script does.

    If that cannot be written, they go to a file in the run's folder.
    """
    try:
        rows = sheets.benchmark_rows(read(output), model=model, mode=mode)
    except InputError as error:
        print(f"{command}: no figures to write: {error}", file=sys.stderr)
        return
    for file in (Path("..") / f"perf_{model}.csv", output / f"perf_{model}.csv"):
        try:
            with file.open("a", encoding="utf-8", newline="") as out:
                out.write(sheets.text_of("benchmark", rows, header=not out.tell()))
        except OSError as error:
            print(f"{command}: cannot write {file}: {error.strerror}", file=sys.stderr)
            continue
        print(f"{command}: → {file}", file=sys.stderr)
        return


def import_exp(options: ImportOptions) -> int:
    """Convert a Primus experiment file to a recipe. Keys that no recipe can express are listed with
    their location.
    """
    set_variables(options.primus_root, allow_unmapped=options.allow_unmapped)
    imported = import_experiment(options.file.absolute())
    for sentence in imported.says:
        print(sentence, file=sys.stderr)
    # The recipe is resolved for a fixed GPU, because the importing machine may have none. All keys
    # are checked anyway.
    choices = Choices(gpu="mi355x", nodes=options.nodes)
    try:
        recipe = resolve(str(options.file.absolute()), (), choices)
        files(Job(name=recipe.get("name", str), recipe=recipe, output=Path("import")))
    except InputError as error:
        raise imported.done.placed(error) from error
    other = another_model(recipe)
    if other:
        print(other, file=sys.stderr)
    nodes = recipe.get("nodes", int)
    text = text_of(imported, nodes=nodes, compared=not other)
    done = imported.done
    document = {
        "recipe": imported.recipe,
        "backend": imported.backend,
        "nodes": nodes,
        "text": text,
        "model": imported.model,
        "settings": done.settings,
        "precision": done.precision,
        "left_out": done.left_out,
        "unmapped": [[asdict(argument), why] for argument, why in done.unmapped],
    }
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
        return answer(options, document, [])
    return answer(options, document, [text.rstrip("\n")])
