"""Measure one candidate by a short training run in a process of its own, and keep the result."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from primus.errors import HostError
from primus.files import read_sealed, write_sealed
from primus.recipes.recipe import Recipe
from primus.training import failure, launch
from primus.training.outcome import document

# Seconds that a run gets to end its ranks.
_GRACE = 30


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one run. ``reason`` is why it does not count, or empty; ``seconds`` is its wall time.

    ``tokens_per_second`` is the median of a rank after the warm-up, ``memory_gib`` the peak, ``losses`` those of
    all steps.
    """

    tokens_per_second: float | None
    memory_gib: float | None
    losses: tuple[float, ...]
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The runs of a recipe ``source``, with their results in ``folder``. A run may take ``limit`` seconds."""

    source: str
    folder: Path
    limit: float
    warmup: int

    def known(self, recipe: Recipe, number: int) -> Result | None:
        """Return the saved result of run ``number`` of ``recipe``, or None. A damaged file counts as none."""
        stored = read_sealed(self._file(recipe, number))
        try:
            return Result(**{**stored, "losses": tuple(stored["losses"])})
        except (TypeError, KeyError):
            return None

    def run(self, recipe: Recipe, number: int) -> Result:
        """Run ``recipe`` and save the result. HostError if the folder cannot be written."""
        output = self.folder / self._name(recipe, number)
        began = time.monotonic()
        try:
            shutil.rmtree(output, ignore_errors=True)  # left by an interrupted run
            output.parent.mkdir(parents=True, exist_ok=True)
            reported, code = self._train(recipe, output)
            result = _read(output, reported, self.warmup, time.monotonic() - began)
            for large in ("cache", "checkpoint"):
                shutil.rmtree(output / large, ignore_errors=True)
            if any(text in result.reason for text in (failure.DISK_FULL.text, "the disk is full")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Do not save a failure for lack of a requirement, which may be installed at the next start.
            if code != HostError.exit_code:
                write_sealed(self._file(recipe, number), asdict(result))
        except OSError as error:
            raise HostError(
                f"cannot write to {self.folder}: {error.strerror}",
                hint="make room there, and run the same command again: finished runs are kept",
            ) from error
        return result

    def _name(self, recipe: Recipe, number: int) -> str:
        return f"{recipe.digest[:16]}-{number}"

    def _file(self, recipe: Recipe, number: int) -> Path:
        return self.folder / f"{self._name(recipe, number)}.json"

    def _train(self, recipe: Recipe, output: Path) -> tuple[str, int]:
        """Train once. Returns the reason for a failure as the command reports it, or "", and the exit code."""
        words = [self.source, *recipe.choices.words(), *recipe.overrides, "--output", str(output), "--json"]
        words += ["--compile-cache", str(self.folder / "compiled")]
        command = [sys.executable, "-m", "primus.cli.main", "train", *words]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"it took longer than {self.limit:g} s", process.returncode
        finally:
            if process.poll() is None:
                _end(process)
        lines = [line for line in errors.splitlines() if line.strip()]
        reported = lines[0].removeprefix("primus train: ") if lines else f"exit code {process.returncode}"
        return reported if process.returncode else "", process.returncode


def _end(process: subprocess.Popen[str]) -> None:
    """End a run and its ranks. The first signal lets the run end its ranks, which are in sessions of their own."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        process.communicate(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


@contextmanager
def ending() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP while the context is open, so that no run outlives the
    command.

    A signal that is ignored, such as SIGHUP under nohup, stays ignored.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [number for number in launch.ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(output: Path, reported: str, warmup: int, seconds: float) -> Result:
    outcome, steps = document(output / "result.json"), _steps(output / "metrics.jsonl")
    reason = reported if reported.startswith("it took longer") else str(outcome.get("cause") or "")
    if not reason and not outcome.get("passed"):
        verdicts: Any = outcome.get("verdicts") or []
        failed = (f"{verdict['name']}: {verdict['reason']}" for verdict in verdicts if not verdict["passed"])
        reason = next(failed, reported or "no result")
    rates = [float(step["tokens_per_second"]) for step in steps[warmup:] if step.get("tokens_per_second")]
    if not reason and not rates:
        reason = f"no step was left to measure after {warmup} of warm-up"
    return Result(
        tokens_per_second=statistics.median(rates) if rates and not reason else None,
        memory_gib=max((step["memory_gib"] for step in steps if step.get("memory_gib") is not None), default=None),
        losses=tuple(step["loss"] for step in steps if step.get("loss") is not None),
        reason=reason,
        seconds=round(seconds, 1),
    )


def _steps(file: Path) -> Sequence[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
