"""Deciding which optimizations a run uses: those of its recipe that are installed and pass their
self-test here.

The self-test runs in a process of its own (:mod:`primus_images.turbo.selftest`), because a faulty
kernel can end the process or damage its GPU context. Passes are kept beside the compiled kernels,
in a folder whose name covers all packages, our kernels and the GPU; the key of an entry adds the
driver and the sizes of the run. Failures are tested again.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from primus_images.errors import CheckFailed, HostError
from primus_images.files import read_sealed, write_sealed
from primus_images.gpus.detect import detect
from primus_images.recipes.choose import CPU
from primus_images.recipes.recipe import Recipe
from primus_images.turbo import optimizations as catalogue
from primus_images.turbo.optimizations import AUTO, Shapes, compatible, missing_packages

KEPT = "selftest.json"
# Compiling one kernel takes seconds, so a minute is a hang. The import of torch may read gigabytes
# from a cold disk.
_PATIENCE = 60.0
_IMPORT = 120.0
_COMMAND = (sys.executable, "-m", "primus_images.turbo.selftest")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """``names`` are the optimizations that a run uses; ``off`` is name → reason of those that it
    could use, but not.
    """

    names: tuple[str, ...] = ()
    off: Mapping[str, str] = field(default_factory=dict)

    def sentence(self) -> str:
        """Return one line for the log of a run."""
        on = f"optimizations: {', '.join(self.names) or 'none'}"
        return on + "".join(f"; {name} is off: {reason}" for name, reason in self.off.items())


def decide(
    recipe: Recipe,
    folder: Path,
    environment: Mapping[str, str],
    progress: Callable[[str], None] = lambda _: None,
) -> Trial:
    """Decide for ``recipe`` on this machine. ``folder`` keeps passed self-tests; ``environment`` is
    that of the ranks.

    Optimizations that the recipe names, or that ``require`` demands, must be usable: raises
    HostError if a package is missing, and CheckFailed if a self-test fails. With several nodes, a
    failed self-test is an error as well, because the nodes would train differently.
    """
    names = catalogue.candidates(recipe)
    strict = catalogue.requested(recipe) != AUTO
    absent = {name: ", ".join(lacking) for name in names if (lacking := missing_packages((name,)))}
    if absent and strict:
        name, packages = next(iter(absent.items()))
        raise HostError(
            f"{name} needs {packages}, which {sys.executable} cannot import",
            hint="run this inside a primus image, or leave the optimization out",
        )
    off = {name: f"{packages} not installed" for name, packages in absent.items()}
    present = [name for name in names if name not in absent]
    gpus = detect()
    if recipe.gpu == CPU or not gpus.names:
        # A machine without a GPU computes in plain PyTorch, and uses only what is named.
        used = ()
        if strict:
            used = compatible(present)
        return Trial(
            names=used, off=off | {name: "there is no GPU" for name in present if name not in used}
        )
    faults: dict[str, str] = {}
    tested: set[str] = set()
    # What excludes another one is tested first; the other one only if it fails.
    shapes = catalogue.shapes_of(recipe)
    key = hashlib.sha256(
        json.dumps([asdict(shapes), gpus.driver, gpus.names[:1]]).encode()
    ).hexdigest()
    while todo := [
        name for name in compatible([n for n in present if n not in faults]) if name not in tested
    ]:
        faults |= _faults(todo, shapes, key, folder, environment, progress)
        tested |= {*todo}
    if faults and (strict or recipe.get("nodes", int) > 1):
        name, reason = next(iter(faults.items()))
        raise CheckFailed(
            f"{name} failed its self-test on this GPU: {reason}",
            hint="--turbo off trains without it",
        )
    off |= {name: f"failed its self-test: {reason}" for name, reason in faults.items()}
    passed = [name for name in present if name not in faults]
    used = compatible(passed)
    off |= {
        name: f"{catalogue.excluded(name, used)} is used instead"
        for name in passed
        if name not in used
    }
    return Trial(names=used, off=off)


def _faults(
    names: Sequence[str],
    shapes: Shapes,
    key: str,
    folder: Path,
    environment: Mapping[str, str],
    progress: Callable[[str], None],
) -> dict[str, str]:
    """Return name → fault of ``names`` that fail. Those that passed before are not tested."""
    passed: dict[str, list[str]] = read_sealed(folder / KEPT) or {}
    todo = [name for name in names if name not in passed.get(key, ())]
    if not todo:
        return {}
    progress(f"testing {len(todo)} optimizations against float64 on this GPU")
    faults = {name: fault for name, fault in _run(todo, shapes, environment).items() if fault}
    passed[key] = [*passed.get(key, ()), *(name for name in todo if name not in faults)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed(folder / KEPT, passed)
    except OSError as error:
        progress(f"the results cannot be kept in {folder}: {error.strerror}")
    return faults


def _run(names: Sequence[str], shapes: Shapes, environment: Mapping[str, str]) -> dict[str, str]:
    faults: dict[str, str] = {}
    while todo := [name for name in names if name not in faults]:
        command = [*_COMMAND, json.dumps(asdict(shapes)), *todo]
        try:
            process = subprocess.run(
                command,
                env={**environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_IMPORT + _PATIENCE * len(todo),
                check=False,
            )
            output = process.stdout
            fault = f"ended its process with exit code {process.returncode}"
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            fault = "gave no answer"
        for line in output.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # what a library printed
                row = json.loads(line)
                faults[row["name"]] = row["fault"]
        begun = next((name for name in todo if name not in faults), "")
        if begun:
            faults[begun] = fault
    return faults
