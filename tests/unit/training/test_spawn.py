"""Ranks on one machine: their variables, and the first of them that fails."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from primus_images.training.run import spawn


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, action in before.items():
        signal.signal(number, action)


def python(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time, signal\n{text}"]


def test_each_rank_knows_its_place(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PRIMUS_LAUNCH"
    line = f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write"
    values = f"' '.join(os.environ[name] for name in {names.split()})"
    assert spawn.main(2, python(f"{line}({values})")) == 0
    for rank in "01":
        assert (tmp_path / rank).read_text() == f"{rank} {rank} 2 2 127.0.0.1 0 {os.getpid()}"


def test_first_failure_is_reported_and_ends_the_others(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    began = time.monotonic()
    text = f"""
if os.environ['RANK'] == '1':
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: (open({str(tmp_path / "ended")!r}, 'w'), sys.exit(5)))
while True:
    time.sleep(0.05)
"""
    assert spawn.main(2, python(text)) == 1
    assert time.monotonic() - began < 8
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == ["Root Cause (first observed failure):", "  rank      : 1"]
    assert lines[2].startswith("  exitcode  : 3 (pid: ")
    assert len(lines) == 3


def test_signal_of_a_rank_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert spawn.main(1, python("os.kill(os.getpid(), signal.SIGKILL)")) == 1
    lines = capfd.readouterr().err.splitlines()
    assert "  exitcode  : -9 (pid: " in lines[2]
    assert lines[3].startswith("  Signal 9 (SIGKILL) received by PID ")


def test_rank_that_ignores_the_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spawn, "_GRACE_SECONDS", 0.2)
    ready = str(tmp_path / "ready")
    text = f"""
if os.environ['RANK'] == '0':
    while not os.path.exists({ready!r}):
        time.sleep(0.02)
    sys.exit(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({ready!r}, 'w').close()
time.sleep(60)
"""
    began = time.monotonic()
    assert spawn.main(2, python(text)) == 1
    assert time.monotonic() - began < 30


def test_signal_to_the_launcher_ends_all_ranks(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ready = tmp_path / "ready"

    def interrupt() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    text = f"open({str(ready)!r}, 'w').close()\ntime.sleep(60)"
    assert spawn.main(1, python(text)) == 1
    assert capfd.readouterr().err == "Root Cause: the launcher of the ranks was ended by SIGTERM\n"
