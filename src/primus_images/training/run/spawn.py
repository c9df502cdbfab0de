"""Starts the ranks of a job on one machine: ``python -m primus_images.training.run.spawn RANKS
COMMAND…``.

It replaces torchrun there, which imports PyTorch before it starts a rank: 3 to 5 seconds of every
run. It reports a failure in torchrun's words, and ends the other ranks as torchrun does. Ranks on
several machines need torchrun.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

# Less than the launcher itself is given to end.
_GRACE_SECONDS = 10.0


def main(count: int, command: Sequence[str]) -> int:
    """Run ``count`` ranks of ``command``. Return 1 after the first failure, or after a signal that
    ends the job.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    job = {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    running: dict[int, subprocess.Popen[bytes]] = {}
    failed = False
    try:
        for rank in range(count):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "PRIMUS_LAUNCH": os.getpid(), **job}
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            running[rank] = subprocess.Popen(command, env=environment, start_new_session=True)
        while running and not failed:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            for rank in [rank for rank, process in running.items() if process.poll() is not None]:
                if (process := running.pop(rank)).returncode and not failed:
                    failed = True
                    _report(rank, process)
    except KeyboardInterrupt as error:
        failed = True
        with suppress(OSError):  # nobody reads it if the command has ended, too
            print(
                f"Root Cause: the launcher of the ranks was ended by {error}",
                file=sys.stderr,
                flush=True,
            )
    _end(running.values())
    return int(failed)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _report(rank: int, process: subprocess.Popen[bytes]) -> None:
    code = process.returncode
    pid = process.pid
    lines = [
        "Root Cause (first observed failure):",
        f"  rank      : {rank}",
        f"  exitcode  : {code} (pid: {pid})",
    ]
    if code < 0:
        lines.append(f"  Signal {-code} ({signal.Signals(-code).name}) received by PID {pid}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
