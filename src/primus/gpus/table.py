"""Queries of the table of GPU generations. Values that are not in the table are never guessed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from primus.errors import InputError, PrimusError, did_you_mean
from primus.gpus.generation import Arch, Dtype, Generation, Peak, Table, Variable, plain_name
from primus.schema import build
from primus.yamlfile import read

TABLE_FILE = Path(__file__).with_name("generations.yaml")


class UnknownPeak(PrimusError):
    """MFU cannot be computed, because the GPU or its peak is unknown."""


@cache
def load_table(path: Path = TABLE_FILE) -> Table:
    """The table that ships with this package, or that of another file in its form."""
    return build(Table, read(path, f"{path.parent.name}/{path.name}"))


def generation(name: str, table: Table | None = None) -> Generation:
    """Return the generation of target ``name``, such as ``mi300x``. Raises InputError for an unknown name."""
    generations = {g.name: g for g in (table or load_table()).generations}
    if name not in generations:
        hint = did_you_mean(name, generations) or "known: " + ", ".join(generations)
        raise InputError(f"no GPU generation is called {name!r}", hint=hint)
    return generations[name]


def by_product_name(text: str) -> Generation | None:
    """Return the generation that a tool calls ``text``, or None.

    Only full names match: "NVIDIA H200 NVL" and "AMD Instinct MI300X HF" are not the products whose names they begin
    with.
    """
    name = plain_name(text)
    return next((g for g in load_table().generations if name in map(plain_name, g.names)), None)


def arch_of(gpu: Generation) -> Arch:
    """Return the architecture of ``gpu``."""
    return next(a for a in load_table().archs if a.arch == gpu.arch)


def peak(gpu: Generation, dtype: Dtype) -> Peak | None:
    """Return the published peak, or None if the GPU does not support ``dtype`` or no source states a figure."""
    return next((p for p in gpu.peaks if p.dtype == dtype and p.tflops is not None), None)


def peak_for_mfu(text: str, dtype: Dtype) -> tuple[Generation, float, str]:
    """Return the generation that a tool calls ``text``, and its peak in TFLOP/s with the source.

    Raises UnknownPeak, whose message can be printed instead of an MFU, if the GPU or its peak is unknown.
    """
    if (gpu := by_product_name(text)) is None:
        raise UnknownPeak(f"no MFU: the peak of {text!r} is unknown")
    if dtype not in arch_of(gpu).dtypes:
        raise UnknownPeak(f"no MFU: {gpu.title} does not compute {dtype}")
    published = peak(gpu, dtype)
    if published is None or published.tflops is None:
        raise UnknownPeak(f"no MFU: no source states the {dtype} peak of {gpu.title}")
    return gpu, published.tflops, published.source


def environment(target: str, table: Table | None = None) -> tuple[Variable, ...]:
    """Return the variables that an image for ``target`` sets, sorted by name. InputError for an unknown generation."""
    table = table or load_table()
    variables = (v for v in table.of(generation(target, table)) if v.value is not None)
    return tuple(sorted(variables, key=lambda v: v.name))
