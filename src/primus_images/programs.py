"""Programs of the host. As root on Debian and Ubuntu, a missing one is installed, with a message.

Those that are tracked end with this process, whether it ends by itself, by Ctrl-C or by SIGKILL.
"""

import contextlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from os import killpg
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from primus_images.errors import HostError
from primus_images.files import text_if_readable, user_name
from primus_images.terminal import say
from primus_images.waits import answer_of

_LISTS = Path("/var/lib/apt/lists")
_STALE_S = 24 * 3600
# Builds run in threads, but apt can run only once at a time.
_installing = threading.RLock()
_FORWARDED = [
    signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH")
]
_running: set[subprocess.Popen[bytes]] = set()


def need(tool: str, package: str) -> Path:
    """Return the path of the executable ``tool``.

    If it is missing, the Debian package ``package`` is installed first. Raises HostError, with the
    command to type, if that fails.
    """
    with _installing:
        if find(tool) is None:
            install({tool: package})
    path = find(tool)
    if path is None:
        raise HostError(f"package {package} is installed, but does not provide {tool}")
    return path


def install(packages: Mapping[str, str]) -> None:
    """Install the Debian package of each tool (``packages``: tool → package).

    A line is printed first.

    Raises HostError, with the command to type, if that fails.
    """
    *others, last = packages
    missing = f"{last} is missing"
    if others:
        missing = f"{', '.join(others)} and {last} are missing"
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages.values()]
    typed = shlex.join(command)
    if not _has_apt():
        names = ", ".join(packages.values())
        hint = f"install {names} (the names of the packages on Debian and Ubuntu)"
        raise HostError(missing, hint=hint)
    if os.geteuid() != 0:
        raise HostError(missing, hint=f"sudo {typed}")
    say(f"{missing}: installing with `{typed}`")
    reason = ""
    with _installing:
        if _lists_are_stale():
            reason = _apt(["apt-get", "-q", "update"])
        if not reason:
            reason = _apt(command)
    if reason:
        raise HostError(
            f"{missing} and could not be installed: {reason}", hint=f"try: apt-get update; {typed}"
        )


def _lists_are_stale() -> bool:
    if not any(_LISTS.glob("*_*Release")):
        return True
    return time.time() - _LISTS.stat().st_mtime > _STALE_S


def installable() -> bool:
    """Return whether :func:`install` may install packages: as root, on Debian or Ubuntu."""
    return os.geteuid() == 0 and _has_apt()


def lacks_ids() -> tuple[str, str] | None:
    """Return what keeps a regular user from having other users' ids in a container.

    It is (problem, remedy), or None.
    """
    if os.geteuid() == 0:
        return None
    absent = [tool for tool in ("newuidmap", "newgidmap") if find(tool) is None]
    if absent:
        return f"not installed: {' and '.join(absent)}", "as root: apt-get install uidmap"
    user = user_name(os.geteuid())
    entry = re.compile(rf"(?m)^(?:{re.escape(user)}|{os.geteuid()}):")
    lacking = []
    for path in ("/etc/subuid", "/etc/subgid"):
        if not entry.search(text_if_readable(Path(path))):
            lacking.append(path)
    if lacking:
        remedy = f"as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
        return f"user {user} has no subordinate ids in {' and '.join(lacking)}", remedy
    return None


def _has_apt() -> bool:
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return False
    names = {release["ID"], *release.get("ID_LIKE", "").split()}
    return bool(names & {"debian", "ubuntu"}) and shutil.which("apt-get") is not None


def find(tool: str) -> Path | None:
    """Return the path of the executable, or None.

    It may also be in sbin, which may not be on a user's PATH.
    """
    path = os.environ.get("PATH", os.defpath)
    program = shutil.which(tool, path=f"{path}:/usr/sbin:/sbin")
    return Path(program) if program else None


def _apt(command: list[str]) -> str:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command, capture_output=True, errors="replace", check=False, input="", env=environment
    )
    if done.returncode == 0:
        return ""
    for line in done.stderr.splitlines():
        if line.startswith("E:"):
            return line[3:]
    return f"exit code {done.returncode}"


def captured(
    words: Sequence[str], source: str, text: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program with the input ``text``, and capture its output.

    After 2 s, a line says that this waits for ``source``. ``options`` are those of
    :func:`subprocess.run`, such as ``env``, and ``timeout``, which raises TimeoutExpired.
    """
    with answer_of(source):
        return subprocess.run(
            words, input=text, capture_output=True, errors="replace", check=False, **options
        )


@contextlib.contextmanager
def tracked(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield ``process``, which leads its own session.

    If the block ends first, it is killed with its session.
    """
    _running.add(process)
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process)
            process.wait()
        _running.discard(process)


def stop_all() -> None:
    """Kill every tracked process with its process group, whichever thread waits for it."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Until it is waited for, the process leads its group, and its number cannot belong to another
    # one.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def received_signals() -> Iterator[SimpleQueue[int]]:
    """Yield a queue of the signals that this process gets in the block; 0 ends it.

    They then do nothing else.
    """
    signals: SimpleQueue[int] = SimpleQueue()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _FORWARDED:
            before[number] = signal.signal(number, lambda number, _: signals.put(number))
    try:
        yield signals
    finally:
        signals.put(0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def finally_run(argv: Sequence[str], env: Mapping[str, str], task: str) -> Iterator[None]:
    """Run ``argv`` when the block ends, and wait for it; also if this process is killed in it.

    After 2 s, say that it waits for ``task``.
    """
    # The shell reads until the other end of its pipe is closed, by us or by the kernel.
    words = ["/bin/sh", "-c", 'read -r _; exec "$@"', "sh", *argv]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=nothing,
        stderr=nothing,
        env=env,
        cwd="/",
        start_new_session=True,
    )
    try:
        yield
    finally:
        with answer_of(task):
            process.communicate()
