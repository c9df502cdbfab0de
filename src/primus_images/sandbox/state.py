"""Podman's own files of a workspace: where they are, and whether a container has run with them.

They are not in the checkout, whose files others may have written: hooks in a ``containers.conf``
would run on this machine. They are in a private folder below /run, and the machine forgets them
when it starts anew.

A *state* is a folder with a configuration and a storage. It is known by the programs that it was
proven with, whatever the spelling of their paths: commands that find other programs make another
state, and none removes that of another command. Only a proven state is kept.
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from primus_images import programs
from primus_images.errors import HostError
from primus_images.files import (
    json_if_readable,
    ownership,
    reason_of,
    remove_path,
    text_if_readable,
    write_file,
)
from primus_images.programs import captured
from primus_images.sandbox.engine import ENGINE, client_environment
from primus_images.waits import is_unlocked, lock

# Best first. Where the kernel has no overlay, as in some containers, each container gets a copy.
FILE_SYSTEMS = ("overlay", "copy")
_RUN = Path("/run")
_TMP = Path("/tmp")
# Podman refuses a longer path of its run folder.
_MOST_PATH = 50
# How many names in /tmp are tried, of which other users may have taken some.
_MOST_NAMES = 10
_PREFIX = "s-"
_SYSTEM_CALLS = Path("/usr/share/containers/seccomp.json")
_PROFILE = "seccomp.json"
_STORAGE_CONF = "storage.conf"
_DRIVER = "vfs"
_STORAGE = '[storage]\ndriver = "{driver}"\nrunroot = "{place}"\ngraphroot = "{place}/storage"\n'
_MOUNTING = ("mount", "fsopen", "fsmount", "move_mount", "open_tree", "mount_setattr", "pivot_root")


class Mode(NamedTuple):
    """A way to run a container: how layers become one file system, by which runtime."""

    file_system: str
    runtime: str
    cgroups: str


@dataclass(frozen=True, kw_only=True)
class State:
    """Podman's own files for the folder ``workspace``, which has the layers and containers.

    ``place`` is the private folder of the configuration and the storage. ``file_system`` is how
    layers become one file system: ``overlay`` or ``copy``.
    """

    workspace: Path
    place: Path
    file_system: str

    def podman(self) -> list[str]:
        """Return podman with the options that name its files."""
        # Conmon notes a command over its memory limit in a file of the current folder. Podman
        # stores no image, and its default storage driver does not work in all folders.
        return [
            "env",
            f"--chdir={self.workspace}",
            str(programs.find("podman")),
            f"--root={self.place}/storage",
            f"--runroot={self.place}",
            f"--storage-driver={_DRIVER}",
        ]

    def inside(self) -> list[str]:
        """Return what precedes a command in the workspace, in podman's namespaces."""
        if os.geteuid() == 0:
            return ["env", f"--chdir={self.workspace}"]
        return [*self.podman(), "unshare"]

    def environment(self) -> dict[str, str]:
        """Return the environment of podman."""
        # The user's own configuration may name what this machine lacks, or be damaged.
        return client_environment() | {
            "CONTAINERS_CONF": str(self.place / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.place / _STORAGE_CONF),
            # Podman 5 warns in each command's own standard error.
            "PODMAN_IGNORE_CGROUPSV1_WARNING": "1",
        }

    def call(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run podman, and return what it prints."""
        return captured([*self.podman(), *words], ENGINE, env=self.environment())

    def configure(self, mode: Mode) -> None:
        """Write podman's configuration, unless it is there. Heals a damaged one."""
        template = Path(__file__).with_name("containers.conf").read_text(encoding="utf-8")
        text = template.format(
            place=self.place,
            init=programs.find("catatonit"),
            runtime=mode.runtime,
            cgroups=mode.cgroups,
        )
        profile = _system_calls()
        if profile:
            # Without it, podman's own one counts.
            text = text.replace(
                "[engine]", f'seccomp_profile = "{self.place}/{_PROFILE}"\n[engine]'
            )
            write_own(self.place / _PROFILE, profile)
        write_own(self.place / _STORAGE_CONF, _STORAGE.format(place=self.place, driver=_DRIVER))
        write_own(self.place / "containers.conf", text)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other commands from removing the state while the block runs."""
        handle = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield
        finally:
            os.close(handle)


def write_own(path: Path, data: str | bytes) -> None:
    """Write a file that is ours alone, unless it has this text. A folder in its place goes."""
    if text_if_readable(path) == data:
        return
    if path.is_dir():
        remove_path(path)
    write_file(path, data)


def _system_calls() -> str:
    """Return podman's list of permitted system calls without those that mount.

    In a user namespace of its own, a root that mounts its control group could raise its limits.
    Empty if podman has no file of them.
    """
    if not _SYSTEM_CALLS.exists():
        return ""
    profile = json_if_readable(_SYSTEM_CALLS)
    try:
        for rule in profile["syscalls"]:
            if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("includes"):
                rule["names"] = [name for name in rule["names"] if name not in _MOUNTING]
    except (AttributeError, KeyError, TypeError):
        raise HostError(
            "this is not a list of system calls, so podman can start no container",
            where=_SYSTEM_CALLS,
            hint="install the package again that it belongs to",
        ) from None
    return json.dumps(profile)


def workspace_of(cache: Path) -> Path:
    """Return the folder of this user's layers and containers below ``cache``.

    It is the real one: commands that name the project by a link share the states, too.
    """
    user = "root" if os.geteuid() == 0 else f"user-{os.geteuid()}"
    return (cache / user).resolve()


def runtimes() -> list[str]:
    """Return the real paths of the OCI runtimes, best first."""
    # crun alone can give a container the groups of a regular user. That of Debian 12 refuses mixed
    # control groups.
    names = ("runc", "crun") if os.geteuid() == 0 else ("crun", "runc")
    return [str(path.resolve()) for path in map(programs.find, names) if path]


@contextmanager
def locked(workspace: Path) -> Iterator[None]:
    """Keep other commands from preparing the workspace while the block runs.

    Raises HostError if podman cannot keep its files there.
    """
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        file = (workspace / "lock").open("w")
    except OSError as error:
        raise HostError(
            f"podman cannot keep its files in {workspace}: {reason_of(error)}",
            hint="the folder must be yours and on a writable file system",
        ) from error
    with file:
        lock(file.fileno(), f"another command that prepares {workspace}", workspace / "lock")
        yield


def known(workspace: Path) -> State | None:
    """Return the state that was proven with the programs that are found now; None without one."""
    path = _note(workspace)
    note = json_if_readable(path)
    try:
        mode = Mode(**note["mode"])
        place = path.parent / note["place"]
    except (KeyError, TypeError):
        return None
    if mode.file_system not in FILE_SYSTEMS or not str(note["place"]).startswith(_PREFIX):
        return None
    if not _is_private(place):
        return None
    (workspace / "layers").mkdir(parents=True, exist_ok=True)
    state = State(workspace=workspace, place=place, file_system=mode.file_system)
    state.configure(mode)
    return state


def new(workspace: Path, mode: Mode) -> State:
    """Return a new state, which no command knows before :func:`keep`."""
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_runs(workspace)))
    state = State(workspace=workspace, place=place, file_system=mode.file_system)
    state.configure(mode)
    return state


def keep(state: State, mode: Mode) -> None:
    """Make a proven state known to other commands. Removes states that none knows or uses."""
    content = {"place": state.place.name, "mode": mode._asdict()}
    write_own(_note(state.workspace), json.dumps(content))
    runs = state.place.parent
    noted = set()
    for note in runs.glob("*.json"):
        noted.add(json_if_readable(note).get("place"))
    for place in runs.glob(f"{_PREFIX}*"):
        if place.name not in noted and is_unlocked(place):
            discard(State(workspace=state.workspace, place=place, file_system=state.file_system))


def forget(state: State) -> None:
    """Make a state that fails unknown, so that the next command proves another one."""
    note = _note(state.workspace)
    if json_if_readable(note).get("place") == state.place.name:
        note.unlink(missing_ok=True)


def discard(state: State) -> None:
    """Remove the folder of a state that no command knows."""
    if os.geteuid() != 0 and (state.place / "libpod").exists():
        # The process that keeps a user's namespaces ends with it.
        state.call("system", "migrate")
    remove_tree(state.place)


def all_states(workspace: Path) -> list[State]:
    """Return every state of the workspace on this machine, known or not."""
    states = []
    for folder in _candidates():
        runs = folder / _digest(str(workspace))
        if not _is_private(runs):
            continue
        for place in sorted(runs.glob(f"{_PREFIX}*")):
            if (place / "containers.conf").exists():
                states.append(State(workspace=workspace, place=place, file_system="overlay"))
    return states


def remove_tree(path: Path) -> None:
    """Remove a folder, including files of a regular user's subordinate ids; of a link, only itself.

    A missing folder is not an error.
    """
    if path.is_symlink():
        path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)
    podman = programs.find("podman")
    if path.exists() and podman and os.geteuid() != 0:
        words = [str(podman), "unshare", "rm", "-rf", str(path)]
        captured(words, ENGINE, env=client_environment())


def _note(workspace: Path) -> Path:
    """Return the path of the note about the state of the programs that are found now."""
    boot = text_if_readable(Path("/proc/sys/kernel/random/boot_id"))
    facts = [boot, *_identities(runtimes())]
    for name in ("podman", "catatonit", "conmon"):
        path = programs.find(name)
        if path:
            facts += _identities([str(path.resolve())])
    return _runs(workspace) / f"{_digest(*facts)}.json"


def _identities(paths: Sequence[str]) -> list[str]:
    """Return what changes if a program is replaced by another one of the same name."""
    identities = []
    for path in paths:
        status = Path(path).stat()
        identities.append(f"{path} {status.st_ino} {status.st_size} {status.st_mtime_ns}")
    return identities


def _runs(workspace: Path) -> Path:
    """Return the private folder of the states of a workspace. Its path must be short.

    Raises HostError if no folder for it belongs to this user alone.
    """
    name = _digest(str(workspace))
    hint = "set XDG_RUNTIME_DIR to a folder of yours with mode 0700 and a short path"
    objections = []
    for folder in _candidates():
        runs = folder / name
        reason = ""
        try:
            _make_private(folder, runs)
        except OSError as error:
            reason = reason_of(error)
        if _is_private(runs):
            return runs
        refused = runs if _is_private(folder) else folder
        objections.append(_objection(refused, reason))
        if os.geteuid() == 0:
            hint = f"remove {refused}"
            if not os.path.lexists(refused):
                hint = f"make {_RUN} writable; in a container: start it with --tmpfs {_RUN}"
    seen = "; ".join(objections)
    raise HostError(
        f"podman has no private folder for what a restart of the machine removes: {seen}", hint=hint
    )


def _make_private(folder: Path, runs: Path) -> None:
    """Create both folders. Raises OSError if that fails."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if _is_private(folder):
        if runs.is_symlink() or not runs.is_dir():
            # Nobody else can have made it.
            runs.unlink(missing_ok=True)
        runs.mkdir(mode=0o700, exist_ok=True)


def _objection(folder: Path, reason: str) -> str:
    """Return why podman cannot use the folder, which could not be made for this reason."""
    if not os.path.lexists(folder):
        return f"{folder} cannot be made: {reason}"
    if folder.lstat().st_uid == os.geteuid():
        return f"{folder} is not a folder that you alone may change"
    return ownership(folder)


def _candidates() -> Iterator[Path]:
    """Yield the folders that may have the states of this user's workspaces, best first."""
    user = os.geteuid()
    if user == 0:
        yield _RUN / "primus"
        return
    for given in (os.environ.get("XDG_RUNTIME_DIR"), str(_RUN / "user" / str(user))):
        # Podman refuses a long path.
        if given and _is_private(Path(given)) and len(given) <= _MOST_PATH - 29:
            yield Path(given) / "primus"
    for number in range(_MOST_NAMES):
        # Anybody may make a folder in /tmp.
        suffix = f"-{number}" if number else ""
        yield _TMP / f"primus-{user}{suffix}"


def _is_private(path: Path) -> bool:
    """Whether the path is a folder, not a link, that only this user may change."""
    try:
        status = path.lstat()
    except OSError:
        return False
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not writable


def _digest(*facts: str) -> str:
    return hashlib.sha256(os.fsencode("\0".join(facts))).hexdigest()[:10]
