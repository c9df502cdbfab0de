"""Requests to sources, recorded for a report; addresses without credentials; causes of failures in our words.

Several threads and tools (uv, apt, skopeo, git, requests) reach sources, so they all notify the listeners of this
module, as with a logger. Without a listener, nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

from primus.yamlfile import read

_CAUSES = Path(__file__).with_name("causes.yaml")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for a source: seconds to connect, seconds of silence, and the tries after a temporary failure.

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
    """One request, or one run of a tool. ``about`` is the package, image or repository that it concerns.

    ``size`` is in bytes, ``seconds`` the time until the answer began (for a tool: until it ended).
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
    heard: float = field(default_factory=time.monotonic)

    def hear(self) -> None:
        """Record that the source has just sent something."""
        self.heard = time.monotonic()

    def answer(self, status: int | None, kind: str = "", size: int | None = None) -> None:
        """Record the beginning of the answer."""
        self.status, self.type, self.size = status, kind, size
        refused = "not here" if status in (403, 404, 410) else "refused"
        self.verdict = "answered" if status is None or status < 400 else refused

    def row(self) -> dict[str, Any]:
        """Return the request as a row of the report."""
        row = asdict(self)
        del row["heard"]
        return row | {"seconds": round(self.seconds, 3)}


@dataclass(frozen=True, eq=False)
class _Listener:
    say: Callable[[str], None] | None
    rows: list[Request] = field(default_factory=list)


_LISTENERS: list[_Listener] = []


@contextmanager
def listening(say: Callable[[str], None] | None = None) -> Iterator[list[Request]]:
    """Collect every request made in this context. ``say`` is called with each line of :func:`notify`."""
    listener = _Listener(say)
    _LISTENERS.append(listener)
    try:
        yield listener.rows
    finally:
        _LISTENERS.remove(listener)


def notify(text: str) -> None:
    """Send one line to the listeners: a retry, or something unusual about an answer."""
    for listener in tuple(_LISTENERS):
        if listener.say is not None:
            listener.say(f"! {text}")


@contextmanager
def requesting(tool: str, url: str, about: str, method: str = "GET") -> Iterator[Request]:
    """Record a request for the listeners. The caller records its answer."""
    request = Request(tool=tool, url=bare_url(url), about=about, method=method)
    for listener in tuple(_LISTENERS):
        listener.rows.append(request)
    began = time.monotonic()
    try:
        yield request
    except Exception as error:
        if request.verdict == "not answered":
            request.verdict = f"failed: {getattr(error, 'message', None) or type(error).__name__}"
        raise
    finally:
        request.seconds = time.monotonic() - began


def bare_url(url: str) -> str:
    """Return ``url`` without credentials, query and fragment, so that messages and reports may show it."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def cause(tool: str, text: str) -> str:
    """Return the cause that the output of ``tool`` names, in a few words; empty if it names no known one."""
    return next((words for mark, words in _causes()[tool].items() if mark in text), "")


@cache
def _causes() -> Mapping[str, Mapping[str, str]]:
    return cast("Mapping[str, Mapping[str, str]]", read(_CAUSES, _CAUSES.name).data)


def short(error: Exception) -> str:
    """Return the cause of an error of ``requests`` in a few words, without its URL."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return cause("requests", str(error)) or (f"HTTP status {status}" if status else type(error).__name__)
