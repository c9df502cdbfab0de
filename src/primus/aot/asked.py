"""What was asked for, and what became of it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Answer", "Asked", "Noted", "folder_of", "refused"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One compiled kernel that a call asked for. ``key`` is its folder in Triton's cache."""

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
    """One kernel that a call asked for, still to be compiled: ``form`` is a file with its first form (TTIR), ``source``
    Triton's hash of the library's source and the arguments, ``options`` what the backend is told.
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
    """All kernels asked for, each once; what does not compile, one sentence each; files that a run had to make."""

    asked: tuple[Asked, ...]
    failures: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    @property
    def compiled(self) -> tuple[Asked, ...]:
        """Those that no cache held."""
        return tuple(one for one in self.asked if one.compiled)


def folder_of(digest: str) -> str:
    """The folder's name that Triton gives a key."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def refused(kernel: str, arch: str, reason: str, case: str) -> str:
    """The sentence about a kernel that does not compile; ``reason`` begins with the function's name."""
    return f"{kernel} does not compile for {arch}: {reason} ({case})"
