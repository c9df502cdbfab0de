"""Sorted folder listings: the ``sitecustomize`` module of every build.

Each file system lists folders in its own order. A build that links its objects in that order
(``os.walk``, ``glob``) would create other bytes on another disk. This file runs in the build root's
Python.
"""

from __future__ import annotations

import os
from typing import Any

_listdir = os.listdir
_scandir = os.scandir


class _Sorted:
    """The result of ``os.scandir``, sorted by name."""

    def __init__(self, path: Any) -> None:
        with _scandir(path) as entries:
            self._entries = iter(sorted(entries, key=lambda entry: entry.name))

    def __iter__(self) -> Any:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: the listing is already closed."""


def _names(path: Any = ".") -> Any:
    return sorted(_listdir(path))


def _entries(path: Any = ".") -> Any:
    return _Sorted(path)


os.listdir = _names
os.scandir = _entries
