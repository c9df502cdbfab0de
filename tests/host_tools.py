"""The programs that tests run for real, and the packages of Debian and Ubuntu that bring them.

`nox -s tests` begins with `python tests/host_tools.py`, which installs the missing ones. Without
root or apt it prints one sentence for each, and the tests that need it are skipped with the same
reason.
"""

import contextlib
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from browser import CHROMIUM
from primus_images import programs
from primus_images.errors import HostError

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
    "docker-buildx": "docker-buildx",
    "chromium": "chromium",
}
# The same, from Debian's unstable suite: stable's does not have the bundles that registries list.
# It needs libc only.
UNSTABLE = {"cosign": "cosign", "oras": "oras"}
PLUGINS = [
    Path(f"/usr/{lib}/docker/cli-plugins/docker-buildx") for lib in ("libexec", "lib", "local/lib")
]


def _system(key: str) -> str:
    """ID (debian, ubuntu) or VERSION_CODENAME of the system; empty if it has none."""
    try:
        return platform.freedesktop_os_release().get(key, "")
    except OSError:
        return ""


def there(program: str) -> bool:
    """Whether the program can be used here."""
    if program == "docker-buildx":
        # bookworm's docker client builds with BuildKit by itself; that of later releases needs this
        # plugin.
        return any(path.exists() for path in PLUGINS) or _system("VERSION_CODENAME") == "bookworm"
    if program == "chromium":  # Ubuntu's package is a snap, which a container cannot install.
        return CHROMIUM is not None or _system("ID") == "ubuntu"
    found = programs.find(program)
    # Debian's package busybox is linked to libc, which the tests' tiny images do not hold.
    return found is not None and (program != "busybox" or b"/ld-linux" not in found.read_bytes())


def dockerd() -> str:
    """The distribution's dockerd (in sbin on Debian, in bin on Ubuntu); no path where it is
    missing.
    """
    return str(programs.find("dockerd") or "dockerd")


def missing(*programs: str) -> str:
    """Why tests that run ``programs`` cannot run here; empty when they can."""
    return "; ".join(
        f"{program} is not installed (apt-get install {(PACKAGES | UNSTABLE)[program]})"
        for program in programs
        if not there(program)
    )


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skips a test where one of ``programs`` is missing, and says which package brings it."""
    reason = missing(*programs)
    return pytest.mark.skipif(bool(reason), reason=reason)


def install_unstable(package: str) -> None:
    """Install a package of Debian's unstable suite from the archive that this host uses, and leave
    its apt as it is.
    """
    asked = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = next(line for line in asked.stdout.splitlines() if line.endswith("/debian"))
    with tempfile.TemporaryDirectory(prefix="primus-unstable-") as name:
        folder = Path(name)
        (folder / "lists").mkdir()
        keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
        (folder / "sources").write_text(f"deb [signed-by={keyring}] {site} sid main\n")
        own = {"etc::sourcelist": "sources", "state::lists": "lists"}
        options = [
            word for key, part in own.items() for word in ("-o", f"Dir::{key}={folder / part}")
        ]
        for words in (["update"], ["download", package]):
            command = ["apt-get", "-q", *options, "-o", "Dir::Etc::sourceparts=/dev/null", *words]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        subprocess.run(
            ["dpkg", "-i", *map(str, folder.glob("*.deb"))], check=True, capture_output=True
        )


def main() -> int:
    """Install what is missing; always 0, because each test says for itself what it lacks."""
    lacking = {program: package for program, package in PACKAGES.items() if not there(program)}
    for program, package in lacking.items():
        # A package that the archive does not have must not keep apt from installing the others.
        try:
            programs.install({program: package})
        except HostError as error:
            print(error.message, file=sys.stderr)
    for program, package in UNSTABLE.items():
        if not there(program):
            with contextlib.suppress(OSError, subprocess.CalledProcessError, StopIteration):
                install_unstable(package)
    for program in (*lacking, *UNSTABLE):
        if reason := missing(program):
            print(f"tests that need it are skipped: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
