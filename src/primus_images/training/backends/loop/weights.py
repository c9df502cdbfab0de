"""The weights of a sharded model, drawn from the seed or read from files by each rank, for any
number of ranks.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from primus_images.patch import replace
from primus_images.recipes.tensors import canonical_name, tensor_files

_STD = 0.02
_ALL = 2**62

# A function of (first, last), which returns rows first … last − 1 of a weight.
Rows = Callable[[int, int], Tensor]


@contextmanager
def empty() -> Iterator[None]:
    """Create models without memory for parameters while the context is open. Buffers are created as
    usual.

    accelerate's ``init_empty_weights`` creates tied parameters anew, which unties them.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    register = replace(nn.Module, "register_parameter", on_meta, takes="self, name, param")
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate a sharded model on ``device``. Parameters are undefined; buffers keep their values."""
    model._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        )
    )


@torch.no_grad()
def fill(parameter: Tensor, rows: Rows) -> None:
    """Set this rank's share of ``parameter`` from ``rows``, requesting only the rows that this rank
    needs.
    """
    local: Any = parameter
    first = 0
    count = 1
    if parameter.ndim:
        count = parameter.shape[0]
    columns: tuple[slice, ...] = ()
    if hasattr(parameter, "to_local"):
        local = parameter.to_local()
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        first = offset[0]
        count = shape[0]
        columns = tuple(
            slice(start, start + size) for start, size in zip(offset[1:], shape[1:], strict=True)
        )
    if local.numel():
        local.copy_(rows(first, first + count)[(..., *columns)])


def draw_all(
    model: nn.Module, seed: int, outer: tuple[str, ...] = (), zero: tuple[str, ...] = ()
) -> None:
    """Initialize every weight of a sharded model: those of ``zero`` with 0, the others as
    :func:`draw_one` does.
    """
    for name, parameter in model.named_parameters():
        if name in zero:
            fill(parameter, constant(parameter, 0.0))
        else:
            draw_one(name, parameter, seed, outer=name in outer)


def draw_one(
    name: str, parameter: Tensor, seed: int, *, outer: bool = False, norm: float = 1.0
) -> None:
    """Initialize a weight: matrices from N(0, 0.02²), factors of norms with ``norm``, others with
    0.

    With ``outer`` (embeddings and output layer), draw from N(0, 1 ÷ 4h) for width h: the first loss
    is ln(vocabulary).
    """
    if name.endswith(("bias", ".sinks")):
        fill(parameter, constant(parameter, 0.0))
    elif parameter.ndim == 1:
        fill(parameter, constant(parameter, norm))
    else:
        fill(
            parameter,
            normal(name, parameter, seed, 0.5 / math.sqrt(parameter.shape[-1]) if outer else _STD),
        )


def constant(parameter: Tensor, value: float) -> Rows:
    """Return rows with a single value."""
    return lambda first, last: torch.full(
        (last - first, *parameter.shape[1:]), value, device=parameter.device
    )


def normal(name: str, parameter: Tensor, seed: int, std: float) -> Rows:
    """Return rows drawn from N(0, ``std``²)."""

    def rows(first: int, last: int) -> Tensor:
        generator = torch.Generator(parameter.device)
        generator.manual_seed(
            int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
        )
        whole = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
        return whole.normal_(0, std, generator=generator)[first:last]

    return rows


class Files:
    """The safetensors files of a folder, read by rows and by the names that weights have in
    transformers' model, with a matrix per expert. InputError without files.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._open = {}
        for file in tensor_files(folder):
            handle = safe_open(file, framework="pt")
            self._open.update({canonical_name(name): (handle, name) for name in handle.keys()})

    def __contains__(self, name: str) -> bool:
        return canonical_name(name) in self._open

    def rows_of(self, name: str) -> Rows:
        """Return the rows of one weight. Raises SystemExit if the files do not contain it."""
        if name not in self:
            raise SystemExit(f"the weights lack {name}")
        handle, written = self._open[canonical_name(name)]
        part = handle.get_slice(written)
        return lambda first, last: part[first:last]

    def whole(self, name: str) -> Tensor:
        """Return one weight completely. Raises SystemExit if the files do not contain it."""
        return self.rows_of(name)(0, _ALL)
