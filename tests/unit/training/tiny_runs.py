"""Runs of a few steps with the shipped code of the launcher, of a rank and of the reference.

They take place in this process, because starting others would take most of the time.
"""

import gc
import importlib
import io
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config
from torch.optim.optimizer import _global_optimizer_pre_hooks

from primus_images import patch
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends import gloo
from primus_images.training.backends.torchtitan import render
from primus_images.training.judge.reference import replay
from primus_images.training.run import start
from primus_images.training.run.job import Job
from primus_images.training.run.outcome import Outcome
from primus_images.training.run.processes import Ended
from primus_images.turbo.optimizations import CALLS
from primus_images.turbo.trial import Trial

SHORT = "ranks=1 steps=3 local_batch=2 global_batch=4"
TEXT = f"{SHORT} seq_len=32 assets.corpus=assets/documents.jsonl"
CHATS = f"{SHORT} seq_len=96 assets.corpus=assets/answers.jsonl"
SMALL = (
    "model.hidden_size=48 model.heads=4 model.kv_heads=2 model.head_dim=8 model.ffn_size=48 "
    "model.layers=2"
)
EVALUATED = "eval.fraction=0.1 eval.every=2"
# name → recipe, backend, mode, precision, settings. {NAME} is the folder of that run.
RUNS = {
    "fsdp": (
        "llama3.1-8b fsdp pretrain fp32",
        f"{TEXT} {SMALL} {EVALUATED} checkpoint=1 saving.keep=2 training.tensorboard=true "
        "training.profile_step=2 training.lr_schedule=linear training.decay_steps=6 "
        "training.recompute=full",
    ),
    "fsdp-again": (
        "llama3.1-8b fsdp pretrain fp32",
        f"{TEXT} {SMALL} {EVALUATED} training.lr_schedule=linear training.decay_steps=6",
    ),
    "fsdp-bf16": (
        "llama3.1-8b fsdp pretrain bf16",
        f"{TEXT} {SMALL} training.master_dtype=bfloat16 sharding.reduce_dtype=bfloat16 "
        "training.lr_schedule=cosine",
    ),
    "fsdp-fp8": ("qwen2.5-7b fsdp pretrain fp8", f"{TEXT} {SMALL}"),
    "finetune-full": (
        "llama3.1-8b finetune full fp32",
        f"{CHATS} {SMALL} {EVALUATED} eval.patience=1 finetune.save_weights=true "
        "finetune.packing=true",
    ),
    "finetune-lora": (
        "llama3.1-8b finetune lora fp32",
        f"{CHATS} {SMALL} finetune.lora.dropout=0.1 finetune.export=merged "
        "finetune.weights={finetune-full}/weights",
    ),
    "finetune-adapters": (
        "mixtral-8x7b finetune lora bf16",
        f"{TEXT} finetune.save_weights=true finetune.lora.rank=4",
    ),
    "finetune-gemma3": ("gemma3-4b finetune full fp32", TEXT),
    "finetune-gpt-oss": ("gpt-oss-20b finetune full fp32", TEXT),
    "finetune-llama4": ("llama4-scout finetune full fp32", TEXT),
    "flux": ("flux.1-dev flux pretrain fp32", f"{SHORT} checkpoint=3"),
    "flux-bf16": ("flux.1-dev flux pretrain bf16", SHORT),
    "torchtitan": (
        "llama3.1-8b torchtitan pretrain fp32",
        f"{TEXT} {EVALUATED} checkpoint=2",
    ),
    "torchtitan-moe": ("qwen3-30b-a3b torchtitan pretrain bf16", f"{TEXT} ep=1"),
    "torchtitan-mla": ("deepseek-16b torchtitan pretrain fp32", f"{TEXT} ep=1"),
    "torchtitan-fp8": ("llama3.1-8b torchtitan pretrain fp8", TEXT),
    "megatron": (
        "llama3.1-8b megatron pretrain bf16",
        f"{TEXT} {EVALUATED} checkpoint=2",
    ),
    "megatron-moe": ("qwen3-30b-a3b megatron pretrain fp32", f"{TEXT} ep=1"),
    "megatron-mla": ("deepseek-v3-proxy megatron pretrain fp32", f"{TEXT} ep=1 checkpoint=3"),
}
RESUMED = {"fsdp-again": "fsdp"}
# The optimizations of a run, which a CPU computes by the same code without kernels.
TURBO = {
    "finetune-full": ("packed-attention",),
    "torchtitan": ("real-rope", "linear-cross-entropy"),
    "torchtitan-moe": ("expert-routing",),
    "torchtitan-mla": ("real-rope",),
    "finetune-lora": ("frozen-weights",),
    "torchtitan-fp8": ("fp8-linear", "fp8-feed-forward"),
}
ROOT = Path(mkdtemp())


@cache
def ended(name: str) -> Outcome:
    """Return the outcome of a run, which takes place once for all tests."""
    words, settings = RUNS[name]
    recipe, backend, mode, precision = words.split()
    folders = {other: folder(other) for other in RUNS if f"{{{other}}}" in settings}
    choices = Choices(backend=backend, mode=mode, gpu="cpu", proxy=True, precision=precision)
    overrides = [word.format(**folders) for word in settings.split()]
    resume_from = None
    if name in RESUMED:
        resume_from = folder(RESUMED[name]) / "checkpoint/step-2"
    job = Job(
        name=name,
        recipe=resolve(recipe, overrides, choices),
        output=ROOT / name,
        # The reference does not know the moments of an earlier run.
        judged=resume_from is None,
        resume_from=resume_from,
    )
    return run(job, TURBO.get(name, ()))


def folder(name: str) -> Path:
    """Return the folder of a run."""
    return ended(name).folder


_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}

_packages = cache(metadata.packages_distributions)


def run(job: Job, turbo: tuple[str, ...] = ()) -> Outcome:
    """Run ``job`` on one rank, as ``primus train`` does, with the optimizations ``turbo``.

    A judged one is repeated.
    """
    trial = Trial(names=turbo)
    with (
        mock.patch.object(start, "decide", lambda *_, **__: trial),
        mock.patch.object(start.processes, "run", _run_here),
        mock.patch.object(start.subprocess, "run", _judge_here),
        # Memory is that of this process, which has no ranks as children.
        mock.patch.object(start.resource, "RUSAGE_CHILDREN", start.resource.RUSAGE_SELF),
        mock.patch.object(metadata, "packages_distributions", _packages),
        # A run proves by these what it used.
        mock.patch.dict(CALLS, clear=True),
    ):
        # Ranks collect garbage, of which all that was imported is none.
        gc.freeze()
        return start.start(start.prepare(job), lambda _line: None)


def _run_here(argv: Sequence[str], *, log: Path, environment: Any, watch: Any) -> Ended:
    folder = Path(argv[-1])
    entry = importlib.import_module(argv[-2])
    backend = argv[-2].split(".")[-2]
    output = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(_state())
        # A note of the store is read under the number of its launch.
        variables = {**environment, **_RANK, "PRIMUS_LAUNCH": str(folder)}
        stack.enter_context(mock.patch.dict(os.environ, variables, clear=True))
        leave = stack.enter_context(mock.patch.object(gloo, "leave"))
        stack.enter_context(redirect_stdout(output))
        stack.enter_context(redirect_stderr(output))
        _ENTRIES.get(backend, _own_loop)(folder, entry)
    assert leave.called, "the process did not end as one on gloo has to"
    log.write_text(output.getvalue())
    for line in output.getvalue().splitlines(keepends=True):
        watch.on_line(line)
    return Ended(exit_code=0, seconds=1.0)


@contextmanager
def _state() -> Iterator[None]:
    """Restore what a rank sets in its process."""
    root = logging.getLogger()
    handlers = [*root.handlers]
    level = root.level
    threads = torch.get_num_threads()
    modes = torch._C._len_torch_function_stack()
    engine = sys.modules.get("transformer_engine", _Missing)
    replaced: list[tuple[Any, str, Any]] = []

    def note(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        # Every replacement of a library's function is an attribute that this module sets.
        with mock.patch.object(patch, "setattr", note, create=True):
            yield
    finally:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)
        root.handlers[:] = handlers
        root.setLevel(level)
        while torch._C._len_torch_function_stack() > modes:
            torch.overrides._pop_mode()
        if engine is _Missing:
            sys.modules.pop("transformer_engine", None)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(False)
        _global_optimizer_pre_hooks.clear()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        gc.enable()


class _Missing:
    """No module."""


def import_torchtitan() -> None:
    """Import torchtitan, which chooses its device when it is imported, for the CPU."""
    with mock.patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
        importlib.import_module("torchtitan.tools.utils")


def _torchtitan(folder: Path, entry: Any) -> None:
    import_torchtitan()
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec

    train_spec._extra_train_specs.clear()
    words = [f"--job.config_file={folder / render.FILE}"]
    # The default is the command line at the time of its import.
    with mock.patch.object(ConfigManager.parse_args, "__defaults__", (words,)):
        entry.main(folder)


def _megatron(folder: Path, entry: Any) -> None:
    # The variable that Megatron's patches set is read when PyTorch is imported.
    with torch._dynamo.config.patch(disable=True):
        entry.main(str(folder))
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def _own_loop(folder: Path, entry: Any) -> None:
    entry.process.main(str(folder), entry.main)


_ENTRIES = {"torchtitan": _torchtitan, "megatron": _megatron}


def _judge_here(command: Sequence[str], **_: Any) -> SimpleNamespace:
    with mock.patch.object(sys, "argv", ["replay", command[-1]]):
        runpy.run_path(str(replay.__file__), run_name="__main__")
    return SimpleNamespace(returncode=0)
