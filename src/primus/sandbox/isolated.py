"""Run a build script so that nothing but its inputs can change its outputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from primus.sandbox.container import GIB, Command, Engine, Mount, RootFs
from primus.sandbox.engines import choose

LOG_TAIL_LINES = 30

# 1980-01-01 is the earliest time a zip archive (so a wheel) can hold.
BUILD_ENV: Mapping[str, str] = {
    "HOME": "/tmp/home",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "SOURCE_DATE_EPOCH": "315532800",
    "TZ": "UTC",
}

# The home directory is made inside: /tmp is the image's, and the image has none.
_PRELUDE = 'umask 022 && mkdir -p "$HOME" && exec "$@"'


def run_isolated(
    root: RootFs,
    argv: Sequence[str],
    *,
    inputs: Mapping[str, Path],
    outputs: Path,
    env: Mapping[str, str],
    log: Path,
    engine: Engine | None = None,
) -> int:
    """Run ``argv`` in ``root`` as its root user, without network, and return its exit code.

    ``inputs`` maps absolute paths inside to host files or directories, all read-only. The host directory
    ``outputs`` (made if missing) is /out, the only place whose changes are kept. ``env`` adds to
    ``BUILD_ENV``; the image's own environment apart from PATH is kept too. Everything the script prints
    goes to ``log``, which is replaced. Works from any thread. ``engine`` None picks what this machine has.
    Raises InputError for a bad input path and HostError when the machine cannot isolate.
    """
    outputs.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = Command(
        argv=("/bin/sh", "-c", _PRELUDE, "build", *argv),
        env={**BUILD_ENV, **env},
        cwd="/",
        mounts=(
            *(Mount(source=source, target=target) for target, source in sorted(inputs.items())),
            Mount(source=outputs, target="/out", read_only=False),
        ),
        tty=False,
        user="0",
        entrypoint=False,
        hostname="build",
        shm_bytes=8 * GIB,
    )
    with log.open("wb") as out, Path(os.devnull).open("rb") as nothing:
        return (engine or choose("auto")).run(root, command, stdin=nothing, stdout=out, stderr=out)


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last ``lines`` lines of a log, then one line with its path; for showing after a failure."""
    # The end of the file is enough: a compiler's log may be gigabytes.
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 400 * lines))
        tail = file.read().decode("utf-8", "replace").splitlines()[-lines:]
    return "\n".join([*tail, f"full log: {log}"])
