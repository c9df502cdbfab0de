"""Runs of tools and requests to sources: records of one logger without credentials, and a time
limit.
"""

import logging
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from primus_images.errors import HostError
from primus_images.waits import answer_of

T = TypeVar("T")

LOG = logging.getLogger("primus.sources")


def run_tool(
    words: Sequence[str], url: str, method: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a tool that accesses ``url`` and record its outcome. The caller checks the exit code."""
    began = time.monotonic()
    outcome = "did not end"
    try:
        options |= {
            "stdin": subprocess.DEVNULL,
            "capture_output": True,
            "encoding": "utf-8",
            "errors": "replace",
        }
        with answer_of(f"{words[0]} {method} {bare_url(url)}"):
            done = subprocess.run(words, check=False, **options)
        text = re.sub(r"(?<=://)[^/@\s\"]+@|\?[^\"\s]*", "", " ".join(done.stderr[-2000:].split()))
        outcome = "done"
        if done.returncode:
            outcome = f"exit code {done.returncode}: {text}"
        return done
    except FileNotFoundError:
        tool_text = words[0]
        raise HostError(
            f"{tool_text} is missing; it is needed to reach registries and repositories",
            hint=f"apt-get install {tool_text}",
        ) from None
    finally:
        tool = re.split("[ /]", words[0])[-1]
        LOG.info(
            "%s %s %s, %.1f s: %s", tool, method, bare_url(url), time.monotonic() - began, outcome
        )


def within(seconds: float, url: str, exchange: Callable[[], T]) -> T:
    """Return ``exchange()`` with the server at ``url``. Raises TimeoutError if it takes longer than
    ``seconds``.

    A server that sends a byte now and then never falls silent.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(exchange())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, daemon=True, name="exchange").start()
    with answer_of(bare_url(url)):
        return answer.result(seconds)


def bare_url(url: str) -> str:
    """Return ``url`` without credentials, query and fragment, so that messages and reports may show
    it.
    """
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def cause(error: BaseException) -> str:
    """Return what ended a request in a few words: the status, or the first error of the chain,
    without its URL.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"HTTP status {status}"
    while error.__context__ is not None:
        error = error.__context__
    return " ".join(
        str(getattr(error, "strerror", None) or str(error) or type(error).__name__).split()
    )
