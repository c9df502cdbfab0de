"""Requesting the catalogue's kernels as a training job does, and recording which of them had to be compiled."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from primus.aot.catalogue import Case
from primus.aot.gpu import Gpu
from primus.aot.pretend import KernelError, pretending
from primus.aot.requested import Answer, Requested, folder_of, refused
from primus.aot.workloads import WORKLOADS, Workload, call


def request_pretending(cases: Iterable[Case], gpu: Gpu, *, progress: Callable[[str], None] = lambda _: None) -> Answer:
    """Request every case as if ``gpu`` were present. ``progress`` is called with each case and each kernel to compile.

    If a kernel does not compile, the failure is recorded and the next case is requested, so one run finds all failures.
    """
    current: list[Case] = []
    with empty_cache() as cache, _noting(current, progress) as requested:
        failures = call_all(cases, gpu, current, progress)
        return Answer(requested=tuple(requested.values()), failures=tuple(failures.values()), made=_files(cache))


def call_all(cases: Iterable[Case], gpu: Gpu, current: list[Case], progress: Callable[[str], None]) -> dict[str, str]:
    """Call every case as if ``gpu`` were present, with the case in ``current``.

    Returns the functions that did not compile, each with a message.
    """
    failures: dict[str, str] = {}
    with pretending(gpu, lambda: current[0].batch * current[0].sequence - current[0].ignored):
        skip_dispatcher()
        for case in cases:
            current[:] = [case]
            progress(case.label)
            try:
                forward_and_backward(case, "cuda")
            except KernelError as error:
                failures.setdefault(error.function, refused(case.kernel.name, gpu.arch, str(error), case.label))
    return failures


def request_all(cases: Iterable[Case], *, compare: Callable[[Case], bool], progress: Callable[[str], None]) -> Answer:
    """Run every case on this machine's GPU. Cases that ``compare`` selects are compared with plain PyTorch."""
    current: list[Case] = []
    failures: list[str] = []
    with empty_cache() as cache, _noting(current, progress) as requested:
        for case in cases:
            current[:] = [case]
            progress(case.label)
            torch.manual_seed(1)
            if fault := forward_and_backward(case, "cuda", compare=compare(case)):
                failures.append(f"{case.label}: {fault}")
        return Answer(requested=tuple(requested.values()), failures=tuple(failures), made=_files(cache))


def forward_and_backward(case: Case, device: str, *, compare: bool = False) -> str:
    """Run the library's forward and backward pass. With ``compare``, returns a difference from plain PyTorch, or ""."""
    workload = WORKLOADS[case.kernel.test]
    inputs = workload.inputs(case, device)
    # Computed first, because some kernels overwrite their inputs with gradients.
    wanted = _wanted(workload, case, inputs) if compare else []
    out = call(case, inputs)
    out.backward(torch.ones_like(out))
    if not compare:
        return ""
    found = [out, *(t.grad for t in inputs if t.requires_grad)]
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        what = f"gradient {index}" if index else "output"
        if one is None or one.shape != other.shape:
            return f"{what} does not have the shape of plain PyTorch's"
        error = ((one.float() - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()
        # "not <=" instead of ">", so that NaN fails.
        if not error <= workload.largest_error:
            return f"{what} is off by {error:.3g} of the largest value"
    return ""


def _wanted(workload: Workload, case: Case, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    out = workload.reference(*copies, **workload.options(case))
    out.backward(torch.ones_like(out))
    return [out.detach().float(), *(t.grad.float() for t in copies if t.grad is not None)]


def skip_dispatcher() -> None:
    """Make Flash Attention call its own functions instead of the operators registered with PyTorch.

    The operators use fake implementations for tensors without values, and have none for a CPU.
    """
    with contextlib.suppress(ImportError):
        from flash_attn import flash_attn_interface as interface

        interface._wrapped_flash_attn_forward = interface._flash_attn_forward._init_fn
        interface._wrapped_flash_attn_backward = interface._flash_attn_backward._init_fn


@contextlib.contextmanager
def empty_cache() -> Iterator[Path]:
    """Use a new, empty folder as Triton's cache, so that only kernels compiled ahead of time are found."""
    with tempfile.TemporaryDirectory(prefix="primus-triton-") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield Path(folder)


@contextlib.contextmanager
def _noting(current: list[Case], progress: Callable[[str], None]) -> Iterator[dict[str, Requested]]:
    """Yield a mapping (key → kernel) that records everything that Triton loads or compiles while it is open."""
    requested: dict[str, Requested] = {}

    def loaded(*, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        key = folder_of(metadata["hash"])
        if key not in requested:
            requested[key] = Requested(
                kernel=current[0].kernel.name,
                function=src.name,
                key=key,
                case=current[0].label,
                compiled=not cache_hit,
                warps=metadata["num_warps"],
                stages=metadata["num_stages"],
                shared_bytes=metadata["shared"],
            )

    def before(*, fn: Any, **_: Any) -> None:
        progress(f"  {fn.name}")

    with triton.knobs.compilation.scope(), triton.knobs.runtime.scope():
        triton.knobs.compilation.listener = loaded
        triton.knobs.runtime.jit_cache_hook = before
        yield requested


def _files(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()))
