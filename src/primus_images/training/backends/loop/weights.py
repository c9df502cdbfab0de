"""The weights of a sharded model: each rank draws them from the seed, or reads them from files.

The weights are the same for any number of ranks.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from primus_images.patch import replace
from primus_images.recipes.tensors import canonical_name, tensor_files

_STD = 0.02
_ALL = 2**62

# A function of (first, last), which returns rows first … last − 1 of a weight.
Rows = Callable[[int, int], Tensor]


@contextmanager
def empty() -> Iterator[None]:
    """Create models without memory for parameters. Buffers are created as usual.

    accelerate's ``init_empty_weights`` creates tied parameters anew, which unties them.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            trained = parameter.requires_grad
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=trained)
        register(module, name, parameter)

    register = replace(nn.Module, "register_parameter", on_meta, takes="self, name, param")
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate a sharded model on ``device``. Parameters are undefined; buffers keep their values.

    Parameters that are tied stay tied, also those that FSDP does not know: torch creates each name
    of them anew.
    """
    tied = _names_of_tied(model)
    model._apply(partial(_allocated, device=device))
    for first, name in tied:
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, model.get_parameter(first))


def _names_of_tied(model: nn.Module) -> list[tuple[str, str]]:
    """Return the first name of each tied parameter with each of its other names."""
    tied = []
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(parameter, name)
        if first != name:
            tied.append((first, name))
    return tied


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device)
    return tensor.to(device)


@torch.no_grad()
def fill(parameter: Tensor, rows: Rows) -> None:
    """Set this rank's share of ``parameter``, from only those ``rows`` that this rank needs."""
    if parameter.ndim == 0:
        parameter.copy_(rows(0, 1))
        return
    local: Any = parameter
    shape: Sequence[int] = parameter.shape
    offset: Sequence[int] = [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    if local.numel() == 0:
        return
    columns = []
    for first_column, count in zip(offset[1:], shape[1:], strict=True):
        columns.append(slice(first_column, first_column + count))
    local.copy_(rows(offset[0], offset[0] + shape[0])[(..., *columns)])


def draw_all(
    model: nn.Module, seed: int, outer: tuple[str, ...] = (), zero: tuple[str, ...] = ()
) -> None:
    """Initialize every weight of a sharded model: from the seed, or as 0 those of ``zero``."""
    for name, parameter in model.named_parameters():
        if name in zero:
            fill(parameter, constant(parameter, 0.0))
        else:
            draw_one(name, parameter, seed, outer=name in outer)


def draw_one(
    name: str, parameter: Tensor, seed: int, *, outer: bool = False, norm: float = 1.0
) -> None:
    """Initialize a weight.

    Matrices are drawn from N(0, 0.02²). Factors of norms get the value ``norm``, and others 0. With
    ``outer`` (embeddings and output layer), draw from N(0, 1 ÷ 4h) for width h: the first loss is
    ln(vocabulary).
    """
    if name.endswith(("bias", ".sinks")):
        rows = constant(parameter, 0.0)
    elif parameter.ndim == 1:
        rows = constant(parameter, norm)
    elif outer:
        rows = normal(name, parameter, seed, 0.5 / math.sqrt(parameter.shape[-1]))
    else:
        rows = normal(name, parameter, seed, _STD)
    fill(parameter, rows)


def constant(parameter: Tensor, value: float) -> Rows:
    """Return rows with a single value."""

    def rows(first: int, last: int) -> Tensor:
        return torch.full((last - first, *parameter.shape[1:]), value, device=parameter.device)

    return rows


def normal(name: str, parameter: Tensor, seed: int, std: float) -> Rows:
    """Return rows drawn from N(0, ``std``²)."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()

    def rows(first: int, last: int) -> Tensor:
        generator = torch.Generator(parameter.device)
        generator.manual_seed(int.from_bytes(digest[:7]))
        whole = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
        return whole.normal_(0, std, generator=generator)[first:last]

    return rows


class Files:
    """The safetensors files of a folder, read by rows. Raises InputError without files.

    Weights have the names of transformers' model, with a matrix per expert.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._places = {}
        for file in tensor_files(folder):
            handle = safe_open(file, framework="pt")
            names = handle.keys()
            for name in names:
                self._places[canonical_name(name)] = (handle, name)

    def __contains__(self, name: str) -> bool:
        return canonical_name(name) in self._places

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name in the files."""
        for handle, name in self._places.values():
            yield name, handle.get_tensor(name)

    def rows_of(self, name: str) -> Rows:
        """Return the rows of one weight. Raises SystemExit if the files do not contain it."""
        if name not in self:
            raise SystemExit(f"the weights lack {name}")
        handle, name_in_file = self._places[canonical_name(name)]
        part = handle.get_slice(name_in_file)
        if not part.get_shape():  # a single number has no rows
            return lambda _first, _last: handle.get_tensor(name_in_file)
        return lambda first, last: part[first:last]

    def whole(self, name: str) -> Tensor:
        """Return one weight completely. Raises SystemExit if the files do not contain it."""
        return self.rows_of(name)(0, _ALL)
