"""The startup time of training inside an image: ``primus train`` and torchtitan's own command in
turns.

Both are timed until the last rank logs ``Starting job``, the first statement of torchtitan's
``Trainer.__init__``, by the time in torchtitan's own log line. The commands are then ended. Prints
one JSON document; ``benchmarks.launcher`` runs this in the sandbox.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path

from benchmarks.measure import run
from primus_images.errors import CheckFailed

_TRAIN = ("primus", "train", "llama3-proxy")
_PLAN = (*_TRAIN, "--dry-run")
_SHOW = ("primus", "show", "llama3.1-8b", "--gpu", "mi355x")
# As torchtitan's own run_train.sh starts it. The line comes before anything that fails without a
# GPU.
_BARE = (
    "python3",
    "-m",
    "torch.distributed.run",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "localhost:0",
)
_TITAN = ("-m", "torchtitan.train", "--job.config_file")
_MARK = re.compile(r"\[titan\] (\S+ \S+) - root - INFO - Starting job: ")
_RANKS = (1, 2)
# The number of runs of cheap commands for each pair of starts.
_PER_PAIR = 4
_LONGEST = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeats", type=int, required=True, help="pairs of starts per number of ranks"
    )
    repeats = parser.parse_args(argv).repeats
    work = Path("starts").absolute()
    work.mkdir()
    pairs = {ranks: _pairs(ranks, repeats, work) for ranks in _RANKS}
    plan, show = (
        [run(command).seconds for _ in range(_PER_PAIR * repeats + 1)][1:]
        for command in (_PLAN, _SHOW)
    )
    commands = {
        "ours": " ".join(_TRAIN),
        "bare": " ".join([*_BARE, *_TITAN, "FILE"]),
        "plan": " ".join(_PLAN),
        "show": " ".join(_SHOW),
    }
    versions = {
        "python": sys.version.split()[0],
        **{name: metadata.version(name) for name in ("torch", "torchtitan")},
    }
    found = {"commands": commands, "versions": versions, "pairs": pairs, "plan": plan, "show": show}
    print(json.dumps(found))
    return 0


def _pairs(ranks: int, repeats: int, work: Path) -> list[dict[str, float]]:
    """Return the seconds of both commands per turn; the one that goes first alternates. The first
    turn warms the caches and is dropped.
    """
    config, found = work / f"torchtitan-{ranks}.toml", []
    for turn in range(repeats + 1):
        pair: dict[str, float] = {}
        for side in ("ours", "bare") if turn % 2 == 0 else ("bare", "ours"):
            log, job = work / "log.txt", work / "job"
            if side == "bare":
                command = [*_BARE, "--nproc-per-node", str(ranks), *_TITAN, str(config)]
                pair[side] = _seconds(command, log, log, ranks)
                continue
            pair[side] = _seconds(
                [*_TRAIN, "--ranks", str(ranks), "--output", str(job)], log, job / "log.txt", ranks
            )
            # Both read the configuration that ours has written.
            shutil.copy(job / "torchtitan.toml", config)
            shutil.rmtree(job)
        seen = ", ".join(f"{side} {seconds:.2f} s" for side, seconds in pair.items())
        print(f"  {ranks} rank(s), turn {turn} of {repeats}: {seen}", file=sys.stderr, flush=True)
        found.append(pair)
    return found[1:]


def _seconds(command: Sequence[str], output: Path, marked: Path, ranks: int) -> float:
    """Return the seconds from the start of ``command`` until its last rank's line in the file
    ``marked``. Then end it.
    """
    with output.open("wb") as out:
        started = time.time()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        ended = False
        while len(marks := _marks(marked)) < ranks:
            if ended or time.time() - started > _LONGEST:
                raise CheckFailed(
                    f"{' '.join(command[:4])} … did not start "
                    f"training:\n{output.read_text()[-2000:]}"
                )
            # A rank may fail right after its line, so read the file once more after the command has
            # ended.
            ended = child.poll() is not None
            time.sleep(0.05)
    finally:
        child.terminate()
        child.wait()
    return max(marks) - started


def _marks(log: Path) -> list[float]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [
        datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp() for when in _MARK.findall(text)
    ]


if __name__ == "__main__":
    sys.exit(main())
