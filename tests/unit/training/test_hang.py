"""A hung job: which rank the others wait for, from the stacks that the ranks left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from primus.training import failure

WAITING = """Fatal Python error: Aborted

Current thread 0x00007f0000000001 (most recent call first):
  File "/opt/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/opt/primus/training/loop/train.py", line 90 in _step
"""
BUSY = """Fatal Python error: Aborted

Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 300 in wait

Current thread 0x00007f0000000001 (most recent call first):
  File "/opt/data.py", line 12 in read
  File "/opt/primus/training/loop/train.py", line 80 in run
"""


def left(output: Path, **stacks: str) -> None:
    for rank, text in stacks.items():
        file = failure.stack_file(output, int(rank.removeprefix("rank")))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_the_rank_that_does_not_wait_is_named(tmp_path: Path) -> None:
    left(tmp_path, rank0=WAITING, rank1=BUSY, rank2=WAITING, rank3="")
    assert failure.name_hung(tmp_path, 60) == [1]
    found = failure.cause(tmp_path, 1)
    assert str(found) == "rank 1: hung: no progress for 60 s; it is in read (data.py:12)"
    assert list(failure.stacks(tmp_path)) == [0, 1, 2]


def test_nobody_is_named_where_all_wait(tmp_path: Path) -> None:
    left(tmp_path, rank0=WAITING, rank1=WAITING)
    assert failure.name_hung(tmp_path, 60) == []


def test_a_rank_that_is_aborted_leaves_its_stack(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from primus.training.failure import noting\n"
        "def stuck():\n    print('ready', flush=True); time.sleep(60)\n"
        f"with noting(Path({str(tmp_path)!r})): stuck()"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"RANK": "5"}, stdout=subprocess.PIPE)
    with rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        rank.send_signal(signal.SIGABRT)
    assert "in stuck" in failure.stacks(tmp_path)[5]
    assert failure.name_hung(tmp_path, 60) == [5]
    (note,) = (tmp_path / "cache" / "failures").glob("*.json")
    assert "it is in stuck" in json.loads(note.read_text())["text"]
