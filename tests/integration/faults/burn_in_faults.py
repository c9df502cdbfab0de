"""Wrong GPUs for ``primus preflight --burn-in``: what PyTorch computes, keeps or sends on one rank
is changed.
"""

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

Change = Callable[[Tensor], None]


def bit(number: int, place: int = 77) -> Change:
    """Flip one bit of one element."""

    def change(values: Tensor) -> None:
        # The result of an attention can be transposed.
        bits = values.as_strided((values.numel(),), (1,))
        bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])[
            place
        ] ^= 1 << number

    return change


def tile(values: Tensor) -> None:
    """Zero and raise the elements of 16 rows and columns."""
    values[..., :16, :16] = values[..., :16, :16] * 0 + 3.5


def stuck_bit(values: Tensor) -> None:
    values.view(-1)[5] |= 1 << 40


def lost(values: Tensor) -> None:
    values.view(-1)[:64] = 0


def nan(values: Tensor) -> None:
    values.view(-1)[-1] = float("nan")


def hang(_: Tensor) -> None:
    time.sleep(3600)


def crash(_: Tensor) -> None:
    raise RuntimeError("HIP error: an illegal memory access was encountered")


class Wrong(NamedTuple):
    """``change`` is applied on ``rank`` to the results of ``call``: all, or the last of each
    ``every`` calls.

    ``named`` is in the sentence, with the numbers of the ``gpus`` that may be named.
    """

    call: str
    rank: int
    change: Change
    named: str
    every: int = 1
    gpus: str = ""


GPUS = {
    "element": Wrong("mm", 1, bit(3), "gemm bf16"),
    "tile": Wrong("mm", 0, tile, "gemm bf16"),
    "sign": Wrong("mm", 2, bit(15, 4000), "gemm bf16"),
    "not-a-number": Wrong("mm", 1, nan, "gemm bf16"),
    "sometimes": Wrong("mm", 2, bit(5), "gemm", every=50),
    "seldom-a-tile": Wrong("mm", 1, tile, "gemm", every=41),
    "repeats": Wrong("mm", 0, bit(0), "repeated gemm", every=9),
    "fp8-element": Wrong("_scaled_mm", 1, bit(4), "gemm fp8"),
    "fp8-tile": Wrong("_scaled_mm", 2, tile, "gemm fp8", every=7),
    "attention": Wrong("scaled_dot_product_attention", 0, bit(0), "repeated attention", every=3),
    "attention-tile": Wrong("scaled_dot_product_attention", 2, tile, "repeated attention", every=2),
    "flipped-memory": Wrong("copy_", 1, bit(63), "memory", every=4),
    "stuck-memory": Wrong("copy_", 0, stuck_bit, "memory"),
    "lost-write": Wrong("copy_", 2, lost, "memory", every=5),
    "flipped-message": Wrong(
        "batch_isend_irecv", 1, bit(11), "exchange with GPU", gpus="0123", every=3
    ),
    "stale-message": Wrong(
        "batch_isend_irecv", 2, lost, "GPU 2 of .* everything that is wrong", gpus="0123"
    ),
    "swapped-message": Wrong("swap", 0, hang, "GPU 0 of .* everything that is wrong", gpus="0123"),
    "wrong-sum": Wrong("all_reduce", 1, bit(22), "all-reduce"),
    # The sums of all, and of all but one, are wrong for everyone with this share; those of two are
    # not.
    "wrong-share": Wrong(
        "all_reduce share", 1, lost, "GPU 1 of .* everything that is wrong", gpus="0123"
    ),
    "stuck-rank": Wrong("mm", 2, hang, "does not end", every=4),
    "crash": Wrong(
        "mm", 1, crash, "fails: RuntimeError: HIP error: an illegal memory access", every=5
    ),
}


def plant(name: str) -> None:
    """Make the GPU of this rank the wrong one ``name``, if it is the rank of that fault."""
    wrong, calls = GPUS[name], 0
    if os.environ["RANK"] != str(wrong.rank):
        return

    def spoiled(values: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls % wrong.every == 0:
            wrong.change(values)
        return values

    def replace(owner: Any, run: Callable[..., Any]) -> None:
        call = wrong.call.split()[0]
        original = getattr(owner, call)
        setattr(owner, call, lambda *words, **named: run(original, *words, **named))

    def on_result(original: Any, *words: Any, **named: Any) -> Tensor:
        return spoiled(original(*words, **named))

    def on_sum(original: Any, values: Tensor, **named: Any) -> None:
        original(values, **named)
        spoiled(values)

    def on_share(original: Any, values: Tensor, **named: Any) -> None:
        original(spoiled(values) if dist.get_world_size(named["group"]) > 2 else values, **named)

    def on_message(original: Any, works: list[Any]) -> Any:
        spoiled(works[0].tensor)
        return original(works)

    def on_memory(original: Any, target: Tensor, source: Tensor) -> Tensor:
        original(target, source)
        return spoiled(target) if target.dtype is torch.int64 else target

    if wrong.call in ("mm", "_scaled_mm"):
        replace(torch, on_result)
    elif wrong.call == "scaled_dot_product_attention":
        replace(functional, on_result)
    elif wrong.call == "copy_":
        replace(Tensor, on_memory)
    elif wrong.call in ("all_reduce", "all_reduce share"):
        replace(dist, on_sum if wrong.call == "all_reduce" else on_share)
    elif wrong.call == "batch_isend_irecv":
        replace(dist, on_message)
    else:
        # What was sent to one rank a moment ago is sent to the next.
        sends, operation = [], dist.P2POp

        def swapped(call: Any, values: Tensor, *words: Any) -> Any:
            if call is dist.isend:
                sends.append(values)
                values = sends[max(0, len(sends) - 2)]
            return operation(call, values, *words)

        dist.P2POp = swapped
