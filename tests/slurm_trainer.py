"""A stand-in for ``primus train`` on two nodes, for tests of what Slurm does to a job.

Its ranks meet at every step, log it, and save the same bytes in every run. The command line is that
of ``primus``; a job for GPUs is primus's own. Nothing is computed, so a busy machine runs it in
seconds.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

STEPS, INTERVAL = 120, 24
STARTING_S, STEP_S = 4, 0.05
# How long a rank waits for the other one, and how long for its first step, as torchrun does.
PATIENCE_S = 25
MEETING_S = 600
# The first node opens the port of the meeting after this.
OPENING_S = 2
# Bytes that a rank holds: more than the job's own script and srun.
MEMORY = 80 << 20


def value(words: list[str], option: str) -> str:
    """What follows an option; empty without it."""
    return words[words.index(option) + 1] if option in words else ""


def wait_for(path: Path, output: Path, patience: float = PATIENCE_S) -> None:
    """Wait for a file of the other rank. A rank whose partner failed ends, too."""
    deadline = time.monotonic() + patience
    while not path.exists():
        if (output / "failed").exists() or time.monotonic() > deadline:
            sys.exit(1)
        time.sleep(0.02)


def train(output: Path, rank: int, first: int) -> None:
    """Take the steps of one rank."""
    held = b"1" * MEMORY
    time.sleep(STARTING_S)
    other = 1 - rank
    folder = output / "node-1" if rank else output
    for place in (folder, output / "steps"):
        place.mkdir(parents=True, exist_ok=True)
    for step in range(first, STEPS + 1):
        (output / f"steps/{step}-{rank}").touch()
        patience = MEETING_S if step == first else PATIENCE_S
        wait_for(output / f"steps/{step}-{other}", output, patience)
        time.sleep(STEP_S)
        with (folder / "log.txt").open("a") as log:
            log.write(f"step: {step}\n")
        if rank == 0:
            with (output / "exact.jsonl").open("a") as exact:
                exact.write(json.dumps({"step": step, "loss": 1000 / step}) + "\n")
        if step % INTERVAL == 0:
            save(output, rank, step)
    del held


def save(output: Path, rank: int, step: int) -> None:
    """Write a checkpoint. It is complete when both ranks have written their part."""
    checkpoint = output / f"checkpoint/step-{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    part = checkpoint / f"__{rank}_0.distcp"
    part.with_suffix(".partial").write_bytes(bytes([step, rank]) * 5000)
    part.with_suffix(".partial").rename(part)
    if rank == 0:
        wait_for(checkpoint / "__1_0.distcp", output)
        (checkpoint / "recipe.json").touch()
        (checkpoint / ".metadata").touch()


def watch(words: list[str]) -> int:
    """Start the rank of this node, and note how it ended."""
    output, rank = Path(value(words, "--output")), int(os.environ["SLURM_NODEID"])
    output.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "RANK": str(rank)}
    process = subprocess.Popen([sys.executable, __file__, "rank", *words], env=environment)

    def end(number: int, _: FrameType | None) -> None:
        process.kill()
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    meeting = socket.socket()
    if rank == 0:
        meeting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        time.sleep(OPENING_S)
        try:
            meeting.bind(("", int(os.environ["MASTER_PORT"])))
            meeting.listen()
        except OSError as error:
            (output / "log.txt").write_text(f"{errno.errorcode[error.errno or 0]}: {error}\n")
            (output / "failed").touch()
            process.kill()
    code = process.wait()
    meeting.close()
    result = {"passed": code == 0}
    if code < 0 and not (output / "failed").exists():
        cause = f"rank {rank}: ended by signal {-code}"
        (output / "result.json").write_text(json.dumps({**result, "cause": cause}))
        (output / "failed").touch()
    elif rank == 0 and code == 0:
        (output / "result.json").write_text(json.dumps(result))
    return int(code != 0)


def main() -> int:
    """Run as ``primus``, or as one of its ranks."""
    words = sys.argv[1:]
    if words[0] == "rank":
        resumed = value(words, "--resume-from").rpartition("step-")[2] or "0"
        train(Path(value(words, "--output")), int(os.environ["RANK"]), int(resumed) + 1)
        return 0
    if "--gpu=cpu" not in words:
        os.execv(sys.executable, [sys.executable, "-m", "primus_images.cli.main", *words])
    return watch(words)


if __name__ == "__main__":
    sys.exit(main())
