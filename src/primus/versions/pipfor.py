"""Runs pip as if on another Python: ``python pipfor.py 3.11.2 x86_64 install …``.

pip's own ``--python-version`` and ``--platform`` choose wheels, but leave environment markers to the running
interpreter, so a host with another Python would lock other dependencies. This file is a program, not imported.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Replace pip's marker environment, then be pip."""
    python, machine = sys.argv[1:3]
    sys.argv = ["pip", *sys.argv[3:]]
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
    from pip._vendor.urllib3.util.retry import Retry

    # A server may ask pip to come back in an hour; pip would wait that long.
    Retry.get_retry_after = lambda *_: None  # type: ignore[assignment,method-assign,unused-ignore]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
