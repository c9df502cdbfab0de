"""Runs of tools and requests to sources: waits, a time limit, and words without credentials."""

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from primus_images.errors import HostError
from primus_images.waits import answer_of

T = TypeVar("T")

# Seconds that an exchange may take besides the time of its bytes, and the slowest line in bytes/s.
_PATIENCE_S = 300.0
_SLOWEST = 250_000
# Seconds that a tool may take whose bytes nobody knows before.
_LONGEST_S = 3600.0


def seconds_for(size: int) -> float:
    """Return how long an exchange of ``size`` bytes may take.

    A server that sends a byte now and then never falls silent.
    """
    return _PATIENCE_S + size / _SLOWEST


def run_tool(
    words: Sequence[str], url: str, command: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a tool's ``command`` that accesses ``url``. The caller checks the exit code.

    Raises HostError if it does not end in time, which is an hour without a ``timeout``.
    """
    options.setdefault("timeout", _LONGEST_S)
    try:
        with answer_of(f"{words[0]} {command} {bare_url(url)}"):
            return subprocess.run(
                words,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                **options,
            )
    except FileNotFoundError:
        raise HostError(
            f"{words[0]} is missing; it is needed to reach registries and repositories",
            hint=f"apt-get install {words[0]}",
        ) from None
    except subprocess.TimeoutExpired as error:
        raise HostError(
            f"{bare_url(url)} does not answer: {words[0]} {command} has not ended in "
            f"{error.timeout:.0f} s",
            hint="check the network, and run it again",
        ) from None


def within(seconds: float, url: str, exchange: Callable[[], T]) -> T:
    """Return ``exchange()`` with the server at ``url``. Raises TimeoutError after ``seconds``.

    A server that sends a byte now and then never falls silent.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(exchange())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            answer.set_exception(error)

    Thread(target=run, daemon=True, name="exchange").start()
    with answer_of(bare_url(url)):
        wait([answer], seconds)
    if not answer.done():
        raise TimeoutError(f"its answer has not ended in {seconds:.0f} s")
    return answer.result()


def bare_url(url: str) -> str:
    """Return ``url`` without credentials, query and fragment, so that messages may show it."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def cause(error: BaseException) -> str:
    """Return what ended a request: the status, or the first error of the chain without its URL."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"HTTP status {status}"
    while error.__context__ is not None:
        error = error.__context__
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(words).split())
