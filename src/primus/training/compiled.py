"""Let torch.compile keep the graphs that it traces, so that a later run does not trace and partition them again.

PyTorch keeps a graph only if it knows every function in it. Those by which a model chooses the backends of attention,
as torchtitan's do, are not among them: every such graph was traced anew, even with all kernels kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from types import FunctionType
from typing import Any

from primus.patch import replace

# Their arguments are part of the graph, and with them of the key of what is kept.
_CHOOSING = ("torch.nn.attention._backend_from_string", "torch.nn.attention._sdpa_kernel")
_POLICIES: dict[str, Callable[[], Any]] = {}


def keep_graphs() -> None:
    """Mark these functions as safe. Call it before the first compilation, in the thread that compiles."""
    import torch
    import torch._dynamo  # before torch._inductor, which otherwise imports itself in a circle
    from torch._inductor import config

    # The one thing that they read and the graph does not hold.
    order = torch._C._get_sdp_priority_order()
    config.unsafe_marked_cacheable_functions = {
        **config.unsafe_marked_cacheable_functions,
        **dict.fromkeys(_CHOOSING, f"{torch.__version__} {order}"),
    }


def name_policies() -> None:
    """Let the graphs of a model with torchtitan's selective checkpointing be kept, too.

    A function decides what is recomputed. PyTorch keeps such a graph only if the function can be pickled and has a
    ``cache_hash``, a name for what it decides.
    """
    from torchtitan.distributed import activation_checkpoint

    def wrapped(module: Any, *words: Any, **options: Any) -> Any:
        if (policy := options.get("context_fn")) is not None:
            # Interned, because PyTorch may compile anew for another object, even of the same text.
            name = sys.intern(f"torchtitan {metadata.version('torchtitan')} {_name(policy)}")
            _POLICIES[name] = policy
            options["context_fn"] = named = partial(_decide, name)
            named.cache_hash = name  # type: ignore[attr-defined]
        return before(module, *words, **options)

    before: Callable[..., Any] = replace(activation_checkpoint, "ptd_checkpoint_wrapper", wrapped)


def _decide(name: str) -> Any:
    return _POLICIES[name]()


def _name(value: Any) -> str:
    """``value`` as a text that is the same in every process: of a function its name and what it has closed over."""
    if isinstance(value, FunctionType):
        return f"{value.__qualname__}({', '.join(_name(cell.cell_contents) for cell in value.__closure__ or ())})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(str, value)))}}}"
    return repr(value)
