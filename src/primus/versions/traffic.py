"""Requests to sources, recorded for a report; addresses without credentials.

Several threads and tools (uv, apt, skopeo, git, requests) reach sources, so they all notify the listeners of this
module, as with a logger. Without a listener, nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit


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

    def answer(self, status: int | None, kind: str = "", size: int | None = None) -> None:
        """Record the beginning of the answer."""
        self.status, self.type, self.size = status, kind, size
        refused = "not here" if status in (403, 404, 410) else "refused"
        self.verdict = "answered" if status is None or status < 400 else refused

    def row(self) -> dict[str, Any]:
        """Return the request as a row of the report."""
        return asdict(self) | {"seconds": round(self.seconds, 3)}


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
    """Send one line to the listeners: something unusual about an answer."""
    for listener in tuple(_LISTENERS):
        if listener.say is not None:
            listener.say(f"! {text}")


@contextmanager
def requesting(tool: str, url: str, about: str, method: str = "GET") -> Iterator[Request]:
    """Record a request for the listeners. It counts as answered unless an exception ends the context."""
    request = Request(tool=tool, url=bare_url(url), about=about, method=method)
    for listener in tuple(_LISTENERS):
        listener.rows.append(request)
    began = time.monotonic()
    try:
        yield request
        if request.status is None:
            request.answer(None)
    except Exception as error:
        request.verdict = f"failed: {getattr(error, 'message', None) or cause(error)}"
        raise
    finally:
        request.seconds = time.monotonic() - began


def bare_url(url: str) -> str:
    """Return ``url`` without credentials, query and fragment, so that messages and reports may show it."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def cause(error: BaseException) -> str:
    """Return what ended a request in a few words: the status, or the first error of the chain, without its URL."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"HTTP status {status}"
    while error.__context__ is not None:
        error = error.__context__
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(words).split())
