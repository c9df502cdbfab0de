"""Checking the arithmetic of the catalogue's kernels on a CPU: Triton's interpreter compared with plain PyTorch.

This does not test compiled code. It uses 32 bits, because the interpreter does not support bfloat16, and corrects two
differences between the interpreter and a GPU.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from primus.aot.catalogue import Case, Kernel, Shape

# Sizes that are not powers of two where kernels use masks, and small enough for an interpreter.
TINY = Shape(name="tiny", hidden=80, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=160)


def interpret(kernels: Sequence[Kernel]) -> Iterator[tuple[Case, str]]:
    """Yield each call of the kernels for :data:`TINY`, with a fault or "". Triton must not be imported yet."""
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    from primus.aot.requests import forward_and_backward, skip_dispatcher

    convert = interpreter._implicit_cvt

    def as_launched(value: Any) -> Any:
        # A float argument reaches a kernel as a 32-bit scalar.
        if isinstance(value, float):
            handle = interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(value)

    interpreter._implicit_cvt = as_launched
    skip_dispatcher()
    if any(kernel.component == "liger-kernel" for kernel in kernels):
        # Functions of the device library cannot be interpreted. tl.rsqrt can, but only while a kernel runs, so it is
        # looked up at each call.
        def rsqrt(x: Any) -> Any:
            return tl.rsqrt(x)

        importlib.import_module("liger_kernel.ops.rms_norm").__dict__["rsqrt"] = rsqrt
    for kernel in kernels:
        for reduction in kernel.reductions:
            for ignored in kernel.ignored:
                case = Case(
                    kernel=kernel, shape=TINY, batch=2, sequence=8, dtype="float32", ignored=ignored,
                    reduction=reduction,
                )  # fmt: skip
                yield case, forward_and_backward(case, "cpu", compare=True)
