"""Gathering sharded tensors into whole copies on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import starmap

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

# PyTorch 2.13 renamed this function, and warns about the old name.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, gathered from its shards, as a copy on the CPU. All ranks."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return each of ``tensors``, gathered from its shards, as a copy on the CPU. All ranks must call it with the same
    names in the same order.

    Tensors sharded by rows, as in FSDP2, are gathered in one collective for each group and dtype. One for each tensor
    would take several times as long. It would also use DTensor's gathers: with gloo, a rank crashed in about one of a
    million of them, for an unknown reason (PyTorch 2.11 and 2.13).
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
    """Return the group over which the rows of ``tensor`` are sharded, or None if it is sharded in another way."""
    sharded = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    # A strided shard, in some versions of PyTorch a subclass of Shard, has another order of rows.
    if len(sharded) != 1 or type(placement := tensor.placements[sharded[0]]) is not Shard or placement.dim != 0:
        return None
    return tensor.device_mesh.get_group(sharded[0])


def _gathered(tensors: Mapping[str, DTensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Return the whole tensors. Each rank of ``group`` holds the rows that ``torch.chunk`` assigns to it."""
    ranks = group.size()
    # The last ranks may have fewer rows than the others, or none.
    rows = [-(-tensor.shape[0] // ranks) for tensor in tensors.values()]
    mine = torch.cat(list(starmap(_padded, zip(tensors.values(), rows, strict=True))))
    every = mine.new_empty(ranks * len(mine))
    _all_gather(every, mine, group=group)
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
