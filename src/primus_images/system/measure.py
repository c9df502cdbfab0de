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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

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
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.on_gpu = torch.cuda.is_available()
        if self.on_gpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        else:
            self.device = torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    def seconds(self, call: Callable[[], object], *, together: bool = False) -> float:
        """Return the median seconds of a call. ``together``: all ranks make the same number of
        calls.
        """
        timer = Timer("call()", globals={"call": call})  # it warms up, and waits for the device
        once = torch.tensor([max(timer.timeit(1).mean, 1e-6)], device=self.device)
        if together:
            dist.all_reduce(once, op=dist.ReduceOp.MAX)
        calls = max(5, min(500, int(_SECONDS / 5 / once.item())))
        return statistics.median(float(timer.timeit(calls).mean) for _ in range(5))


def _gemm_tflops(bench: _Bench, size: int, fp8: str = "") -> float:
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    product = partial(torch.mm, a, b, out=torch.empty_like(a))
    if fp8:
        kind = getattr(torch, f"float8_{fp8}")
        product = partial(
            _scaled,
            a.to(kind),
            b.to(kind),
            torch.ones((), device=bench.device),
            use_fast_accum=True,
        )
    return 2.0 * size**3 / bench.seconds(product) / 1e12


def _scaled(a: Tensor, b: Tensor, scale: Tensor, **options: bool) -> Tensor:
    return torch._scaled_mm(
        a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, **options
    )


def _bus_gb_s(bench: _Bench, data: Tensor, call: Callable[[], object]) -> float:
    return (
        float(data.nbytes)
        * (bench.world - 1)
        / bench.world
        / bench.seconds(call, together=True)
        / 1e9
    )


# Takes the number of a round, and returns the wrong elements and all that were compared.
_Check: TypeAlias = Callable[[int], tuple[Tensor, int]]


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
        self._size, self._period, self._products = (
            (8192, 1021, 200) if bench.on_gpu else (256, 61, 2)
        )
        self._message = 1 << (23 if bench.on_gpu else 10)
        chunk, free = (
            (1 << 25, torch.cuda.mem_get_info()[0]) if bench.on_gpu else (1 << 14, 1 << 19)
        )
        # The rest is for the other parts, and for NCCL's buffers of all pairs.
        count = free * 3 // 4 // (8 * chunk)
        self._chunks = [
            torch.empty(chunk, dtype=torch.int64, device=bench.device) for _ in range(count)
        ]
        side = 64
        if bench.on_gpu:
            side = 4096
        generator = torch.Generator().manual_seed(1)
        a, b, c = (
            torch.randn(side, side, generator=generator).to(bench.device, torch.bfloat16)
            for _ in range(3)
        )
        heads = [values.view(-1, 16, side // 4, side // 16) for values in (a, b, c)]
        alone = (self.rank,)
        # Each part has its place among all ranks' parts, and the ranks that it concerns.
        self._parts: list[tuple[int, str, Sequence[int], _Check]] = [
            (0, "gemm bf16", alone, partial(self._exact, torch.bfloat16)),
            *(
                [(1, "gemm fp8", alone, partial(self._exact, getattr(torch, f"float8_{fp8}")))]
                if fp8
                else []
            ),
            (2, "repeated gemm", alone, self._repeated(lambda: torch.mm(a, b.t()))),
            (
                3,
                "repeated attention",
                alone,
                self._repeated(lambda: scaled_dot_product_attention(*heads)),
            ),
            (4, "memory", alone, self._memory),
        ]
        # A sum of all is wrong for all. Sums of all but one tell whose part in it is.
        if self.world > 1:
            sizes = sorted({2, self.world - 1, self.world} - {0, 1})
        else:
            sizes = []
        for place, ranks in enumerate(
            (c for size in sizes for c in combinations(range(self.world), size)), start=5
        ):
            group = dist.new_group([*ranks])
            if self.rank in ranks:
                if len(ranks) == 2:
                    (peer,) = {*ranks} - {self.rank}
                    self._parts.append(
                        (place, "exchange", ranks, partial(self._exchanged, peer, group))
                    )
                self._parts.append(
                    (place, "all-reduce", ranks, partial(self._summed, ranks, group))
                )
        self._wrong: dict[str, dict[str, Any]] = {}
        self.state: dict[str, Any] = {"device": device_name(bench.device)}
        self.note(round=0, place=-1, what="the start", ranks=alone)

    def run(self, number: int) -> None:
        """Run the round ``number``, from 1, and add what is wrong to the state."""
        for place, what, ranks, check in self._parts:
            self.note(round=number, place=place, what=what, ranks=ranks)
            wrong, total = check(number)
            count = int(wrong)
            if count:
                new: dict[str, Any] = {
                    "what": what,
                    "ranks": ranks,
                    "elements": 0,
                    "of": 0,
                    "rounds": 0,
                }
                row = self._wrong.setdefault(f"{what} {ranks}", new | {"first": number})
                row |= {
                    "elements": row["elements"] + count,
                    "of": row["of"] + total,
                    "rounds": row["rounds"] + 1,
                }

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
            values = [
                self._pattern(place * len(chunk), len(chunk), n // 2) ^ -(n % 2)
                for n in (number - 1, number)
            ]
            if number > 1:
                wrong += (chunk != values[0]).sum()
            chunk.copy_(values[1])
        return wrong, sum(map(len, self._chunks))

    def _exchanged(self, peer: int, group: Any, number: int) -> tuple[Tensor, int]:
        def between(source: int, target: int) -> Tensor:
            return self._pattern(
                0, self._message, (number * self.world + source) * self.world + target
            )

        received = torch.zeros(self._message, dtype=torch.int64, device=self.device)
        sent = dist.P2POp(dist.isend, between(self.rank, peer), peer, group)
        for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, peer, group)]):
            work.wait()
        return (received != between(peer, self.rank)).sum(), self._message

    def _summed(self, ranks: Iterable[int], group: Any, number: int) -> tuple[Tensor, int]:
        index = torch.arange(self._message, device=self.device)
        shares = {rank: ((index + 7 * rank + number) % 128).float() for rank in ranks}
        total = shares[self.rank].clone()
        dist.all_reduce(total, group=group)
        return (total != sum(shares.values())).sum(), self._message


def device_name(device: torch.device) -> str:
    """Return the product, PCI address and UUID of a GPU, as far as PyTorch tells them."""
    if device.type == "cpu":
        return "CPU"
    gpu: Any = torch.cuda.get_device_properties(device)
    # Older versions of PyTorch lack these.
    has_pci = hasattr(gpu, "pci_bus_id")
    pci = ""
    if has_pci:
        pci = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    return ", ".join(filter(None, (gpu.name, pci, str(getattr(gpu, "uuid", "")))))


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
    figures: dict[str, float | str] = {}
    size = 256
    if bench.on_gpu:
        size = 8192
    figures["gemm bf16"] = _gemm_tflops(bench, size)
    if fp8 and bench.on_gpu:
        figures["gemm fp8"] = _gemm_tflops(bench, size, fp8)
    source = torch.ones((1 << 30) if bench.on_gpu else (1 << 22), device=bench.device)
    copied = torch.empty_like(source)
    figures["memory"] = 2.0 * source.nbytes / bench.seconds(partial(copied.copy_, source)) / 1e12
    del source, copied
    if bench.world > 1:
        ranks = torch.full((1 << 16,), float(bench.rank + 1), device=bench.device)
        dist.all_reduce(ranks)
        if not bool((ranks == bench.world * (bench.world + 1) / 2).all()):
            raise RuntimeError("an all-reduce gave a wrong sum")
        # The size that AMD's acceptance guide uses; smaller if the GPU's memory is in use.
        if bench.on_gpu:
            message = min(8 << 30, torch.cuda.mem_get_info()[0] // 4)
        else:
            message = 1 << 20
        # Bus bandwidth as in NVIDIA's nccl-tests: an all-reduce sends and receives each byte twice.
        data = torch.zeros(message // 4, device=bench.device)
        figures["all-reduce"] = 2 * _bus_gb_s(bench, data, lambda: dist.all_reduce(data))
        part = data[: min(len(data), 1 << 29) // bench.world * bench.world]
        target = torch.empty_like(part)
        figures["all-to-all"] = _bus_gb_s(bench, part, lambda: dist.all_to_all_single(target, part))
    figures["device"] = torch.cuda.get_device_name() if bench.on_gpu else "cpu"
    (folder / f"rank-{bench.rank}.json").write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
