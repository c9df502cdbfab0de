"""Commands of older documents → the run that they ask for, by the tables ``commands.yaml`` and
``paths.yaml``.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Self

from primus_images.cli.verb import TYPES, parser_of_shared
from primus_images.compat.translate import (
    is_experiment,
    listed,
    options,
    read_experiment,
    recipe_of,
    table,
    translate,
)
from primus_images.errors import HostError, InputError, nearest
from primus_images.gpus.table import load_table, words_for
from primus_images.recipes.load import names
from primus_images.recipes.resolve import resolve
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import Choices

_positive = partial(TYPES["whole"], least=1, most=999_999_999)
TUNING = "PRIMUS_HIPBLASLT_TUNING_STAGE"
STAGES = {"0": "", "1": "dump", "2": "tune", "3": "use"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run: a recipe, its choices, and ``key=value`` words in order.

    ``says`` are sentences for the user about differences from the old command. ``gpu_of_path`` is
    the GPU generation in a documented path. It is used only with --dry-run on a machine without a
    GPU; otherwise the machine's GPU decides. ``benchmark`` is the model and mode as the command
    names them, if the command writes a CSV. ``stage``: ``primus tune gemm`` runs with it in place
    of a training job.
    """

    recipe: str
    choices: Choices = field(default_factory=Choices)
    words: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    gpu_of_path: str | None = None
    benchmark: tuple[str, str] | None = None
    stage: str = ""

    def arguments(self) -> list[str]:
        """Return the equivalent arguments of ``primus``."""
        if self.stage:
            verb = ["tune", "gemm", f"--stage={self.stage}"]
        else:
            verb = ["train"]
        return [*verb, self.recipe, *self.choices.words(), *self.words]

    def for_proxy(self) -> Self:
        """Return the request for the proxy. It keeps its own sizes, so only the number of steps and
        the seed remain.
        """
        knows = backends()[self.choices.backend or "torchtitan"]
        words = tuple(
            w for w in self.words if w.partition("=")[0] in (knows.key("steps"), knows.key("seed"))
        )
        dropped = [word for word in self.words if word not in words]
        says = ()
        if dropped:
            says = (f"the proxy keeps its own sizes: {' '.join(dropped)} left out",)
        return replace(
            self, choices=replace(self.choices, proxy=True), words=words, says=(*self.says, *says)
        )


def requested(
    name: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    allow_unmapped: bool = False,
    precision: str | None = None,
) -> Request:
    """Translate the command ``name`` to a request. Raises InputError, or HostError if it trains
    nothing.
    """
    name = name.rpartition("/")[2]
    refused = table("commands")["refused"]
    if name in ("run_pretrain.sh", "run_local_pretrain.sh", "run_slurm_pretrain.sh"):
        request = _pretrain(words, environment, allow_unmapped=allow_unmapped, precision=precision)
    elif row := refused.get(f"{name} {' '.join(words)}") or refused.get(name):
        raise HostError(f"{name}: {row['message']}", hint=row["hint"])
    elif name == "pytorch_benchmark_report.sh":
        request = _report(words)
    elif name == "train_fsdp.py":
        request = _fsdp(words, environment)
    elif row := table("commands")["programs"].get(name):
        if words:
            raise InputError(
                f"{words[0]!r} is not supported here",
                where=name,
                hint="settings are written key=value",
            )
        request = _of_row(row)
    elif name == "madengine":
        # Its other options concern containers and are ignored.
        if words[:1] != ["run"] or "--tags" not in words or words[-1] == "--tags":
            raise InputError("only `madengine run --tags TAG` is supported", where="madengine")
        tag = words[words.index("--tags") + 1]
        tags = table("commands")["tags"]
        match = re.fullmatch(r"primus_train/([a-z]+)_(MI\d+X)_(.+)", tag)
        if match:
            path = "examples/{}/configs/{}/{}.yaml".format(*match.groups())
            request = _pretrain([], {"EXP": path}, allow_unmapped=False)
        else:
            request = _of_row(tags[_in_any_case(tag, tags, "--tags")])
    elif name == "pytorch_benchmark_setup.sh" and words:
        raise InputError(f"there is no option {words[0]!r}", where=name)
    else:
        scripts_text = ", ".join(scripts())
        raise InputError(
            f"there is no command {name!r}{nearest(name, scripts())}",
            hint=f"commands: {scripts_text}",
        )
    if precision:
        return replace(request, choices=replace(request.choices, precision=precision))
    return request


def scripts() -> list[str]:
    """Return the names of the scripts in the image."""
    return list(table("commands")["scripts"])


def documented(name: str) -> tuple[Request, Mapping[str, Any]]:
    """Return the run that the documented path ``name`` stands for, with its settings.

    Raises InputError, with a similar name, if no document has it.
    """
    paths = table("paths")
    parts = PurePosixPath(name).parts
    start = next((i for i, part in enumerate(parts) if part in paths["frameworks"]), None)
    match = re.fullmatch(
        r"(.+?)(?:-(BF16|FP8|MXFP8))?(?:-pretrain)?\.(?:ya?ml|toml)", parts[-1] if parts else ""
    )
    if start is None or match is None:
        raise InputError(
            f"there is no file {name}, and no document names it",
            where=f"EXP={name}",
            hint="as in EXP=examples/megatron/configs/llama3.1_8B-pretrain.yaml, or the name of "
            "a recipe",
        )
    backend = paths["frameworks"][parts[start]]
    folders = [part for part in parts[start + 1 : -1] if part not in ("config", "configs")]
    gpus = {gpu.upper(): gpu for gpu in load_table().imaged if "amd" in words_for(gpu)}
    folder = ""
    if folders:
        folder = listed("/".join(folders), gpus, name, "no document has a folder")
    stem = listed(match[1], paths["stems"][backend], name, "no document has a model")
    recipe, settings = recipe_of(backend, stem)
    request = Request(
        recipe=recipe,
        choices=Choices(
            backend=backend, mode="pretrain", precision=paths["precisions"].get(match[2], "bf16")
        ),
        gpu_of_path=gpus.get(folder),
        says=tuple(filter(None, [paths["says"].get("/".join(parts[max(start - 1, 0) :]))])),
    )
    return request, settings


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
    says = []
    if not name:
        raise InputError(
            "EXP is not set", hint="as in EXP=examples/megatron/configs/llama3.1_8B-pretrain.yaml"
        )
    frameworks = table("paths")["frameworks"]
    backend = environment.get("BACKEND")
    if backend and backend not in frameworks:
        listed(
            backend, dict.fromkeys(frameworks.values()), f"BACKEND={backend}", "there is no backend"
        )
    if (path := Path(name)).is_dir():
        raise InputError("this is a folder, not a file", where=f"EXP={name}")
    if path.is_file() and is_experiment(path):
        source = read_experiment(path, environment)
        done = source.translated(arguments)
        request = Request(
            recipe=source.recipe, choices=Choices(backend=source.backend, mode="pretrain")
        )
        says.append(
            f"{name} is a Primus experiment; what it does not set is as in the recipe "
            f"{source.recipe}"
        )
    elif path.is_file() or name in names():
        # The recipe's default backend determines the names of its keys.
        recipe = resolve(name, (), Choices(backend=frameworks.get(backend), gpu="mi300x"))
        done = translate(recipe.backend, arguments)
        request = Request(recipe=name, choices=Choices(backend=recipe.backend))
    else:
        request, settings = documented(name)
        done = translate(
            str(request.choices.backend), arguments, settings, str(request.choices.precision)
        )
        if (precision or done.precision) == request.choices.precision:
            says += request.says
    if backend and frameworks[backend] != request.choices.backend:
        raise InputError(
            f"BACKEND is {backend}, but {name} is for {request.choices.backend}",
            where=f"EXP={name}",
        )
    if not allow_unmapped:
        done.refuse_unmapped()
    stage = environment.get(TUNING) or "0"
    if stage not in STAGES:
        raise InputError(f"must be 0, 1, 2 or 3, not {stage!r}", where=f"{TUNING}={stage}")
    says += [
        f"{key} is left out: {why}"
        for key, why in table("keys")["environment"].items()
        if environment.get(key)
    ]
    says += [*done.left_out, *(f"{option.key} is left out: {why}" for option, why in done.unmapped)]
    nodes = _count(environment, "NNODES")
    ranks = _count(environment, "GPUS_PER_NODE")
    if ranks:
        words = [f"ranks={ranks}"]
    else:
        words = []
    if environment.get("PRIMUS_DETERMINISTIC", "0") not in ("", "0"):
        words.append(f"{backends()[str(request.choices.backend)].key('deterministic')}=true")
    # The script's default is one node, whereas the recipe's default may be more.
    choices = replace(request.choices, precision=done.precision, nodes=nodes or 1)
    return replace(
        request,
        choices=choices,
        words=(*words, *done.words()),
        says=tuple(says),
        stage=STAGES[stage],
    )


def _report(words: Sequence[str]) -> Request:
    args = parser_of_shared("pytorch_benchmark_report.sh").parse_args(words)
    rows = table("commands")["report"]
    mode = rows["modes"][_in_any_case(args.t, rows["modes"], "-t")]
    model = _in_any_case(args.m, rows["models"], "-m")
    precision = listed(args.p.lower(), rows["precisions"], "-p")
    runs = rows["models"][model]["runs"]
    if mode not in runs:
        having = ", ".join(word for word, kind in rows["modes"].items() if kind in runs)
        raise InputError(
            f"{model} has no {args.t}", where=f"-t {args.t}", hint=f"there are: {having}"
        )
    run = runs[mode]
    return Request(
        recipe=rows["models"][model]["recipe"],
        choices=Choices(backend=run["backend"], mode=run.get("mode", mode), precision=precision),
        words=(f"{run['length']}={args.s}",) if args.s and "length" in run else (),
        says=tuple(filter(None, [run.get("says", {}).get(precision)])),
        benchmark=(model, args.t),
    )


def _fsdp(words: Sequence[str], environment: Mapping[str, str]) -> Request:
    args = parser_of_shared("train_fsdp.py").parse_args(words)
    configs = table("commands")["configs"]
    row = configs[_in_any_case(args.config.removeprefix("./"), configs, "train_fsdp.py")]
    if args.family != row["family"]:
        family = row["family"]
        raise InputError(
            f"{args.config} is of the family {family}, not {args.family!r}", where="train_fsdp.py"
        )
    ranks = _count(environment, "WORLD_SIZE") or 8
    batch = args.batch_size
    settings = {
        "ranks": ranks,
        "fsdp.training.seq_len": row["seq_len"],
        "fsdp.training.micro_batch_size": batch,
        # Its step was eight of these.
        "fsdp.training.global_batch_size": batch and batch * 8 * ranks,
    }
    precision = "bf16"
    if str(args.enable_fp8).lower() == "true":
        precision = "fp8"
    return Request(
        recipe=row["recipe"],
        choices=Choices(backend="fsdp", mode="pretrain", precision=precision),
        words=tuple(f"{key}={setting}" for key, setting in settings.items() if setting),
    )


def _of_row(row: Mapping[str, str]) -> Request:
    choices = Choices(
        backend=row["backend"], mode=row.get("mode", "pretrain"), precision=row.get("precision")
    )
    return Request(
        recipe=row["recipe"], choices=choices, says=(row["says"],) if "says" in row else ()
    )


def _in_any_case(word: str, rows: Mapping[str, Any], where: str) -> str:
    return listed(next((name for name in rows if name.lower() == word.lower()), word), rows, where)


def _count(environment: Mapping[str, str], name: str) -> int | None:
    try:
        if text := environment.get(name):
            return _positive(text)
        return None
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{name} {error}", where=f"{name}={environment[name]}") from None
