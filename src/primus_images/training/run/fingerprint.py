"""A fingerprint of the samples of a step.

It does not depend on how ranks and micro-batches divide them, nor on their order: it is a sum of
one number for each sample, modulo 2⁶⁴.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# Odd numbers with bits everywhere (those of SplitMix64), as signed numbers.
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


def of_samples(*tensors: Tensor) -> int:
    """Return the sum of the numbers of all samples, as a signed number of 64 bits.

    ``tensors`` are integers [samples, …], such as inputs and labels. Values at other places or in
    another tensor give another number.
    """
    numbers = torch.zeros(len(tensors[0]), dtype=torch.int64)
    first_place = 1
    for tensor in tensors:
        values = tensor.flatten(1).to(torch.int64).cpu()
        places = torch.arange(first_place, first_place + values.shape[1])
        numbers += (values * _mixed(places * _STRIDE)).sum(dim=1)
        first_place += values.shape[1]
    return int(_mixed(numbers).sum())


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ (numbers >> 30)) * _MIX
    return numbers ^ (numbers >> 27)


def added(numbers: Iterable[int]) -> int:
    """Return the sum of ``numbers`` modulo 2⁶⁴, as a signed number of 64 bits."""
    total = sum(numbers) % 2**64
    if total >= 2**63:
        total -= 2**64
    return total


def written(total: int) -> str:
    """Return the fingerprint of a step from the sum over all ranks, as 16 digits."""
    return f"{total % 2**64:016x}"
