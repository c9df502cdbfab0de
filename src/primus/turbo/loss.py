"""The output projection and its cross entropy in one function, one chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch

from primus.turbo.kernels import cross_entropy_

CHUNK = 8192
"""Tokens per chunk: long enough for products at full speed, and 2 GB of logits for a vocabulary of 128,256."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int) -> torch.Tensor:
        rows, places = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
        losses = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(rows)
        grad_weight: torch.Tensor | None = None
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            logits = rows[part] @ weight.t()
            cross_entropy_(logits, places[part], losses[part])
            torch.mm(logits, weight, out=grad_x[part])
            if not weight.requires_grad:
                continue
            if grad_weight is None:
                grad_weight = logits.t() @ rows[part]
            else:
                grad_weight.addmm_(logits.t(), rows[part])
        ctx.save_for_backward(grad_x.view_as(x), grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        # The gradients belong to this function and are used once.
        return grad_x.mul_(grads[0]), None if grad_weight is None else grad_weight.mul_(grads[0]), None, None


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int = CHUNK
) -> torch.Tensor:
    """Return the sum of the cross entropies of ``x @ weight.T`` against ``labels`` (-100: ignored), as float32.

    ``x`` [..., hidden] and ``weight`` [vocabulary, hidden] have one type, and ``labels`` [...] are int64. The
    gradients are computed in the forward pass, so that only the logits of ``chunk`` tokens exist at any time;
    ``backward`` works once. A frozen ``weight`` gets no gradient, which saves a third of the work.
    """
    loss: torch.Tensor = _LinearCrossEntropy.apply(x, weight, labels, chunk)
    return loss


class LossHead(torch.nn.Linear):
    """An output projection that returns the sum of the losses while ``labels`` is set, and logits otherwise."""

    labels: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss or the logits."""
        if self.labels is None:
            return super().forward(x)
        labels, self.labels = self.labels, None
        return linear_cross_entropy(x, self.weight, labels)
