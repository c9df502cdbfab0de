"""What a job's ranks are given: files, command line, environment; and what they must say of themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primus.errors import InputError
from primus.training import identity
from primus.training.job import Job
from primus.turbo.optimizations import chosen

__all__ = ["argv", "checkpoints", "environment", "expected_facts", "files", "job_file"]


def job_file(job: Job) -> str:
    """The text of ``job.json``, which the entry reads and which stays as the record of what was asked."""
    recipe = job.recipe
    content = {
        "name": job.name,
        "output": str(job.output),
        "threads": 1,
        "witness": job.judged,
        "resume_from": str(job.resume_from) if job.resume_from else None,
        "first_step": job.first_step,
        "last_step": job.last_step,
        "recipe": {
            "name": recipe.name, "sha256": recipe.digest,
            "overrides": [*recipe.asked.words(), *recipe.overrides],
        },
        "identity": identity.of(recipe),
        "backend": recipe.backend,
        "mode": recipe.mode,
        "precision": recipe.precision,
        "gpu": recipe.gpu,
        "world_size": recipe.world_size,
        "turbo": list(chosen(recipe)),
        "accumulation": recipe.accumulation,
        "data_parallel": recipe.data_parallel,
        "model": asdict(recipe.architecture),
        "assets": {
            name: str(recipe.asset(name) or value) for name, value in recipe.section("assets").items()
        },
        "column": recipe.find("data.column", "") or None,
        "config": recipe.section(recipe.backend),
        "settings": {key: {"value": s.value, "origin": s.origin} for key, s in recipe.settings.items()},
    }  # fmt: skip
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def files(job: Job) -> dict[str, str]:
    """Name → text of every file that the ranks read from the job's folder. InputError: its backend cannot train it."""
    made = {"job.json": job_file(job)}
    if job.recipe.backend == "torchtitan":
        from primus.training.torchtitan import render

        made["torchtitan.toml"] = render.toml(job)
    if job.recipe.backend == "megatron":
        from primus.training.megatron.render import check

        check(job.recipe)
    return made


def argv(job: Job, python: str, given: Mapping[str, str]) -> list[str]:
    """The command that starts all ranks of ``job`` on this machine, in the environment ``given``."""
    backend = job.recipe.backend
    words = ["--job.config_file", str(job.output / "torchtitan.toml")] if backend == "torchtitan" else [str(job.output)]
    return [
        python, "-m", "torch.distributed.run",
        "--nproc-per-node", str(job.recipe.get("ranks", int)),
        *_meeting(job, given),
        "--log-dir", str(job.output / "cache" / "torchrun"),
        "-m", f"primus.training.{backend}.entry", *words,
    ]  # fmt: skip


def _meeting(job: Job, given: Mapping[str, str]) -> list[str]:
    """Where the ranks meet. InputError when several nodes are asked for and nothing says which one this is."""
    nodes = job.recipe.get("nodes", int)
    if nodes == 1:
        # A file of the job: jobs side by side never meet, and torchrun's own store of the other kind needs a torch
        # with libuv. The address is named so that no host name is looked up.
        return [
            "--rdzv-backend", "c10d", "--rdzv-endpoint", str(job.output / "cache" / "rendezvous"),
            "--rdzv-conf", "store_type=file", "--local-addr", "127.0.0.1",
        ]  # fmt: skip
    rank, address = given.get("NODE_RANK") or given.get("SLURM_NODEID"), given.get("MASTER_ADDR")
    if rank is None or not address:
        raise InputError(
            f"{nodes} nodes: {'NODE_RANK' if rank is None else 'MASTER_ADDR'} is not set on this machine",
            where=job.recipe.settings["nodes"].origin,
            hint="on each node: MASTER_ADDR=HOST-OF-NODE-0 NODE_RANK=0… primus train … --nodes N",
        )
    return [
        "--nnodes", str(nodes), "--node-rank", rank,
        "--master-addr", address, "--master-port", given.get("MASTER_PORT", "29500"),
    ]  # fmt: skip


def environment(job: Job, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks, made from ``given``: no network, caches in the job's own folder.

    The root file system may be read-only, the user id unknown to the system and HOME not writable.
    """
    cache = job.output / "cache"
    made = dict(given)
    if not any(str(setting.value).startswith("hf:") for setting in job.recipe.settings.values()):
        made |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(cache / "huggingface")}
    made |= {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "XDG_CACHE_HOME": str(cache),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
        "NO_COLOR": "1",
        # Rank 0 opens the ranks' store, not torchrun, which would ask for libuv without a choice.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    # torchrun's own default, which it only announces loudly when it is not set.
    made.setdefault("OMP_NUM_THREADS", "1")
    made.setdefault("USER", "primus")
    return made


def expected_facts(job: Job) -> dict[str, Any]:
    """What the run must say of itself when it ran as the recipe asks; keys as in ``facts.json``."""
    recipe = job.recipe
    asked: dict[str, Any] = {
        "world_size": recipe.world_size,
        "local_batch_size": recipe.local_batch,
        "accumulation_steps": recipe.accumulation,
        "seq_len": recipe.seq_len,
    }
    if recipe.architecture.vocab_size:
        asked["vocab_size"] = recipe.architecture.vocab_size
    if recipe.mode == "lora":
        asked |= {"mode": "lora", "trained_outside_adapters": 0}
    if recipe.seed >= 0:
        asked["seed"] = recipe.seed
    if recipe.deterministic:
        asked["deterministic"] = True
    if turbo := chosen(recipe):
        asked["turbo"] = sorted(turbo)
    return asked


def checkpoints(output: Path, folder: str = "checkpoint") -> list[Path]:
    """The checkpoint folders a run left, oldest step first."""
    found = [path for path in (output / folder).glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))
