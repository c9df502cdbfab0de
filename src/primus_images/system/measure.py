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
        first = max(timer.timeit(1).mean, 1e-6)
        slowest = torch.tensor([first], device=self.device)
        if together:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        fitting = int(_SECONDS / 5 / slowest.item())
        calls = max(5, min(500, fitting))
        means = []
        for _ in range(5):
            means.append(timer.timeit(calls).mean)
        return float(statistics.median(means))


def _gemm_tflops(bench: _Bench, size: int, fp8: str = "") -> float:
    a = torch.randn(size, size, device=bench.device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    out = torch.empty_like(a)
    product = partial(torch.mm, a, b, out=out)
    if fp8:
        kind = getattr(torch, f"float8_{fp8}")
        one = torch.ones((), device=bench.device)
        narrow_a = a.to(kind)
        narrow_b = b.to(kind)
        product = partial(_scaled, narrow_a, narrow_b, one, use_fast_accum=True)
    operations = 2.0 * size**3
    seconds = bench.seconds(product)
    return operations / seconds / 1e12


def _scaled(a: Tensor, b: Tensor, scale: Tensor, **options: bool) -> Tensor:
    return torch._scaled_mm(
        a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, **options
    )


def _bus_gb_s(bench: _Bench, data: Tensor, call: Callable[[], object]) -> float:
    others = bench.world - 1
    sent = float(data.nbytes) * others / bench.world
    seconds = bench.seconds(call, together=True)
    return sent / seconds / 1e9


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
            free, _ = torch.cuda.mem_get_info()
            side = 4096
        # The rest is for the other parts, and for NCCL's buffers of all pairs.
        kept = free * 3 // 4
        self._chunks: list[Tensor] = []
        for _ in range(kept // (8 * chunk)):
            memory = torch.empty(chunk, dtype=torch.int64, device=bench.device)
            self._chunks.append(memory)
        self._parts = list(self._parts_alone(side, fp8))
        self._parts += self._parts_together()
        self._wrong: dict[str, dict[str, Any]] = {}
        self.state: dict[str, Any] = {"device": device_name(bench.device)}
        self.note(round=0, place=-1, what="the start", ranks=(self.rank,))

    def _parts_alone(self, side: int, fp8: str) -> Iterator[_Part]:
        alone = (self.rank,)
        generator = torch.Generator().manual_seed(1)
        matrices = []
        heads = []
        for _ in range(3):
            values = torch.randn(side, side, generator=generator)
            matrix = values.to(self.device, torch.bfloat16)
            matrices.append(matrix)
            heads.append(matrix.view(-1, 16, side // 4, side // 16))
        left, right, _ = matrices
        gemm = self._repeated(lambda: torch.mm(left, right.t()))
        attention = self._repeated(lambda: scaled_dot_product_attention(*heads))
        wide = partial(self._exact, torch.bfloat16)
        yield _Part(0, "gemm bf16", alone, wide)
        if fp8:
            kind = getattr(torch, f"float8_{fp8}")
            narrow = partial(self._exact, kind)
            yield _Part(1, "gemm fp8", alone, narrow)
        yield _Part(2, "repeated gemm", alone, gemm)
        yield _Part(3, "repeated attention", alone, attention)
        yield _Part(4, "memory", alone, self._memory)

    def _parts_together(self) -> Iterator[_Part]:
        # A sum of all is wrong for all. Sums of all but one tell whose part in it is.
        all_but_one = self.world - 1
        sizes = {2, all_but_one, self.world} - {0, 1}
        if self.world == 1:
            sizes = set()
        place = 5
        for size in sorted(sizes):
            for ranks in combinations(range(self.world), size):
                group = dist.new_group(list(ranks))
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
            key = f"{part.what} {part.ranks}"
            new = {
                "what": part.what,
                "ranks": part.ranks,
                "elements": 0,
                "of": 0,
                "rounds": 0,
                "first": number,
            }
            row = self._wrong.setdefault(key, new)
            row["elements"] += count
            row["of"] += total
            row["rounds"] += 1

    def note(self, **changes: Any) -> None:
        """Change the state, and write it."""
        self.state |= changes
        self.state["wrong"] = list(self._wrong.values())
        text = json.dumps(self.state)
        part = self._file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(self._file)

    def _exact(self, kind: torch.dtype, number: int) -> tuple[Tensor, int]:
        """Multiply two matrices of integers, tiled with signs that alternate: sums become large,
        and end small.
        """
        generator = torch.Generator().manual_seed(number)
        tile = (self._period, self._period)
        left = torch.randint(-3, 4, tile, generator=generator)
        right = torch.randint(-3, 4, tile, generator=generator)
        places = torch.arange(self._size)
        index = places % self._period
        odd = places // self._period % 2
        sign = 1 - odd * 2
        repeats = torch.zeros(self._period, dtype=torch.int64)
        repeats.index_add_(0, index, sign)
        # The sums are at most 216: 9 times the repeats that no other cancels. FP8 and bfloat16
        # represent all exactly.
        counted = repeats.nonzero().flatten()
        weighted = left[:, counted] * repeats[counted]
        sums = weighted @ right[:, counted].t()
        index = index.to(self.device)
        sign = sign.to(self.device, torch.bfloat16)

        def whole(values: Tensor) -> Tensor:
            narrow = values.to(self.device, torch.bfloat16)
            return narrow[index][:, index]

        signed = whole(left) * sign
        a = signed.to(kind)
        b = whole(right).to(kind)
        expected = whole(sums)
        scale = torch.ones((), device=self.device)
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for _ in range(self._products):
            if kind is torch.bfloat16:
                product = torch.mm(a, b.t())
            else:
                product = _scaled(a, b, scale)
            differs = product != expected
            wrong += differs.sum()
        total = self._products * expected.numel()
        return wrong, total

    def _repeated(self, compute: Callable[[], Tensor]) -> _Check:
        first: Tensor | None = None

        def check(_: int) -> tuple[Tensor, int]:
            nonlocal first
            bits = compute().view(torch.int16)  # as bits, NaN is equal to itself
            if first is None:
                first = bits
            differs = bits != first
            return differs.sum(), bits.numel()

        return check

    def _pattern(self, start: int, count: int, key: int) -> Tensor:
        places = torch.arange(start, start + count, device=self.device)
        return places * _STRIDE + key

    def _memory(self, number: int) -> tuple[Tensor, int]:
        """Read what the last round wrote, and write the opposite of each bit, or in every second
        round others.
        """
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        total = 0
        for chunk in self._chunks:
            if number > 1:
                written = self._content(total, len(chunk), number - 1)
                differs = chunk != written
                wrong += differs.sum()
            content = self._content(total, len(chunk), number)
            chunk.copy_(content)
            total += len(chunk)
        return wrong, total

    def _content(self, start: int, count: int, number: int) -> Tensor:
        pair, opposite = divmod(number, 2)
        return self._pattern(start, count, pair) ^ -opposite

    def _exchanged(self, peer: int, group: Any, number: int) -> tuple[Tensor, int]:
        sent = self._sent(number, self.rank, peer)
        received = torch.zeros(self._message, dtype=torch.int64, device=self.device)
        operations = [
            dist.P2POp(dist.isend, sent, peer, group),
            dist.P2POp(dist.irecv, received, peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        expected = self._sent(number, peer, self.rank)
        differs = received != expected
        return differs.sum(), self._message

    def _sent(self, number: int, source: int, target: int) -> Tensor:
        key = (number * self.world + source) * self.world + target
        return self._pattern(0, self._message, key)

    def _summed(self, ranks: Iterable[int], group: Any, number: int) -> tuple[Tensor, int]:
        index = torch.arange(self._message, device=self.device)
        total = torch.zeros(self._message, device=self.device)
        expected = torch.zeros(self._message, device=self.device)
        for rank in ranks:
            # Whole numbers below 128, whose sums are exact in every order.
            share = (index + 7 * rank + number) % 128
            expected += share
            if rank == self.rank:
                total += share
        dist.all_reduce(total, group=group)
        differs = total != expected
        return differs.sum(), self._message


def device_name(device: torch.device) -> str:
    """Return the product, PCI address and UUID of a GPU, as far as PyTorch tells them."""
    if device.type == "cpu":
        return "CPU"
    gpu: Any = torch.cuda.get_device_properties(device)
    words = [gpu.name]
    # Older versions of PyTorch lack these.
    if hasattr(gpu, "pci_bus_id"):
        bus = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}"
        words.append(f"{bus}:{gpu.pci_device_id:02x}.0")
    if hasattr(gpu, "uuid"):
        words.append(str(gpu.uuid))
    return ", ".join(words)


def _burn_in(bench: _Bench, folder: Path, fp8: str, seconds: float) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    file = folder / f"rank-{bench.rank}.json"
    burn_in = BurnIn(bench, file, fp8)
    # Rank 0 decides how long it lasts, by a file: the GPUs' own messages are under test.
    shared = str(folder / "store")
    store = dist.FileStore(shared, bench.world)
    end = time.monotonic() + seconds
    number = 0
    try:
        while True:
            number += 1
            key = str(number)
            if bench.rank == 0:
                decision = "end"
                # Each bit of the memory is read as 0 and as 1 by the fourth round.
                if number <= 4 or time.monotonic() < end:
                    decision = "go"
                store.set(key, decision)
            if store.get(key) == b"end":
                break
            burn_in.run(number)
    except Exception as error:
        kind = type(error).__name__
        first_line, _, _ = str(error).partition("\n")
        burn_in.note(error=f"{kind}: {first_line}", failed_at=time.time())
        raise


def main(folder: Path, fp8: str, seconds: float = 0) -> None:
    """Write to ``folder`` this rank's figures, or what the burn-in counts in ``seconds``. ``fp8``:
    the GPU's format.
    """
    bench = _Bench()
    backend = "gloo"
    if bench.on_gpu:
        backend = "nccl"
    dist.init_process_group(backend)
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
    file = folder / f"rank-{bench.rank}.json"
    file.write_text(json.dumps(figures), encoding="utf-8")


def _copy_tb_s(bench: _Bench, count: int) -> float:
    source = torch.ones(count, device=bench.device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    moved = 2.0 * float(source.nbytes)
    return moved / bench.seconds(copy) / 1e12


def _collectives(bench: _Bench) -> dict[str, float]:
    number = float(bench.rank + 1)
    numbers = torch.full((1 << 16,), number, device=bench.device)
    dist.all_reduce(numbers)
    expected = bench.world * (bench.world + 1) / 2
    if not bool((numbers == expected).all()):
        raise RuntimeError("an all-reduce gave a wrong sum")
    # The size that AMD's acceptance guide uses; smaller if the GPU's memory is in use.
    message = 1 << 20
    if bench.on_gpu:
        free, _ = torch.cuda.mem_get_info()
        message = min(8 << 30, free // 4)
    data = torch.zeros(message // 4, device=bench.device)
    most = min(len(data), 1 << 29)
    part = data[: most // bench.world * bench.world]
    target = torch.empty_like(part)
    reduced = _bus_gb_s(bench, data, lambda: dist.all_reduce(data))
    exchanged = _bus_gb_s(bench, part, lambda: dist.all_to_all_single(target, part))
    # Bus bandwidth as in NVIDIA's nccl-tests: an all-reduce sends and receives each byte twice.
    return {"all-reduce": 2 * reduced, "all-to-all": exchanged}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
