"""The table of GPU generations, ``generations.yaml``, and queries that never guess."""

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
        names: list[str] = []
        device_ids: list[str] = []
        for index, generation in enumerate(self.generations):
            names += map(plain_name, generation.names)
            device_ids += generation.device_ids
            _once(f"variable of {generation.name}", map(_name_of, self.of(generation)))
            self._require_peaks(index, generation)
        _once("architecture", self._archs)
        _once("generation", map(_name_of, self.generations))
        _once("product name", names)
        _once("device id", device_ids)
        self._require_targets()
        self._require_variables()

    @property
    def _archs(self) -> list[str]:
        return [arch.arch for arch in self.archs]

    def arch_of(self, generation: Generation) -> Arch:
        """Return the architecture of ``generation``."""
        return self.archs[self._archs.index(generation.arch)]

    def _require_peaks(self, index: int, generation: Generation) -> None:
        if generation.arch not in self._archs:
            message = f"{generation.name}: there is no architecture {generation.arch!r}"
            raise WrongValue(message, "generations", index, "arch")
        needed = self.arch_of(generation).dtypes
        dtypes = [peak.dtype for peak in generation.peaks]
        if sorted(dtypes) != sorted(needed):
            raise WrongValue(
                f"{generation.name} needs one peak for each of {', '.join(needed)}, "
                f"not {', '.join(dtypes)}",
                "generations",
                index,
                "peaks",
            )

    def _require_targets(self) -> None:
        targets = {*self._archs, *map(_name_of, self.generations)}
        for index, variable in enumerate(self.environment):
            for target in variable.for_:
                if target not in targets:
                    message = (
                        f"{variable.name} is for {target!r}, which is neither architecture nor "
                        "generation"
                    )
                    raise WrongValue(message, "environment", index, "for")

    def _require_variables(self) -> None:
        # Otherwise the image of a new GPU would silently lack a variable that others have.
        archs_with: dict[str, set[str]] = {}
        for generation in self.generations:
            for variable in self.of(generation):
                archs_with.setdefault(variable.name, set()).add(generation.arch)
        for index, generation in enumerate(self.generations):
            if generation.no_image or self.arch_of(generation).vendor != "amd":
                continue
            lacking = set(archs_with).difference(map(_name_of, self.of(generation)))
            # A variable of one other architecture alone may be about that architecture.
            for name, archs in archs_with.items():
                if len(archs) == 1 and generation.arch not in archs:
                    lacking.discard(name)
            if lacking:
                raise WrongValue(
                    f"{generation.name} has no entry for the environment variables "
                    f"{', '.join(sorted(lacking))} (`value: null` leaves one unset)",
                    "generations",
                    index,
                )

    @property
    def imaged(self) -> tuple[str, ...]:
        """The names of the generations that images are built for."""
        return tuple(generation.name for generation in self.generations if not generation.no_image)

    def of(self, generation: Generation) -> tuple[Variable, ...]:
        """Return the variables for ``generation``, set or left unset, in the order of the table."""
        targets = {generation.name, generation.arch}
        return tuple(row for row in self.environment if not targets.isdisjoint(row.for_))


def _name_of(row: Generation | Variable) -> str:
    return row.name


def _once(kind: str, words: Iterable[str]) -> None:
    for word, count in Counter(words).items():
        if count > 1:
            raise ValueError(f"{kind} {word!r} is a duplicate")


class UnknownPeak(PrimusError):
    """MFU cannot be computed, because the GPU or its peak is unknown."""


@cache
def load_table() -> Table:
    """Return the table that ships with this package."""
    return build(Table, read(TABLE_FILE, f"gpus/{TABLE_FILE.name}"))


@cache
def _generations() -> dict[str, Generation]:
    return {generation.name: generation for generation in load_table().generations}


def generation(name: str) -> Generation:
    """Return the generation of target ``name``, such as ``mi300x``; InputError if there is none."""
    if name not in _generations():
        hint = did_you_mean(name, _generations()) or "known: " + ", ".join(_generations())
        raise InputError(f"no GPU generation is called {name!r}", hint=hint)
    return _generations()[name]


def by_product_name(text: str) -> Generation | None:
    """Return the generation that a tool calls ``text``, or None.

    Only full names match: "NVIDIA H200 NVL" and "AMD Instinct MI300X HF" are not the products whose
    names they begin with.
    """
    for gpu in load_table().generations:
        if plain_name(text) in map(plain_name, gpu.names):
            return gpu
    return None


def arch_of(gpu: Generation) -> Arch:
    """Return the architecture of ``gpu``."""
    return load_table().arch_of(gpu)


def words_for(name: str) -> frozenset[str]:
    """Return the words that stand for a target in conditions.

    They are its name and, for a GPU, its architecture and its vendor.
    """
    gpu = _generations().get(name)
    if gpu is None:
        return frozenset({name})
    return frozenset({name, gpu.arch, arch_of(gpu).vendor})


def peak(gpu: Generation, dtype: Dtype) -> tuple[float, str] | None:
    """Return the peak in TFLOP/s and its source.

    None if the GPU does not support ``dtype``, or if no source states it.
    """
    for row in gpu.peaks:
        if row.dtype == dtype and row.tflops is not None:
            return row.tflops, row.source
    return None


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
    """Return the variables that an image for ``target`` sets, sorted by name.

    Raises InputError for an unknown generation.
    """
    variables = [row for row in load_table().of(generation(target)) if row.value is not None]
    return tuple(sorted(variables, key=lambda row: row.name))
