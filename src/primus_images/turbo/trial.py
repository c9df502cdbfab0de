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
from primus_images.turbo.optimizations import AUTO, compatible, missing_packages

KEPT = "selftest.json"
# Compiling one kernel takes seconds, so a minute is a hang. The import of torch may read gigabytes
# from a cold disk.
_PATIENCE = 60.0
_IMPORT = 120.0
_COMMAND = (sys.executable, "-P", "-m", "primus_images.turbo.selftest")


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
    *,
    repeated: bool = False,
) -> Trial:
    """Decide for ``recipe`` on this machine. ``folder`` keeps passed self-tests; ``environment`` is
    that of the ranks. ``repeated``: the run computes some steps twice, and compares all bits.

    Optimizations that the recipe names, or that ``require`` demands, must be usable: raises
    HostError if a package is missing, and CheckFailed if a self-test fails. With several nodes, a
    failed self-test is an error as well, because the nodes would train differently.
    """
    strict = catalogue.requested(recipe) != AUTO
    off: dict[str, str] = {}
    installed = []
    for name in catalogue.candidates(recipe):
        packages = ", ".join(missing_packages((name,)))
        if packages and strict:
            raise HostError(
                f"{name} needs {packages}, which {sys.executable} cannot import",
                hint="run this inside a primus image, or leave the optimization out",
            )
        if packages:
            off[name] = f"{packages} not installed"
        else:
            installed.append(name)
    gpus = detect()
    if recipe.gpu == CPU or not gpus.names:
        return _without_gpu(installed, off, strict)
    shapes = asdict(catalogue.shapes_of(recipe, repeated=repeated))
    key = _digest([shapes, gpus.driver, gpus.names[:1]])
    tester = _Tester(shapes, key, folder, environment, progress)
    faults = _tested(installed, tester)
    if faults and (strict or recipe.get("nodes", int) > 1):
        name, reason = next(iter(faults.items()))
        raise CheckFailed(
            f"{name} failed its self-test on this GPU: {reason}",
            hint="--turbo off trains without it",
        )
    for name, reason in faults.items():
        off[name] = f"failed its self-test: {reason}"
    passed = [name for name in installed if name not in faults]
    used = compatible(passed)
    for name in passed:
        if name not in used:
            off[name] = f"{catalogue.excluded(name, used)} is used instead"
    return Trial(names=used, off=off)


def _without_gpu(installed: Sequence[str], off: dict[str, str], named: bool) -> Trial:
    """Use what the recipe names: a machine without a GPU computes in plain PyTorch."""
    if named:
        return Trial(names=compatible(installed), off=off)
    return Trial(off=off | dict.fromkeys(installed, "there is no GPU"))


def test(
    names: Sequence[str],
    shapes: Mapping[str, object],
    machine: object,
    folder: Path,
    environment: Mapping[str, str],
) -> dict[str, str]:
    """Test optimizations with tensors of ``shapes``. Returns name → fault of those that fail.

    Passes are kept in ``folder``, for these shapes and this ``machine``.
    """
    key = _digest([shapes, machine])
    return _faults(names, _Tester(shapes, key, folder, environment, lambda _: None))


@dataclass(frozen=True)
class _Tester:
    """Tests optimizations with a run's ``shapes``. Passes are kept in ``folder``, by ``key``."""

    shapes: Mapping[str, object]
    key: str
    folder: Path
    environment: Mapping[str, str]
    progress: Callable[[str], None]


def _digest(key: object) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def _tested(names: Sequence[str], tester: _Tester) -> dict[str, str]:
    """Return name → fault. What excludes another is tested first; the other only if it fails."""
    faults: dict[str, str] = {}
    tested: set[str] = set()
    while True:
        healthy = [name for name in names if name not in faults]
        todo = [name for name in compatible(healthy) if name not in tested]
        if not todo:
            return faults
        faults |= _faults(todo, tester)
        tested.update(todo)


def _faults(names: Sequence[str], tester: _Tester) -> dict[str, str]:
    """Return name → fault of ``names`` that fail. Those that passed before are not tested."""
    passed: dict[str, list[str]] = read_sealed(tester.folder / KEPT) or {}
    before = passed.get(tester.key, [])
    todo = [name for name in names if name not in before]
    if not todo:
        return {}
    tester.progress(f"testing {len(todo)} optimizations against float64 on this GPU")
    faults = _run(todo, tester)
    passed[tester.key] = before + [name for name in todo if name not in faults]
    try:
        write_sealed(tester.folder / KEPT, passed)
    except OSError as error:
        tester.progress(f"the results cannot be kept in {tester.folder}: {error.strerror}")
    return faults


def _run(names: Sequence[str], tester: _Tester) -> dict[str, str]:
    """Test in a process, and in another one after a kernel that ended the first."""
    answers: dict[str, str] = {}
    while True:
        todo = [name for name in names if name not in answers]
        if not todo:
            return {name: fault for name, fault in answers.items() if fault}
        output, end = _process(todo, tester)
        for line in output.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # what a library printed
                row = json.loads(line)
                answers[row["name"]] = row["fault"]
        untested = [name for name in todo if name not in answers]
        if untested:
            answers[untested[0]] = end


def _process(names: Sequence[str], tester: _Tester) -> tuple[bytes, str]:
    """Return what a process of the self-test printed, and how it ended."""
    try:
        process = subprocess.run(
            [*_COMMAND, json.dumps(tester.shapes), *names],
            env=tester.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_IMPORT + _PATIENCE * len(names),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return error.stdout or b"", "gave no answer"
    return process.stdout, f"ended its process with exit code {process.returncode}"
