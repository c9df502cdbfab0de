"""The catalogue of kernels: name, component, requirements, and the shapes to compile each kernel for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from primus.errors import InputError
from primus.schema import build, described
from primus.yamlfile import read

CATALOGUE_FILE = Path(__file__).with_name("catalogue.yaml")

Dtype = Literal["bfloat16", "float32"]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one model that determine block sizes."""

    name: str = described("The model.")
    hidden: int = described("Width of the residual stream.")
    ffn: int = described("Width inside the MLP.")
    heads: int = described("Query heads.")
    kv_heads: int = described("Key and value heads.")
    head_dim: int = described("Values per head.")
    vocab: int = described("Tokens of the vocabulary.")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One autograd function of a library, whose forward and backward kernels are compiled ahead of time."""

    name: str = described("Its name in the catalogue.", pattern=r"[a-z0-9]+(-[a-z0-9]+)*", shape="like liger-rope")
    title: str = described("What it computes.")
    component: str = described("Component of versions.yaml that contains it.")
    entry: str = described("Module and name of the autograd function.", pattern=r"[\w.]+:\w+", shape="MODULE:NAME")
    dtypes: tuple[Dtype, ...] = described("Dtypes to compile it for.")
    needs: str = described("Requirements for its use.")
    excludes: str = described("Features that cannot be used together with it.")
    test: str = described("Its reference in workloads.py: the same computation in plain PyTorch.")
    vendors: tuple[Literal["amd", "nvidia"], ...] = described(
        "Vendors of the GPUs that it is written for.", default=("amd", "nvidia")
    )
    ignored: tuple[int, ...] = described("Targets left out of the loss, one variant each.", default=(0,))
    reductions: tuple[Reduction, ...] = described("How a loss is reduced, one variant each.", default=("mean",))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: a kernel for a shape, micro-batch, sequence length and dtype."""

    kernel: Kernel
    shape: Shape
    batch: int
    sequence: int
    dtype: Dtype
    ignored: int = 0
    reduction: Reduction = "mean"

    @property
    def label(self) -> str:
        """A short description of the call."""
        variant = f", {self.ignored} ignored" if self.ignored else ""
        variant += f", {self.reduction}" if len(self.kernel.reductions) > 1 else ""
        return f"{self.kernel.name} {self.shape.name} {self.batch}×{self.sequence} {self.dtype}{variant}"


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """All kernels, and the shapes to compile them for."""

    batches: tuple[int, ...] = described("Micro-batch sizes.")
    sequences: tuple[int, ...] = described("Sequence lengths.")
    shapes: tuple[Shape, ...] = described("Models.")
    kernels: tuple[Kernel, ...] = described("Kernels.")

    def __post_init__(self) -> None:
        for what, names in (("kernel", [k.name for k in self.kernels]), ("shape", [s.name for s in self.shapes])):
            if twice := sorted({n for n in names if names.count(n) > 1}):
                raise ValueError(f"{what} {twice[0]!r} is a duplicate")

    def of(self, components: Sequence[str], vendor: str) -> tuple[Kernel, ...]:
        """Return the kernels of ``components`` for GPUs of ``vendor``. InputError for a component without any."""
        mine = tuple(k for k in self.kernels if k.component in components and vendor in k.vendors)
        if lacking := [c for c in components if not any(k.component == c for k in mine)]:
            known = ", ".join(dict.fromkeys(k.component for k in self.kernels if vendor in k.vendors))
            raise InputError(
                f"the catalogue has no kernel of {lacking[0]!r} for GPUs of {vendor}",
                hint=f"components with kernels: {known}",
            )
        return mine

    def cases(self, kernels: Sequence[Kernel]) -> Iterator[Case]:
        """Yield every call of ``kernels``, the smallest of each shape first."""
        for kernel in kernels:
            choices = (self.shapes, kernel.dtypes, self.batches, self.sequences, kernel.ignored, kernel.reductions)
            for shape, dtype, batch, sequence, ignored, reduction in product(*choices):
                yield Case(
                    kernel=kernel,
                    shape=shape,
                    batch=batch,
                    sequence=sequence,
                    dtype=dtype,
                    ignored=ignored,
                    reduction=reduction,
                )


def load_catalogue(path: Path = CATALOGUE_FILE) -> Catalogue:
    """Read the catalogue that ships with this package, or another file in the same format."""
    return build(Catalogue, read(path, path.name))
