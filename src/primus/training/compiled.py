"""Let torch.compile cache the graphs that it traces, so that a later run does not trace and partition them again.

PyTorch caches a graph only if it knows every function in it. The functions that select attention backends, which
torchtitan's models call, are not among them. Without this module, every such graph is traced again although all kernels
are cached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from types import FunctionType
from typing import Any

from primus.patch import replace

# Their arguments are part of the graph, and therefore of the cache key.
_CHOOSING = ("torch.nn.attention._backend_from_string", "torch.nn.attention._sdpa_kernel")
_POLICIES: dict[str, Callable[[], Any]] = {}


def keep_graphs() -> None:
    """Mark these functions as safe to cache. Call it before the first compilation, in the thread that compiles."""
    import torch
    import torch._dynamo  # before torch._inductor, which has a circular import otherwise
    from torch._inductor import config

    # The only state that they read and the graph does not contain.
    order = torch._C._get_sdp_priority_order()
    config.unsafe_marked_cacheable_functions = {
        **config.unsafe_marked_cacheable_functions,
        **dict.fromkeys(_CHOOSING, f"{torch.__version__} {order}"),
    }


def name_policies() -> None:
    """Make graphs with torchtitan's selective checkpointing cacheable, too.

    A function decides what is recomputed. PyTorch caches such a graph only if the function can be pickled and has a
    ``cache_hash``, a text that identifies its decisions.
    """
    from torchtitan.distributed import activation_checkpoint

    def wrapped(module: Any, *words: Any, **options: Any) -> Any:
        if (policy := options.get("context_fn")) is not None:
            # Interned, because PyTorch may compile again for another object with the same text.
            name = sys.intern(f"torchtitan {metadata.version('torchtitan')} {_name(policy)}")
            _POLICIES[name] = policy
            options["context_fn"] = named = partial(_decide, name)
            named.cache_hash = name  # type: ignore[attr-defined]
        return before(module, *words, **options)

    before: Callable[..., Any] = replace(activation_checkpoint, "ptd_checkpoint_wrapper", wrapped)


def _decide(name: str) -> Any:
    return _POLICIES[name]()


def _name(value: Any) -> str:
    if isinstance(value, FunctionType):
        return f"{value.__qualname__}({', '.join(_name(cell.cell_contents) for cell in value.__closure__ or ())})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(str, value)))}}}"
    return repr(value)
