"""Communication between the runner and its helpers: a job as JSON through one descriptor, errors through another."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from primus.errors import HostError, InputError, PrimusError


def pack(job: dict[str, Any]) -> int:
    """Return a descriptor from which a child process reads ``job``. Close it when the child has started."""
    number = os.memfd_create("primus-job", 0)
    with open(number, "wb", closefd=False) as file:
        file.write(json.dumps(job).encode())
    os.lseek(number, 0, os.SEEK_SET)
    return number


def unpack(number: int) -> dict[str, Any]:
    """Read the job, in the child."""
    with open(number, "rb") as file:
        job: dict[str, Any] = json.loads(file.read())
    return job


def report(number: int, error: BaseException) -> None:
    """Send the error with which the helper ends to the runner."""
    hint = error.hint if isinstance(error, PrimusError) else None
    message = error.message if isinstance(error, PrimusError) else str(error)
    if isinstance(error, OSError):
        message = f"the sandbox cannot be set up: {error.strerror or error}"
        hint = "run as root, in a container only with --privileged, or use --engine docker"
    kind = "input" if isinstance(error, InputError) else "host"
    with contextlib.suppress(OSError):
        os.write(number, json.dumps({"kind": kind, "message": message[:3000], "hint": hint}).encode() + b"\n")


def raise_reported(number: int) -> None:
    """Read the errors that helpers sent, and raise the first one. Returns if there is none."""
    with open(number, "rb", closefd=False) as file:
        line = file.readline()
    if not line:
        return
    entry = json.loads(line)
    error = InputError if entry["kind"] == "input" else HostError
    raise error(entry["message"], hint=entry["hint"])
