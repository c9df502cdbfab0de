"""The fastest solution of every GEMM, by PyTorch's TunableOp.

PyTorch records the GEMMs of a run as ``OPERATION,SHAPE`` lines, measures them from such a file, and
reads the result in later runs. A result begins with lines that name the versions it is valid for;
PyTorch refuses one of other versions. On ROCm it tries rocBLAS and hipBLASLt. On CUDA it knows only
cuBLAS, so nothing gets faster there.
"""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.files import write_file
from primus_images.gpus.table import generation
from primus_images.recipes.choose import CPU
from primus_images.recipes.recipe import Recipe
from primus_images.waits import holders, try_lock

_RECORDED = ("Gemm", "ScaledGemm")
# Shapes that one process measures before it saves the results. An interruption loses at most this
# many per GPU.
_PART = 16
# Results are read per device: PyTorch replaces %d by the device's number.
_DEVICES = 16
_READING = {"PYTORCH_TUNABLEOP_ENABLED": "1", "PYTORCH_TUNABLEOP_TUNING": "0"}
_WORKER = "import sys; import torch.cuda.tunable as tunable; tunable.tune_gemm_in_file(sys.argv[1])"
# Settings that change no matrix product, only the length of a run or the location of its files.
_NEUTRAL = ("steps", "seed", "deterministic", "checkpoint", "lr", "global_batch")


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a result is valid for: the version of PyTorch, the GPU's architecture and the recipe's
    hash.
    """

    pytorch: str
    arch: str
    recipe: str

    @staticmethod
    def of(recipe: Recipe, pytorch: str, arch: str) -> "Key":
        """Return the key of ``recipe``, without the settings that change no matrix product."""
        neutral = {recipe.knows.key(name) for name in _NEUTRAL if name in recipe.knows.keys}
        # GEMMs are tuned on one node. Further ones are further copies of the data.
        neutral.add("nodes")
        values = {
            key: setting.value
            for key, setting in recipe.settings.items()
            if key not in neutral and not key.startswith(("assets.", "validation."))
        }
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return Key(pytorch=pytorch, arch=arch, recipe=digest)

    @property
    def digest(self) -> str:
        """The hash of the key, for names of folders."""
        return hashlib.sha256(json.dumps(vars(self)).encode()).hexdigest()[:16]


class Place:
    """The files of one recipe below ``root``: a folder of recorded ``shapes``, the result, and the
    key of the result.

    ``tuned`` is the file name of the result, with %d for the device's number.
    """

    def __init__(self, root: Path) -> None:
        self.shapes = root / "gemm_shape"
        self.tuned = root / "gemm_tune" / "tunableop_results%d.csv"
        self.key = self.tuned.parent / "key.json"


def key_here(recipe: Recipe) -> Key:
    """Return the key of a result for this machine's PyTorch.

    Raises InputError for a recipe on the CPU, HostError if PyTorch is not installed.
    """
    if recipe.gpu == CPU:
        raise InputError("TunableOp tunes GEMMs of GPUs only", hint="--gpu mi300x")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise HostError("PyTorch is not installed here", hint="run it in an image") from None
    return Key.of(recipe, version, generation(recipe.gpu).arch)


def dumping(place: Place, node: str) -> dict[str, str]:
    """Return the environment variables that make a run record its GEMMs. PyTorch adds the device's
    number.
    """
    return {
        **_READING,
        "PYTORCH_TUNABLEOP_RECORD_UNTUNED": "1",
        "PYTORCH_TUNABLEOP_UNTUNED_FILENAME": str(
            place.shapes / f"tunableop_untuned_node{node}_gpu.csv"
        ),
    }


def read_shapes(folder: Path) -> list[str]:
    """Return the distinct recorded GEMMs of all files in ``folder``, in order. Raises InputError if
    there is none.
    """
    shapes: dict[str, None] = {}
    for file in sorted(folder.glob("*.csv")):
        # If the process was killed, its last line can be truncated at any point.
        whole, _, _ = file.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        for line in whole.splitlines():
            if line.startswith(_RECORDED) and "," in line:
                shapes[",".join(line.split(",")[:2])] = None
    if not shapes:
        raise InputError(
            f"no GEMM is recorded in {folder}",
            hint="the stage dump records them: primus tune gemm RECIPE --stage dump",
        )
    return list(shapes)


def measure(
    shapes: Sequence[str], folder: Path, gpus: Sequence[str], python: str = sys.executable
) -> tuple[list[str], list[str]]:
    """Measure every shape, a part at a time on each of ``gpus``. Finished parts in ``folder`` are
    reused.

    Returns the lines of PyTorch's file: those that name versions, and one
    ``OPERATION,SHAPE,SOLUTION,TIME`` for each GEMM. Raises CheckFailed if PyTorch fails, after the
    parts in progress have ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [shapes[start : start + _PART] for start in range(0, len(shapes), _PART)]
    free = list(gpus)

    def work(number: int) -> Path:
        gpu = free.pop()
        try:
            return _part(parts[number], folder, number, gpu, python)
        finally:
            free.append(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        files = list(pool.map(work, range(len(parts))))
    validators: dict[str, None] = {}
    rows = []
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("Validator,"):
                # The parts have the same ones: the key of their folder names PyTorch's version.
                validators[line] = None
            elif line.startswith(_RECORDED) and line.count(",") >= 2:
                rows.append(line)
    if not rows:
        raise CheckFailed(
            f"PyTorch measured none of {len(shapes)} GEMMs", hint="it skips products with a vector"
        )
    return list(validators), rows


def _part(shapes: Sequence[str], folder: Path, number: int, gpu: str, python: str) -> Path:
    todo = folder / f"part-{number}.todo.csv"
    done = folder / f"part-{number}.csv"
    text = "\n".join(shapes) + "\n"
    if done.is_file() and todo.is_file() and todo.read_text(encoding="utf-8") == text:
        return done
    done.unlink(missing_ok=True)
    write_file(todo, text)
    # A process that a killed command left behind may still write to its own file.
    raw = folder / f"part-{number}.{os.getpid()}-%d.csv"
    result = _of_device(raw, 0)
    result.unlink(missing_ok=True)
    ended = subprocess.run(
        [python, "-c", _WORKER, str(todo)],
        env=_tuning(raw, gpu),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        errors="replace",
        check=False,
    )
    if ended.returncode or not result.is_file():
        said = [line for line in ended.stderr.splitlines() if line.strip()] or [
            "it wrote no result"
        ]
        raise CheckFailed(
            f"PyTorch could not measure {len(shapes)} GEMMs on GPU {gpu}: {said[-1][:300]}",
            hint="finished parts are kept; run it again to continue",
        )
    result.replace(done)
    return done


def _tuning(result: Path, gpu: str) -> dict[str, str]:
    """Return the environment of a process that writes what it measures on ``gpu`` to ``result``."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTORCH_TUNABLEOP_")
    }
    return {
        **inherited,
        **_READING,
        "PYTORCH_TUNABLEOP_TUNING": "1",
        "PYTORCH_TUNABLEOP_FILENAME": str(result),
        # Each vendor's driver reads its own variable.
        "HIP_VISIBLE_DEVICES": gpu,
        "CUDA_VISIBLE_DEVICES": gpu,
    }


def merge(place: Place, key: Key, lines: Sequence[str]) -> None:
    """Write the lines of a result for every device, and its key. A result without a matching key is
    not used.
    """
    place.tuned.parent.mkdir(parents=True, exist_ok=True)
    place.key.unlink(missing_ok=True)
    for device in range(_DEVICES):
        write_file(_of_device(place.tuned, device), "\n".join(lines) + "\n")
    write_file(place.key, json.dumps(vars(key), indent=2) + "\n")


def check(place: Place, key: Key) -> Mapping[str, str]:
    """Return the environment variables of a run with ``key`` that uses the result.

    Raises InputError if there is no result, or one of another key.
    """
    tuned = _of_device(place.tuned, 0)
    if not tuned.is_file():
        raise InputError(f"there is no {tuned}", hint="the stage `tune` creates it")
    try:
        stored: Any = json.loads(place.key.read_text(encoding="utf-8"))
        differences = _differences(stored, key)
    except (OSError, ValueError, AttributeError):
        raise InputError(
            f"{tuned} has no valid key: {place.key} is missing or damaged", hint="tune again"
        ) from None
    if differences:
        raise InputError(f"{tuned} was measured with {', '.join(differences)}", hint="tune again")
    return {**_READING, "PYTORCH_TUNABLEOP_FILENAME": str(place.tuned)}


def _differences(stored: Any, key: Key) -> list[str]:
    differences = []
    for name, value in vars(key).items():
        if stored.get(name) == value:
            continue
        if name == "recipe":
            # This part is a hash, which tells a reader nothing.
            differences.append("other settings of the recipe")
        else:
            differences.append(f"{name} {stored.get(name)} instead of {value}")
    return differences


def _of_device(name: Path, device: int) -> Path:
    return Path(str(name).replace("%d", str(device)))


def folder_of(recipe: str, below: Path) -> Path:
    """Return the folder of a recipe's results below ``below``, named like its file."""
    return below.absolute() / recipe.rpartition("/")[2].removesuffix(".yaml")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder while the context is open. Raises HostError if another process holds the
    lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    with path.open("a") as lock:
        if not try_lock(lock.fileno()):
            raise HostError(
                f"another process tunes in {folder}: {holders(lock.fileno(), path)}",
                hint="run it again when that has ended, or choose another --folder",
            )
        yield
