"""The input of a job's ranks (files, command line, environment), and the facts expected of them."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from primus_images.errors import InputError, PrimusError
from primus_images.files import json_if_readable
from primus_images.recipes.choose import CPU
from primus_images.recipes.rules import rules_of
from primus_images.system import fabric
from primus_images.system.host import CHECKOUT, IMAGE_FILE, Host, commit_of
from primus_images.training.backends.protocol import backend_of
from primus_images.training.run import identity
from primus_images.training.run.job import Job
from primus_images.training.run.processes import clean
from primus_images.turbo import optimizations
from primus_images.yamlfile import read_values

# How long a node may wait for the first one to open torchrun's store, because that one may still
# pull the image.
_MEETING_SECONDS = 600
_VARIABLES: Any = read_values(Path(__file__).with_name("environment.yaml")).data


def job_file(job: Job) -> str:
    """Return the text of ``job.json``, which the ranks read and which records the request."""
    recipe = job.recipe
    resume_from = None
    if job.resume_from:
        resume_from = str(job.resume_from)
    evaluation = {}
    if recipe.section("eval"):
        evaluation = {
            "every": steps_between_evaluations(job),
            "patience": recipe.find("eval.patience", 0),
            "fraction": recipe.find("eval.fraction", 0.0),
            "corpus": "",
            "split": recipe.find("eval.split", ""),
        }
        if "eval.corpus" in recipe.settings:
            evaluation["corpus"] = str(
                recipe.asset("eval.corpus") or recipe.get("eval.corpus", str)
            )
    assets = {}
    for name, value in recipe.section("assets").items():
        assets[name] = str(recipe.asset(name) or value)
    settings = {}
    for key, setting in recipe.settings.items():
        settings[key] = {"value": setting.value, "origin": setting.origin}
    image = json_if_readable(IMAGE_FILE)
    content = {
        "name": job.name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "first_step": job.first_step,
        "last_step": job.last_step,
        "examined": job.examined,
        "judge_every": job.judge_every,
        "output": str(job.output),
        "witness": job.judged,
        "resume_from": resume_from,
        # Hooks on a compiled block would compile it again; with context parallelism, ranks hold
        # parts of a sequence.
        "blocks": rules_of(recipe).blocks_judged(recipe),
        "recipe": {
            "name": recipe.name,
            "sha256": recipe.digest,
            "overrides": [*recipe.choices.words(), *recipe.overrides],
        },
        "image": {key: image[key] for key in ("release", "target", "channel") if key in image},
        "commit": commit_of(CHECKOUT),
        "identity": identity.of(recipe),
        "backend": recipe.backend,
        "mode": recipe.mode,
        "precision": recipe.precision,
        "gpu": recipe.gpu,
        "world_size": recipe.world_size,
        "accumulation": recipe.accumulation,
        "data_parallel": recipe.data_parallel,
        "global_batch": recipe.global_batch,
        "turbo": list(job.turbo),
        "model": asdict(recipe.architecture),
        "assets": assets,
        "data": recipe.section("data"),
        "evaluation": evaluation,
        "saving": {
            "seconds": 60 * recipe.checkpoint_minutes,
            "keep": recipe.find("saving.keep", 0),
        },
        "config": recipe.section(recipe.backend),
        "settings": settings,
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def steps_between_evaluations(job: Job) -> int:
    """Return after how many steps each a job evaluates.

    By default, it is a tenth of the run. A resumed run keeps to the points of the run before it.
    """
    usual = max(1, job.recipe.steps // 10)
    if job.resume_from:
        former = json_if_readable(job.resume_from.absolute().parent.parent / "job.json")
        before = former.get("evaluation")
        if isinstance(before, dict) and isinstance(before.get("every"), int):
            usual = max(1, before["every"])
    return job.recipe.find("eval.every", usual)


def files(job: Job) -> dict[str, str]:
    """Return name → text of every file that the ranks read from the job's folder."""
    return {"job.json": job_file(job), **backend_of(job.recipe).files(job)}


def argv(job: Job, python: str, variables: Mapping[str, str]) -> list[str]:
    """Return the command that starts all ranks of ``job`` on this machine.

    ``variables`` are this machine's environment.
    """
    entry = f"primus_images.training.backends.{job.recipe.backend}.entry"
    count = str(job.recipe.get("ranks", int))
    rank = [*job.wrap, python, "-u", "-m", entry, str(job.output)]
    if job.recipe.get("nodes", int) == 1:
        return [python, "-m", "primus_images.training.run.spawn", count, *rank]
    log = folder_of_node(job, variables) / "cache" / "torchrun"
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", count]
    command += _meeting(job, variables)
    # Each rank also writes its own files, because the log of a node mixes the lines of its ranks.
    command += ["--tee", "3", "--log-dir", str(log)]
    if job.wrap:
        return [*command, "--no-python", *rank]
    return [*command, "-m", entry, str(job.output)]


def node_rank(job: Job, variables: Mapping[str, str]) -> int:
    """Return the number of this node: NODE_RANK, or a scheduler's variable.

    Raises InputError if none is set.
    """
    nodes = job.recipe.get("nodes", int)
    if nodes == 1:
        return 0
    for name in ("NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"):
        text = variables.get(name)
        if not text:
            continue
        if text.isascii() and text.isdigit() and int(text) < nodes:
            return int(text)
        raise InputError(
            f"must be a whole number from 0 to {nodes - 1}, not {text!r}", where=f"{name}={text}"
        )
    raise _not_set(job, "NODE_RANK")


def _not_set(job: Job, name: str) -> PrimusError:
    nodes = job.recipe.settings["nodes"]
    return InputError(
        f"{nodes.value} nodes: {name} is not set on this machine",
        where=nodes.origin,
        hint="`primus launch slurm` starts all nodes; by hand, on each of them: "
        "MASTER_ADDR=HOST-OF-NODE-0 NODE_RANK=0… primus train … --nodes N",
    )


def folder_of_node(job: Job, variables: Mapping[str, str]) -> Path:
    """Return the folder for this node's own files, such as log and caches. Node 0 uses the job's
    folder.
    """
    node = node_rank(job, variables)
    if node:
        return job.output / f"node-{node}"
    return job.output


def awaited(job: Job, variables: Mapping[str, str]) -> str:
    """Return whom this node waits for before it starts its ranks; empty if for nobody."""
    folder = folder_of_node(job, variables) / "cache" / "torchrun"
    # torchrun creates the folder before the nodes meet, and one inside it afterwards.
    if not folder.is_dir() or any(folder.iterdir()):
        return ""
    nodes = job.recipe.get("nodes", int)
    address, port = _place(job, variables)
    return (
        f"waiting for the other nodes of {nodes} at {address}:{port} "
        f"(the job ends after {_MEETING_SECONDS} s)"
    )


def _place(job: Job, variables: Mapping[str, str]) -> tuple[str, str]:
    address = variables.get("MASTER_ADDR")
    port = variables.get("MASTER_PORT") or "29500"
    if not address:
        raise _not_set(job, "MASTER_ADDR")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InputError(
            f"must be a port from 1 to 65535, not {port!r}", where=f"MASTER_PORT={port}"
        )
    return address, port


def _meeting(job: Job, variables: Mapping[str, str]) -> list[str]:
    """Return torchrun's arguments by which the nodes of a job find each other."""
    first = node_rank(job, variables) == 0
    address, port = _place(job, variables)
    local = variables.get("NODE_ADDR")
    if not local:
        local = address if first else fabric.own_address(address)
    # The id rejects agents of another job, or of an earlier attempt of this one, that find the same
    # port.
    name = variables.get("RDZV_ID") or job.name
    timeouts = f"read_timeout={_MEETING_SECONDS},join_timeout={_MEETING_SECONDS}"
    words = ["--nnodes", str(job.recipe.get("nodes", int)), "--rdzv-backend", "c10d"]
    words += ["--rdzv-id", name, "--rdzv-endpoint", f"{address}:{port}"]
    words += ["--rdzv-conf", f"is_host={str(first).lower()},{timeouts}"]
    if local:
        words += ["--local-addr", local]
    return words


def environment(job: Job, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks, from ``inherited``.

    There is no network, and caches are in the job's folder or beside it.
    """
    cache = folder_of_node(job, inherited) / "cache"
    variables = clean(inherited)
    if job.recipe.get("nodes", int) > 1:
        variables = _of_several_nodes(job, variables)
    else:
        # By default, gloo looks up the host name, which a container may not resolve.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not any(str(setting.value).startswith("hf:") for setting in job.recipe.settings.values()):
        variables |= {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(cache / "huggingface"),
        }
    if not _has_temporary_folder(inherited):
        variables["TMPDIR"] = str(cache)
    compiled = compiled_before(job)
    if compiled is None or not os.access(compiled, os.W_OK):  # it may belong to another user
        compiled = cache
    for name, folder in _VARIABLES["compiled"].items():
        variables[name] = str(compiled / folder)
    variables |= {**_VARIABLES["always"], "XDG_CACHE_HOME": str(cache)}
    if job.recipe.deterministic or job.judge_every:
        # cuBLAS reads it when its handle is created, also for single steps that are deterministic.
        variables.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    tracking = {"MLFLOW_TRACKING_URI": (job.output / "mlflow").as_uri()}
    return {**_VARIABLES["usual"], **tracking, **variables}


def _of_several_nodes(job: Job, variables: dict[str, str]) -> dict[str, str]:
    # Without it, NCCL and gloo may select a bridge of a container engine, which other nodes cannot
    # reach.
    interface = fabric.interface_towards(variables.get("MASTER_ADDR", ""))
    if interface:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            variables.setdefault(name, interface)
    if job.recipe.gpu != CPU:
        variables |= fabric.variables(Host(environment=variables))
    # The format that torch uses for tracebacks. By default, every line begins with the name of
    # torchrun's role.
    variables.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: ")
    return variables


def _has_temporary_folder(variables: Mapping[str, str]) -> bool:
    """Whether Python's tempfile finds a folder, which is not so if the root is read-only.

    Python itself keeps its answer for the whole process.
    """
    named = [variables.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    places = [*named, "/tmp", "/var/tmp", "/usr/tmp", Path.cwd()]
    return any(place and os.access(place, os.W_OK | os.X_OK) for place in places)


def compiled_before(job: Job) -> Path | None:
    """Return the folder of kernels from earlier runs with the same compilers and GPU.

    None to compile anew.     CPU keys do not cover the instruction set, and a proof must not depend
    on files of earlier runs.
    """
    if job.compiled is None or job.judged or job.recipe.gpu == CPU:
        return None
    return job.compiled / f"{_packages()[:16]}-{job.recipe.gpu}"


def tokens_before(job: Job) -> Path | None:
    """Return the folder of tokens from earlier runs with the same packages.

    None to tokenize anew: a proof must not depend on files of earlier runs.
    """
    if job.compiled is None or job.judged:
        return None
    return job.compiled / _packages()[:16]


@cache
def _packages() -> str:
    # PyTorch's key of a graph covers neither the gradients nor the code of the operators in it.
    packages = sorted((package.name, package.version) for package in metadata.distributions())
    digest = hashlib.sha256(repr(packages).encode())
    for source in sorted(Path(optimizations.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def expected_facts(job: Job) -> dict[str, Any]:
    """Return the facts, as in ``facts.json``, of a run that ran as the recipe requests."""
    recipe = job.recipe
    expected: dict[str, Any] = {
        "world_size": recipe.world_size,
        "local_batch_size": recipe.local_batch,
        "accumulation_steps": recipe.accumulation,
        "seq_len": recipe.seq_len,
    }
    if recipe.architecture.vocab_size:
        expected["vocab_size"] = recipe.architecture.vocab_size
    if recipe.mode == "lora":
        expected |= {"mode": "lora", "trained_outside_adapters": 0}
    if recipe.seed >= 0:
        expected["seed"] = recipe.seed
    if recipe.deterministic:
        expected["deterministic"] = True
    if job.turbo:
        expected["turbo"] = sorted(job.turbo)
    return expected
