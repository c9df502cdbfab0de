"""A stand-in for a GPU: the libraries' own code runs, and each kernel launch becomes a compilation.

Tensors have sizes but no values (PyTorch's ``meta`` device) and report the device ``cuda:0``. Triton's driver is
replaced by one that only knows the architecture. A kernel is therefore requested with the arguments of a real call, and
Triton derives the same key as on that GPU. The case supplies what depends on values, such as the number of targets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from primus.aot.gpu import Gpu

_DEVICE = torch.device("cuda", 0)
# Allocators of GPU memory align to at least this many bytes.
_ALIGNED = 512


class KernelError(Exception):
    """A kernel did not compile. ``function`` is its name in the library."""

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(f"{function}: {reason}")
        self.function = function


class _Driver:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, gpu: Gpu) -> None:
        self._target = gpu.target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return _DEVICE


class _Pointer:
    """A tensor as a kernel's argument, with only the properties that Triton specializes on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address: int = _ALIGNED + tensor.storage_offset() * tensor.element_size()
        self._bytes: int = tensor.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return self._bytes


class _OnCuda(TorchFunctionMode):  # type: ignore[misc]
    """Creates tensors for ``cuda`` on ``meta``, and makes them report ``cuda``."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Compare getters with ==, because each access returns a new object.
        if func == torch.Tensor.device.__get__ and args[0].is_meta:
            return _DEVICE
        if func == torch.Tensor.is_cuda.__get__ and args[0].is_meta:
            return True
        if func is torch.Tensor.item and args[0].is_meta:
            return self._count()
        # Libraries test whether an incoming gradient is 1. A trainer that scales its loss passes another value.
        if func is torch.equal:
            return False
        # addmm to an existing tensor: PyTorch computes the shape in Python, which takes a fifth of the total time.
        if func is torch.addmm and len(args) == 3 and _fits(kwargs.get("out"), *args):
            return kwargs["out"]
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def pretending(gpu: Gpu, count: Callable[[], int]) -> Iterator[None]:
    """Make ``gpu`` seem present while the context is open. ``count`` is the result of ``item()`` for tensors on it.

    Import libraries inside the context, because they query the GPU on import. Meanwhile, no thread can use a real GPU.
    A call whose kernel does not compile raises KernelError.
    """
    real_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        given = [_argument(a) for a in args]
        named = {k: _argument(v) for k, v in kwargs.items()} | {"warmup": True}
        try:
            return real_run(self, *given, grid=grid, **named)
        except Exception as error:
            raise KernelError(self.__name__, f"{type(error).__name__}: {error}") from error

    with contextlib.ExitStack() as stack:
        replace = _replacer(stack)
        replace(torch.version, "hip", "7.2.4" if gpu.amd else None)
        replace(torch.cuda, "is_available", lambda: True)
        replace(torch.cuda, "device_count", lambda: 1)
        replace(torch.cuda, "current_device", lambda: 0)
        replace(torch.cuda, "device", lambda _: contextlib.nullcontext())
        replace(torch.cuda, "get_device_properties", lambda _=None: gpu)
        replace(torch.cuda, "get_device_capability", lambda _=None: gpu.capability)
        replace(JITFunction, "run", run)
        mode, real_backward = _OnCuda(count), torch.autograd._engine_run_backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            # PyTorch disables a mode while the mode handles a call, and backward() is such a call.
            with mode:
                return real_backward(*args, **kwargs)

        replace(torch.autograd, "_engine_run_backward", backward)
        replace(triton.runtime.driver, "_active", _Driver(gpu))
        stack.enter_context(mode)
        yield


def _fits(out: torch.Tensor | None, *given: torch.Tensor) -> bool:
    """Whether ``out`` is on ``meta`` and has the shape and dtype of the result of addmm with ``given``."""
    added, left, right = given
    return (
        out is not None
        and out.is_meta
        and out.shape == added.shape == (left.shape[0], right.shape[1])
        and out.dtype == added.dtype == left.dtype == right.dtype
    )


def _argument(value: Any) -> Any:
    return _Pointer(value) if isinstance(value, torch.Tensor) else value


def _replacer(stack: contextlib.ExitStack) -> Callable[[Any, str, Any], None]:
    def replace(owner: Any, name: str, value: Any) -> None:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    return replace
