"""The tuned file of a recipe: its location, the key that it is valid for, and whether a run may use it."""

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

# Settings that change no GEMM, only the length of a run or the location of its files.
_WITHOUT_GEMMS = ("steps", "seed", "deterministic", "checkpoint", "lr")


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a tuned file is valid for. Its solutions are numbers of one build of a library on one architecture.

    ``library`` is ``hipblaslt`` or ``pytorch``, and ``version`` its version.
    """

    library: str = "hipblaslt"
    version: str
    arch: str
    recipe: str

    @staticmethod
    def of(recipe: Recipe, version: str, arch: str, library: str = "hipblaslt") -> Key:
        """Return the key of ``recipe``, without the settings that change no GEMM."""
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
        """The hash of the key, for names of folders."""
        return hashlib.sha256(json.dumps(self.document()).encode()).hexdigest()[:16]

    def document(self) -> dict[str, str]:
        """Return the contents of key.json."""
        return {self.library: self.version, "arch": self.arch, "recipe": self.recipe}

    def write(self, file: Path) -> None:
        """Write key.json."""
        write_file(file, json.dumps(self.document(), indent=2) + "\n")

    def require(self, tuned: Path, file: Path) -> None:
        """Raise InputError unless ``tuned`` exists and ``file`` contains this key."""
        if not tuned.is_file():
            raise InputError(f"there is no {tuned}", hint="the stage `tune` creates it")
        try:
            found: Any = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, Mapping):
            raise InputError(f"{tuned} has no valid key: {file} is missing or damaged", hint="tune again")
        wrong = [
            # The recipe's part is a hash, which tells a reader nothing.
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
        """Return the folders of a recipe below ``below``."""
        return cls(root=below.absolute() / recipe.rpartition("/")[2].removesuffix(".yaml"))

    @property
    def shapes(self) -> Path:
        """The output folder of the stage dump."""
        return self.root / "gemm_shape"

    @property
    def results(self) -> Path:
        """The folder with the result of the stage tune, which runs use."""
        return self.root / "gemm_tune"

    @property
    def key(self) -> Path:
        """The file with the key of the result."""
        return self.results / "key.json"

    def work(self, key: Key) -> Path:
        """Return the folder for results of single shapes, which are valid for one key."""
        return self.results / "work" / key.digest


class Folder(Place):
    """The documented folders of hipBLASLt's tuning, below ``output/tune_hipblaslt/RECIPE``."""

    @property
    def tuned(self) -> Path:
        """The file that runs use."""
        return self.results / "tune_hipblas_gemm_results.txt"

    @property
    def times(self) -> Path:
        """The file with the times of every shape."""
        return self.results / "times.json"

    def dump(self, node: str) -> Path:
        """Return the log file of one node."""
        return self.shapes / f"dump_hipblaslt_gemm_shape_{node}.txt"


def merge(folder: Folder, key: Key, measured: Sequence[Measured]) -> None:
    """Write the tuned file, its key and the times. CheckFailed if the parts come from different builds."""
    heads = {one.tuned[0] for one in measured}
    if len(heads) > 1:
        raise CheckFailed(
            f"the results are of {len(heads)} builds of hipBLASLt: {'; '.join(sorted(heads))[:200]}",
            hint=f"delete {folder.work(key)} and tune again",
        )
    rows = list(dict.fromkeys(row for one in measured for row in one.tuned[1:]))
    # Write the key first, because a file without a matching key is not used.
    folder.tuned.unlink(missing_ok=True)
    key.write(folder.key)
    write_file(folder.times, times(measured))
    write_file(folder.tuned, "\n".join([*heads, *rows]) + "\n")


def check(folder: Folder, key: Key) -> Path:
    """Return the tuned file for a run with ``key``. InputError if there is none, or if it has another key."""
    key.require(folder.tuned, folder.key)
    return folder.tuned


def speedups(measured: Sequence[Measured]) -> tuple[float, float]:
    """Return time before ÷ after of all logged GEMMs, and the mean gain of a shape, weighted by FLOPs."""
    before = sum(one.shape.count * one.default for one in measured)
    after = sum(one.shape.count * min(one.best, one.default) for one in measured)
    work = sum(one.shape.count * one.shape.flops for one in measured)
    gain = sum(one.shape.count * one.shape.flops * max(1.0, one.default / one.best) for one in measured)
    return (before / after if after else 1.0), (gain / work if work else 1.0)


def baseline(file: Path) -> dict[str, float]:
    """Return the best time of each shape in a ``times.json``, in µs. Raises InputError if it is not such a file."""
    try:
        return {row["shape"]: float(row["best_us"]) for row in json.loads(file.read_text(encoding="utf-8"))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} contains no times", hint="name the times.json of another tuning") from error


def slower(measured: Sequence[Measured], rows: Mapping[str, float], tolerance: float) -> list[str]:
    """Return a sentence per shape that is slower than in ``rows`` by over ``tolerance``."""
    return [
        f"{one.shape.title}: {one.best:.1f} µs, was {rows[shape]:.1f}"
        for one in measured
        if (shape := " ".join(one.shape.words)) in rows and one.best > rows[shape] * (1 + tolerance)
    ]
