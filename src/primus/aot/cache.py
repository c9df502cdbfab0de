"""A cache manager for Triton that first looks for kernels that were compiled when the image was built.

Triton loads it because of ``TRITON_CACHE_MANAGER=primus.aot.cache:BakedCacheManager``. Kernels that are not in the
image are compiled and stored in ``TRITON_CACHE_DIR``, as usual. The image has its kernels in
``FOLDER/VERSION/ARCH/KEY``: Triton's version, the GPU architecture, and Triton's cache key.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from triton import __version__
from triton.runtime.cache import FileCacheManager

BAKED = "/opt/primus/triton"
# The variable that replaces BAKED by another folder.
VARIABLE = "PRIMUS_TRITON_BAKED"


class BakedCacheManager(FileCacheManager):  # type: ignore[misc]
    """The files of one key: those of the image if it has the key, otherwise those of Triton's own cache."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._baked = None if override or dump else _baked_folder(os.environ.get(VARIABLE, BAKED), key)

    def get_file(self, filename: str) -> str | None:
        """Return the path of the file, or None."""
        if self._baked is not None and (self._baked / filename).is_file():
            return str(self._baked / filename)
        found: str | None = super().get_file(filename)
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return name → path of the files in the group of ``filename``, or None."""
        if self._baked is not None and (self._baked / f"__grp__{filename}").is_file():
            return {p.name: str(p) for p in sorted(self._baked.iterdir()) if not p.name.startswith("__grp__")}
        group: dict[str, str] | None = super().get_group(filename)
        return group


def _baked_folder(root: str, key: str) -> Path | None:
    return next((arch / key for arch in _archs(root) if (arch / key).is_dir()), None)


@cache
def _archs(root: str) -> tuple[Path, ...]:
    folder = Path(root, __version__)
    return tuple(sorted(p for p in folder.iterdir() if p.is_dir())) if folder.is_dir() else ()
