"""The keys of the ``fsdp`` section that are its own."""

from __future__ import annotations

from dataclasses import dataclass

from primus.recipes.bounds import bounded

__all__ = ["FsdpConfig"]


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """The model's loss is made for ``loss_chunk`` tokens at a time.

    The options of ``train_fsdp.py`` are keys of the loop: ``--batch_size`` is ``training.micro_batch_size``,
    ``--num_iteration`` counts micro-batches, so it is ``training.steps`` × the accumulation;
    ``--grad_accumlate_pre_steps`` (its spelling) is that accumulation: ``training.global_batch_size`` ÷ (micro batch ×
    ranks); ``--enable_fp8`` is ``training.fp8`` (tensorwise; Transformer Engine's delayed scaling there),
    ``--enable_compile`` ``training.compile``, ``--seed`` ``training.seed``. ``--reduce_pre_steps`` has no key: every
    step is logged.
    """

    loss_chunk: int = bounded(2048, "[1, inf)")
