"""Fetch missing locked files into the cache, through the host's own pip, apt, registry and git configuration.

A file is identified by its sha256 alone, so a mirror, a local folder and the original source are equally good.
"""

from __future__ import annotations

import errno
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import requests
from urllib3.exceptions import HTTPError

from primus.errors import HostError, InputError
from primus.programs import with_packages
from primus.progress import Progress
from primus.terminal import counted
from primus.versions.debs import download_debs
from primus.versions.filecache import FileCache
from primus.versions.indexes import Indexes
from primus.versions.lock import LockedFile
from primus.versions.registry import copy_image
from primus.versions.repository import archive_commit
from primus.versions.traffic import bare_url, cause
from primus.versions.wheels import locate

_JOBS = 4
_FAULTS = 4
_FIRST_WAIT_S = 0.4
# "Not found". Indexes on an object store without listing permission answer 403 for what they do not have.
_ABSENT = (403, 404, 410)


class _Stopped(Exception):
    """The whole fetch is being stopped; the downloaded part is kept and can be resumed."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Sources besides pip's and apt's, from versions.yaml: index → address, base → image, commit → repository."""

    indexes: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    repositories: Mapping[str, str] = field(default_factory=dict)

    def of(self, file: LockedFile) -> str:
        """Return the address of the file's source; empty for pip's. InputError if versions.yaml does not name it."""
        if file.kind == "layer":
            name, addresses = file.base, self.images
        elif file.kind == "git":
            name, addresses = _commit(file), self.repositories
        else:
            name, addresses = file.index, self.indexes
        if name is None:
            return ""
        if name not in addresses:
            raise InputError(f"the lock names {name}, but versions.yaml does not", hint="run `primus lock` again")
        return addresses[name]


def fetch(
    files: Sequence[LockedFile],
    cache: FileCache,
    *,
    suites: Mapping[str, tuple[str, ...]],
    pythons: Collection[str] = (),
    sources: Sources | None = None,
    offline: bool = False,
    progress: Progress,
) -> None:
    """Fetch every missing file into the cache.

    ``suites`` maps base names to their Debian suites, ``pythons`` are the versions of Python that wheels are for, and
    ``sources`` are those besides pip's and apt's.

    Raises HostError if a source is unreachable, no longer has a file or offers other bytes under its name, or if the
    disk is full. Files that were fetched before are kept.
    """
    missing = list({f.sha256: f for f in files if not cache.has(f.sha256, f.size)}.values())
    if not missing:
        return
    if offline:
        amount = f"{len(missing)} file{'s are' if len(missing) > 1 else ' is'}"
        raise HostError(
            f"--offline allows no download, and {amount} not here: {_names(missing)}",
            hint="run it once without --offline",
        )
    began, size = time.monotonic(), sum(f.size for f in missing)
    progress.start("fetch", "fetch", size)
    work = _Fetch(cache, progress, sources or Sources())
    work.run(work.jobs(missing, suites, pythons))
    if work.gone:
        gone = sorted(work.gone, key=lambda file: file.name)
        names = list(dict.fromkeys(file.name for file in gone))[:5]
        raise HostError(
            f"no source offers any more: {_names(gone)}",
            hint=f"lock their successors (primus lock {' '.join(f'--refresh-package {name}' for name in names)}), "
            "or point pip or apt at an archive that keeps them",
        )
    rate = size / 1e6 / max(time.monotonic() - began, 1e-3)
    progress.finish("fetch", f"{counted(len(missing), 'file')}, {size / 1e6:,.1f} MB, {rate:,.1f} MB/s")


class _Fetch:
    """Daemon threads that work on a queue of jobs, so that Ctrl-C does not wait for a server that stalls."""

    def __init__(self, cache: FileCache, progress: Progress, sources: Sources) -> None:
        self._cache, self._progress, self._sources = cache, progress, sources
        self._positions: dict[str, int] = {}
        self._stop = threading.Event()
        self.gone: list[LockedFile] = []
        self._failures: list[BaseException] = []

    def run(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Run all jobs. Raises the first failure."""
        waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        threads = [threading.Thread(target=self._work, args=[waiting], daemon=True) for _ in range(_JOBS)]
        for thread in threads:
            thread.start()
        try:
            # Do not use join(): Python 3.11 considers a thread finished if its join is interrupted.
            while any(thread.is_alive() for thread in threads) and not self._failures:
                time.sleep(0.02)
        finally:
            # On a failure or Ctrl-C, the other threads get a moment to leave their parts in order.
            self._stop.set()
            until = time.monotonic() + 0.5
            while time.monotonic() < until and any(thread.is_alive() for thread in threads):
                time.sleep(0.02)
        if self._failures:
            raise self._failures[0]

    def _work(self, waiting: queue.SimpleQueue[Callable[[], None]]) -> None:
        while not self._stop.is_set():
            try:
                waiting.get_nowait()()
            except (queue.Empty, _Stopped):
                return
            except BaseException as error:  # noqa: BLE001 - carried to the caller's thread and raised there
                self._failures.append(error)
                return

    def jobs(
        self, files: Sequence[LockedFile], suites: Mapping[str, tuple[str, ...]], pythons: Collection[str]
    ) -> Iterator[Callable[[], None]]:
        """Yield a job per archive, image and commit, and one per file of a Python index."""
        groups: dict[tuple[str, str], list[LockedFile]] = {}
        for file in files:
            source = file.base or "" if file.kind == "deb" else self._sources.of(file)
            groups.setdefault(("wheel" if file.kind == "sdist" else file.kind, source), []).append(file)
        for (kind, source), group in groups.items():
            if kind == "deb":
                yield partial(self._debs, group, suites[source])
            elif kind == "layer":
                yield partial(self._copy, group, source)
            elif kind == "git":
                yield from (partial(self._copy, [file], source) for file in group)
            else:
                host = Indexes.of_host()
                indexes = host.only(source) if source else host
                offers: dict[str, list[tuple[str, str | None]]] = {file.file: [] for file in group}
                for offer in locate(group, indexes, pythons, self._sources.indexes):
                    offers[offer.file].append((offer.url, offer.sha256))
                # Largest first: the last one alone would prolong the fetch.
                for file in sorted(group, key=lambda f: -f.size):
                    yield partial(self._download, file, offers[file.file], indexes)

    def _download(self, file: LockedFile, offers: Sequence[tuple[str, str | None]], indexes: Indexes) -> None:
        refusal: HostError | None = None
        for url, stated in offers:
            sha256 = stated or file.sha256
            if sha256 == file.sha256:
                with _disk_errors(self._cache.root, file), self._cache.part(file.sha256) as part:
                    if part is None:
                        return self._report(file, file.size)
                    resumed = part.seek(0, os.SEEK_END) > 0
                    if not self._append(part, file, url, indexes):
                        continue
                    sha256 = self._cache.commit(part, file.sha256)
                    # What was there before may come from another source or a bad disk. Only a file read in one go
                    # proves that the source is wrong.
                    if resumed and sha256 != file.sha256 and self._append(part, file, url, indexes):
                        sha256 = self._cache.commit(part, file.sha256)
                    if sha256 == file.sha256:
                        return None
            refusal = _refusal(file, f"sha256 {sha256}", url)
        if refusal:
            raise refusal
        self.gone.append(file)
        return None

    def _append(self, part: BinaryIO, file: LockedFile, url: str, indexes: Indexes) -> bool:
        """Download the rest of the part, as long as bytes keep arriving. Returns False if the source has no file."""
        faults, size = 0, part.seek(0, os.SEEK_END)
        while size < file.size or not file.size:
            before = size
            try:
                for offset, block in indexes.read(url, size):
                    if self._stop.is_set():
                        raise _Stopped
                    # A server without ranges begins again.
                    part.truncate(offset)
                    part.write(block)
                    size = offset + len(block)
                    self._report(file, size)
                    if size > file.size:
                        break
                return True
            except (FileNotFoundError, PermissionError):
                return False
            except (requests.RequestException, HTTPError) as error:
                status = getattr(getattr(error, "response", None), "status_code", None)
                reason = cause(error)
                if status in _ABSENT:
                    return False
                if status == 416:
                    return True
                if status is not None:
                    hint = "give pip the credentials (netrc, or in its index URL)" if status in (401, 407) else None
                    raise HostError(f"{bare_url(url)} cannot be fetched: {reason}", hint=hint) from None
            # A server that starts over each time makes no progress.
            faults = 1 if size > before else faults + 1
            if faults >= _FAULTS:
                raise HostError(
                    f"{bare_url(url)} cannot be fetched: {reason}, {_FAULTS} times",
                    hint="run it again to continue the download",
                )
            if self._stop.wait(_FIRST_WAIT_S * 2 ** (faults - 1)):
                raise _Stopped
        return True

    def _report(self, file: LockedFile, position: int) -> None:
        before, now = self._positions.get(file.sha256, 0), min(position, file.size)
        self._positions[file.sha256] = now
        self._progress.advance("fetch", now - before)

    def _debs(self, files: Sequence[LockedFile], suites: tuple[str, ...]) -> None:
        with self._growing(files) as folder:
            paths = with_packages(partial(download_debs, files, suites, folder), say=self._progress.say)
            for file in files:
                if file in paths:
                    self._put(file, paths[file], f"the archive of {' and '.join(suites)}")
                else:
                    self.gone.append(file)

    def _copy(self, files: Sequence[LockedFile], source: str) -> None:
        with self._growing(files) as folder:
            if files[0].kind == "layer":
                copy_image(source, folder)
            else:
                archive_commit(source, _commit(files[0]), folder / files[0].sha256)
            for file in files:
                self._put(file, folder / file.sha256, source)

    def _put(self, file: LockedFile, path: Path, source: str) -> None:
        with _disk_errors(self._cache.root, file):
            if not path.exists() or not self._cache.put(path, file.sha256):
                raise _refusal(file, "other bytes", source)

    @contextmanager
    def _growing(self, files: Sequence[LockedFile]) -> Iterator[Path]:
        """Yield a folder to which a tool downloads the files. Its growth is reported as progress."""
        done, ended, total = 0, threading.Event(), sum(f.size for f in files)

        def watch(folder: Path) -> None:
            nonlocal done
            while not ended.wait(0.5):
                # The tool renames its temporary files meanwhile.
                with suppress(FileNotFoundError):
                    before, done = done, min(total, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
                    self._progress.advance("fetch", done - before)

        root = self._cache.root
        with _disk_errors(root, files[0]):
            root.mkdir(parents=True, exist_ok=True)
            # On the cache's own disk.
            scratch = tempfile.TemporaryDirectory(prefix="files-", dir=root, ignore_cleanup_errors=True)
        with scratch as name:
            thread = threading.Thread(target=watch, args=[Path(name)], daemon=True)
            thread.start()
            try:
                yield Path(name)
            finally:
                ended.set()
                thread.join()
        self._progress.advance("fetch", total - done)


@contextmanager
def _disk_errors(root: Path, file: LockedFile) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostError(
                f"the disk is full at {root}: {file.file} needs {file.size / 1e6:,.1f} MB",
                hint="free some space and run it again; what has been fetched is kept",
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS):
            raise HostError(f"{root} cannot be written: {error.strerror}") from None
        raise


def _refusal(file: LockedFile, offer: str, source: str) -> HostError:
    return HostError(
        f"{file.file} from {bare_url(source)} has {offer}, but sha256 {file.sha256} ({file.size} bytes) is locked",
        hint="do not trust that source; if its maker replaced the file on purpose: primus lock --refresh",
    )


def _commit(file: LockedFile) -> str:
    return Path(file.file).stem.rpartition("-")[2]


def _names(files: Sequence[LockedFile]) -> str:
    shown = ", ".join(f.label for f in files[:5])
    return shown + (f" and {len(files) - 5} more" if len(files) > 5 else "")
