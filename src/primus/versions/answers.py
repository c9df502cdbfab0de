"""The meaning of an HTTP answer or failure for the lock (absent, temporary or permanent), and its wording."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import cast
from urllib.parse import urljoin

import requests

from primus.yamlfile import read

_CAUSES = Path(__file__).with_name("causes.yaml")

# "Not found". AMD's indexes answer 403 for a package or file that they do not have, as object stores without listing
# permission do (ROCm/rocm-cli #194, #271).
ABSENT = (403, 404, 410)
# Answers and failures that may be different a moment later.
PASSING = (408, 425, 429, 500, 502, 503, 504)


class SafeSession(requests.Session):
    """Follows no redirect from https to http, on which anyone on the path could change the answer."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Return the target of a redirect. Raises InvalidSchema if it is less secure."""
        target: str | None = super().get_redirect_target(resp)  # type: ignore[no-untyped-call,unused-ignore]
        if target and resp.url.startswith("https:") and urljoin(resp.url, target).startswith("http:"):
            raise requests.exceptions.InvalidSchema("it redirects from https to http")
        return target


LASTING = requests.exceptions.InvalidSchema | requests.exceptions.InvalidURL
PLAIN = {"Accept-Encoding": "identity"}


def file_length(response: requests.Response) -> int | None:
    """Return the file's length from the answer's headers, if they describe the file's own bytes."""
    length = response.headers.get("Content-Length", "")
    as_it_is = response.headers.get("Content-Encoding", "identity") == "identity"
    page = response.headers.get("Content-Type", "").startswith("text/html")
    return int(length) if length.isdigit() and as_it_is and not page else None


def retry_after(response: requests.Response) -> float | None:
    """Return the seconds that the server requests, given as a number or as a date."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def cause(tool: str, text: str) -> str:
    """Return the cause that the output of ``tool`` names, in a few words; empty if it names no known one."""
    return next((words for mark, words in _causes()[tool].items() if mark in text), "")


@cache
def _causes() -> Mapping[str, Mapping[str, str]]:
    return cast("Mapping[str, Mapping[str, str]]", read(_CAUSES, _CAUSES.name).data)


def short(error: Exception) -> str:
    """Return the cause of a network error in a few words, without its URL."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return cause("requests", str(error)) or (f"HTTP status {status}" if status else type(error).__name__)
