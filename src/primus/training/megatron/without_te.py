"""What megatron-core 0.16.1 needs where Transformer Engine is not installed, on CPU and GPU alike."""

from __future__ import annotations

from primus.patch import replace


def apply() -> None:
    """Mend the two modules that take it for installed. Each patch states what breaks without it."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # Latent attention: its imports succeed with None for every class, and isinstance(…, None) raises TypeError.
    replace(multi_latent_attention, "HAVE_TE", False)
    # The router: NameError, since another name of the same import is missing.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
