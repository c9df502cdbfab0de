"""Measure the time and memory of a command, and describe the machine."""

import datetime
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from primus_images.errors import HostError

# The code of the installed `primus` script, run by this interpreter.
PRIMUS = (
    sys.executable,
    "-c",
    "import sys; from primus_images.cli.main import main; sys.exit(main())",
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A command that succeeded.

    ``megabytes`` is the peak of its largest process (``ru_maxrss``).
    """

    seconds: float
    megabytes: float
    lines: tuple[str, ...]


def run(
    command: Sequence[str], *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> Finished:
    """Run ``command``. Raises HostError, with the end of its output, if it fails."""
    # Otherwise dirty pages of the previous run would be written back during this one.
    os.sync()
    start = time.perf_counter()
    child = _start(command, env, cwd)
    out = child.stdout.read() if child.stdout else ""
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        tail = "\n".join(out.splitlines()[-15:])
        raise HostError(f"{' '.join(command[:6])} … ended with {child.returncode}:\n{tail}")
    return Finished(
        seconds=seconds, megabytes=usage.ru_maxrss / 1024, lines=tuple(out.splitlines())
    )


def peak_megabytes(
    command: Sequence[str], *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> float:
    """Return the peak memory of ``command`` and all its descendants together, in MB.

    ``ru_maxrss`` covers only the largest process, so a builder with workers would seem smaller than
    it is. This function adds up proportional set sizes, which count a shared page once. That slows
    the run, so timed runs do not use it.
    """
    child = _start(command, env, cwd)
    with peak_of_tree(child.pid) as peak:
        out = child.stdout.read() if child.stdout else ""
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise HostError(f"{' '.join(command[:6])} … ended with {child.returncode}:\n{out[-2000:]}")
    # A process that ends within milliseconds may not have been sampled.
    return max(peak[0], usage.ru_maxrss / 1024)


@contextmanager
def peak_of_tree(root: int) -> Iterator[list[float]]:
    """Measure the peak memory of process ``root`` and all its descendants inside the block. On
    exit, the yielded list contains one figure in MB.
    """
    found: list[float] = []
    peak, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _megabytes(_below(root)))
            done.wait(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()
        found.append(peak)


def _start(
    command: Sequence[str], env: dict[str, str] | None, cwd: Path | None
) -> subprocess.Popen[str]:
    # Installed Python programs cache their compiled modules. With this variable, each start would
    # compile them again.
    inherited = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    return subprocess.Popen(
        command,
        env={**inherited, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _parents() -> dict[int, int]:
    """Return process → parent process."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError, IndexError):
                # Field 4 of stat. The command's name before it may contain spaces and brackets.
                found[int(folder.name)] = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
    return found


def _below(root: int) -> set[int]:
    parents = _parents()
    tree = {root}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree


def _megabytes(pids: Iterable[int]) -> float:
    total = 0
    for pid in pids:
        with suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(
                int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")
            )
    return total / 1024


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Return the median and spread of ``samples``, and the samples themselves."""
    return {
        "median": round(statistics.median(samples), 4),
        "min": round(min(samples), 4),
        "max": round(max(samples), 4),
        "repeats": len(samples),
        "samples": [round(s, 4) for s in samples],
    }


def machine() -> dict[str, Any]:
    """Return a description of the machine, without its name."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        "unknown",
    )
    memory = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    system = next(
        (
            line.partition("=")[2].strip('"')
            for line in _lines("/etc/os-release")
            if "PRETTY" in line
        ),
        "",
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**20),
        "kernel": platform.release().partition("-")[0],
        "system": system,
        "python": sys.version.split()[0],
    }


def result(
    session: str,
    command: str,
    versions: Mapping[str, str],
    load: tuple[float, float, float],
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the fields of every results file: date, program, machine and load. ``load`` is the one
    before the benchmark.
    """
    return {
        "generated": f"by `nox -s {session}`; do not edit",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "machine": machine(),
        "versions": {"primus-images": metadata.version("primus-images"), **versions},
        "load_average": {
            "before": [round(v, 2) for v in load],
            "after": [round(v, 2) for v in os.getloadavg()],
        },
        "rows": rows,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
