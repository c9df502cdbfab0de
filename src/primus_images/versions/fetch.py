"""Fetch missing locked files into the cache, as the host's pip, apt, skopeo and git would.

A file is identified by its sha256 alone, so a mirror, a local folder and the original source are
equally good.
"""

import errno
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import BinaryIO

import requests
from urllib3.exceptions import HTTPError

from primus_images.errors import HostError, InputError
from primus_images.progress import Progress
from primus_images.terminal import counted, some
from primus_images.versions.debs import download_debs
from primus_images.versions.filecache import FileCache
from primus_images.versions.indexes import LOGIN_HINT, Indexes, Offer
from primus_images.versions.lock import LockedFile, Request, suites_of
from primus_images.versions.remotes import archive_commit, copy_image
from primus_images.versions.traffic import bare_url, cause, seconds_for
from primus_images.waits import answer_of

_JOBS = 8
_FAULTS = 4
_FIRST_WAIT_S = 0.4
# "Not found". Indexes on an object store without listing permission answer 403 for what they do not
# have.
_ABSENT = (403, 404, 410)


def fetch(
    files: Mapping[LockedFile, Request],
    cache: FileCache,
    *,
    offline: bool = False,
    progress: Progress,
) -> None:
    """Fetch every missing file into the cache. ``files`` maps each to the request of its lock.

    Raises HostError if a source is unreachable, no longer has a file or offers other bytes under
    its name, or if the disk is full; InputError if a request does not name a file's source. Files
    that were fetched before are kept.
    """
    missing = {
        file.sha256: file for file in files if not cache.has(file.sha256, file.size)
    }.values()
    if not missing:
        return
    if offline:
        names = some([f"{file.name} {file.version}" for file in missing], 5)
        amount = f"{len(missing)} file{'s are' if len(missing) > 1 else ' is'}"
        raise HostError(
            f"--offline allows no download, and {amount} not here: {names}",
            hint="run it once without --offline",
        )
    began = time.monotonic()
    size = sum(file.size for file in missing)
    megabytes = f"{size / 1e6:,.1f} MB"
    progress.start("fetch", "fetch", size)
    try:
        cache.root.mkdir(parents=True, exist_ok=True)
        # On the cache's own disk.
        with tempfile.TemporaryDirectory(
            prefix="files-", dir=cache.root, ignore_cleanup_errors=True
        ) as name:
            work = _Fetch(cache, Path(name), progress)
            work.run(work.jobs({file: files[file] for file in missing}), missing)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostError(
                f"the disk is full at {cache.root}: the missing files take {megabytes}",
                hint="free some space and run it again; what has been fetched is kept",
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS):
            raise HostError(f"{cache.root} cannot be written: {error.strerror}") from None
        raise
    if work.gone:
        raise _not_offered(work.gone)
    rate = size / 1e6 / max(time.monotonic() - began, 1e-3)
    progress.finish("fetch", f"{counted(len(missing), 'file')}, {megabytes}, {rate:,.1f} MB/s")


def _not_offered(gone: Collection[LockedFile]) -> HostError:
    files = sorted(gone, key=lambda file: (file.name, file.version))
    texts = dict.fromkeys(f"{file.name} {file.version}" for file in files)
    names = list(dict.fromkeys(file.name for file in files))[:5]
    options = " ".join(f"--refresh-package {name}" for name in names)
    return HostError(
        f"no source that pip and apt are configured for offers: {some([*texts], 5)}",
        hint="configure them as where it was locked (pip config list); if the files were "
        "removed there, use an archive that keeps them, or lock their successors "
        f"(primus lock {options})",
    )


def _other_bytes(file: LockedFile, source: str, offer: str) -> HostError:
    return HostError(
        f"{file.file} from {bare_url(source)} has {offer}, but sha256 {file.sha256} "
        f"({file.size} bytes) is locked",
        hint="do not trust that source; if its maker replaced the file on purpose: primus "
        "lock --refresh",
    )


class _Fetch:
    def __init__(self, cache: FileCache, scratch: Path, progress: Progress) -> None:
        self._cache = cache
        self._scratch = scratch
        self._progress = progress
        self.gone: list[LockedFile] = []

    def jobs(self, files: Mapping[LockedFile, Request]) -> list[Callable[[], None]]:
        """Return a job per archive and image, and one per other file."""
        archives: dict[tuple[str, ...], list[LockedFile]] = defaultdict(list)
        images: dict[str, list[LockedFile]] = defaultdict(list)
        singles: list[Callable[[], None]] = []
        own = {name: url for request in files.values() for name, url in request.indexes.items()}
        indexes = None
        # Largest first: the last one alone would prolong the fetch.
        for file, request in sorted(files.items(), key=lambda item: -item[0].size):
            try:
                if file.kind == "git":
                    commit = request.gits[file.name]
                    tool = partial(archive_commit, commit, file.sha256)
                    singles.append(partial(self._copy, [file], commit.url, tool))
                elif file.kind == "deb":
                    base = request.bases[file.base or ""]
                    archives[suites_of(base.suite, base.packages)].append(file)
                elif file.kind == "layer":
                    image = request.bases[file.base or ""].image
                    images[image or ""].append(file)
                else:
                    indexes = indexes or Indexes.of_host(own)
                    places = (own[file.index],) if file.index else indexes.places
                    singles.append(partial(self._download, file, indexes, places))
            except KeyError as error:
                raise InputError(
                    f"the lock names {error.args[0]}, but versions.yaml does not",
                    hint="run `primus lock` again",
                ) from None
        jobs: list[Callable[[], None]] = []
        for image, group in images.items():
            size = sum(file.size for file in group)
            tool = partial(copy_image, image, size=size)
            jobs.append(partial(self._copy, group, image, tool))
        for suites, group in archives.items():
            source = f"the archive of {' and '.join(suites)}"
            jobs.append(partial(self._copy, group, source, partial(download_debs, group, suites)))
        return jobs + singles

    def run(self, jobs: Sequence[Callable[[], None]], files: Collection[LockedFile]) -> None:
        """Run all jobs. Raises the first failure."""
        present = 0
        # Its threads are daemons, so neither Ctrl-C nor a failure waits for a server that stalls.
        with ThreadPool(_JOBS) as pool, suppress(StopIteration):
            results = pool.imap_unordered(lambda job: job(), jobs)
            while True:
                with suppress(multiprocessing.TimeoutError):
                    results.next(timeout=0.2)
                before = present
                present = self._present(files)
                self._progress.advance("fetch", present - before)

    def _present(self, files: Collection[LockedFile]) -> int:
        size = sum(min(file.size, self._cache.size(file.sha256)) for file in files)
        # A tool renames its temporary files meanwhile.
        with suppress(FileNotFoundError):
            size += sum(path.stat().st_size for path in self._scratch.rglob("*") if path.is_file())
        return size

    def _copy(self, files: Sequence[LockedFile], source: str, tool: Callable[[Path], None]) -> None:
        """Take the files from a folder to which the tool writes them, named by their sha256."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        tool(folder)
        for file in files:
            path = folder / file.sha256
            if not path.exists():
                self.gone.append(file)
                continue
            if not self._cache.put(path, file.sha256):
                raise _other_bytes(file, source, "other bytes")
            self._require_size(file)
            path.unlink()

    def _require_size(self, file: LockedFile) -> None:
        """Raise InputError if the right bytes are not as many as the lock says."""
        size = self._cache.size(file.sha256)
        if size != file.size:
            raise InputError(
                f"{file.file} has {size} bytes, and the lock says {file.size} of the same sha256: "
                "the lock was edited",
                hint=f"primus lock --refresh-package {file.name}",
            )

    def _download(self, file: LockedFile, indexes: Indexes, places: Sequence[str]) -> None:
        failure: HostError | None = None
        for place in places:
            try:
                for offer in indexes.offers(file.name, place):
                    if offer.file == file.file and self._take(file, offer, indexes):
                        return
            except HostError as error:
                failure = failure or error
        if failure:
            raise failure
        self.gone.append(file)

    def _take(self, file: LockedFile, offer: Offer, indexes: Indexes) -> bool:
        """Download the file from one place. Returns False if it is not there."""
        sha256 = offer.sha256 or file.sha256
        if sha256 != file.sha256:
            raise _other_bytes(file, offer.url, f"sha256 {sha256}")
        with self._cache.part(file.sha256) as part:
            if part is None:
                self._require_size(file)
                return True
            # What is there already may come from another source or a bad disk. Only a file read in
            # one go proves that the source is wrong.
            tries = 2 if part.seek(0, os.SEEK_END) else 1
            for _ in range(tries):
                if not _append(part, file, offer.url, indexes):
                    return False
                sha256 = self._cache.commit(part, file.sha256)
                if sha256 == file.sha256:
                    self._require_size(file)
                    return True
        raise _other_bytes(file, offer.url, f"sha256 {sha256}")


def _append(part: BinaryIO, file: LockedFile, url: str, indexes: Indexes) -> bool:
    """Download the rest of the part, as long as bytes keep arriving in time.

    Returns False if the source has no file.
    """
    deadline = time.monotonic() + seconds_for(file.size)
    faults = 0
    while True:
        begin = part.seek(0, os.SEEK_END)
        if begin >= file.size > 0:
            return True
        try:
            _read_on(part, file, url, indexes, deadline)
            return True
        except (FileNotFoundError, PermissionError):
            return False
        except (requests.RequestException, HTTPError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in _ABSENT:
                return False
            if status == 416:
                return True
            # A server that starts over each time makes no progress.
            faults = 1 if part.seek(0, os.SEEK_END) > begin else faults + 1
            if status is not None or faults >= _FAULTS:
                times = f", {_FAULTS} times" if status is None else ""
                hint = "run it again to continue the download"
                if status in (401, 407):
                    hint = LOGIN_HINT
                raise HostError(
                    f"{bare_url(url)} cannot be fetched: {cause(error)}{times}", hint=hint
                ) from None
        time.sleep(_FIRST_WAIT_S * 2 ** (faults - 1))


def _read_on(part: BinaryIO, file: LockedFile, url: str, indexes: Indexes, deadline: float) -> None:
    """Append what the source sends; no more than a block beyond the file's size."""
    size = part.seek(0, os.SEEK_END)
    with answer_of(bare_url(url), lambda: size), indexes.open(url, size) as (_, offset, blocks):
        # A server without ranges begins again.
        part.truncate(offset)
        size = offset
        for block in blocks:
            part.write(block)
            size += len(block)
            if size > file.size:
                break
            if time.monotonic() > deadline:
                raise HostError(
                    f"{bare_url(url)} is too slow: {size:,} of {file.size:,} bytes are here",
                    hint="run it again to continue the download",
                )
