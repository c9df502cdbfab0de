"""The hashes of a project's own files: which of them changed, without reading the others again."""

import contextlib
import os
import stat
import time
from pathlib import Path

from primus_images.errors import InputError
from primus_images.files import (
    link_fault,
    mark_of,
    path_fault,
    read_sealed,
    reason_of,
    sha256_of,
    write_sealed,
)

# A file may change again within the resolution of its times, so the hash of one that has just
# changed is not kept.
_RACY_NS = 50_000_000
_RENAME = "rename it, or leave it out with `include`"


class StatIndex:
    """The SHA-256 of local files by sizes, times and inodes. Losing it costs only time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # If not trusted, every file is read.
        self.trusted = True
        self._changed = False
        # Targets that share trees walk each tree once.
        self._trees: dict[tuple[str, tuple[str, ...]], list[tuple[str, str, str]]] = {}
        entries = read_sealed(path)
        # Path → size, mtime, ctime, inode, SHA-256.
        self._entries: dict[str, object] = entries if isinstance(entries, dict) else {}

    def sha256(self, path: str, status: os.stat_result | None = None) -> str:
        """Return the file's SHA-256, as hex. Raises InputError if it cannot be read."""
        status = status or os.stat(path)
        mark = mark_of(status)
        match self._entries.get(path):
            case [*recorded, str(digest)] if recorded == mark and digest and self.trusted:
                return digest
        now = time.time_ns()
        try:
            digest = sha256_of(path)
        except OSError as error:
            raise InputError(f"cannot be read: {reason_of(error)}", where=path) from None
        if now - max(status.st_mtime_ns, status.st_ctime_ns) > _RACY_NS:
            self._entries[path] = [*mark, digest]
            self._changed = True
        return digest

    def digest(self, path: Path) -> str:
        """Return the file's SHA-256 as in a manifest."""
        return "sha256:" + self.sha256(str(path))

    def tree(self, root: Path, include: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
        """Return every file below ``root``, or below its children ``include``, in order.

        The rows are those of :data:`primus_images.plan.action.Tree`, without caches. Raises
        InputError for what is missing or unreadable, and for files that an image may not contain:
        pipes, devices, sockets and unclean paths.
        """
        key = (str(root), include)
        if key not in self._trees:
            if not root.is_dir():
                raise InputError("there is no such folder", where=str(root))
            files: list[tuple[str, str, str]] = []
            try:
                for name in include:
                    self._child(root, name, files)
                if not include:
                    self._walk(str(root), "", files)
            except OSError as error:
                where = str(error.filename or root)
                raise InputError(f"cannot be read: {reason_of(error)}", where=where) from None
            self._trees[key] = sorted(files)
        return self._trees[key]

    def _child(self, root: Path, name: str, files: list[tuple[str, str, str]]) -> None:
        path = f"{root}/{name}"
        if not os.path.lexists(path):
            raise InputError(f"there is no {name!r} in this folder", where=str(root))
        if os.path.isdir(path) and not os.path.islink(path):
            self._walk(path, f"{name}/", files)
        else:
            self._file(path, name, files)

    def _walk(self, folder: str, prefix: str, files: list[tuple[str, str, str]]) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in ("__pycache__", ".git"):
                        self._walk(entry.path, f"{prefix}{entry.name}/", files)
                elif not entry.name.endswith(".pyc"):
                    self._file(entry.path, prefix + entry.name, files)

    def _file(self, path: str, name: str, files: list[tuple[str, str, str]]) -> None:
        fault = path_fault(name)
        if fault:
            raise InputError(
                f"{name!r} cannot be in an image: {fault}",
                where=path[: -len(name) - 1],
                hint=_RENAME,
            )
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(path)
            fault = link_fault(target)
            if fault:
                raise InputError(
                    f"the target of this link cannot be used: {fault}", where=path, hint=_RENAME
                )
            files.append((name, "link", target))
        else:
            kind = "exec" if status.st_mode & 0o100 else "file"
            files.append((name, kind, self.sha256(path, status)))

    def save(self) -> None:
        """Write the cache if it changed. After a failure, the next run reads the files again."""
        if self._changed:
            with contextlib.suppress(OSError, InputError):
                write_sealed(self._path, self._entries)
