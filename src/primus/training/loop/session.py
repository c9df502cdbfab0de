"""What the loop needs of a backend: a model that trains (:class:`Session`) and samples by number (:class:`Data`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from primus.training.witness import Taken, whole_parameters

__all__ = ["Batch", "Data", "Session"]

# One micro-batch: tensors whose first dimension counts samples. Language models: ``input_ids`` and ``labels``, both
# int64 [samples, seq_len]; labels are shifted already, −100 is not trained on.
Batch = Mapping[str, torch.Tensor]


class Data(Protocol):
    """Samples that are found by number, so a position in the data is one number and any layout sees the same ones."""

    @property
    def tokens_per_sample(self) -> int:
        """Tokens that one sample adds to the throughput figure."""

    @property
    def images_per_sample(self) -> int:
        """Images that one sample adds to the throughput figure; 0: it is no image."""

    def batch(self, first: int, count: int) -> Batch:
        """Samples ``first`` … ``first + count − 1``, on the CPU. Any number is valid: data begin anew at their end."""

    def terms(self, batch: Batch) -> int:
        """How many terms the loss of ``batch`` is a sum of: labels not ignored, or samples."""


class Session(Protocol):
    """One rank's part of a model in training. All methods are called on all ranks, in the same order."""

    @property
    def model_parts(self) -> Sequence[torch.nn.Module]:
        """The modules this rank holds (several with interleaved pipelines), for facts and digests."""

    @property
    def linear_types(self) -> tuple[type, ...]:
        """The classes that count as linear layers when their dtypes are watched: see ``facts.watching``."""

    @property
    def data_rank(self) -> int:
        """Which share of a global batch this rank takes, below ``data_ranks`` (the job's ``data_parallel``)."""

    def forward_backward(self, batches: Sequence[Batch], terms: int) -> torch.Tensor:
        """Run the micro-batches of one step, on the CPU as :class:`Data` made them.

        Leaves the gradient of (sum of all losses over all data-parallel ranks) ÷ ``terms``. Returns the sum of
        this rank's losses, undivided and detached, a scalar on the rank's device; 0 where no loss is computed.
        """

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a scalar over the data-parallel ranks, the same on every rank of the job.

        A value that only some ranks compute (the last pipeline stage) reaches all.
        """

    def step(self, lr: float) -> torch.Tensor:
        """Clip the gradients, update the weights at rate ``lr``, forget the gradients.

        Returns the global gradient norm before clipping, a scalar, the same on every rank.
        """

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer as :mod:`torch.distributed.checkpoint` saves them, read in place when loading.

        Ranks that hold different tensors under one name must make the names differ, unless they are DTensors.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was loaded into the tensors of :meth:`state_dict`."""

    def whole(self) -> Mapping[str, torch.Tensor]:
        """All of the job's parameters on rank 0, whole and on the CPU, under the names of one rank that holds them all.

        Other ranks may return less, but all must call it.
        """
        return whole_parameters(self.model_parts)

    def taken(self) -> Taken | None:
        """What the last update changed, where torch's optimizers do not update the parameters themselves."""
        return None

    def facts(self) -> dict[str, Any]:
        """What only the backend can say of itself: optimizer, parallel degrees, adapters."""
