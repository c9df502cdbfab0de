"""Run pip as if on another Python: ``python pipfor.py 3.11.2 x86_64 FD install …``.

pip's own ``--python-version`` and ``--platform`` select wheels, but environment markers use the running interpreter. A
host with another Python would therefore lock other dependencies. Each request is reported to the file descriptor ``FD``
as lines of JSON: one when it is sent, one when its answer begins. This file is a program and is not imported.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
from typing import Any

# The longest Retry-After to obey. Statuses that pip itself does not retry are retried as well.
LONGEST_PAUSE_S = 10.0
PASSING = (408, 425, 429, 500, 502, 503, 504, 520, 524)


def main() -> None:
    """Replace pip's marker environment, then run pip."""
    python, machine, out = sys.argv[1:4]
    sys.argv = ["pip", *sys.argv[4:]]
    from pip._vendor.packaging import markers

    environment = {
        "implementation_name": "cpython",
        "implementation_version": python,
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "sys_platform": "linux",
    }
    markers.default_environment = lambda: dict(environment)  # type: ignore[assignment,return-value,unused-ignore]
    from pip._vendor.requests.adapters import HTTPAdapter
    from pip._vendor.urllib3.util.retry import Retry

    for owner, name in (
        (markers, "default_environment"), (Retry, "get_retry_after"), (Retry, "is_retry"), (HTTPAdapter, "send"),
    ):  # fmt: skip
        if not hasattr(owner, name):
            sys.exit(f"ERROR: this pip has no {owner.__name__}.{name}, which locking replaces; install pip<27")
    # A server can ask for an hour, and pip would wait that long.
    asked_for = Retry.get_retry_after
    Retry.get_retry_after = lambda self, response: min(asked_for(self, response) or 0.0, LONGEST_PAUSE_S) or None  # type: ignore[assignment,method-assign,unused-ignore]
    Retry.is_retry = lambda self, _, status, *__, **___: bool(self.total) and status in PASSING  # type: ignore[assignment,method-assign,unused-ignore]
    _report_requests(int(out))
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


def _report_requests(out: int) -> None:
    """Make pip report every request to the file descriptor ``out``."""
    from pip._vendor.requests.adapters import HTTPAdapter

    send, numbers = HTTPAdapter.send, itertools.count()

    def report_send(self: Any, request: Any, *args: Any, **more: Any) -> Any:
        number = next(numbers)

        def write(**fields: object) -> None:
            os.write(out, (json.dumps({"id": number, **fields}) + "\n").encode())

        write(url=request.url, method=request.method)
        try:
            response = send(self, request, *args, **more)
        except Exception as error:
            write(failed=type(error).__name__)
            raise
        headers = response.headers
        write(status=response.status_code, type=headers.get("Content-Type", ""), size=headers.get("Content-Length", ""))
        return response

    HTTPAdapter.send = report_send  # type: ignore[method-assign,unused-ignore]


if __name__ == "__main__":
    main()
