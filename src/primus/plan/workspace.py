"""The folders that a build writes to: the image store, fetched files, unpacked layers, caches and logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from primus.fetch.filecache import FileCache
from primus.oci.store import InUse, Store
from primus.plan.stats import StatIndex


@dataclass(frozen=True)
class Workspace:
    """The store, and the folder that contains everything else (``.primus`` of a project). It contains no input."""

    store: Store
    folder: Path

    @cached_property
    def _in_use(self) -> InUse:
        # Commands with different stores share the folder, so it has a lock of its own.
        return InUse(self.folder / "in-use", "the downloads and unpacked layers", self.folder)

    def hold(self) -> None:
        """Prevent :meth:`alone` from starting until this process ends."""
        self.store.in_use.hold()
        self._in_use.hold()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other commands from using the store and the folder. Raises HostError if one is using them."""
        with self.store.in_use.alone(), self._in_use.alone():
            yield

    @cached_property
    def files(self) -> FileCache:
        """The cache of fetched files."""
        return FileCache(self.folder / "files")

    @cached_property
    def stats(self) -> StatIndex:
        """The cache of hashes of local files."""
        return StatIndex(self.folder / "cache" / "stats.json")

    @property
    def unpacked(self) -> Path:
        """The unpacked layers, for the sandbox."""
        return self.folder / "unpacked"

    @property
    def facts(self) -> Path:
        """The cached results of gates for each layer."""
        return self.folder / "cache" / "gates"

    @property
    def logs(self) -> Path:
        """The logs of actions that ran in the sandbox."""
        return self.folder / "logs"
