"""Download one file from one URL into the cache: resumable, hashed while it is written, retried."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import requests
from urllib3.exceptions import HTTPError

from primus.errors import HostError
from primus.fetch.filecache import FileCache, Part
from primus.progress import Progress
from primus.versions.answers import ABSENT, short
from primus.versions.lock import LockedFile
from primus.versions.pages import local_path
from primus.versions.traffic import bare_url

_BLOCK = 1 << 18
_FAULTS = 4
_FIRST_WAIT_S = 0.4
# url, headers → streamed response
Get = Callable[[str, Mapping[str, str]], "requests.Response"]


class NotThere(Exception):
    """The server has no such file."""


class Stopped(Exception):
    """The whole fetch is being stopped; the downloaded part is kept and can be resumed."""


class WrongBytes(HostError):
    """A source offers other bytes under the file's name."""

    def __init__(self, file: LockedFile, got: str, source: str) -> None:
        super().__init__(
            f"{file.file} from {bare_url(source)} has {got}, but sha256 {file.sha256} ({file.size} bytes) is locked",
            hint="do not trust that source; if its maker replaced the file on purpose: primus lock --refresh",
        )


class Meter:
    """Counts one file's bytes for its own progress bar (large files) and for the total."""

    def __init__(self, progress: Progress, file: LockedFile, own: bool) -> None:
        self._progress, self._key, self._own = progress, f"fetch {file.sha256}", own
        self._file = file
        self._done = 0

    def begin(self) -> None:
        """Start the file's progress bar."""
        if self._own:
            self._progress.start(self._key, self._file.label, self._file.size)

    def at(self, position: int) -> None:
        """Report that ``position`` bytes of the file have been downloaded."""
        step, self._done = position - self._done, position
        self._progress.advance("fetch", step)
        if self._own:
            self._progress.advance(self._key, step)

    def end(self, note: str) -> None:
        """Report that the file is complete."""
        self.at(self._file.size)
        if self._own:
            self._progress.finish(self._key, note)


def download(file: LockedFile, url: str, cache: FileCache, *, get: Get, meter: Meter, stop: threading.Event) -> None:
    """Download the file into the cache. Raises NotThere, WrongBytes, Stopped, or HostError if the source fails."""
    try:
        with cache.part(file.sha256) as part:
            if part is not None:
                _Transfer(file=file, url=url, part=part, get=get, meter=meter, stop=stop).fill()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostError(
                f"the disk is full at {cache.root}: {file.file} needs {file.size / 1e6:,.1f} MB",
                hint="free some space and run it again; what has been fetched is kept",
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS):
            raise HostError(f"{cache.root} cannot be written: {error.strerror}") from None
        raise


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    file: LockedFile
    url: str
    part: Part
    get: Get
    meter: Meter
    stop: threading.Event

    def fill(self) -> None:
        """Download the part to its full size, compare its hash, and commit it."""
        file, part, meter = self.file, self.part, self.meter
        if part.size > file.size:
            part.restart()
        resumed = part.size > 0
        while True:
            meter.at(part.size)
            if part.size < file.size or file.size == 0:
                self._complete()
            if part.sha256() == file.sha256:
                part.commit()
                return
            got = part.sha256()
            part.restart()
            meter.at(0)
            # The existing part may come from another source or a bad disk. Only a file read in one go proves that the
            # source is wrong.
            if not resumed:
                raise WrongBytes(file, f"sha256 {got}", self.url)
            resumed = False

    def _complete(self) -> None:
        """Append until the file has its size. Transient faults are retried as long as bytes keep arriving."""
        local = local_path(self.url)
        if local is not None:
            return self._copy()
        faults, most = 0, self.part.size
        while True:
            reason = "it ended early"
            try:
                if self._stream():
                    return None
            except (requests.RequestException, HTTPError) as error:
                status = getattr(getattr(error, "response", None), "status_code", None)
                if status in ABSENT:
                    raise NotThere(self.url) from None
                reason = short(error)
                if status is not None and status < 500 and status not in (408, 425, 429):
                    hint = "give the host's pip or apt the credentials for it" if status in (401, 407) else None
                    raise HostError(f"{bare_url(self.url)} cannot be fetched: {reason}", hint=hint) from None
            # Compare with the largest size so far: a server that starts over each time makes no progress.
            faults = 1 if self.part.size > most else faults + 1
            most = max(most, self.part.size)
            if faults >= _FAULTS:
                raise HostError(
                    f"{bare_url(self.url)} cannot be fetched: {reason}, {_FAULTS} times",
                    hint="run it again to continue the download",
                )
            if self.stop.wait(_FIRST_WAIT_S * 2 ** (faults - 1)):
                raise Stopped

    def _stream(self) -> bool:
        part = self.part
        headers = {"Accept-Encoding": "identity"}
        if part.size:
            headers["Range"] = f"bytes={part.size}-"
        with self.get(self.url, headers) as response:
            if response.status_code == 416:
                part.restart()
                return False
            response.raise_for_status()
            total = _total(response)
            if total is not None and total != self.file.size:
                part.restart()
                raise WrongBytes(self.file, f"{total} bytes", self.url)
            # A server that ignores Range sends the file from the start.
            if part.size and response.status_code != 206:
                part.restart()
            for block in response.raw.stream(_BLOCK, decode_content=False):
                if self.stop.is_set():
                    raise Stopped
                part.write(block)
                self.meter.at(min(part.size, self.file.size))
                if part.size > self.file.size:
                    return True
        return part.size >= self.file.size

    def _copy(self) -> None:
        # Copy the file instead of linking it: the cached file would change if its owner rewrites it in place.
        path = local_path(self.url)
        assert path is not None
        try:
            source = path.open("rb")
        except (FileNotFoundError, PermissionError):
            raise NotThere(self.url) from None
        with source:
            source.seek(self.part.size)
            while block := source.read(1 << 20):
                if self.stop.is_set():
                    raise Stopped
                self.part.write(block)
                self.meter.at(min(self.part.size, self.file.size))


def _total(response: requests.Response) -> int | None:
    """Return the size of the whole file as the server states it."""
    if response.status_code == 206:
        text = response.headers.get("Content-Range", "").rpartition("/")[2]
    else:
        text = response.headers.get("Content-Length", "")
    return int(text) if text.isdigit() else None


def speed(size: int, began: float) -> str:
    """Return ``12.3 MB, 45.6 MB/s`` for a finished download."""
    seconds = max(time.monotonic() - began, 1e-3)
    return f"{size / 1e6:,.1f} MB, {size / 1e6 / seconds:,.1f} MB/s"
