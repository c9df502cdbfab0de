"""Real training runs for tests, started as a user would, and the names of failed checks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from primus.training import outcome
from primus.training.checks import Verdict
from primus.training.job import Job
from primus.training.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]


def run(python: list[str], *words: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python that knows primus, with ``fault`` of ``faults/sitecustomize.py`` if it is not empty."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PRIMUS_FAULT": fault}
    return subprocess.run([*python, *words], env=environment, capture_output=True, text=True, timeout=300, check=False)


def started(python: list[str], job: Job, *words: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``job`` with ``primus train`` and ``words``."""
    return run(python, "-m", "primus.cli.main", *job.arguments(), *words, fault=fault)


def train(python: list[str], job: Job, fault: str = "") -> Outcome:
    """Run ``job`` with ``primus train``; one that fails has an outcome, one that cannot start is an error."""
    ended = started(python, job, "--json", fault=fault)
    assert ended.returncode in (0, 1), ended.stderr
    return outcome.read(job, ended.returncode)


def failing(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the names of the verdicts that did not pass."""
    return [verdict.name for verdict in verdicts if not verdict.passed]
