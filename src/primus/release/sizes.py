"""Estimating the size of an image without a lock, from published sizes and the layers of its preview."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from primus.errors import InputError
from primus.plan.resolve import ResolvedTarget
from primus.release.gate_record import load_gate_records
from primus.release.markdown import table
from primus.schema import build, described
from primus.yamlfile import read

CHANNEL = "amd"
_FILE = Path(__file__).with_name("sizes.yaml")
_MEASURED = "measured"
Basis = Literal["published", "near", "assumed"]
# Layers of a preview that images of every channel contain, by the beginning of their names.
_SHARED = ("python", "environment", "facts")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A published image of another project that contains everything."""

    image: str = described("Its name.")
    mb: float = described("Compressed size in 10^6 bytes.")
    source: str = described("Where the size stands.")


@dataclass(frozen=True, kw_only=True)
class Size:
    """One known or assumed size."""

    for_: tuple[str, ...] = described("What it is the size of.")
    mb: float = described("Compressed size in 10^6 bytes.")
    basis: Basis = described("published, near or assumed.")
    source: str = described("Where the size stands, or the reason of an assumption.")
    arch: str | None = described("GPU architecture that it is for; every one when left out.", default=None)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """sizes.yaml."""

    whole: Whole = described("An upper bound of everything.")
    sizes: tuple[Size, ...] = described("The sizes.")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One row of an estimate; ``basis`` is that of :class:`Size`, or ``measured``."""

    names: tuple[str, ...]
    mb: float
    basis: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The parts of one image, and its budget in 10^9 bytes."""

    target: str
    arch: str
    parts: tuple[Part, ...]
    budget_gb: float | None

    def gb(self, *bases: str) -> float:
        """Return the size of the parts with one of ``bases``, or of all parts, in 10^9 bytes."""
        return sum(part.mb for part in self.parts if not bases or part.basis in bases) / 1000

    @property
    def text(self) -> str:
        """The estimate in one line."""
        budget = f", its budget is {self.budget_gb:g} GB" if self.budget_gb is not None else ""
        return (
            f"{self.target} on channel {CHANNEL}: about {self.gb():.1f} GB compressed{budget}; "
            f"{self.gb('assumed'):.1f} GB of this estimate is assumed, see docs/sizes.md"
        )


@cache
def load_sizes() -> Sizes:
    """Read the file that ships with this package."""
    return build(Sizes, read(_FILE, _FILE.name))


def estimate(resolved: ResolvedTarget, record: Mapping[str, Any], sizes: Sizes) -> Estimate:
    """Estimate the image that ``resolved`` (on channel ``amd``) will be.

    ``record`` is the committed record of the gates in its preview. Raises InputError for a part whose size neither it
    nor ``sizes`` has.
    """
    arch, layers = resolved.arch or "", {layer["name"]: layer["bytes"] for layer in record["layers"]}
    rows = [row for row in sizes.sizes if row.arch in (None, arch)]
    wanted = ["image", "base", *resolved.extras, *resolved.pins]
    known = {name for row in rows for name in row.for_}
    if lacking := [name for name in wanted if name not in known and name not in layers]:
        raise InputError(f"no size of {lacking[0]} is known for {arch}", where=f"src/primus/release/{_FILE.name}")
    parts = [Part(names=row.for_, mb=row.mb, basis=row.basis, source=row.source) for row in rows]
    own = tuple(name for name in wanted if name not in known)
    brought = tuple(name for name in layers if name.startswith(_SHARED))
    preview = f"the preview of {resolved.name}, {record['date']}"
    for names, what in ((own, preview), (brought, f"{preview}: packages that others require, and small files")):
        parts.append(Part(names=names, mb=sum(layers[n] for n in names) / 1e6, basis=_MEASURED, source=what))
    return Estimate(target=resolved.name, arch=arch, parts=tuple(parts), budget_gb=resolved.budget_gb)


def estimates(root: Path, targets: Sequence[ResolvedTarget]) -> list[Estimate]:
    """Estimate those of ``targets`` that have no lock on channel ``amd`` and a recorded preview in the project."""
    asked = [one for one in targets if one.choice.channel == CHANNEL and one.lock is None]
    records = load_gate_records(root) if asked else {}
    return [estimate(one, records[one.name], load_sizes()) for one in asked if one.name in records]


def sizes_page(estimates: Sequence[Estimate], sizes: Sizes) -> str:
    """Return docs/sizes.md."""
    whole = sizes.whole
    lines = [
        "<!-- Generated from src/primus/release/sizes.yaml and benchmarks/results/gates-*.json by `nox -s docs`; do "
        "not edit. -->",
        "# Size of the release images",
        "",
        f"Channel `{CHANNEL}` has no lock yet, so the size of its images is an estimate. Sizes are compressed, in "
        "units of 10^6 bytes (MB) or 10^9 bytes (GB). The size of a wheel stands for that of its layer: the layers of "
        "the images that were built have together fewer bytes than the files they are made from. The gate `budget` "
        "decides when the image is built.",
        "",
        *table(
            ("target", "architecture", "published or measured", "near", "assumed", "estimate", "budget"),
            [
                (
                    f"`{one.target}`",
                    one.arch,
                    *(f"{one.gb(*bases):.1f} GB" for bases in (("published", _MEASURED), ("near",), ("assumed",))),
                    f"{one.gb():.1f} GB",
                    f"{one.budget_gb:g} GB" if one.budget_gb is not None else "–",
                )
                for one in estimates
            ],
        ),
        "",
        "What is assumed has no published size. The only bound without an assumption is that of "
        f"`{whole.image}`, which has the same pins for both architectures and ROCm's development files: "
        f"{whole.mb / 1000:.1f} GB ({whole.source}).",
        "",
        "| basis | meaning |",
        "|---|---|",
        "| published | the size of exactly what is pinned |",
        "| near | the size of another version, or of packages that were downloaded together |",
        "| measured | the layer in the target's preview image |",
        "| assumed | no size is published: an upper bound, with its reason |",
        "",
    ]
    for arch, one in {one.arch: one for one in reversed(estimates)}.items():
        lines += [
            f"## {arch}",
            "",
            *table(
                ("part", "MB", "basis", "source or reason"),
                [
                    (", ".join(f"`{name}`" for name in part.names), f"{part.mb:,.1f}", part.basis, part.source)
                    for part in sorted(one.parts, key=lambda part: -part.mb)
                ],
            ),
            "",
        ]
    return "\n".join(lines)
