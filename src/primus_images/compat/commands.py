"""Commands of older documents → the run that they ask for.

The tables are ``commands.yaml`` and ``paths.yaml``.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Self

from primus_images.cli.verb import TYPES, parser_of_shared
from primus_images.compat.tables import table
from primus_images.errors import HostError, InputError, nearest
from primus_images.gpus.table import load_table, words_for
from primus_images.recipes.experiments.presets import Argument, is_experiment
from primus_images.recipes.experiments.source import backend_of, import_experiment, least_nodes
from primus_images.recipes.experiments.translate import (
    Translation,
    listed,
    options,
    table as table_of_experiments,
    translate,
)
from primus_images.recipes.load import names
from primus_images.recipes.recipe import MOCK
from primus_images.recipes.resolve import resolve
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import Choices

_positive = partial(TYPES["whole"], least=1, most=999_999_999)
TUNING = "PRIMUS_HIPBLASLT_TUNING_STAGE"
# The documents' scripts that train the experiment EXP.
_PRETRAINING = ("run_pretrain.sh", "run_local_pretrain.sh", "run_slurm_pretrain.sh")
# A file of an experiment: its model and precision.
_EXPERIMENT = re.compile(r"(.+?)(?:-(BF16|FP8|MXFP8))?(?:-pretrain)?\.(?:ya?ml|toml)")
STAGES = {"0": "", "1": "dump", "2": "tune", "3": "use"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run: a recipe, its choices, and ``key=value`` words in order.

    ``says`` are sentences for the user about differences from the old command. ``gpu_of_path`` is
    the GPU generation in a documented path. It is used only with --dry-run on a machine without a
    GPU; otherwise the machine's GPU decides. ``benchmark`` is the model and mode as the command
    names them, if the command writes a CSV. ``by_layout``: nobody named the number of nodes, so it
    is the least that the layout needs. ``stage``: ``primus tune gemm`` runs with it in place
    of a training job.
    """

    recipe: str
    choices: Choices = field(default_factory=Choices)
    words: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    gpu_of_path: str | None = None
    benchmark: tuple[str, str] | None = None
    by_layout: bool = False
    stage: str = ""

    def arguments(self) -> list[str]:
        """Return the equivalent arguments of ``primus``."""
        verb = ["train"]
        if self.stage:
            verb = ["tune", "gemm", f"--stage={self.stage}"]
        return [*verb, self.recipe, *self.choices.words(), *self.words]

    def for_proxy(self) -> Self:
        """Return the request for the proxy, which keeps its own sizes.

        Only the number of steps and the seed remain, and the number of nodes if somebody named it.
        """
        backend = backends()[self.choices.backend or "torchtitan"]
        remaining = (backend.key("steps"), backend.key("seed"))
        words = tuple(word for word in self.words if word.partition("=")[0] in remaining)
        dropped = [word for word in self.words if word not in words]
        says = self.says
        if dropped:
            says = (*says, f"the proxy keeps its own sizes: {' '.join(dropped)} left out")
        choices = replace(self.choices, proxy=True)
        if self.by_layout:
            choices = replace(choices, nodes=1)
        return replace(self, choices=choices, words=words, says=says)


def requested(
    name: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    allow_unmapped: bool = False,
    precision: str | None = None,
) -> Request:
    """Translate the command ``name`` to a request.

    Raises InputError, or HostError if it trains nothing.
    """
    name = name.rpartition("/")[2]
    if name in _PRETRAINING:
        request = _pretrain(words, environment, allow_unmapped=allow_unmapped, precision=precision)
    else:
        request = _of_command(name, words, environment)
    for variable, why in table("commands")["passed"].items():
        if environment.get(variable):
            says = f"{variable}={environment[variable]} is passed on to the ranks: {why}"
            request = replace(request, says=(*request.says, says))
    if precision:
        return replace(request, choices=replace(request.choices, precision=precision))
    return request


def _of_command(name: str, words: Sequence[str], environment: Mapping[str, str]) -> Request:
    refused = table("commands")["refused"]
    row = refused.get(f"{name} {' '.join(words)}") or refused.get(name)
    if row:
        raise HostError(f"{name}: {row['message']}", hint=row["hint"])
    if name == "pytorch_benchmark_report.sh":
        return _report(words)
    if name == "train_fsdp.py":
        return _fsdp(words, environment)
    if name == "madengine":
        return _of_tag(words)
    program = table("commands")["programs"].get(name)
    if program and words:
        raise InputError(
            f"{words[0]!r} is not supported here",
            where=name,
            hint="settings are written key=value",
        )
    if program:
        return _of_row(program)
    if name == "pytorch_benchmark_setup.sh" and words:
        raise InputError(f"there is no option {words[0]!r}", where=name)
    raise InputError(
        f"there is no command {name!r}{nearest(name, scripts())}",
        hint=f"commands: {', '.join(scripts())}",
    )


def _of_tag(words: Sequence[str]) -> Request:
    """Translate ``madengine run --tags TAG``, whose other options concern containers."""
    if words[:1] != ["run"] or "--tags" not in words or words[-1] == "--tags":
        raise InputError("only `madengine run --tags TAG` is supported", where="madengine")
    tag = words[words.index("--tags") + 1]
    match = re.fullmatch(r"primus_train/([a-z]+)_(MI\d+X)_(.+)", tag)
    if match:
        framework, gpu, model = match.groups()
        path = f"examples/{framework}/configs/{gpu}/{model}.yaml"
        return _pretrain([], {"EXP": path}, allow_unmapped=False)
    tags = table("commands")["tags"]
    return _of_row(tags[_in_any_case(tag, tags, "--tags")])


def scripts() -> list[str]:
    """Return the names of the scripts in the image."""
    return list(table("commands")["scripts"])


def documented(name: str) -> tuple[Request, Mapping[str, Any]]:
    """Return the run that the documented path ``name`` stands for, with its settings.

    Raises InputError, with a similar name, if no document has it.
    """
    paths = table("paths")
    *folders, file = PurePosixPath(name).parts or ("",)
    match = _EXPERIMENT.fullmatch(file)
    start = next((n for n, folder in enumerate(folders) if folder in paths["frameworks"]), None)
    if start is None or match is None:
        raise InputError(
            f"there is no file {name}, and no document names it",
            where=f"EXP={name}",
            hint="as in EXP=examples/megatron/configs/llama3.1_8B-pretrain.yaml, or the name of "
            "a recipe",
        )
    model, precision = match.groups()
    backend = paths["frameworks"][folders[start]]
    known = table_of_experiments("models")["recipes"][backend]
    row = known[listed(model, known, name, "no document has a model")]
    recipe = row
    settings: Mapping[str, Any] = {}
    if not isinstance(row, str):
        recipe = row["recipe"]
        settings = row["settings"]
    says = paths["says"].get("/".join([*folders, file][max(start - 1, 0) :]))
    request = Request(
        recipe=recipe,
        choices=Choices(
            backend=backend,
            mode="pretrain",
            precision=paths["precisions"].get(precision, "bf16"),
        ),
        gpu_of_path=_gpu_of(folders[start + 1 :], name),
        says=(says,) if says else (),
    )
    return request, settings


def _gpu_of(folders: Sequence[str], name: str) -> str | None:
    """Return the GPU whose name is a folder of the path ``name``, below that of the framework."""
    gpus = {gpu.upper(): gpu for gpu in load_table().imaged if "amd" in words_for(gpu)}
    folder = "/".join(part for part in folders if part not in ("config", "configs"))
    if not folder:
        return None
    return gpus[listed(folder, gpus, name, "no document has a folder")]


def _pretrain(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    allow_unmapped: bool,
    precision: str | None = None,
) -> Request:
    """Translate ``EXP=… BACKEND=… NNODES=… run_pretrain.sh --key value …``."""
    arguments = options(words)
    name = environment.get("EXP", "")
    if not name:
        raise InputError(
            "EXP is not set", hint="as in EXP=examples/megatron/configs/llama3.1_8B-pretrain.yaml"
        )
    backend = _backend(environment)
    path = Path(name)
    if path.is_dir():
        raise InputError("this is a folder, not a file", where=f"EXP={name}")
    if path.is_file() and is_experiment(path):
        # Like any recipe file: the experiment is read where the run is resolved.
        of_file = backend_of(path, environment)
        choices = Choices(backend=of_file, mode="pretrain")
        request = Request(recipe=_as_path(name), choices=choices)
        done = translate(of_file, arguments)
    elif path.is_file() or name in names():
        # The recipe's default backend determines the names of its keys.
        recipe = resolve(name, (), Choices(backend=backend, gpu="mi300x"))
        request = Request(recipe=name, choices=Choices(backend=recipe.backend))
        done = translate(recipe.backend, arguments)
    else:
        request, done = _of_document(name, arguments, precision)
    if backend and backend != request.choices.backend:
        raise InputError(
            f"BACKEND is {environment['BACKEND']}, but {name} is for {request.choices.backend}",
            where=f"EXP={name}",
        )
    if not allow_unmapped:
        done.refuse_unmapped()
    return _with_environment(request, done, environment)


def _backend(environment: Mapping[str, str]) -> str | None:
    word = environment.get("BACKEND")
    if not word:
        return None
    frameworks = table("paths")["frameworks"]
    if word not in frameworks:
        known = list(dict.fromkeys(frameworks.values()))
        listed(word, known, f"BACKEND={word}", "there is no backend")
    return str(frameworks[word])


def _as_path(name: str) -> str:
    """Return the name of a file so that it is no name of a recipe."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        return name
    return f"./{name}"


def _of_document(
    name: str, arguments: Sequence[Argument], precision: str | None
) -> tuple[Request, Translation]:
    request, settings = documented(name)
    in_document = request.choices.precision
    done = translate(str(request.choices.backend), arguments, settings, str(in_document))
    if (precision or done.precision) != in_document:
        request = replace(request, says=())
    return request, _with_tokenizer(request, done)


def _with_tokenizer(request: Request, done: Translation) -> Translation:
    """Add the tokenizer of the model's publisher, as in AMD's files, for text of the user's own."""
    corpus = done.settings.get("assets.corpus", MOCK)
    if corpus == MOCK or "assets.tokenizer" in done.settings:
        return done
    repository = resolve(request.recipe, (), replace(request.choices, gpu="mi300x")).get(
        "model.hf_repo", str
    )
    return replace(done, settings={**done.settings, "assets.tokenizer": f"hf:{repository}"})


def _with_environment(
    request: Request, done: Translation, environment: Mapping[str, str]
) -> Request:
    """Add the translated settings, and what the variables of Primus's scripts ask for."""
    stage = environment.get(TUNING) or "0"
    if stage not in STAGES:
        raise InputError(f"must be 0, 1, 2 or 3, not {stage!r}", where=f"{TUNING}={stage}")
    says = list(request.says)
    for name, why in table_of_experiments("keys")["environment"].items():
        if environment.get(name):
            says.append(f"{name} is left out: {why}")
    if done.left_out:
        says.append(done.summary())
    for option, why in done.unmapped:
        says.append(f"{option.key} is left out: {why}")
    asked = _count(environment, "NNODES")
    nodes = asked or _usual_nodes(request, done)
    words = []
    ranks = _count(environment, "GPUS_PER_NODE")
    if ranks:
        words.append(f"ranks={ranks}")
    if environment.get("PRIMUS_DETERMINISTIC", "0") not in ("", "0"):
        words.append(f"{backends()[str(request.choices.backend)].key('deterministic')}=true")
    return replace(
        request,
        choices=replace(request.choices, precision=done.precision, nodes=nodes),
        words=(*words, *done.words()),
        says=tuple(says),
        by_layout=asked is None,
        stage=STAGES[stage],
    )


def _usual_nodes(request: Request, done: Translation) -> int:
    """Return the nodes of a run without NNODES.

    The script's default is one node, whereas a recipe's may be more. An experiment has the least
    that its layout needs, with the degrees of the command.
    """
    path = Path(request.recipe)
    if not is_experiment(path):
        return 1
    imported = import_experiment(path)
    return least_nodes(imported.backend, {**imported.done.settings, **done.settings})


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of ``pytorch_benchmark_report.sh``: task, model, precision, and length."""

    t: str
    m: str
    p: str
    s: int | None


def _report(words: Sequence[str]) -> Request:
    namespace = parser_of_shared("pytorch_benchmark_report.sh").parse_args(words)
    options = ReportOptions(**vars(namespace))
    rows = table("commands")["report"]
    mode = rows["modes"][_in_any_case(options.t, rows["modes"], "-t")]
    model = _in_any_case(options.m, rows["models"], "-m")
    precision = listed(options.p.lower(), rows["precisions"], "-p")
    runs = rows["models"][model]["runs"]
    if mode not in runs:
        having = ", ".join(word for word, kind in rows["modes"].items() if kind in runs)
        raise InputError(
            f"{model} has no {options.t}", where=f"-t {options.t}", hint=f"there are: {having}"
        )
    run = runs[mode]
    settings: tuple[str, ...] = ()
    if options.s and "length" in run:
        settings = (f"{run['length']}={options.s}",)
    says = run.get("says", {}).get(precision)
    return Request(
        recipe=rows["models"][model]["recipe"],
        choices=Choices(backend=run["backend"], mode=run.get("mode", mode), precision=precision),
        words=settings,
        says=(says,) if says else (),
        benchmark=(model, options.t),
    )


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """The options of ``train_fsdp.py``."""

    config: str
    family: str
    batch_size: int | None
    enable_fp8: str | None


def _fsdp(words: Sequence[str], environment: Mapping[str, str]) -> Request:
    namespace = parser_of_shared("train_fsdp.py").parse_args(words)
    options = FsdpOptions(**vars(namespace))
    configs = table("commands")["configs"]
    row = configs[_in_any_case(options.config.removeprefix("./"), configs, "train_fsdp.py")]
    if options.family != row["family"]:
        raise InputError(
            f"{options.config} is of the family {row['family']}, not {options.family!r}",
            where="train_fsdp.py",
        )
    ranks = _count(environment, "WORLD_SIZE") or 8
    settings = [f"ranks={ranks}", f"fsdp.training.seq_len={row['seq_len']}"]
    batch = options.batch_size
    if batch:
        settings.append(f"fsdp.training.micro_batch_size={batch}")
        # Its step was eight of these.
        settings.append(f"fsdp.training.global_batch_size={batch * 8 * ranks}")
    precision = "bf16"
    if str(options.enable_fp8).lower() == "true":
        precision = "fp8"
    choices = Choices(backend="fsdp", mode="pretrain", precision=precision)
    return Request(recipe=row["recipe"], choices=choices, words=tuple(settings))


def _of_row(row: Mapping[str, str]) -> Request:
    choices = Choices(
        backend=row["backend"], mode=row.get("mode", "pretrain"), precision=row.get("precision")
    )
    request = Request(recipe=row["recipe"], choices=choices)
    if "says" in row:
        return replace(request, says=(row["says"],))
    return request


def _in_any_case(word: str, rows: Mapping[str, Any], where: str) -> str:
    for name in rows:
        if name.lower() == word.lower():
            return name
    return listed(word, rows, where)


def _count(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return int(_positive(text))
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{name} {error}", where=f"{name}={text}") from None
