"""Gathering tensors that ranks share: whole, as copies on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import starmap

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, gathered from its shards, as a copy on the CPU. All ranks."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same of several tensors. All ranks, with the same names in the same order.

    Tensors whose rows are divided among ranks, as FSDP2 does, are gathered in one collective for each dtype. One for
    each tensor would take several times as long. With gloo, about one in a million of DTensor's own collectives also
    ended a rank with a damaged heap (PyTorch 2.11 and 2.13).
    """
    found: dict[str, torch.Tensor] = {}
    packs: dict[tuple[dist.ProcessGroup, torch.dtype], dict[str, DTensor]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and (group := _group_of_rows(tensor)) is not None:
            packs.setdefault((group, tensor.dtype), {})[name] = tensor
        else:
            found[name] = whole_tensor(tensor)
    for (group, _), pack in packs.items():
        found |= _gathered(pack, group)
    return {name: found[name] for name in tensors}


def _group_of_rows(tensor: DTensor) -> dist.ProcessGroup | None:
    """Return the ranks that divide the rows of ``tensor``, or None if it is divided in another way."""
    divided = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    # A strided shard is a subclass of Shard with another order of rows.
    if len(divided) != 1 or type(placement := tensor.placements[divided[0]]) is not Shard or placement.dim != 0:
        return None
    return tensor.device_mesh.get_group(divided[0])


def _gathered(tensors: Mapping[str, DTensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Return the whole tensors of which each rank of ``group`` has the rows that ``torch.chunk`` gives it."""
    ranks = group.size()
    # The last ranks may have fewer rows than the others, or none.
    rows = [-(-tensor.shape[0] // ranks) for tensor in tensors.values()]
    mine = torch.cat(list(starmap(_padded, zip(tensors.values(), rows, strict=True))))
    every = mine.new_empty(ranks * len(mine))
    dist.all_gather_into_tensor(every, mine, group=group)
    sizes = [count * tensor.shape[1:].numel() for tensor, count in zip(tensors.values(), rows, strict=True)]
    parts = every.cpu().view(ranks, -1).split(sizes, 1)
    return {
        name: part.reshape(-1, *tensor.shape[1:])[: tensor.shape[0]].clone()
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def _padded(tensor: DTensor, rows: int) -> torch.Tensor:
    """Return this rank's rows of ``tensor``, and zeros up to ``rows``, as a vector."""
    shard = tensor.to_local().detach().flatten()
    return torch.cat([shard, shard.new_zeros(rows * tensor.shape[1:].numel() - len(shard))])
