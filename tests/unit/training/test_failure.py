"""The first cause of a failed job, from what its ranks noted and what its log says."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tables
from primus_images.errors import InputError
from primus_images.training.run import failure, hang, processes
from primus_images.training.run.failure import _last_line, cause, share, text_of
from project_kit import until
from tables import table_of

SRC = Path(__file__).resolve().parents[3] / "src"
PEER = (
    "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
)
REPORT = tables.text_of("torchrun_report.txt")
PLAIN = REPORT.format(
    rank=0, code=1, said="To enable traceback see: https://pytorch.org/docs/stable/elastic"
)
KILLED = REPORT.format(rank=1, code=-9, said="Signal 9 (SIGKILL) received by PID 7")


def left(folder: Path, log: str, *notes: tuple[float, int, str]) -> Path:
    (folder / "cache" / "failures").mkdir(parents=True)
    (folder / "log.txt").write_text(log)
    for when, rank, text in notes:
        note = {"time": when, "rank": rank, "text": text}
        (folder / "cache" / "failures" / f"{rank}.json").write_text(json.dumps(note))
    return folder


@pytest.mark.parametrize(("log", "notes", "code", "wanted"), table_of("failure.first_cause"))
def test_the_first_cause(
    tmp_path: Path, log: str, notes: list[tuple[float, int, str]], code: int, wanted: str
) -> None:
    texts = {
        "PEER": PEER,
        "PLAIN": PLAIN,
        "KILLED": KILLED,
        "SEVEN": PLAIN.replace("code  : 1", "code  : 7"),
    }
    shown = [(when, rank, text.format(**texts)) for when, rank, text in notes]
    assert wanted in str(cause(left(tmp_path, log.format(**texts), *shown), code))


def test_a_message_without_text_is_no_cause() -> None:
    assert _last_line(" \n") == ""
    assert _last_line("ValueError:\n  no such shard") == "ValueError: no such shard"


def test_a_job_that_passed_has_no_cause_and_broken_notes_are_none(tmp_path: Path) -> None:
    folder = left(tmp_path, "ValueError: caught and logged\n")
    assert cause(folder, 0) is None
    (folder / "cache" / "failures" / "0.json").write_text("{")
    assert str(cause(folder, 1)) == "ValueError: caught and logged"
    assert str(cause(tmp_path / "absent", 1)) == "exit code 1"


def test_a_rank_that_a_signal_ends_on_another_node_is_the_cause_on_every_node(
    tmp_path: Path,
) -> None:
    """Node 0 only sees that its peer is gone; node 1's report names the signal, in a log of its
    own.
    """
    left(tmp_path, PLAIN, (1.0, 0, PEER))
    other = tmp_path / "node-1"
    other.mkdir()
    (other / "log.txt").write_text(KILLED)
    assert PEER in str(cause(tmp_path, 1))
    later = threading.Timer(0.5, share, (tmp_path, other / "log.txt", 0.0))
    later.start()
    started = time.monotonic()
    share(tmp_path, tmp_path / "log.txt", 30.0)
    later.join()
    assert time.monotonic() - started < 10
    for folder in (tmp_path, other):
        assert str(cause(folder, 1, tmp_path)).startswith(
            "rank 1: ended by signal 9 (SIGKILL) (the kernel does this"
        )


def test_what_an_error_says_is_its_own_last_line() -> None:
    worker = RuntimeError(
        "Caught KeyError in worker 0.\nOriginal Traceback (most recent call last):\n  "
        "x\nKeyError: 'text'"
    )
    assert text_of(worker) == "KeyError: 'text'"
    assert text_of(SystemExit("the weights lack x")) == "the weights lack x"
    assert text_of(InputError("no", where="a:1", hint="do")) == "a:1: no → do"
    assert text_of(RuntimeError("Error(s) in loading state_dict:\n\tMissing key(s): a\n")) == (
        "RuntimeError: Error(s) in loading state_dict: Missing key(s): a"
    )
    try:
        try:
            raise KeyError("text")
        except KeyError as error:
            raise RuntimeError("while reading") from error
    except RuntimeError as error:
        assert text_of(error) == "RuntimeError: while reading; raised from KeyError: 'text'"


@pytest.mark.parametrize(("statement", "wanted"), table_of("failure.why_a_rank_ends"))
def test_a_rank_notes_why_it_ends(tmp_path: Path, statement: str, wanted: str | None) -> None:
    start = "import sys, pathlib\nfrom primus_images.training.run.failure import noting\n"
    code = f"{start}with noting(pathlib.Path(sys.argv[1])):\n    {statement}"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(SRC), "RANK": "3"},
        capture_output=True,
        check=False,
    )
    assert bool(ended.returncode) is (wanted is not None)
    found = cause(tmp_path, ended.returncode)
    assert (str(found) if found else None) == wanted
    assert failure.known(tmp_path) is (wanted is not None)


# Hung jobs

STACKS = table_of("failure.stacks_of_a_hung_job")


def stacks(output: Path, **texts: str) -> None:
    for rank, text in texts.items():
        file = failure.stack_file(output, int(rank.removeprefix("rank")))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_the_rank_that_does_not_wait_is_named(tmp_path: Path) -> None:
    stacks(
        tmp_path, rank0=STACKS["waiting"], rank1=STACKS["busy"], rank2=STACKS["waiting"], rank3=""
    )
    assert hang.name_hung(tmp_path, 60, {3}) == [1]
    found = failure.cause(tmp_path, 1)
    assert str(found) == "rank 1: hung: no progress for 60 s; it is in read (data.py:12)"
    assert list(hang.stacks(tmp_path)) == [0, 1, 2]
    stacks(tmp_path, rank1=STACKS["waiting"])
    assert hang.name_hung(tmp_path, 60, {0, 1}) == []
    (tmp_path / "cache" / "failures" / "1.json").unlink()
    assert hang.name_hung(tmp_path, 60, {0, 3}) == [3]
    assert str(failure.cause(tmp_path, 1)).endswith("no progress for 60 s; it left no stack")


def test_a_stopped_rank_is_named_and_killed_and_the_others_are_ended(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(["sleep", "60"], env=os.environ | {"RANK": str(number)})
        for number in range(2)
    ]
    try:
        os.kill(ranks[1].pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while processes.processes()[ranks[1].pid][1] != "T" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert hang.end_ranks(os.getpid(), tmp_path, 9) == {0}
        assert [rank.wait(10) for rank in ranks] == [-signal.SIGABRT, -signal.SIGKILL]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert str(failure.cause(tmp_path, 1)) == (
        "rank 1: hung: no progress for 9 s; its process is stopped (SIGSTOP, or a debugger)"
    )


@pytest.mark.parametrize(
    ("state", "does", "number"),
    [
        ("t", "stopped (SIGSTOP, or a debugger)", signal.SIGKILL),
        ("D", "waiting for a disk or a device", signal.SIGABRT),
    ],
)
def test_a_traced_rank_takes_only_sigkill(
    state: str, does: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A debugger holds other signals back. What waits for a device takes one when it returns."""
    with subprocess.Popen(["sleep", "60"], env=os.environ | {"RANK": "2"}) as rank:
        # The kernel shows the variables a moment after the program began.
        until(lambda: hang._rank(rank.pid) == 2)
        monkeypatch.setattr(hang, "processes", lambda: {rank.pid: (os.getpid(), state)})
        assert hang.end_ranks(os.getpid(), tmp_path, 9) == set()
        assert rank.wait(10) == -number
    assert str(failure.cause(tmp_path, 1)) == (
        f"rank 2: hung: no progress for 9 s; its process is {does}"
    )
