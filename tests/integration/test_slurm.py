"""Jobs of a real Slurm: two virtual nodes train the proxy over gloo, and what goes wrong there is put right or named.

PRIMUS_TEST_PYTHON is a Python with torch and torchtitan; without it, or without Slurm, these tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import slurm_kit
from slurm_kit import Slurm

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("PRIMUS_TEST_PYTHON", "")
WHY = slurm_kit.missing() or ("" if PYTHON else "PRIMUS_TEST_PYTHON names no Python with torch")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.skipif(bool(WHY), reason=WHY)]
STEPS = 80


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's own are too long for a socket
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def slurm(folder: Path) -> Iterator[Slurm]:
    cluster = Slurm(folder / "cluster")
    tools = folder / "bin"
    tools.mkdir()
    (tools / "primus").write_text(f'#!/bin/sh\nexec {PYTHON} -m primus.cli.main "$@"\n')
    (tools / "primus").chmod(0o755)
    more = f"{ROOT / 'tests/integration/faults'}:{ROOT / 'src'}"
    cluster.environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": more}
    yield cluster
    cluster.stop()


class Launched:
    """A submitted job and its folder."""

    def __init__(self, slurm: Slurm, runs: Path, *words: str, steps: int = STEPS, **variables: str) -> None:
        self.slurm = slurm
        done = subprocess.run(
            [
                sys.executable, "-m", "primus.cli.main", "launch", "slurm", "llama3-proxy", "--nodes", "2", "--ranks",
                "1", "--gpu", "cpu", "--steps", str(steps), "--container", "none", "--output", str(runs),
                "checkpoint.interval=20", "--json", *words,
            ],
            env=slurm.environment | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.number = str(json.loads(done.stdout)["job"])
        self.folder = runs / self.number
        self.log = runs / f"slurm-{self.number}.txt"

    def ended(self, seconds: float = 400) -> dict[str, str]:
        return self.slurm.ended(self.number, seconds)

    def reach(self, step: int, attempt: int = 0) -> None:
        """Wait until the ranks have logged ``step``."""
        log = self.folder / f"attempt-{attempt}" / "log.txt"
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            with suppress(OSError):
                if any(int(number) >= step for number in re.findall(r"step:\s*(\d+)", log.read_text())):
                    return
            time.sleep(0.2)
        raise AssertionError(self.said())

    def pids(self, node: str) -> list[int]:
        """The ranks on ``node``."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                words = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
                mine = f"SLURM_JOB_ID={self.number}".encode() in words and f"SLURMD_NODENAME={node}".encode() in words
                if mine and any(word.startswith(b"RANK=") for word in words):
                    found.append(int(entry.name))
        return found

    def result(self, attempt: int = 0) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.folder / f"attempt-{attempt}" / "result.json").read_text())
        return found

    def losses(self, attempt: int) -> dict[int, float]:
        lines = (self.folder / f"attempt-{attempt}" / "exact.jsonl").read_text().splitlines()
        return {one["step"]: one["loss"] for one in map(json.loads, lines)}

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else "(no log)"


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, folder: Path) -> Launched:
    job = Launched(slurm, folder / "runs")
    assert job.ended()["JobState"] == "COMPLETED", job.said()
    return job


def test_two_nodes_train_and_each_rank_has_a_log(undisturbed: Launched) -> None:
    assert undisturbed.result()["passed"] is True
    assert len(undisturbed.losses(0)) == STEPS
    assert (undisturbed.folder / "attempt-0" / "node-1" / "log.txt").is_file()
    ranks = [path for path in undisturbed.folder.rglob("stdout.log") if path.parent.name.isdigit()]
    assert len(ranks) == 2
    job = undisturbed.slurm.job(undisturbed.number)
    assert (job["NumNodes"], job["Requeue"], job["ExitCode"]) == ("2", "1", "0:0")


def test_a_lost_node_requeues_the_job_which_ends_at_the_same_loss(
    slurm: Slurm, folder: Path, undisturbed: Launched
) -> None:
    job = Launched(slurm, folder / "runs")
    job.reach(45)
    slurm.kill_node("n2")
    try:
        assert job.ended()["JobState"] == "COMPLETED", job.said()
        assert job.slurm.job(job.number)["Restarts"] != "0"
    finally:
        slurm.start_node("n2")
    last = max(int(path.name[8:]) for path in job.folder.glob("attempt-*"))
    assert "step-40" in job.said() or "step-60" in job.said()
    resumed, whole = job.losses(last), undisturbed.losses(0)
    assert resumed == {step: whole[step] for step in resumed}
    assert max(resumed) == STEPS


def test_a_preempted_job_continues(slurm: Slurm, folder: Path, undisturbed: Launched) -> None:
    job = Launched(slurm, folder / "runs")
    job.reach(30)
    slurm.run("scancel", "--signal=USR1", "--batch", job.number)
    assert job.ended()["JobState"] == "COMPLETED", job.said()
    assert "requeued" in job.said()
    whole = undisturbed.losses(0)
    assert job.losses(1) == {step: whole[step] for step in job.losses(1)}
    assert max(job.losses(1)) == STEPS


def test_a_killed_rank_fails_the_job_which_says_why(slurm: Slurm, folder: Path) -> None:
    job = Launched(slurm, folder / "runs")
    job.reach(10)
    os.kill(job.pids("n2")[0], signal.SIGKILL)
    ended = job.ended()
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), job.said()
    assert ended["ExitCode"] != "0:0"
    assert "ended by signal 9" in job.said() or "Signal 9 (SIGKILL)" in job.said()


def test_a_hung_rank_ends_and_is_named(slurm: Slurm, folder: Path) -> None:
    job = Launched(slurm, folder / "runs", "--stall-timeout", "60", "comm.train_timeout_seconds=600")
    job.reach(10)
    for pid in job.pids("n2"):
        os.kill(pid, signal.SIGSTOP)
    ended = job.ended()
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), job.said()
    assert re.search(r"rank [01]: hung: no progress for 60 s; its process is stopped", str(job.result()["cause"]))


def test_a_slow_rank_delays_the_job_and_changes_nothing(slurm: Slurm, folder: Path, undisturbed: Launched) -> None:
    job = Launched(slurm, folder / "runs")
    job.reach(10)
    for _ in range(10):
        for signal_ in (signal.SIGSTOP, signal.SIGCONT):
            for pid in job.pids("n2"):
                os.kill(pid, signal_)
            time.sleep(1)
    assert job.ended()["JobState"] == "COMPLETED", job.said()
    assert job.losses(0) == undisturbed.losses(0)


def test_a_full_disk_fails_the_job_and_loses_no_checkpoint(slurm: Slurm, folder: Path, undisturbed: Launched) -> None:
    runs = folder / "small"
    runs.mkdir()
    size = sum(path.stat().st_size for path in undisturbed.folder.rglob("*") if path.is_file())
    # Room for two of the four checkpoints, for the logs, and for what both nodes reserve.
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size * 5 // 8 + (8 << 20)}", "tmpfs", runs], check=True)
    try:
        job = Launched(slurm, runs)
        ended = job.ended()
        assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), job.said()
        assert "No space left on device" in str(job.result()["cause"]), job.said()
        subprocess.run(["mount", "-o", f"remount,size={size * 4}", runs], check=True)
        again = Launched(slurm, runs, "--resume-from", str(job.folder / "attempt-0"))
        assert again.ended()["JobState"] == "COMPLETED", again.said()
        whole = undisturbed.losses(0)
        assert again.losses(0) == {step: whole[step] for step in again.losses(0)}
        assert max(again.losses(0)) == STEPS
        assert min(again.losses(0)) > 1
    finally:
        subprocess.run(["umount", runs], check=True)
