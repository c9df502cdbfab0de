"""A job as torchtitan 0.2.2 wants it: TOML file, the entry's job file, torchrun's words, environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primus.recipes.model import Value
from primus.recipes.resolve import data_parallel
from primus.training.job import Job

__all__ = ["argv", "checkpoints", "environment", "expected_facts", "job_file", "toml"]

ENTRY = "primus.training.torchtitan.entry"


def toml(job: Job) -> str:
    """The text of ``torchtitan.toml``."""
    tree: dict[str, Any] = {}
    settings: dict[str, Value] = {**job.recipe.section("torchtitan"), **_owned(job)}
    for key, value in settings.items():
        if value is None:
            continue
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return "".join(_tables(tree, ()))


def _owned(job: Job) -> dict[str, Value]:
    recipe = job.recipe
    owned: dict[str, Value] = {
        "job.dump_folder": str(job.output),
        "job.description": recipe.name,
        "model.name": recipe.get("model.name", str),
        "model.flavor": "recipe",
        "model.hf_assets_path": str(recipe.asset("tokenizer")),
        "training.dataset": "recipe_corpus",
        "training.dataset_path": str(recipe.asset("corpus")),
        "metrics.log_freq": 1,
        "metrics.disable_color_printing": True,
    }
    if job.resume_from is not None:
        owned |= {
            "checkpoint.enable": True,
            "checkpoint.load_only": True,
            "checkpoint.initial_load_path": str(job.resume_from),
            "checkpoint.initial_load_model_only": False,
        }
    return owned


def _tables(tree: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    values = [f"{key} = {_toml_value(value)}\n" for key, value in tree.items() if not isinstance(value, dict)]
    lines = [f"[{'.'.join(path)}]\n", *values, "\n"] if values and path else values
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += _tables(value, (*path, key))
    return lines


def _toml_value(value: Value) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # JSON's spelling of text, numbers and booleans is valid TOML.
    return json.dumps(value, ensure_ascii=False)


def job_file(job: Job) -> str:
    """The text of ``job.json``, which the entry reads and which stays as the record of what was asked."""
    recipe = job.recipe
    content = {
        "name": job.name,
        "output": str(job.output),
        "threads": 1,
        "resume_from": str(job.resume_from) if job.resume_from else None,
        "first_step": job.first_step,
        "last_step": job.last_step,
        "recipe": {"name": recipe.name, "sha256": recipe.digest, "overrides": list(recipe.overrides)},
        "model": {"name": recipe.get("model.name", str), "args": recipe.section("model.args")},
        "settings": {key: {"value": s.value, "origin": s.origin} for key, s in recipe.settings.items()},
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def argv(job: Job, python: str) -> list[str]:
    """The command that starts all ranks of ``job`` on this machine."""
    return [
        python, "-m", "torch.distributed.run",
        "--nproc-per-node", str(job.recipe.get("ranks", int)),
        # The ranks meet over a file of the job: jobs side by side never do, and torchrun's own store of the other kind
        # needs a torch with libuv. The address is named so that no host name is looked up.
        "--rdzv-backend", "c10d", "--rdzv-endpoint", str(job.output / "cache" / "rendezvous"),
        "--rdzv-conf", "store_type=file", "--local-addr", "127.0.0.1",
        "--log-dir", str(job.output / "cache" / "torchrun"),
        "-m", ENTRY, "--job.config_file", str(job.output / "torchtitan.toml"),
    ]  # fmt: skip


def environment(job: Job, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks, made from ``given``: no network, caches in the job's own folder.

    The root file system may be read-only, the user id unknown to the system and HOME not writable.
    """
    cache = job.output / "cache"
    made = dict(given)
    made |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(cache / "huggingface"),
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
    local = recipe.get("torchtitan.training.local_batch_size", int)
    batch = recipe.find("torchtitan.training.global_batch_size", -1)
    together = local * data_parallel(recipe)
    asked: dict[str, Any] = {
        "world_size": recipe.get("ranks", int),
        "seq_len": recipe.get("torchtitan.training.seq_len", int),
        "local_batch_size": local,
        "accumulation_steps": batch // together if batch > 0 else 1,
        "vocab_size": recipe.get("model.args.vocab_size", int),
    }
    if "torchtitan.debug.seed" in recipe.settings:
        asked["seed"] = recipe.get("torchtitan.debug.seed", int)
    if recipe.find("torchtitan.debug.deterministic", False):
        asked["deterministic"] = True
    return asked


def checkpoints(output: Path, folder: str = "checkpoint") -> list[Path]:
    """The checkpoint folders a run left, oldest step first."""
    found = [path for path in (output / folder).glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))
