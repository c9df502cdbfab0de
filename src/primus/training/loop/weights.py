"""The weights of a sharded model: built without memory, drawn from the seed or read from files, each rank its share.

A weight drawn from the seed depends on the seed and its name alone, not on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["Files", "Rows", "constant", "draw_all", "draw_one", "empty", "fill", "materialize", "normal"]

_STD = 0.02
_ALL = 2**62

# Gives rows first … last − 1 of a weight's first dimension.
Rows = Callable[[int, int], torch.Tensor]


@contextmanager
def empty() -> Iterator[None]:
    """Models built inside have parameters without memory; their buffers are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a sharded model memory on ``device``: parameters undefined, buffers as they were."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


@torch.no_grad()
def fill(parameter: torch.Tensor, rows: Rows) -> None:
    """Set this rank's share of ``parameter`` from ``rows``, which is asked for no more than this rank needs."""
    local: Any = parameter
    first, count = 0, parameter.shape[0] if parameter.ndim else 1
    if hasattr(parameter, "to_local"):
        local = parameter.to_local()
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        first, count = offset[0], shape[0]
    if local.numel():
        local.copy_(rows(first, first + count))


def draw_all(model: nn.Module, seed: int, outer: tuple[str, ...] = ()) -> None:
    """Draw every weight of a sharded model; see :func:`draw_one`."""
    for name, parameter in model.named_parameters():
        draw_one(name, parameter, seed, outer=name in outer)


def draw_one(name: str, parameter: torch.Tensor, seed: int, *, outer: bool = False) -> None:
    """Draw a weight: matrices from N(0, 0.02²), factors of norms are 1, biases 0.

    With ``outer`` (embeddings and output layer) from N(0, 1 ÷ 4h): whatever the width h, logits then start near
    N(0, ½²) and the first loss near ln(vocabulary).
    """
    if parameter.ndim == 1:
        fill(parameter, constant(parameter, 0.0 if name.endswith("bias") else 1.0))
    else:
        fill(parameter, normal(name, parameter, seed, 0.5 / math.sqrt(parameter.shape[-1]) if outer else _STD))


def constant(parameter: torch.Tensor, value: float) -> Rows:
    """Rows that hold one value."""
    return lambda first, last: torch.full((last - first, *parameter.shape[1:]), value, device=parameter.device)


def normal(name: str, parameter: torch.Tensor, seed: int, std: float) -> Rows:
    """Rows from N(0, ``std``²)."""

    def rows(first: int, last: int) -> torch.Tensor:
        generator = torch.Generator(parameter.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]))
        whole = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
        return whole.normal_(0, std, generator=generator)[first:last]

    return rows


class Files:
    """The safetensors files of a folder, read by name and rows."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = sorted(folder.glob("*.safetensors.index.json"))
        if index:
            listed: dict[str, str] = json.loads(index[0].read_text(encoding="utf-8"))["weight_map"]
            files = {folder / file for file in listed.values()}
        else:
            files = set(folder.glob("*.safetensors"))
        if not files:
            raise SystemExit(f"{folder} holds no safetensors files")
        self._open = {}
        for file in sorted(files):
            handle = safe_open(file, framework="pt")
            self._open.update(dict.fromkeys(handle.keys(), handle))

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def rows_of(self, name: str) -> Rows:
        """The rows of one weight. SystemExit when the files lack it."""
        if name not in self:
            raise SystemExit(f"the weights lack {name}")
        part = self._open[name].get_slice(name)
        return lambda first, last: part[first:last]

    def whole(self, name: str) -> torch.Tensor:
        """All of one weight. SystemExit when the files lack it."""
        return self.rows_of(name)(0, _ALL)
