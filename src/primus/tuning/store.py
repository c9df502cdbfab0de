"""The tuned file of a recipe: where it lies, what it is valid for, and whether a run may use it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from primus.errors import CheckFailed, InputError
from primus.files import write_file
from primus.recipes.recipe import Recipe
from primus.tuning.bench import Measured, times

# Settings that change how long a run takes, or where it writes, but none of its GEMMs.
_WITHOUT_GEMMS = ("steps", "seed", "deterministic", "checkpoint", "lr")


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a tuned file is of: solutions are numbers that only one build of a library on one architecture knows.

    ``library`` is ``hipblaslt`` or ``pytorch``, ``version`` is its version.
    """

    library: str = "hipblaslt"
    version: str
    arch: str
    recipe: str

    @staticmethod
    def of(recipe: Recipe, version: str, arch: str, library: str = "hipblaslt") -> Key:
        """The key of ``recipe``, without the settings that change no GEMM."""
        left = {recipe.knows.key(name) for name in _WITHOUT_GEMMS if name in recipe.knows.keys}
        values = {
            key: setting.value
            for key, setting in recipe.settings.items()
            if key not in left and not key.startswith(("assets.", "validation."))
        }
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return Key(library=library, version=version, arch=arch, recipe=digest)

    @property
    def digest(self) -> str:
        """A name for folders."""
        return hashlib.sha256(json.dumps(self.document()).encode()).hexdigest()[:16]

    def document(self) -> dict[str, str]:
        """What key.json holds."""
        return {self.library: self.version, "arch": self.arch, "recipe": self.recipe}

    def write(self, file: Path) -> None:
        """Write key.json."""
        write_file(file, json.dumps(self.document(), indent=2) + "\n")

    def require(self, tuned: Path, file: Path) -> None:
        """InputError unless ``tuned`` exists and ``file`` says that it is of this key."""
        if not tuned.is_file():
            raise InputError(f"there is no {tuned}", hint="the stage tune makes it")
        try:
            found: Any = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, Mapping):
            raise InputError(f"{tuned} has no valid key: {file} is missing or damaged", hint="tune again")
        wrong = [
            # A recipe is its digest, which tells a reader nothing.
            "other settings of the recipe" if name == "recipe" else f"{name} {found.get(name)} instead of {value}"
            for name, value in self.document().items()
            if found.get(name) != value
        ]
        if wrong:
            raise InputError(f"{tuned} was measured with {', '.join(wrong)}", hint="tune again")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The folders of one recipe, for either engine."""

    root: Path

    @classmethod
    def of(cls, recipe: str, below: Path) -> Self:
        """The folders of a recipe, in ``below``."""
        return cls(root=below.absolute() / recipe.rpartition("/")[2].removesuffix(".yaml"))

    @property
    def shapes(self) -> Path:
        """Where the stage dump writes."""
        return self.root / "gemm_shape"

    @property
    def results(self) -> Path:
        """Where the stage tune writes what runs use."""
        return self.root / "gemm_tune"

    @property
    def key(self) -> Path:
        """What the results are valid for."""
        return self.results / "key.json"

    def work(self, key: Key) -> Path:
        """Results of single shapes, valid for one key."""
        return self.results / "work" / key.digest


class Folder(Place):
    """The documented folders of hipBLASLt's tuning, below ``output/tune_hipblaslt/RECIPE``."""

    @property
    def tuned(self) -> Path:
        """The file that runs use."""
        return self.results / "tune_hipblas_gemm_results.txt"

    @property
    def times(self) -> Path:
        """Times of every shape."""
        return self.results / "times.json"

    def dump(self, node: str) -> Path:
        """The log of one node."""
        return self.shapes / f"dump_hipblaslt_gemm_shape_{node}.txt"


def merge(folder: Folder, key: Key, measured: Sequence[Measured]) -> None:
    """Write the tuned file, its key and the times, each whole. CheckFailed where the parts are of different builds."""
    heads = {one.tuned[0] for one in measured}
    if len(heads) > 1:
        raise CheckFailed(
            f"the results are of {len(heads)} builds of hipBLASLt: {'; '.join(sorted(heads))[:200]}",
            hint=f"delete {folder.work(key)} and tune again",
        )
    rows = list(dict.fromkeys(row for one in measured for row in one.tuned[1:]))
    # The key goes first: a file without the right one is not used.
    folder.tuned.unlink(missing_ok=True)
    key.write(folder.key)
    write_file(folder.times, times(measured))
    write_file(folder.tuned, "\n".join([*heads, *rows]) + "\n")


def check(folder: Folder, key: Key) -> Path:
    """The tuned file, for a run with ``key``. InputError where there is none, or it is of another key."""
    key.require(folder.tuned, folder.key)
    return folder.tuned


def speedups(measured: Sequence[Measured]) -> tuple[float, float]:
    """Expected gain: the time of all logged GEMMs before ÷ after, and the mean gain of a shape, weighted by FLOPs."""
    before = sum(one.shape.count * one.default for one in measured)
    after = sum(one.shape.count * min(one.best, one.default) for one in measured)
    work = sum(one.shape.count * one.shape.flops for one in measured)
    gain = sum(one.shape.count * one.shape.flops * max(1.0, one.default / one.best) for one in measured)
    return (before / after if after else 1.0), (gain / work if work else 1.0)


def slower(measured: Sequence[Measured], baseline: Path, tolerance: float) -> list[str]:
    """Sentences on shapes whose best time exceeds the baseline's by over ``tolerance``. InputError: no baseline."""
    try:
        rows = {row["shape"]: float(row["best_us"]) for row in json.loads(baseline.read_text(encoding="utf-8"))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{baseline} holds no times", hint="name the times.json of another tuning") from error
    return [
        f"{one.shape.title}: {one.best:.1f} µs, was {rows[shape]:.1f}"
        for one in measured
        if (shape := " ".join(one.shape.words)) in rows and one.best > rows[shape] * (1 + tolerance)
    ]
