"""The result of a run: one file, which ``primus train`` writes and other programs read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from primus.errors import PrimusError
from primus.files import write_file
from primus.jsonfile import read_json
from primus.schema import build
from primus.training.checks import Verdict
from primus.training.metrics import Summary

NAME = "result.json"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    ``exit_code`` is that of the launcher, ``argv`` its command and ``seconds`` its wall time. ``host_memory_gib`` is
    the largest resident memory of one process. ``optimizations`` are those that the ranks used; ``optimizations_off``
    is name → reason of those that the recipe could use. ``cause`` is the first cause of a failure. ``refused`` is the
    reason why no rank was started; ``exit_code`` is then that of the command. ``passed``, ``verdicts`` and ``summary``
    are missing until the run's checks have been applied.
    """

    exit_code: int
    seconds: float = 0.0
    argv: tuple[str, ...] = ()
    host_memory_gib: float | None = None
    optimizations: tuple[str, ...] = ()
    optimizations_off: Mapping[str, str] = field(default_factory=dict)
    passed: bool | None = None
    cause: str = ""
    refused: str = ""
    verdicts: tuple[Verdict, ...] = ()
    summary: Summary | None = None


def write(result: RunResult, folder: Path) -> None:
    """Write the result to the folder of the run, atomically."""
    write_file(folder / NAME, json.dumps(asdict(result), indent=2, ensure_ascii=False) + "\n")


def read(folder: Path) -> RunResult:
    """Read the result of the run in ``folder``. Raises InputError if it is damaged, and OSError as any read."""
    return build(RunResult, read_json(folder / NAME))


def write_refusal(error: PrimusError, folder: Path) -> None:
    """Record why a run was not started, if its ``folder`` exists, can be written to, and contains no run."""
    if not folder.is_dir() or (folder / "log.txt").exists() or (folder / "checkpoint").exists():
        return
    try:
        write(RunResult(exit_code=error.exit_code, passed=False, refused=str(error).partition("\n")[0]), folder)
    except OSError:
        return  # the error itself is printed in any case
