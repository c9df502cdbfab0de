"""Fetch missing locked files into the cache, through the host's own pip and apt configuration.

A file is identified by its sha256 alone, so a mirror, a local folder and the original source are equally good.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

from primus.errors import HostError
from primus.fetch.download import Meter, NotThere, Stopped, WrongBytes, download, speed
from primus.fetch.filecache import FileCache
from primus.progress import Progress
from primus.sandbox.tools import with_packages
from primus.terminal import counted
from primus.versions.indexes import Indexes
from primus.versions.lock import LockedFile
from primus.versions.pool import Pool, locate
from primus.versions.reachable import require_answers
from primus.versions.registry import copy_image
from primus.versions.repository import archive_commit
from primus.versions.sources import Sources, ask_host
from primus.versions.traffic import listening

# Smaller files only advance the total: a line each for a hundred small debs would hide what matters.
_OWN_BAR = 16_000_000
_JOBS = 4
_ARCHITECTURE = "amd64"


class GoneError(HostError):
    """Locked files that no source offers any more: ``files``. Lock them again, or find a source that has them."""

    def __init__(self, files: Sequence[LockedFile]) -> None:
        super().__init__(
            f"no source offers any more: {_names(files)}",
            hint="take their successors (build without --locked, or primus lock --refresh), "
            "or point pip or apt at an archive that keeps them",
        )
        self.files = tuple(files)


def fetch(
    files: Sequence[LockedFile],
    cache: FileCache,
    *,
    suites: Mapping[str, tuple[str, ...]],
    sources: Sources | None = None,
    offline: bool = False,
    progress: Progress,
) -> None:
    """Fetch every missing file into the cache.

    ``suites`` maps base names to their Debian suites; ``sources`` are those besides pip's and apt's.

    Raises GoneError if sources no longer have files; HostError if a source is unreachable, offers other bytes
    (WrongBytes), or the disk is full. Files that were fetched before are kept.
    """
    wanted = list({f.sha256: f for f in files if not cache.has(f.sha256, f.size)}.values())
    if not wanted:
        return
    if offline:
        raise HostError(
            f"--offline allows no download, and {len(wanted)} file{'s are' if len(wanted) > 1 else ' is'} not here: "
            f"{_names(wanted)}",
            hint="run it once without --offline",
        )
    began, size = time.monotonic(), sum(f.size for f in wanted)
    asked = (sources or Sources()).of_files(wanted)
    with _spill_folder(cache.root) as spill, listening(progress.say):
        places = _Places(wanted, suites, spill, asked, progress)
        require_answers(asked.probes(lambda: places.indexes))
        bases = {f.base for f in wanted if f.kind == "deb" and f.base}
        python = [f for f in wanted if f.kind in ("wheel", "sdist") and f.index is None]
        indexes = places.indexes if python else None
        named = sorted({suite for base in bases for suite in suites[base]})
        with_packages(partial(ask_host, indexes=indexes, python=python, suites=named), say=progress.say)
        progress.start("fetch", "fetch", size)
        work = _Work(places, cache, progress)
        # Fetch large files first, since the last one alone would prolong the wait.
        work.run(sorted(wanted, key=lambda f: -f.size))
    progress.finish("fetch", f"{counted(len(wanted), 'file')}, {speed(size, began)}")


class _Places:
    """The places to look for each kind of file; read from the host once, when first needed."""

    def __init__(
        self,
        wanted: Sequence[LockedFile],
        suites: Mapping[str, tuple[str, ...]],
        spill: Path,
        sources: Sources,
        progress: Progress,
    ) -> None:
        self._wanted, self._suites, self._spill = wanted, suites, spill
        self._guards = {"indexes": threading.Lock(), "pools": threading.Lock(), "images": threading.Lock()}
        self.sources, self._progress = sources, progress

    @cached_property
    def _indexes(self) -> Indexes:
        return Indexes.of_host()

    @property
    def indexes(self) -> Indexes:
        with self._guards["indexes"]:
            return self._indexes

    @cached_property
    def _pools(self) -> dict[str, Pool]:
        pools: dict[str, Pool] = {}
        for base in sorted({f.base for f in self._wanted if f.kind == "deb" and f.base}):
            debs = [f for f in self._wanted if f.base == base]
            where = (self._suites[base], _ARCHITECTURE, self._spill)
            pools[base] = with_packages(partial(locate, debs, *where), say=self._progress.say)
        return pools

    def pool(self, base: str, stop: threading.Event) -> Pool:
        with self._guards["pools"]:
            if stop.is_set():
                raise Stopped
            return self._pools[base]

    def image(self, base: str) -> Path:
        """Return a folder with the layers of the base's image, each named by its digest."""
        folder = self._spill / f"image-{base}"
        with self._guards["images"]:
            if not folder.exists():
                copy_image(self.sources.images[base], _ARCHITECTURE, folder)
        return folder

    def archive(self, file: LockedFile) -> Path:
        """Return the archive of the commit that the name of a ``git`` file ends with."""
        commit = Path(file.file).stem.rpartition("-")[2]
        target = self._spill / file.file
        archive_commit(self.sources.repositories[commit], commit, target)
        return target


class _Work:
    """Daemon threads that work on a queue, so that Ctrl-C does not wait for a server that stalls."""

    def __init__(self, places: _Places, cache: FileCache, progress: Progress) -> None:
        self._places, self._cache, self._progress = places, cache, progress
        self._stop = threading.Event()
        self._local = threading.local()
        self._gone: list[LockedFile] = []
        self._failed: list[BaseException] = []

    def run(self, files: Sequence[LockedFile]) -> None:
        todo: queue.SimpleQueue[LockedFile] = queue.SimpleQueue()
        for file in files:
            todo.put(file)
        threads = [
            threading.Thread(target=self._worker, args=(todo,), daemon=True) for _ in range(min(_JOBS, len(files)))
        ]
        for thread in threads:
            thread.start()
        try:
            # Do not use join(): Python 3.11 considers a thread finished if its join is interrupted.
            while not self._failed and any(thread.is_alive() for thread in threads):
                time.sleep(0.02)
        finally:
            # On a failure or Ctrl-C, the other threads get a moment to leave their parts in order.
            self._stop.set()
            until = time.monotonic() + 0.5
            while time.monotonic() < until and any(thread.is_alive() for thread in threads):
                time.sleep(0.02)
        if self._failed:
            raise self._failed[0]
        if self._gone:
            raise GoneError(sorted(self._gone, key=lambda f: f.name))

    def _worker(self, todo: queue.SimpleQueue[LockedFile]) -> None:
        while not self._stop.is_set():
            try:
                file = todo.get_nowait()
            except queue.Empty:
                return
            try:
                self._one(file)
            except Stopped:
                return
            except NotThere:
                self._gone.append(file)
            except BaseException as error:  # noqa: BLE001 - carried to the caller's thread and raised there
                self._failed.append(error)
                self._stop.set()
                return

    def _one(self, file: LockedFile) -> None:
        meter, began = Meter(self._progress, file, file.size >= _OWN_BAR), time.monotonic()
        meter.begin()
        if file.kind == "deb":
            self._deb(file, meter)
        elif file.kind in ("layer", "git"):
            self._whole(file)
        else:
            self._python(file, meter)
        meter.end(speed(file.size, began))

    def _deb(self, file: LockedFile, meter: Meter) -> None:
        pool = self._places.pool(file.base or "", self._stop)
        kept: dict[str, Callable[..., object]] = self._local.__dict__
        if "apt" not in kept:
            kept["apt"] = pool.access.get()
        for url in pool.urls(file):
            try:
                return self._take(file, url, kept["apt"], meter)
            except NotThere:
                continue
        raise NotThere(file.file)

    def _whole(self, file: LockedFile) -> None:
        """Fetch what a tool downloads in one piece: a layer of an image, or the archive of a commit."""
        sources = self._places.sources
        if file.kind == "git":
            path = self._places.archive(file)
            origin = sources.repositories[path.stem.rpartition("-")[2]]
        else:
            path, origin = self._places.image(file.base or "") / file.sha256, sources.images[file.base or ""]
        if not path.exists() or not self._cache.put(path, file.sha256):
            raise WrongBytes(file, "other bytes", origin)

    def _python(self, file: LockedFile, meter: Meter) -> None:
        indexes = self._places.indexes
        if file.index is not None:
            indexes = indexes.only(self._places.sources.indexes[file.index])
        kept = self._local.__dict__
        if "pip" not in kept:
            kept["pip"] = indexes.session()
        refused: HostError | None = None

        def get(url: str, headers: Mapping[str, str]) -> object:
            return indexes.get(kept["pip"], url, headers=headers)

        for place in indexes.places(file.name):
            try:
                offers = [link for link in indexes.offers(kept["pip"], place) if link.file == file.file]
            except HostError as error:
                refused = refused or error
                continue
            for link in offers:
                if link.sha256 not in (None, file.sha256):
                    refused = refused or WrongBytes(file, f"sha256 {link.sha256}", link.url)
                    continue
                try:
                    return self._take(file, link.url, get, meter)
                except NotThere:
                    continue
                except WrongBytes as error:
                    refused = refused or error
        raise refused or NotThere(file.file)

    def _take(self, file: LockedFile, url: str, get: Callable[..., object], meter: Meter) -> None:
        download(file, url, self._cache, get=get, meter=meter, stop=self._stop)  # type: ignore[arg-type]


@contextmanager
def _spill_folder(root: Path) -> Iterator[Path]:
    """Yield a folder next to the cache, on the same disk, for files that apt must fetch itself."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="apt-", dir=root, ignore_cleanup_errors=True)
    except OSError as error:
        raise HostError(f"{root} cannot be written: {error.strerror}") from None
    with folder as name:
        yield Path(name)


def _names(files: Sequence[LockedFile]) -> str:
    shown = ", ".join(f.label for f in files[:5])
    return shown + (f" and {len(files) - 5} more" if len(files) > 5 else "")
