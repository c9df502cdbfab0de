"""The programs that tests run for real, and the packages of Debian and Ubuntu that bring them.

`nox -s tests` begins with `python tests/host_tools.py`, which installs the missing ones. Without root or apt it prints
one sentence for each, and the tests that need it are skipped with the same reason.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from primus import programs
from primus.errors import HostError

# Program → package.
PACKAGES = {
    "mmdebstrap": "mmdebstrap",
    "newuidmap": "uidmap",
    "dockerd": "docker.io",
    "podman": "podman",
    "catatonit": "catatonit",
    "runc": "runc",
    "docker-registry": "docker-registry",
    "skopeo": "skopeo",
    "busybox": "busybox-static",
    "git": "git",
    "cosign": "cosign",
    "docker-buildx": "docker-buildx",
}
PLUGINS = [Path(f"/usr/{lib}/docker/cli-plugins/docker-buildx") for lib in ("libexec", "lib", "local/lib")]


def _codename() -> str:
    """The release of Debian or Ubuntu; empty elsewhere."""
    try:
        return platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    except OSError:
        return ""


def there(program: str) -> bool:
    """Whether the program can be used here."""
    if program == "docker-buildx":
        # bookworm's docker client builds with BuildKit by itself; that of later releases needs this plugin.
        return any(path.exists() for path in PLUGINS) or _codename() == "bookworm"
    found = programs.find(program)
    # Debian's package busybox is linked to libc, which the tests' tiny images do not hold.
    return found is not None and (program != "busybox" or b"/ld-linux" not in found.read_bytes())


def dockerd() -> str:
    """The distribution's dockerd (in sbin on Debian, in bin on Ubuntu); no path where it is missing."""
    return str(programs.find("dockerd") or "dockerd")


def missing(*programs: str) -> str:
    """Why tests that run ``programs`` cannot run here; empty when they can."""
    return "; ".join(
        f"{program} is not installed (apt-get install {PACKAGES[program]})"
        for program in programs
        if not there(program)
    )


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skips a test where one of ``programs`` is missing, and says which package brings it."""
    reason = missing(*programs)
    return pytest.mark.skipif(bool(reason), reason=reason)


def main() -> int:
    """Install what is missing; always 0, since each test says for itself what it lacks."""
    lacking = {program: package for program, package in PACKAGES.items() if not there(program)}
    if not lacking:
        return 0
    try:
        programs.install(lacking, say=print)
    except HostError as error:
        print(error.message, file=sys.stderr)
    for program in lacking:
        if reason := missing(program):
            print(f"tests that need it are skipped: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
