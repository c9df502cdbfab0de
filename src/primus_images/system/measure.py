"""Benchmarks and burn-in of one rank's GPU. Needs PyTorch only.

The benchmarks are GEMMs, copies in the GPU's memory, all-reduce and all-to-all. The burn-in repeats
what has a known result, and counts the elements that differ from it.

:mod:`primus_images.system.nodes` starts it through torchrun with one rank per GPU and the folder
for ``rank-N.json``. All GPUs work at the same time, as in a training job. Without a GPU, it runs
the same steps on a CPU with small sizes.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from primus_images.training.backends import gloo

_SECONDS = 1.0
# An odd number: its multiples differ in all bits of 64, and none repeats.
_STRIDE = 0x1E3779B97F4A7C15


class _Bench:
    """The device of this rank, and the timing of calls on it."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cpu")
        if self.on_gpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)

    def seconds(self, call: Callable[[], object], *, together: bool = False) -> float:
        """Return the median seconds of a call.

        ``together``: all ranks make the same number of calls.
        """
        timer = Timer("call()", globals={"call": call})  # it warms up, and waits for the device
        once = torch.tensor([max(timer.timeit(1).mean, 1e-6)], device=self.device)
        if together:
            dist.all_reduce(once, op=dist.ReduceOp.MAX)
        calls = max(5, min(500, int(_SECONDS / 5 / once.item())))
        return statistics.median(float(timer.timeit(calls).mean) for _ in range(5))


def _gemm_tflops(bench: _Bench, size: int, fp8: str = "") -> float:
    a = torch.randn(size, size, device=bench.device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    product = partial(torch.mm, a, b, out=torch.empty_like(a))
    if fp8:
        kind = getattr(torch, f"float8_{fp8}")
        one = torch.ones((), device=bench.device)
        product = partial(_scaled, a.to(kind), b.to(kind), one, use_fast_accum=True)
    operations = 2.0 * size**3
    return operations / bench.seconds(product) / 1e12


def _scaled(a: Tensor, b: Tensor, scale: Tensor, **options: bool) -> Tensor:
    return torch._scaled_mm(
        a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, **options
    )


def _bus_gb_s(bench: _Bench, data: Tensor, call: Callable[[], object]) -> float:
    sent = float(data.nbytes) * (bench.world - 1) / bench.world
    return sent / bench.seconds(call, together=True) / 1e9


# Takes the number of a round, and returns the wrong elements and all that were compared.
_Check: TypeAlias = Callable[[int], tuple[Tensor, int]]


class _Part(NamedTuple):
    """A part of a round: its ``place`` among those of all ranks, and the ranks it concerns."""

    place: int
    what: str
    ranks: tuple[int, ...]
    check: _Check


class BurnIn:
    """What one rank computes, keeps in memory and exchanges in each round, with a known result.

    Before each part begins, ``state`` is written to ``file``, so that it is also known of a rank
    that hangs.
    """

    def __init__(self, bench: _Bench, file: Path, fp8: str = "") -> None:
        """Prepare this rank. All ranks of the default process group at once."""
        self.rank = bench.rank
        self.world = bench.world
        self.device = bench.device
        self._file = file
        # The period is prime, so each place in a tile of the matrix units meets all values.
        self._size = 256
        self._period = 61
        self._products = 2
        self._message = 1 << 10
        chunk = 1 << 14
        free = 1 << 19
        side = 64
        if bench.on_gpu:
            self._size = 8192
            self._period = 1021
            self._products = 200
            self._message = 1 << 23
            chunk = 1 << 25
            free = torch.cuda.mem_get_info()[0]
            side = 4096
        # The rest is for the other parts, and for NCCL's buffers of all pairs.
        count = free * 3 // 4 // (8 * chunk)
        self._chunks = [
            torch.empty(chunk, dtype=torch.int64, device=bench.device) for _ in range(count)
        ]
        self._parts = [*self._parts_alone(side, fp8), *self._parts_together()]
        self._wrong: dict[str, dict[str, Any]] = {}
        self.state: dict[str, Any] = {"device": device_name(bench.device)}
        self.note(round=0, place=-1, what="the start", ranks=(self.rank,))

    def _parts_alone(self, side: int, fp8: str) -> Iterator[_Part]:
        alone = (self.rank,)
        generator = torch.Generator().manual_seed(1)
        values = [
            torch.randn(side, side, generator=generator).to(self.device, torch.bfloat16)
            for _ in range(3)
        ]
        heads = [value.view(-1, 16, side // 4, side // 16) for value in values]
        gemm = self._repeated(lambda: torch.mm(values[0], values[1].t()))
        attention = self._repeated(lambda: scaled_dot_product_attention(*heads))
        yield _Part(0, "gemm bf16", alone, partial(self._exact, torch.bfloat16))
        if fp8:
            kind = getattr(torch, f"float8_{fp8}")
            yield _Part(1, "gemm fp8", alone, partial(self._exact, kind))
        yield _Part(2, "repeated gemm", alone, gemm)
        yield _Part(3, "repeated attention", alone, attention)
        yield _Part(4, "memory", alone, self._memory)

    def _parts_together(self) -> Iterator[_Part]:
        # A sum of all is wrong for all. Sums of all but one tell whose part in it is.
        sizes = sorted({2, self.world - 1, self.world} - {0, 1})
        if self.world == 1:
            sizes = []
        place = 5
        for size in sizes:
            for ranks in combinations(range(self.world), size):
                group = dist.new_group([*ranks])
                if self.rank in ranks:
                    if size == 2:
                        peer = sum(ranks) - self.rank
                        exchange = partial(self._exchanged, peer, group)
                        yield _Part(place, "exchange", ranks, exchange)
                    add = partial(self._summed, ranks, group)
                    yield _Part(place, "all-reduce", ranks, add)
                place += 1

    def run(self, number: int) -> None:
        """Run the round ``number``, from 1, and add what is wrong to the state."""
        for part in self._parts:
            self.note(round=number, place=part.place, what=part.what, ranks=part.ranks)
            wrong, total = part.check(number)
            count = int(wrong)
            if not count:
                continue
            new = {"what": part.what, "ranks": part.ranks, "elements": 0, "of": 0, "rounds": 0}
            row = self._wrong.setdefault(f"{part.what} {part.ranks}", new | {"first": number})
            row["elements"] += count
            row["of"] += total
            row["rounds"] += 1

    def note(self, **changes: Any) -> None:
        """Change the state, and write it."""
        self.state |= {**changes, "wrong": [*self._wrong.values()]}
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.state), encoding="utf-8")
        part.replace(self._file)

    def _exact(self, kind: torch.dtype, number: int) -> tuple[Tensor, int]:
        """Multiply two matrices of integers, tiled with signs that alternate: sums become large,
        and end small.
        """
        generator = torch.Generator().manual_seed(number)
        tile = (self._period, self._period)
        left, right = (torch.randint(-3, 4, tile, generator=generator) for _ in range(2))
        index = torch.arange(self._size) % self._period
        sign = 1 - torch.arange(self._size) // self._period % 2 * 2
        repeats = torch.zeros(self._period, dtype=torch.int64).index_add_(0, index, sign)
        # The sums are at most 216: 9 times the repeats that no other cancels. FP8 and bfloat16
        # represent all exactly.
        counted = repeats.nonzero().flatten()
        sums = (left[:, counted] * repeats[counted]) @ right[:, counted].t()
        index = index.to(self.device)
        sign = sign.to(self.device, torch.bfloat16)

        def whole(values: Tensor) -> Tensor:
            return values.to(self.device, torch.bfloat16)[index][:, index]

        a = (whole(left) * sign).to(kind)
        b = whole(right).to(kind)
        expected = whole(sums)
        scale = torch.ones((), device=self.device)
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for _ in range(self._products):
            if kind is torch.bfloat16:
                product = torch.mm(a, b.t())
            else:
                product = _scaled(a, b, scale)
            wrong += (product != expected).sum()
        return wrong, self._products * expected.numel()

    def _repeated(self, compute: Callable[[], Tensor]) -> _Check:
        first: Tensor | None = None

        def check(_: int) -> tuple[Tensor, int]:
            nonlocal first
            bits = compute().view(torch.int16)  # as bits, NaN is equal to itself
            if first is None:
                first = bits
            return (bits != first).sum(), bits.numel()

        return check

    def _pattern(self, start: int, count: int, key: int) -> Tensor:
        return torch.arange(start, start + count, device=self.device) * _STRIDE + key

    def _memory(self, number: int) -> tuple[Tensor, int]:
        """Read what the last round wrote, and write the opposite of each bit, or in every second
        round others.
        """
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for place, chunk in enumerate(self._chunks):
            start = place * len(chunk)
            if number > 1:
                wrong += (chunk != self._content(start, len(chunk), number - 1)).sum()
            chunk.copy_(self._content(start, len(chunk), number))
        return wrong, sum(map(len, self._chunks))

    def _content(self, start: int, count: int, number: int) -> Tensor:
        return self._pattern(start, count, number // 2) ^ -(number % 2)

    def _exchanged(self, peer: int, group: Any, number: int) -> tuple[Tensor, int]:
        received = torch.zeros(self._message, dtype=torch.int64, device=self.device)
        operations = [
            dist.P2POp(dist.isend, self._sent(number, self.rank, peer), peer, group),
            dist.P2POp(dist.irecv, received, peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return (received != self._sent(number, peer, self.rank)).sum(), self._message

    def _sent(self, number: int, source: int, target: int) -> Tensor:
        key = (number * self.world + source) * self.world + target
        return self._pattern(0, self._message, key)

    def _summed(self, ranks: Iterable[int], group: Any, number: int) -> tuple[Tensor, int]:
        index = torch.arange(self._message, device=self.device)
        # Whole numbers below 128, whose sums are exact in every order.
        shares = {rank: ((index + 7 * rank + number) % 128).float() for rank in ranks}
        total = shares[self.rank].clone()
        dist.all_reduce(total, group=group)
        expected = sum(shares.values())
        wrong = (total != expected).sum()
        return wrong, self._message


def device_name(device: torch.device) -> str:
    """Return the product, PCI address and UUID of a GPU, as far as PyTorch tells them."""
    if device.type == "cpu":
        return "CPU"
    gpu: Any = torch.cuda.get_device_properties(device)
    words = [gpu.name]
    # Older versions of PyTorch lack these.
    if hasattr(gpu, "pci_bus_id"):
        words.append(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    if hasattr(gpu, "uuid"):
        words.append(str(gpu.uuid))
    return ", ".join(words)


def _burn_in(bench: _Bench, folder: Path, fp8: str, seconds: float) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    burn_in = BurnIn(bench, folder / f"rank-{bench.rank}.json", fp8)
    # Rank 0 decides how long it lasts, by a file: the GPUs' own messages are under test.
    store = dist.FileStore(str(folder / "store"), bench.world)
    end = time.monotonic() + seconds
    number = 0
    try:
        while True:
            number += 1
            if bench.rank == 0:
                # Each bit of the memory is read as 0 and as 1 by the fourth round.
                store.set(str(number), "go" if number <= 4 or time.monotonic() < end else "end")
            if store.get(str(number)) == b"end":
                break
            burn_in.run(number)
    except Exception as error:
        burn_in.note(
            error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            failed_at=time.time(),
        )
        raise


def main(folder: Path, fp8: str, seconds: float = 0) -> None:
    """Write to ``folder`` this rank's figures, or what the burn-in counts in ``seconds``. ``fp8``:
    the GPU's format.
    """
    bench = _Bench()
    dist.init_process_group("nccl" if bench.on_gpu else "gloo")
    if seconds:
        _burn_in(bench, folder, fp8, seconds)
    else:
        _benchmarks(bench, folder, fp8)
    dist.destroy_process_group()
    if not bench.on_gpu:
        gloo.leave()


def _benchmarks(bench: _Bench, folder: Path, fp8: str) -> None:
    figures: dict[str, float | str] = {"device": "cpu"}
    size = 256
    copied = 1 << 22
    if bench.on_gpu:
        figures["device"] = torch.cuda.get_device_name()
        size = 8192
        copied = 1 << 30
    figures["gemm bf16"] = _gemm_tflops(bench, size)
    if fp8 and bench.on_gpu:
        figures["gemm fp8"] = _gemm_tflops(bench, size, fp8)
    figures["memory"] = _copy_tb_s(bench, copied)
    if bench.world > 1:
        figures |= _collectives(bench)
    (folder / f"rank-{bench.rank}.json").write_text(json.dumps(figures), encoding="utf-8")


def _copy_tb_s(bench: _Bench, count: int) -> float:
    source = torch.ones(count, device=bench.device)
    target = torch.empty_like(source)
    return 2.0 * float(source.nbytes) / bench.seconds(partial(target.copy_, source)) / 1e12


def _collectives(bench: _Bench) -> dict[str, float]:
    ranks = torch.full((1 << 16,), float(bench.rank + 1), device=bench.device)
    dist.all_reduce(ranks)
    if not bool((ranks == bench.world * (bench.world + 1) / 2).all()):
        raise RuntimeError("an all-reduce gave a wrong sum")
    # The size that AMD's acceptance guide uses; smaller if the GPU's memory is in use.
    message = 1 << 20
    if bench.on_gpu:
        message = min(8 << 30, torch.cuda.mem_get_info()[0] // 4)
    data = torch.zeros(message // 4, device=bench.device)
    part = data[: min(len(data), 1 << 29) // bench.world * bench.world]
    target = torch.empty_like(part)
    return {
        # Bus bandwidth as in NVIDIA's nccl-tests: an all-reduce sends and receives each byte twice.
        "all-reduce": 2 * _bus_gb_s(bench, data, lambda: dist.all_reduce(data)),
        "all-to-all": _bus_gb_s(bench, part, lambda: dist.all_to_all_single(target, part)),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
