"""Triton's cache with a read-only part: kernels compiled when the image was built are found, new ones go elsewhere.

``TRITON_CACHE_MANAGER=primus.aot.cache:BakedCacheManager`` is Triton's own way to replace its cache. What the baked
folder lacks is compiled and kept in ``TRITON_CACHE_DIR`` as ever. Baked kernels lie in ``FOLDER/VERSION/ARCH/KEY``:
Triton's version, the GPU architecture, Triton's own key.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from triton import __version__
from triton.runtime.cache import FileCacheManager

__all__ = ["BAKED", "VARIABLE", "BakedCacheManager"]

BAKED = "/opt/primus/triton"
# Names another folder than BAKED.
VARIABLE = "PRIMUS_TRITON_BAKED"


class BakedCacheManager(FileCacheManager):  # type: ignore[misc]
    """One key's files: the baked ones if there are any, else Triton's own."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._baked = None if override or dump else _baked_folder(os.environ.get(VARIABLE, BAKED), key)

    def get_file(self, filename: str) -> str | None:
        """The file's path, or None."""
        if self._baked is not None and (self._baked / filename).is_file():
            return str(self._baked / filename)
        found: str | None = super().get_file(filename)
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Name → path of the files that belong together with ``filename``, or None."""
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
