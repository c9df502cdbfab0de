"""Records of requested kernels, and of the outcome."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Requested:
    """One compiled kernel that a call requested. ``key`` is the name of its folder in Triton's cache."""

    kernel: str
    function: str
    key: str
    case: str
    compiled: bool
    warps: int
    stages: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class Noted:
    """One requested kernel that is not compiled yet.

    ``form`` is a file with its first intermediate representation (TTIR). ``source`` is Triton's hash of the library's
    source and the arguments. ``options`` are those of the compiler backend.
    """

    kernel: str
    function: str
    key: str
    case: str
    source: str
    options: Mapping[str, Any]
    form: Path


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All requested kernels without duplicates, a message for each failure, and the files that a run created."""

    requested: tuple[Requested, ...]
    failures: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    @property
    def compiled(self) -> tuple[Requested, ...]:
        """The kernels that were not in a cache."""
        return tuple(one for one in self.requested if one.compiled)


def folder_of(digest: str) -> str:
    """Return the name that Triton gives to the folder of a key."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def refused(kernel: str, arch: str, reason: str, case: str) -> str:
    """Return the message for a kernel that does not compile. ``reason`` begins with the name of the function."""
    return f"{kernel} does not compile for {arch}: {reason} ({case})"
