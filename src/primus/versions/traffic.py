"""Requests to sources: recording them for a report, and reporting sources that are silent.

Several threads and tools (requests, pip, skopeo, git) make requests, so they all notify the listeners of this module,
as with a logger. Without a listener, nothing is recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

# A silent source is reported within 5 s. Starting Python and pip takes half of that time.
SILENCE_S = 2.5
# A host that is slow with each of hundreds of files is reported only this often.
MOST_MESSAGES = 20


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for a source: seconds to connect, seconds of silence, and the retries after a temporary
    failure.

    ``pause_s`` doubles with each try. A server's Retry-After replaces it, up to ``longest_pause_s``.
    """

    connect_s: float = 4.0
    read_s: float = 20.0
    tries: int = 3
    pause_s: float = 0.5
    longest_pause_s: float = 10.0


PATIENCE = Patience()


@dataclass(kw_only=True)
class Request:
    """One request. ``about`` is the package, image or repository that it concerns, and ``size`` is in bytes.

    ``seconds`` is the time until the answer began (for a tool: until it ended).
    """

    tool: str
    url: str
    about: str
    method: str = "GET"
    status: int | None = None
    type: str = ""
    size: int | None = None
    seconds: float = 0.0
    verdict: str = "not answered"
    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    def hear(self) -> None:
        """Record that the source has just sent something."""
        self.heard = time.monotonic()

    def answer(self, status: int | None, kind: str = "", size: int | None = None) -> None:
        """Record the beginning of the answer."""
        self.status, self.type, self.size = status, kind, size
        if status in (403, 404, 410):
            self.verdict = "not here"
        else:
            self.verdict = "answered" if status is None or status < 400 else "refused"

    def row(self) -> dict[str, Any]:
        """Return the request as a row of the report."""
        row = asdict(self)
        del row["began"], row["heard"]
        return row | {"seconds": round(self.seconds, 3)}


class _Listener:
    def __init__(self, say: Callable[[str], None] | None) -> None:
        self.rows: list[Request] = []
        self.open: list[Request] = []
        self.say = say
        self.guard, self.done = threading.Lock(), threading.Event()
        self._reported: set[str] = set()

    def watch(self) -> None:
        """Report each source once if it sends nothing for ``SILENCE_S`` seconds."""
        while not self.done.wait(0.2):
            now = time.monotonic()
            with self.guard:
                silent = [one for one in self.open if now - one.heard >= SILENCE_S]
            for one in silent:
                if one.url not in self._reported and len(self._reported) < MOST_MESSAGES and self.say is not None:
                    self._reported.add(one.url)
                    self.say(f"! {one.url} ({one.about}) has sent nothing for {SILENCE_S:g} s; waiting for it")


_LISTENERS: list[_Listener] = []


@contextmanager
def listening(say: Callable[[str], None] | None = None) -> Iterator[list[Request]]:
    """Collect every request made in this context. ``say`` is called with a line per retry and per silent source."""
    listener = _Listener(say)
    _LISTENERS.append(listener)
    if say is not None:
        threading.Thread(target=listener.watch, daemon=True).start()
    try:
        yield listener.rows
    finally:
        listener.done.set()
        _LISTENERS.remove(listener)


def notify(text: str) -> None:
    """Send one line to the listeners: a retry, or something unusual about an answer."""
    for listener in tuple(_LISTENERS):
        if listener.say is not None:
            listener.say(f"! {text}")


@contextmanager
def requesting(
    tool: str, url: str, about: str, method: str = "GET", *, record: bool = True, silent: bool = False
) -> Iterator[Request]:
    """Notify the listeners of a request while the context is open.

    ``record`` is False for a request that is only watched, such as the rest of a recorded answer. ``silent`` is for
    a tool that takes long without output.
    """
    one = Request(tool=tool, url=bare_url(url), about=about, method=method)
    listeners = tuple(_LISTENERS)
    for listener in listeners:
        with listener.guard:
            if not silent:
                listener.open.append(one)
            if record:
                listener.rows.append(one)
    try:
        yield one
    except Exception as error:
        if one.verdict == "not answered":
            one.verdict = f"failed: {getattr(error, 'message', None) or type(error).__name__}"
        raise
    finally:
        one.seconds = time.monotonic() - one.began
        for listener in listeners:
            with listener.guard:
                # By identity, because two requests may be equal.
                listener.open[:] = [other for other in listener.open if other is not one]


def bare_url(url: str) -> str:
    """Return ``url`` without credentials, query and fragment, so that messages and reports may show it."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
