"""The keys of plain FSDP."""

from __future__ import annotations

from dataclasses import dataclass

from primus.recipes.setting import bounded


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """The settings of plain FSDP training. The loss is computed for ``loss_chunk`` tokens at a time.

    The options of ``train_fsdp.py`` correspond to keys of the loop:

    * ``--batch_size``: ``training.micro_batch_size``
    * ``--num_iteration``: ``training.steps`` × accumulation, because it counts micro-batches
    * ``--grad_accumlate_pre_steps`` (its spelling): the accumulation, ``training.global_batch_size`` ÷ (micro-batch ×
      ranks)
    * ``--enable_fp8``: ``training.fp8``, with tensorwise instead of Transformer Engine's delayed scaling
    * ``--enable_compile``: ``training.compile``
    * ``--seed``: ``training.seed``
    * ``--reduce_pre_steps``: no key, because every step is logged
    """

    loss_chunk: int = bounded(2048, "[1, inf)")
