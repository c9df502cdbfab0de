"""What ranks on CPUs need of torch.distributed: a store, 16-bit floats, and a safe exit.

Some builds of gloo, such as Debian's, lack 16-bit floats. A tensor of such a dtype is sent as
float32, which represents all its values; a sum over ranks is rounded once, at the end. Send and
receive do not depend on the dtype.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from primus_images.yamlfile import read_values

_OPERATIONS: Any = read_values(Path(__file__).with_name("gloo.yaml")).data
_DTYPES = (torch.bfloat16, torch.float16)
# The replacement calls the CUDA implementation, which does the same as the CPU's: it passes the
# tensors to the group's backend, and gloo is registered for both. Called by its dispatch key, it
# runs without the GIL. If the GIL is held, ranks hang: gloo's threads take it while they hold the
# lock of the queue that the call waits for.
_ORIGINAL = torch._C.DispatchKey.CUDA
# torch removes an implementation when its library object is deleted.
_KEPT: list[torch.library.Library] = []


def lacks(dtype: torch.dtype) -> bool:
    """Return whether gloo refuses tensors of ``dtype`` here, by a group of this process alone."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    try:
        group.allreduce([torch.zeros(1, dtype=dtype)]).wait()
    except RuntimeError as error:
        # Any other error does not answer the question.
        if "scalar type" not in str(error):
            raise
        return True
    return False


def complete(*, always: bool = False) -> tuple[torch.dtype, ...]:
    """Add the 16-bit floats that gloo lacks in this process, and return them.

    With ``always``, both are added. Rank 0 prints a message to standard error with the first such
    tensor. Call it once, after GLOO_SOCKET_IFNAME is set and before any collective.
    """
    missing = tuple(dtype for dtype in _DTYPES if always or lacks(dtype))
    if not missing:
        return ()
    library = torch.library.Library("c10d", "IMPL")
    for name in _OPERATIONS:
        operation = getattr(torch.ops.c10d, name).default
        library.impl(name, _widened(operation, missing), "CPU", allow_override=True)
    _KEPT.append(library)
    return missing


def leave() -> NoReturn:
    """Exit immediately with code 0. Every process that used gloo ends with it, once its work is
    done.

    A gloo thread that releases a finished collective during the interpreter's finalization aborts
    the process. On busy cores, one good run in fifteen ended so (pytorch#190489, pytorch#179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _widened(operation: Any, missing: tuple[torch.dtype, ...]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        results: list[tuple[torch.Tensor, torch.Tensor]] = []

        def widen(
            tensor: torch.Tensor, copies: list[tuple[torch.Tensor, torch.Tensor]]
        ) -> torch.Tensor:
            if tensor.dtype not in missing:
                return tensor
            _say(tensor.dtype)
            copies.append((tensor, tensor.to(torch.float32)))
            return copies[-1][1]

        # Do not copy back tensors that are only read, because they may share memory with a result.
        first = tree_map_only(torch.Tensor, lambda tensor: widen(tensor, results), arguments[0])
        rest = tree_map_only(torch.Tensor, lambda tensor: widen(tensor, []), arguments[1:])
        result = operation._op_dk(_ORIGINAL, first, *rest)
        whole = isinstance(result, (tuple, list))
        if results:
            dist.Work.unbox(result[-1] if whole else result).wait()
            for tensor, copy in results:
                tensor.copy_(copy)
        # Some operations also return their first argument; return the caller's tensor.
        if whole:
            return (arguments[0], result[-1])
        return result

    return run


@cache
def _say(dtype: torch.dtype) -> None:
    if os.environ.get("RANK", "0") == "0":
        name = str(dtype).removeprefix("torch.")
        sentence = (
            f"this PyTorch's gloo has no {name}: ranks exchange float32 instead, and "
            "sums are rounded once"
        )
        print(f"primus: {sentence}", file=sys.stderr, flush=True)


# A store ends when its object is deleted.
_OPEN_STORES: list[Any] = []


def choose_store(folder: Path) -> None:
    """Choose the kind and port of the store, before the process groups are created.

    If torch has no libuv, as Debian's, the store does without it. If all ranks are on this machine,
    rank 0 opens it at a free port that the others read from the job's ``folder``, so that jobs that
    start together never choose the same.
    """
    try:
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        os.environ["USE_LIBUV"] = "0"
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        _open(folder)


def _open(folder: Path) -> None:
    size = int(os.environ["WORLD_SIZE"])
    notes = dist.FileStore(str(folder / "cache" / "store"), size)
    # Different in each attempt, because the file of an attempt that was killed stays.
    key = os.environ["PRIMUS_LAUNCH"]
    if os.environ["RANK"] == "0":
        # With multi_tenant, init_process_group finds this server in place of starting its own.
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            0,
            size,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
        _OPEN_STORES.append(store)
        notes.set(key, str(store.port))
    _OPEN_STORES.append(notes)
    os.environ["MASTER_PORT"] = notes.get(key).decode()
