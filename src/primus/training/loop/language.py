"""The interface of language models in the loop: from tokens and labels to the sum of the losses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from primus.training.loop.faster import optimized
from primus.training.loop.session import Batch


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
        states, wanted = hidden.flatten(0, 1), labels.flatten()
        if self._fused:
            total = optimized().loss.linear_cross_entropy(states, self.head.weight, wanted)
            return self._with(total, besides, wanted)
        parts = list(zip(states.split(self._chunk), wanted.split(self._chunk), strict=True))
        if len(parts) == 1:
            total = self._summed(self.head, *parts[0])
        else:
            sums = [checkpoint(self._summed, self.head, *part, use_reentrant=False) for part in parts]
            total = torch.stack(sums).sum()
        return self._with(total, besides, wanted)

    @staticmethod
    def _with(total: torch.Tensor, besides: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
        if besides is None:
            return total
        # The additional loss is trained but not reported: it adds a gradient, but not to the value.
        return total + (besides - besides.detach()) * wanted.numel()


def _summed(head: nn.Linear, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(head(states).float(), labels, ignore_index=-100, reduction="sum")


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of a language model, for :class:`primus.training.loop.sharded.Sharded`."""
    total: torch.Tensor = model(batch["input_ids"], batch["labels"])
    return total
