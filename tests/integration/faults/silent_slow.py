"""Ranks that are slower than the others: every result is right, and all wait for one."""

from __future__ import annotations

import os
import time
from typing import Any

from silent import ADAMW, TITAN_DATA, TITAN_MODEL, silent, wrap

SLOW = "slow rank"


def _asleep(seconds: float, rank: int = 1, from_call: int = 0) -> Any:
    """Around a function: rank ``rank`` sleeps before each call from number ``from_call`` on."""
    calls = 0

    def around(original: Any, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == str(rank) and calls > from_call:
            time.sleep(seconds)
        return original(*given, **named)

    return around


@silent("pace", "torchtitan", TITAN_MODEL, SLOW)
def one_rank_sleeps_in_every_layer(module: Any) -> None:
    wrap(module.TransformerBlock, "forward", _asleep(0.03))


@silent("pace", "torchtitan", TITAN_DATA, SLOW, words=("steps=10",))
def one_rank_reads_slowly(module: Any) -> None:
    original = module.HuggingFaceTextDataset.__iter__

    def samples(self: Any) -> Any:
        for sample in original(self):
            if os.environ["RANK"] == "0":
                time.sleep(0.03)
            yield sample

    module.HuggingFaceTextDataset.__iter__ = samples


@silent("pace", "fsdp", "primus.training.loop.sharded", SLOW, words=("steps=12",))
def slow_from_the_sixth_step_on(module: Any) -> None:
    wrap(module.Sharded, "step", _asleep(0.15, rank=0, from_call=5))


@silent("pace", "finetune", ADAMW, SLOW, words=("--mode=lora",))
def one_rank_sleeps_in_its_update(module: Any) -> None:
    wrap(module.AdamW, "step", _asleep(0.1))


@silent("pace", "megatron", "primus.training.megatron.session", SLOW, words=("steps=8",))
def one_rank_computes_twice(module: Any) -> None:
    """A core that something else keeps busy."""

    def around(original: Any, *given: Any, **named: Any) -> Any:
        began = time.thread_time()
        result = original(*given, **named)
        spent = time.thread_time() - began
        while os.environ["RANK"] == "1" and time.thread_time() - began < 2 * spent + 0.05:
            pass
        return result

    wrap(module.MegatronSession, "forward_backward", around)


@silent("pace", "flux", "primus.training.flux.latents", SLOW, words=("--recipe=flux.1-dev", "--mode=pretrain"))
def one_rank_draws_slowly(module: Any) -> None:
    wrap(module.Images, "batch", _asleep(0.05))


@silent("pace", "fsdp", "primus.training.loop.data", SLOW)
def one_rank_sleeps_some_milliseconds(module: Any) -> None:
    wrap(module, "text", lambda text, *given: _slow_batches(text(*given)))


def _slow_batches(data: Any) -> Any:
    wrap(data, "batch", _asleep(0.008))
    return data
