"""Let torch.compile keep the graphs that it traces, so that a later run does not trace and partition them again.

PyTorch keeps a graph only if it knows every function in it. Those by which a model chooses the backends of attention,
as torchtitan's do, are not among them: every such graph was traced anew, even with all kernels kept.
"""

from __future__ import annotations

__all__ = ["keep_graphs"]

# Their arguments are part of the graph, and with them of the key of what is kept.
_CHOOSING = ("torch.nn.attention._backend_from_string", "torch.nn.attention._sdpa_kernel")


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
