"""``run_pretrain.sh`` and its siblings: EXP, BACKEND and their options → a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from primus.compat.experiment import experiment
from primus.compat.merge import is_experiment, merge
from primus.compat.request import Request, switched_on
from primus.compat.tables import documented, ignored_variables
from primus.compat.translate import refuse, translate
from primus.compat.words import options
from primus.errors import HostError, InputError, nearest
from primus.recipes.backends import backend as known_backend
from primus.recipes.load import names
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices

ALLOW_UNMAPPED = "--allow-unmapped leaves them out"
# "torchtatin" is a misspelling in the documents.
_BACKENDS = {"megatron": "megatron", "torchtitan": "torchtitan", "torchtatin": "torchtitan"}
_CLIENT_OPTIONS = ("replica", "cpu", "gpu", "backend", "exp", "data_path", "image", "hf_token", "workspace", "nodelist")


def pretrain(
    options_given: Sequence[str],
    environment: Mapping[str, str],
    *,
    allow_unmapped: bool = False,
    precision: str | None = None,
) -> Request:
    """Translate ``EXP=… BACKEND=… NNODES=… run_pretrain.sh --key value …``. Raises InputError."""
    given = options(options_given)
    name = environment.get("EXP", "")
    if not name:
        raise InputError("EXP is not set", hint="as in EXP=examples/megatron/configs/llama3.1_8B-pretrain.yaml")
    backend = environment.get("BACKEND")
    if backend and backend not in _BACKENDS:
        raise InputError(
            f"there is no backend {backend!r}" + nearest(backend, ["megatron", "torchtitan"]),
            where=f"BACKEND={backend}", hint="there are: megatron, torchtitan",
        )  # fmt: skip
    path = Path(name)
    if path.is_dir():
        raise InputError("this is a folder, not a file", where=f"EXP={name}")
    says: list[str] = []
    if path.is_file() and is_experiment(path):
        source = experiment(merge(path, environment))
        done = source.translated(given)
        request = Request(recipe=source.recipe, choices=Choices(backend=source.backend, mode="pretrain"))
        says.append(f"{name} is a Primus experiment; `primus import-exp {name}` converts it to a recipe")
    elif path.is_file() or name in names():
        # The recipe's default backend determines the names of its keys.
        known = resolve(name, (), Choices(backend=_BACKENDS.get(backend or ""), gpu="mi300x"))
        done = translate(known.backend, given)
        request = Request(recipe=name, choices=Choices(backend=known.backend))
    else:
        what = documented(name)
        done = translate(what.backend, given)
        done.settings = {**what.settings, **done.settings}
        done.choices.setdefault("precision", what.precision)
        request = Request(
            recipe=what.recipe, choices=Choices(backend=what.backend, mode="pretrain"), gpu_of_path=what.gpu
        )  # fmt: skip
        if what.says and (precision or done.choices["precision"]) == what.precision:
            says.append(what.says)
    if backend and _BACKENDS[backend] != request.choices.backend:
        raise InputError(f"BACKEND is {backend}, but {name} is for {request.choices.backend}", where=f"EXP={name}")
    if not allow_unmapped:
        refuse(done.unmapped, ALLOW_UNMAPPED)
    ignored = [f"{name} is left out: {why}" for name, why in ignored_variables().items() if environment.get(name)]
    says += [*ignored, *done.left_out, *(f"{one.given.key} is left out: {one.why}" for one in done.unmapped)]
    nodes = _count(environment, "NNODES")
    ranks = _count(environment, "GPUS_PER_NODE")
    # The script's default is one node, whereas the recipe's default may be more.
    choices = replace(request.choices, precision=done.choices.get("precision"), nodes=nodes or 1)
    words = [f"ranks={ranks}"] if ranks else []
    if switched_on(environment, "PRIMUS_DETERMINISTIC"):
        words.append(f"{known_backend(str(choices.backend)).key('deterministic')}=true")
    return replace(
        request,
        choices=choices,
        words=(*words, *done.words()),
        says=tuple(says),
        environment={**_meeting(environment, nodes), **_tuning(environment, request.recipe)},
    )


def kubernetes(words: Sequence[str], environment: Mapping[str, str], *, allow_unmapped: bool = False) -> Request:
    """Translate ``run_k8s_pretrain.sh --url … create …``. Raises HostError for commands that train nothing."""
    rest = list(words)
    command = next((word for word in rest if word in ("create", "get", "delete", "list", "nodes")), None)
    if command is None:
        raise InputError("no command is given", where="run_k8s_pretrain.sh", hint="create, get, delete, list or nodes")
    if command != "create":
        raise HostError(
            f"{command} is for the workload service and trains nothing",
            hint="run it without --dry-run and PRIMUS_DRY_RUN, which show what create would train",
        )
    rest.remove(command)
    given = {one.key: one for one in options(rest)}
    if "exp" not in given:
        raise InputError("--exp is missing", where="run_k8s_pretrain.sh create")
    own = {key: str(one.value) for key, one in given.items() if key in _CLIENT_OPTIONS}
    made = {**environment, "EXP": own["exp"], "NNODES": own.get("replica", "1"), "GPUS_PER_NODE": own.get("gpu", "8")}
    if "backend" in own:
        made["BACKEND"] = own["backend"]
    more = [f"--{key}={one.value}" for key, one in given.items() if key not in (*_CLIENT_OPTIONS, "url")]
    request = pretrain(more, made, allow_unmapped=allow_unmapped)
    data = (f"assets.corpus={own['data_path']}",) if "data_path" in own else ()
    says = request.says
    if "hf_token" in own:
        says = (*says, "every user of the machine can see a token on a command line: export HF_TOKEN instead")
    return replace(request, words=(*request.words, *data), says=says)


def for_proxy(request: Request, kept: Sequence[str]) -> Request:
    """Return the request for the proxy. It keeps its own sizes, so only settings in ``kept`` remain."""
    stay = tuple(word for word in request.words if word.partition("=")[0] in kept)
    gone = [word for word in request.words if word not in stay]
    says = (*request.says, f"the proxy keeps its own sizes: {' '.join(gone)} left out") if gone else request.says
    return replace(request, choices=replace(request.choices, proxy=True), words=stay, says=says)


def _count(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{name} must be a whole number of at least 1, not {text!r}", where=f"{name}={text}")
    return int(text)


def _meeting(environment: Mapping[str, str], nodes: int | None) -> dict[str, str]:
    """Return the rendezvous port of several nodes. The script's default was 1234."""
    return {"MASTER_PORT": environment.get("MASTER_PORT", "1234")} if nodes and nodes > 1 else {}


def _tuning(environment: Mapping[str, str], recipe: str) -> dict[str, str]:
    """Return the ranks' variables for ``PRIMUS_HIPBLASLT_TUNING_STAGE``."""
    stage = environment.get("PRIMUS_HIPBLASLT_TUNING_STAGE") or "0"
    folder = Path("output/tune_hipblaslt").absolute() / recipe
    if stage == "0":
        return {}
    if stage == "1":
        shapes = folder / "gemm_shape" / f"dump_hipblaslt_gemm_shape_{environment.get('NODE_RANK', '0')}.txt"
        return {"HIPBLASLT_LOG_MASK": "32", "HIPBLASLT_LOG_FILE": str(shapes)}
    if stage == "3":
        tuned = folder / "gemm_tune" / "tune_hipblas_gemm_results.txt"
        return {"HIPBLASLT_TUNING_OVERRIDE_FILE": str(tuned)}
    if stage == "2":
        return {}
    raise InputError(
        f"there is no tuning stage {stage!r}", where=f"PRIMUS_HIPBLASLT_TUNING_STAGE={stage}",
        hint="0 none, 1 dump the shapes, 2 tune them, 3 train with the result",
    )  # fmt: skip
