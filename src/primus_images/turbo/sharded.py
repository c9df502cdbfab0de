"""Faster handling of shards by FSDP2 and the optimizer, for every model and every backend that uses
both.

Gathers and reductions can use the copy engines of GPUs that read each other's memory. NCCL's
kernels hold SMs, which the products beside them then lack, and add gradients in float32 on the
wire. Here each rank copies what it needs from the memory of its peers, which takes no SM. Gradients
travel as BF16, the type in which they were computed, and each rank adds its share in float32, in
the order of ranks: half of the bytes, and at least the precision of a float32 reduction. Weights
that are kept until the backward pass are gathered in place.
"""

import math
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from primus_images.patch import replace
from primus_images.turbo.kernels import copy_in, sum_of_ranks
from primus_images.turbo.optimizations import CALLS


def lay_out_gradients() -> None:
    """Make FSDP2 copy gradients to the layout of the reduce-scatter with one kernel per gradient,
    in this process.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    def foreach_reduce_scatter_copy_in(grads: Any, out: Tensor, ranks: int) -> None:
        if not copy_in(grads, out, ranks):
            original(grads, out, ranks)

    takes = "unsharded_grads, reduce_scatter_input, world_size"
    original = replace(
        collectives, "foreach_reduce_scatter_copy_in", foreach_reduce_scatter_copy_in, takes=takes
    )


_SLOTS = 2
"""Buffers in use at a time: FSDP2 gathers the next weights while it copies one buffer out."""
_ALIGNED = 4096


def gather(
    memory: Any, outputs: Sequence[Tensor], offsets: Sequence[int], stride: int, rank: int
) -> None:
    """Fill each of ``outputs`` [ranks, count], but for the row of ``rank``, from the ``memory`` of
    all ranks.

    A rank has its share of an output at the output's offset + ``stride`` · rank, in bytes.
    ``memory`` is the handle of symmetric memory that a rendezvous returns.
    """
    ranks = len(outputs[0])
    memory.barrier()
    for peer in ((rank + step) % ranks for step in range(1, ranks)):
        for output, offset in zip(outputs, offsets, strict=True):
            at = (offset + stride * peer) // output.itemsize
            output[peer].copy_(memory.get_buffer(peer, (output.shape[1],), output.dtype, at))
    # Nobody overwrites what a peer still reads.
    memory.barrier()


def reduce(memory: Any, output: Tensor, dtype: torch.dtype, rank: int, ranks: int) -> None:
    """Write the sum of what all ranks have for the share of ``rank``, in ``dtype``, to ``output``
    [count].
    """
    count = output.numel()
    shares = torch.empty(ranks, count, dtype=dtype, device=output.device)
    memory.barrier()
    for peer in ((rank + step) % ranks for step in range(ranks)):
        shares[peer].copy_(memory.get_buffer(peer, (count,), dtype, rank * count))
    memory.barrier()
    sum_of_ranks(shares, output)


class Buffers:
    """Stands for the handle of symmetric memory, with the buffers of all ranks in one process."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype, offset: int) -> Tensor:
        """Return a part of one buffer; ``offset`` is in numbers."""
        return self.buffers[rank].view(dtype)[offset : offset + sizes[0]]

    def barrier(self) -> None:
        """Wait for all GPUs."""
        for buffer in self.buffers if self.buffers[0].is_cuda else ():
            torch.cuda.synchronize(buffer.device)


class _Collective:
    """Slots in symmetric memory, which grows in the first step. Ranks ask for the same sizes."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._slot = 0
        self._size = 0
        self._buffer: Any = None
        self._handle: Any = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the buffer for the next call."""
        needed = math.prod(size) * dtype.itemsize
        if needed > self._size:
            torch.cuda.synchronize(device)
            self._buffer = self._handle = None
            self._size = math.ceil(needed / _ALIGNED) * _ALIGNED
            # Only copies are used, and some drivers refuse to create the objects for multicast.
            os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
            self._buffer = symmetric.empty(
                self._size * self._slots, dtype=torch.uint8, device=device
            )
            # It is filled with zeros on the default stream, for which no other stream waits.
            # Without this, zeros can replace what another stream copies into it.
            torch.cuda.synchronize(device)
        self._slot = (self._slot + 1) % self._slots
        start = self._slot * self._size
        part: Tensor = self._buffer[start : start + needed].view(dtype)
        return part

    def memory(self, group: dist.ProcessGroup) -> Any:
        """Return the handle of all ranks' buffers. The first call exchanges their addresses."""
        if self._handle is None:
            self._handle = symmetric.rendezvous(self._buffer, group.group_name)
            # The addresses are copied to the GPU on the default stream, for which no other stream
            # waits. Without this, a barrier can read what their memory held before.
            torch.cuda.synchronize(self._buffer.device)
        return self._handle


class PeerGather(_Collective):
    """FSDP2's all-gather: ``torch.distributed.fsdp``'s protocol of ``set_custom_all_gather``."""

    def __init__(self) -> None:
        super().__init__(_SLOTS)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather; ``input_tensor`` is this rank's part of ``output_tensor``."""
        share = input_tensor.numel() * input_tensor.itemsize
        self._gather([output_tensor.view(group.size(), -1)], [0], share, group)

    def _gather(
        self,
        outputs: Sequence[Tensor],
        offsets: Sequence[int],
        stride: int,
        group: dist.ProcessGroup,
    ) -> None:
        CALLS["peer_gather"] += 1
        start = self._slot * self._size
        gather(self.memory(group), outputs, [start + at for at in offsets], stride, group.rank())

    def fill(
        self, params: Sequence[Any], group: dist.ProcessGroup, copying: Any, stream: Any
    ) -> torch.Event:
        """Gather FSDP2's ``params`` into their own memory on ``stream``, after the casts on
        ``copying``.
        """
        shards = [param._sharded_param_data for param in params]
        ranks = group.size()
        sizes = [shard.numel() for shard in shards]
        kind = params[0].param_dtype
        device = shards[0].device
        with torch.cuda.stream(copying):
            own = self.allocate((sum(sizes),), dtype=kind, device=device).split(sizes)
            torch._foreach_copy_(own, shards)
        if not params[0].all_gather_outputs:
            for param, size in zip(params, sizes, strict=True):
                param.init_all_gather_outputs([size], [kind], ranks, device)
                param.gathered_in_place = True
            # What had this memory before is over then.
            stream.wait_stream(torch.cuda.current_stream())
        stream.wait_stream(copying)
        with torch.cuda.stream(stream):
            outputs = [param.all_gather_outputs[0].view(ranks, -1) for param in params]
            torch._foreach_copy_([output[group.rank()] for output in outputs], own)
            starts = [at * kind.itemsize for at in accumulate(sizes[:-1], initial=0)]
            self._gather(outputs, starts, 0, group)
            event: torch.Event = stream.record_event()
        return event


class PeerReduce(_Collective):
    """FSDP2's reduce-scatter: ``torch.distributed.fsdp``'s protocol of
    ``set_custom_reduce_scatter``.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._for_output = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the buffer of the gradients, which is BF16 whatever ``dtype`` is, then that of
        their sum.
        """
        self._for_output = not self._for_output
        if self._for_output:
            return torch.empty(*size, dtype=dtype, device=device)
        return super().allocate(size, dtype=torch.bfloat16, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add up the gradients of all ranks. Raises RuntimeError for any other operation than a
        sum.
        """
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(f"peer-copies cannot reduce by {op}")
        CALLS["peer_reduce"] += 1
        reduce(self.memory(group), output_tensor, input_tensor.dtype, group.rank(), group.size())


def attach(parts: Iterable[torch.nn.Module], *, kept: bool) -> None:
    """Let all FSDP2 modules of ``parts`` gather weights and reduce gradients by copies.

    With ``kept``, no module frees its weights before the backward pass. Then they have memory for
    the whole run, and are gathered into it. Raises SystemExit if the ranks cannot share memory.
    """
    gathering = PeerGather()
    reducing = PeerReduce()
    try:
        gathering.allocate(
            (1,), dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device())
        )
        gathering.memory(dist.group.WORLD)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise SystemExit(
            f"peer-copies: the ranks cannot share memory: {reason}; --turbo off trains without it"
        ) from error
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gathering)
            module.set_custom_reduce_scatter(reducing)
            # FSDP2 divides the sum instead, where NCCL would multiply each addend.
            module.set_force_sum_reduction_for_comms(True)
    if kept:
        _fill_in_place()


def _fill_in_place() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

    def foreach_all_gather(
        params: Any, group: Any, later: bool, copying: Any, stream: Any, device: Any, gathering: Any
    ) -> Any:
        if any(
            param.fsdp_placement.dim or hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
            for param in params
        ):
            return from_buffer(params, group, later, copying, stream, device, gathering)
        return AllGatherResult(
            params[0]._sharded_param_data,
            gathering.fill(params, group, copying, stream),
            None,
            [],
            [],
            [],
        )

    def foreach_all_gather_copy_out(result: Any, params: Any, group: Any) -> None:
        if result.param_all_gather_input_numels:
            copy_out(result, params, group)
        else:
            torch.cuda.current_stream().wait_event(result.all_gather_event)

    def free_unsharded_param(self: Any) -> None:
        if not getattr(self, "gathered_in_place", False):
            free(self)

    takes = (
        "fsdp_params, group, async_op, all_gather_copy_in_stream, all_gather_stream, "
        "device, all_gather_comm"
    )
    from_buffer = replace(
        groups, "foreach_all_gather", torch.no_grad()(foreach_all_gather), takes=takes
    )
    takes = "all_gather_result, fsdp_params, group"
    copy_out = replace(
        groups, "foreach_all_gather_copy_out", foreach_all_gather_copy_out, takes=takes
    )
    free = replace(groups.FSDPParam, "free_unsharded_param", free_unsharded_param, takes="self")
