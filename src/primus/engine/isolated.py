"""Running a build script so that only its inputs can affect its outputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from primus.sandbox.container import GIB, Command, Mount, RootFs
from primus.sandbox.engines import Engine, choose

LOG_TAIL_LINES = 30

# 1980-01-01 is the earliest time that a zip archive, and so a wheel, supports.
BUILD_ENV: Mapping[str, str] = {
    "HOME": "/tmp/home",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "SOURCE_DATE_EPOCH": "315532800",
    "TZ": "UTC",
}

# The home directory is created inside: /tmp belongs to the image, which has no home. podman sets two variables.
_PRELUDE = 'unset container TERM; umask 022 && mkdir -p "$HOME" && exec "$@"'


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

    ``inputs`` maps absolute paths inside to host files or folders, all read-only. The host folder ``outputs``
    (created if missing) is /out, the only place whose changes are kept. ``env`` adds to ``BUILD_ENV``; the image's
    own environment is kept as well, except for PATH. The script's output replaces ``log``. Any thread may call
    this. ``engine`` None selects one. Raises InputError for an invalid input path, and HostError if the machine
    cannot isolate the script.
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
    """Return the last ``lines`` lines of a log and a line with its path, for a message after a failure."""
    # Read only the end of the file, because a compiler's log can have gigabytes.
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 400 * lines))
        tail = file.read().decode("utf-8", "replace").splitlines()[-lines:]
    return "\n".join([*tail, f"full log: {log}"])
