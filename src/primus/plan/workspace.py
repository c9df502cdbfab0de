"""Where builds keep what they make: the image store, fetched files, unpacked layers, caches and logs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from primus.fetch.filecache import FileCache
from primus.oci.store import Store
from primus.plan.stats import StatIndex


@dataclass(frozen=True)
class Workspace:
    """The store, and the folder (``.primus`` of a project) that holds everything else. Nothing here is input."""

    store: Store
    folder: Path

    @cached_property
    def files(self) -> FileCache:
        """Files fetched by hash."""
        return FileCache(self.folder / "files")

    @cached_property
    def stats(self) -> StatIndex:
        """Hashes of local files."""
        return StatIndex(self.folder / "cache" / "stats.json")

    @property
    def unpacked(self) -> Path:
        """Layers as folders, for the sandbox."""
        return self.folder / "unpacked"

    @property
    def facts(self) -> Path:
        """What gates know about layers."""
        return self.folder / "cache" / "gates"

    @property
    def logs(self) -> Path:
        """One log per action that ran in the sandbox."""
        return self.folder / "logs"
