"""Questions to the one table of GPU generations. What the table does not know is never guessed."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

from primus.errors import InputError, PrimusError, did_you_mean
from primus.gpus.generation import Arch, Dtype, Generation, Peak, Table, Variable, plain_name
from primus.schema import build
from primus.yamlfile import read

__all__ = [
    "TABLE_FILE",
    "UnknownPeak",
    "arch_of",
    "by_device_id",
    "by_gfx",
    "by_product_name",
    "environment",
    "fp8_dtype",
    "generation",
    "left_unset",
    "load_table",
    "mfu",
    "mx_supported",
    "peak",
]

TABLE_FILE = Path(__file__).with_name("generations.yaml")


class UnknownPeak(PrimusError):
    """Utilisation cannot be told: the GPU or its peak is not known."""


@cache
def load_table(path: Path = TABLE_FILE) -> Table:
    """The table that ships with this package, or that of another file in its form."""
    return build(Table, read(path, f"{path.parent.name}/{path.name}"))


def generation(name: str, table: Table | None = None) -> Generation:
    """The generation of target ``name``, such as ``mi300x``. Raises InputError for any other word."""
    known = {g.name: g for g in (table or load_table()).generations}
    if name not in known:
        hint = did_you_mean(name, known) or "known: " + ", ".join(known)
        raise InputError(f"no GPU generation is called {name!r}", hint=hint)
    return known[name]


def by_product_name(text: str) -> Generation | None:
    """The generation that a tool calls ``text``, or None.

    Only whole names count: "NVIDIA H200 NVL" and "AMD Instinct MI300X HF" are other products than the ones whose
    names they begin with.
    """
    wanted = plain_name(text)
    return next((g for g in load_table().generations if wanted in map(plain_name, g.names)), None)


def by_device_id(device_id: int) -> Generation | None:
    """The generation with this PCI device id, or None."""
    return next((g for g in load_table().generations if f"0x{device_id:04x}" in g.device_ids), None)


def by_gfx(arch: str) -> tuple[Generation, ...]:
    """Every generation of the table that has ``arch`` (``gfx942``, or torch's ``gfx942:sramecc+:xnack-``).

    An architecture never tells a product, not even where this is one generation: see ``Arch.others``.
    """
    wanted = arch.partition(":")[0]
    return tuple(g for g in load_table().generations if g.arch == wanted)


def arch_of(gpu: Generation) -> Arch:
    """The architecture of ``gpu``."""
    return next(a for a in load_table().archs if a.arch == gpu.arch)


def fp8_dtype(gpu: Generation) -> str:
    """``e4m3fnuz`` or ``e4m3fn``."""
    return arch_of(gpu).fp8


def mx_supported(gpu: Generation) -> bool:
    """Whether its matrix units compute block-scaled (MX) formats."""
    return bool(arch_of(gpu).mx)


def peak(gpu: Generation, dtype: Dtype) -> Peak | None:
    """The published peak; None when the GPU does not compute ``dtype`` or nobody states a figure."""
    return next((p for p in gpu.peaks if p.dtype == dtype and p.tflops is not None), None)


def mfu(tflops: float, gpu: Generation | str, dtype: Dtype) -> float:
    """Model FLOP/s utilisation, 0.5 for a half, of a GPU or of a product's name as a tool prints it.

    Raises UnknownPeak, with the sentence to print instead, when the GPU or its peak is not known.
    """
    if not (math.isfinite(tflops) and tflops >= 0):
        raise ValueError(f"{tflops} TFLOP/s is no throughput")
    known = by_product_name(gpu) if isinstance(gpu, str) else gpu
    if known is None:
        raise UnknownPeak(
            f"no MFU: the peak of {gpu!r} is not known",
            hint="known: " + ", ".join(g.title for g in load_table().generations),
        )
    if dtype not in arch_of(known).dtypes:
        raise UnknownPeak(f"no MFU: {known.title} does not compute {dtype}")
    published = peak(known, dtype)
    if published is None or published.tflops is None:
        raise UnknownPeak(f"no MFU: no source states the {dtype} peak of {known.title}")
    return tflops / published.tflops


def environment(target: str, table: Table | None = None) -> tuple[Variable, ...]:
    """The variables that an image for ``target`` carries, by name. Raises InputError for an unknown generation."""
    return tuple(v for v in _of(target, table) if v.value is not None)


def left_unset(target: str, table: Table | None = None) -> tuple[Variable, ...]:
    """The variables that such an image leaves unset on purpose, by name."""
    return tuple(v for v in _of(target, table) if v.value is None)


def _of(target: str, table: Table | None) -> list[Variable]:
    table = table or load_table()
    return sorted(table.of(generation(target, table)), key=lambda v: v.name)
