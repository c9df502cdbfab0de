"""Patches that megatron-core 0.16.1 needs without Transformer Engine, on CPU and GPU."""

from __future__ import annotations

from primus.patch import replace


def apply() -> None:
    """Patch the two modules that assume it is installed. Each patch states what fails without it."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # Latent attention: its imports set every class to None, and isinstance(…, None) raises TypeError.
    replace(multi_latent_attention, "HAVE_TE", False)
    # The router: NameError, because another name of the same import is missing.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
