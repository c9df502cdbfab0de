"""The table of GPU generations: the format of ``generations.yaml`` (see fields.yaml), and queries
that never guess.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from primus_images.errors import InputError, PrimusError, did_you_mean
from primus_images.schema import WrongValue, build
from primus_images.yamlfile import read

TABLE_FILE = Path(__file__).with_name("generations.yaml")

Dtype = Literal["bf16", "fp8", "mxfp8", "mxfp6", "mxfp4"]
MxDtype = Literal["mxfp8", "mxfp6", "mxfp4"]

_ALWAYS: tuple[Dtype, ...] = ("bf16", "fp8")


def plain_name(text: str) -> str:
    """Normalize a product name: case, blanks and trade marks, which tools spell differently."""
    return " ".join(re.sub(r"[™®]|\((?:tm|r)\)", " ", text.casefold()).split())


@dataclass(frozen=True, kw_only=True)
class Arch:
    """An architecture that compilers target. Several products can share it."""

    arch: str
    vendor: Literal["amd", "nvidia"]
    fp8: Literal["e4m3fnuz", "e4m3fn"]
    fp8_source: str
    mx: tuple[MxDtype, ...]
    mx_source: str
    others: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.arch.startswith("gfx") != (self.vendor == "amd"):
            raise ValueError(f"{self.arch} is not an architecture of {self.vendor}")

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """The dtypes used in training that its matrix units support."""
        return (*_ALWAYS, *self.mx)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The dense peak of the matrix units, as published by the vendor."""

    dtype: Dtype
    tflops: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of the GPU."""

    gb: float
    gib: float
    tb_s: float


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One product that recipes can be resolved for."""

    name: str
    title: str
    arch: str
    names: tuple[str, ...]
    device_ids: tuple[str, ...]
    compute_units: int
    memory: Memory
    source: str
    peaks: tuple[Peak, ...]
    notes: tuple[str, ...] = ()
    no_image: str | None = None


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The value of a variable in one source."""

    by: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable: its value, the GPUs that it is for, and the reason."""

    name: str
    value: str | None
    for_: tuple[str, ...]
    why: str
    stated: tuple[Statement, ...]
    choice: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """All architectures, GPU generations and environment variables."""

    archs: tuple[Arch, ...]
    generations: tuple[Generation, ...]
    environment: tuple[Variable, ...]

    def __post_init__(self) -> None:
        _once("architecture", (a.arch for a in self.archs))
        _once("generation", (g.name for g in self.generations))
        _once("product name", (plain_name(n) for g in self.generations for n in g.names))
        _once("device id", (i for g in self.generations for i in g.device_ids))
        archs = {a.arch: a for a in self.archs}
        for index, generation in enumerate(self.generations):
            if generation.arch not in archs:
                message = f"{generation.name}: there is no architecture {generation.arch!r}"
                raise WrongValue(message, "generations", index, "arch")
            computed = archs[generation.arch].dtypes
            rows = tuple(p.dtype for p in generation.peaks)
            if sorted(rows) != sorted(computed):
                message = (
                    f"{generation.name} needs one peak for each of {', '.join(computed)}, "
                    f"not {', '.join(rows)}"
                )
                raise WrongValue(message, "generations", index, "peaks")
        targets = {*archs, *(g.name for g in self.generations)}
        for place, variable in enumerate(self.environment):
            strange = [word for word in variable.for_ if word not in targets]
            if strange:
                message = (
                    f"{variable.name} is for {strange[0]!r}, which is neither "
                    "architecture nor generation"
                )
                raise WrongValue(message, "environment", place, "for")
        for generation in self.generations:
            _once(f"variable of {generation.name}", (v.name for v in self.of(generation)))
        self._require_variables()

    def _require_variables(self) -> None:
        # Otherwise the images of a new architecture would silently lack a variable that others
        # have.
        imaged = {g.arch for g in self.generations if not g.no_image}
        archs = {a.arch: a.arch for a in self.archs if a.vendor == "amd"}
        of = archs | {g.name: g.arch for g in self.generations if g.arch in archs}
        stated: dict[str, set[str]] = {}
        for variable in self.environment:
            stated.setdefault(variable.name, set()).update(
                of[word] for word in variable.for_ if word in of
            )
        for index, generation in enumerate(self.generations):
            has = {variable.name for variable in self.of(generation)}
            lacking = [
                name
                for name, archs_of in stated.items()
                if generation.arch in archs_of and name not in has
            ]
            if lacking:
                message = (
                    f"{generation.name} has no entry for {', '.join(lacking)}, which "
                    f"other {generation.arch} have"
                )
                raise WrongValue(
                    message + " (`value: null` leaves one unset)", "generations", index
                )
        for index, arch in enumerate(self.archs):
            lacking = [
                name
                for name, archs_of in stated.items()
                if len(archs_of) > 1 and arch.arch not in archs_of
            ]
            if arch.vendor == "amd" and arch.arch in imaged and lacking:
                message = (
                    f"{arch.arch} has no entry for the environment variables {', '.join(lacking)}"
                )
                raise WrongValue(message + " (`value: null` leaves one unset)", "archs", index)

    @property
    def imaged(self) -> tuple[str, ...]:
        """The names of the generations that images are built for."""
        return tuple(generation.name for generation in self.generations if not generation.no_image)

    def of(self, generation: Generation) -> tuple[Variable, ...]:
        """Return the variables for ``generation``, set or left unset, in the order of the table."""
        mine = {generation.name, generation.arch}
        return tuple(v for v in self.environment if mine & set(v.for_))


def _once(what: str, words: Iterable[str]) -> None:
    for word, count in Counter(words).items():
        if count > 1:
            raise ValueError(f"{what} {word!r} is a duplicate")


class UnknownPeak(PrimusError):
    """MFU cannot be computed, because the GPU or its peak is unknown."""


@cache
def load_table() -> Table:
    """Return the table that ships with this package."""
    return build(Table, read(TABLE_FILE, f"gpus/{TABLE_FILE.name}"))


def generation(name: str) -> Generation:
    """Return the generation of target ``name``, such as ``mi300x``. Raises InputError for an
    unknown name.
    """
    generations = {g.name: g for g in load_table().generations}
    if name not in generations:
        hint = did_you_mean(name, generations) or "known: " + ", ".join(generations)
        raise InputError(f"no GPU generation is called {name!r}", hint=hint)
    return generations[name]


def by_product_name(text: str) -> Generation | None:
    """Return the generation that a tool calls ``text``, or None.

    Only full names match: "NVIDIA H200 NVL" and "AMD Instinct MI300X HF" are not the products whose
    names they begin with.
    """
    name = plain_name(text)
    return next((g for g in load_table().generations if name in map(plain_name, g.names)), None)


def arch_of(gpu: Generation) -> Arch:
    """Return the architecture of ``gpu``."""
    return next(a for a in load_table().archs if a.arch == gpu.arch)


def words_for(name: str) -> frozenset[str]:
    """Return the words that stand for a target in conditions: its name and, for a GPU, architecture
    and vendor.
    """
    gpu = next((row for row in load_table().generations if row.name == name), None)
    return frozenset({name, *((gpu.arch, arch_of(gpu).vendor) if gpu else ())})


def peak(gpu: Generation, dtype: Dtype) -> tuple[float, str] | None:
    """Return the peak in TFLOP/s and its source; None if the GPU does not support ``dtype`` or no
    source states it.
    """
    return next(
        ((p.tflops, p.source) for p in gpu.peaks if p.dtype == dtype and p.tflops is not None), None
    )


def peak_for_mfu(text: str, dtype: Dtype) -> tuple[Generation, float, str]:
    """Return the generation that a tool calls ``text``, and its peak in TFLOP/s with the source.

    Raises UnknownPeak, whose message can be printed instead of an MFU, if the GPU or its peak is
    unknown.
    """
    gpu = by_product_name(text)
    if gpu is None:
        raise UnknownPeak(f"no MFU: the peak of {text!r} is unknown")
    if dtype not in arch_of(gpu).dtypes:
        raise UnknownPeak(f"no MFU: {gpu.title} does not compute {dtype}")
    published = peak(gpu, dtype)
    if published is None:
        raise UnknownPeak(f"no MFU: no source states the {dtype} peak of {gpu.title}")
    return gpu, *published


def environment(target: str) -> tuple[Variable, ...]:
    """Return the variables that an image for ``target`` sets, sorted by name. InputError for an
    unknown generation.
    """
    variables = (v for v in load_table().of(generation(target)) if v.value is not None)
    return tuple(sorted(variables, key=lambda v: v.name))
