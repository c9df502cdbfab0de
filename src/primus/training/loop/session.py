"""The interface between the loop and a backend: a trainable model (:class:`Session`) and its data (:class:`Data`).

:class:`LanguageModel` is the base of models that map tokens and labels to the sum of the losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from primus.training.witness import Taken, whole_parameters

# One micro-batch: tensors whose first dimension is the sample. For language models: ``input_ids`` and ``labels``, both
# int64 [samples, seq_len]. Labels are already shifted; −100 is ignored.
Batch = Mapping[str, torch.Tensor]


class Data(Protocol):
    """Samples accessed by number. A position in the data is one number, and every layout uses the same samples.

    ``tokens_per_sample`` and ``images_per_sample`` (0 for text) are the sizes of one sample, for throughput.
    """

    tokens_per_sample: int
    images_per_sample: int

    def batch(self, first: int, count: int) -> Batch:
        """Return samples ``first`` … ``first + count − 1`` on the CPU. The data repeats, so any number is valid."""

    def terms(self, batch: Batch) -> int:
        """Return the number of terms in the loss of ``batch``: labels that are not ignored, or samples."""


class Session(Protocol):
    """One rank's part of a model in training. All ranks must call the methods in the same order.

    ``model_parts`` are the modules of this rank (several with interleaved pipelines), for facts and digests.
    ``linear_types`` are the classes that count as linear layers when dtypes are recorded: see ``facts.watching``.
    """

    model_parts: Sequence[torch.nn.Module]
    linear_types: tuple[type, ...]

    @property
    def data_rank(self) -> int:
        """The number of this rank's share of the global batch, from 0 to the job's ``data_parallel`` − 1."""

    def forward_backward(self, batches: Sequence[Batch], terms: int) -> torch.Tensor:
        """Run the forward and backward passes of one step's micro-batches, which are on the CPU.

        Computes the gradient of (sum of all losses over all data-parallel ranks) ÷ ``terms``. Returns the sum of this
        rank's losses, undivided and detached, as a scalar on the rank's device; 0 if this rank computes no loss.
        """

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a scalar over the data-parallel ranks, on every rank of the job.

        Ranks that do not compute the value (all but the last pipeline stage) get it as well.
        """

    def step(self, lr: float) -> torch.Tensor:
        """Clip the gradients, update the weights with learning rate ``lr``, and reset the gradients.

        Returns the global gradient norm before clipping: a scalar, equal on every rank.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return model and optimizer for :mod:`torch.distributed.checkpoint`, which loads into these tensors in place.

        Different tensors on different ranks must have different names, unless they are DTensors.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Use the state that was loaded into the tensors of :meth:`state_dict`."""

    def whole(self) -> Mapping[str, torch.Tensor]:
        """Return all parameters of the job, unsharded and on the CPU, under the names of a run on one rank.

        All ranks must call it; only rank 0 gets everything.
        """
        return whole_parameters(self.model_parts)

    def taken(self) -> Taken | None:
        """Return the last update, if the backend does not use torch's optimizers on the parameters; otherwise None."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return facts that only the backend knows: optimizer, parallel degrees, adapters."""


class LanguageModel(nn.Module):
    """A transformer and its output layer.

    The logits are computed for ``chunk`` tokens at a time, and again for the backward pass. Otherwise, they would be
    the largest tensor of a small model with a large vocabulary (12 bytes × tokens × vocabulary).
    """

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self._chunk = chunk
        self._summed = _summed
        self._fused = False

    def compile_loss(self) -> None:
        """Compile the computation of logits and loss."""
        self._summed = torch.compile(_summed)

    def fuse_loss(self) -> None:
        """Compute loss and gradients of the output layer together, in chunks, so that logits are computed only once."""
        self._fused = True

    def hidden(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last hidden states [samples, seq_len, hidden], and an additional loss per token or None."""
        raise NotImplementedError

    @property
    def head(self) -> nn.Linear:
        """The output layer."""
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the cross entropies of all labels."""
        hidden, besides = self.hidden(input_ids)
        states, targets = hidden.flatten(0, 1), labels.flatten()
        parts = list(zip(states.split(self._chunk), targets.split(self._chunk), strict=True))
        total: torch.Tensor
        if self._fused:
            from primus.turbo.kernels import linear_cross_entropy

            total = linear_cross_entropy(states, self.head.weight, targets)
        elif len(parts) == 1:
            total = self._summed(self.head, *parts[0])
        else:
            sums = [checkpoint(self._summed, self.head, *part, use_reentrant=False) for part in parts]
            total = torch.stack(sums).sum()
        if besides is None:
            return total
        # The additional loss is trained but not reported: it adds a gradient, but not to the value.
        return total + (besides - besides.detach()) * targets.numel()


def _summed(head: nn.Linear, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(head(states).float(), labels, ignore_index=-100, reduction="sum")


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of a language model, for :class:`primus.training.loop.sharded.Sharded`."""
    total: torch.Tensor = model(batch["input_ids"], batch["labels"])
    return total
