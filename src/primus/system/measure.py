"""Benchmarks of one rank's GPU: GEMMs, copies in its memory, all-reduce, all-to-all. Needs PyTorch only.

:mod:`primus.system.nodes` starts it through torchrun with one rank per GPU and the folder for ``rank-N.json``. All GPUs
work at the same time, as in a training job. Without a GPU, it runs the same steps on a CPU with small sizes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from primus.training import gloo

_SECONDS = 1.0


class _Bench:
    """The device of this rank, and the timing of calls on it."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    def seconds(self, call: Callable[[], object], *, together: bool = False) -> float:
        """Return the median seconds of a call. ``together``: all ranks make the same number of calls."""
        timer = Timer("call()", globals={"call": call})  # it warms up, and waits for the device
        once = torch.tensor([max(timer.timeit(1).mean, 1e-6)], device=self.device)
        if together:
            dist.all_reduce(once, op=dist.ReduceOp.MAX)
        calls = max(5, min(500, int(_SECONDS / 5 / once.item())))
        return statistics.median(float(timer.timeit(calls).mean) for _ in range(5))


def _gemm_tflops(bench: _Bench, size: int) -> float:
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(size, size, device=bench.device, dtype=torch.bfloat16)
    return 2.0 * size**3 / bench.seconds(lambda: torch.mm(a, b, out=out)) / 1e12


def _fp8_gemm_tflops(bench: _Bench, size: int, name: str) -> float:
    kind = getattr(torch, f"float8_{name}")
    a, b = (torch.randn(size, size, device=bench.device).to(kind) for _ in range(2))
    scale = torch.ones((), device=bench.device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2.0 * size**3 / bench.seconds(product) / 1e12


def _copy_tb_s(bench: _Bench, size: int) -> float:
    source = torch.ones(size // 4, device=bench.device)
    target = torch.empty_like(source)
    return 2.0 * size / bench.seconds(lambda: target.copy_(source)) / 1e12


def _bus_gb_s(bench: _Bench, data: torch.Tensor, call: Callable[[], object]) -> float:
    return float(data.nbytes) * (bench.world - 1) / bench.world / bench.seconds(call, together=True) / 1e9


def main(folder: Path, fp8: str) -> None:
    """Run all benchmarks and write this rank's figures to ``folder``. ``fp8`` is the GPU's format; empty for none."""
    bench = _Bench()
    dist.init_process_group("nccl" if bench.on_gpu else "gloo")
    figures: dict[str, float | str] = {}
    size = 8192 if bench.on_gpu else 256
    figures["gemm bf16"] = _gemm_tflops(bench, size)
    if fp8 and bench.on_gpu:
        figures["gemm fp8"] = _fp8_gemm_tflops(bench, size, fp8)
    figures["memory"] = _copy_tb_s(bench, (4 << 30) if bench.on_gpu else (1 << 24))
    if bench.world > 1:
        ranks = torch.full((1 << 16,), float(bench.rank + 1), device=bench.device)
        dist.all_reduce(ranks)
        if not bool((ranks == bench.world * (bench.world + 1) / 2).all()):
            raise RuntimeError("an all-reduce gave a wrong sum")
        # The size that AMD's acceptance guide uses; smaller if the GPU's memory is in use.
        message = min(8 << 30, torch.cuda.mem_get_info()[0] // 4) if bench.on_gpu else 1 << 20
        # Bus bandwidth as in NVIDIA's nccl-tests: an all-reduce sends and receives each byte twice.
        data = torch.zeros(message // 4, device=bench.device)
        figures["all-reduce"] = 2 * _bus_gb_s(bench, data, lambda: dist.all_reduce(data))
        part = data[: min(len(data), 1 << 29) // bench.world * bench.world]
        target = torch.empty_like(part)
        figures["all-to-all"] = _bus_gb_s(bench, part, lambda: dist.all_to_all_single(target, part))
    figures["device"] = torch.cuda.get_device_name() if bench.on_gpu else "cpu"
    (folder / f"rank-{bench.rank}.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()
    if not bench.on_gpu:
        gloo.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
