"""Podman: each layer is unpacked once, and a container's root file system is an overlay of them.

A layer is unpacked with tar into a folder of its own below the workspace. The user's own containers
and images are not touched. Podman's own files are in :mod:`primus_images.sandbox.state`.

Each container has a lock file, which its command holds. A container whose lock is free outlived
its command, and is removed by the next one.
"""

import fcntl
import os
import platform
import shlex
import subprocess
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from primus_images import programs
from primus_images.errors import HostError
from primus_images.programs import captured, finally_run
from primus_images.sandbox.container import Command, RootFs, Stream
from primus_images.sandbox.engine import (
    CRUN_HINT,
    ENGINE,
    Client,
    Engine,
    error_of,
    group_options,
)
from primus_images.sandbox.layers import PARTIAL, compare, unpacked_layers
from primus_images.sandbox.state import (
    FILE_SYSTEMS,
    Mode,
    State,
    all_states,
    discard,
    forget,
    keep,
    known,
    locked,
    new,
    remove_tree,
    runtimes,
    workspace_of,
    write_own,
)
from primus_images.terminal import counted, say
from primus_images.waits import try_lock

# Shell scripts that run in the workspace.
_MOUNT = 'cd layers && umask 022 && mkdir -p "$1/upper" "$1/work" "$1/root" && shift && exec "$@"'
_UNMOUNT = 'umount "$1/root"; rm -rf --one-file-system "$1"'
_LOCK = ".lock"


class Podman(Engine):
    """Podman 4 or newer, as root or as a regular user."""

    name = "podman"

    def __init__(self) -> None:
        self._compared: set[str] = set()
        self._comparing = threading.Lock()

    def require(self) -> None:
        """Raise HostError unless podman is installed or can be installed.

        A regular user also needs the ids of other users.
        """
        if platform.system() != "Linux":
            raise HostError(f"this is {platform.system()}, not Linux", hint="use --engine docker")
        lacking = _lacking()
        if lacking and not programs.installable():
            packages = " ".join(lacking.values())
            missing = " and ".join(lacking)
            raise HostError(f"{missing} missing", hint=f"as root: apt-get install {packages}")
        problem = programs.lacks_ids()
        if problem:
            raise HostError(problem[0], hint=problem[1])

    def run(
        self,
        root: RootFs,
        command: Command,
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> int:
        """As :meth:`Engine.run`. If podman's own files are damaged, new ones are made."""
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        try:
            return super().run(root, command, **streams)
        except HostError:
            # The container did not start.
            if not self._mended(workspace_of(root.cache)):
                raise
        return super().run(root, command, **streams)

    def verify(self, root: RootFs) -> None:
        """Compare every byte of the unpacked layers with the image's blobs, once for each image.

        What differs is unpacked again. Raises HostError if that fails.
        """
        with self._comparing:
            if root.id not in self._compared:
                compare(root, self._prepared(root.cache))
                self._compared.add(root.id)

    @contextmanager
    def _container(self, root: RootFs, name: str) -> Iterator[Client]:
        state = self._prepared(root.cache)
        sweep(root.cache)
        layers = unpacked_layers(root, state)
        with _mounted(state, layers, name) as mounted:
            if mounted.returncode != 0:
                raise HostError(f"{self.name} cannot run {root.name}: {error_of(mounted)}")
            yield _client(state, name)

    def prepare_host(self, cache: Path) -> None:
        """Install podman, an init for containers, and an OCI runtime; then start a container."""
        self._prepared(cache)

    def _prepared(self, cache: Path) -> State:
        workspace = workspace_of(cache)
        if not _lacking():
            state = known(workspace)
            if state:
                return state
        with locked(workspace):
            lacking = _lacking()
            if lacking:
                programs.install(lacking)
            return known(workspace) or self._proven(workspace)

    def _proven(self, workspace: Path) -> State:
        """Return a new state in which a container ran."""
        for place in (workspace / "layers", workspace / "probe"):
            place.mkdir(exist_ok=True)
        init = workspace / "probe" / "init"
        write_own(init, Path(str(programs.find("catatonit"))).read_bytes())
        init.chmod(0o755)
        reasons: dict[str, str] = {}
        for mode in _modes():
            state = new(workspace, mode)
            reason = _failure(state)
            if not reason:
                break
            discard(state)
            reasons.setdefault(mode.file_system, reason)
        else:
            # A copy needs no mount, so that the reason is podman's.
            reason = reasons.get("copy", "there is no OCI runtime")
            hint = "in a container: start it with --privileged; else use --engine docker"
            if "crun" in reason:
                hint = CRUN_HINT
            raise HostError(f"{self.name} cannot run a container here: {reason}", hint=hint)
        keep(state, mode)
        if mode.file_system == "copy":
            say(f"whole file systems are copied: there are no overlays in {workspace}")
        return state

    def _mended(self, workspace: Path) -> bool:
        """Whether podman's own files were damaged, and new ones were made."""
        if _lacking():
            return False
        with locked(workspace):
            state = known(workspace)
            if state is None or not _failure(state):
                return False
            forget(state)
            self._proven(workspace)
        say("podman's own files were damaged, and were made again")
        return True

    def _own_options(self, command: Command) -> list[str]:
        # With SELinux, the files of the workspace lack the labels that a container may read.
        options = ["--security-opt=label=disable"]
        if command.network:
            options.append("--volume=/etc/hosts:/etc/hosts:ro")
        if os.geteuid() == 0:
            return options + group_options(command)
        if command.memory_bytes and not Path("/sys/fs/cgroup/cgroup.controllers").exists():
            raise HostError(
                "control groups of version 1 let only root set a limit",
                hint="run as root, or leave the limit out",
            )
        if command.devices.names:
            options.append("--group-add=keep-groups")
        return options


def _lacking() -> dict[str, str]:
    packages = {"podman": "podman", "catatonit": "catatonit"}
    if not runtimes():
        packages["runc"] = "runc"
    return {name: package for name, package in packages.items() if programs.find(name) is None}


def _modes() -> Iterator[Mode]:
    for file_system in FILE_SYSTEMS:
        for runtime in runtimes():
            yield Mode(file_system, runtime, "enabled")
        for runtime in runtimes():
            # Only crun can do without control groups.
            if runtime.endswith("/crun"):
                yield Mode(file_system, runtime, "disabled")


def _failure(state: State) -> str:
    """Run a container whose only file is an init. Return why that failed; empty if it ran."""
    name = f"probe-{uuid.uuid4().hex[:12]}"
    with _mounted(state, ["../probe"], name) as mounted:
        if mounted.returncode != 0:
            return error_of(mounted)
        client = _client(state, name)
        options = [f"--name={name}", "--network=none", *client.image]
        ended = client.answer("run", *options, "/init", "-V")
    if ended.returncode == 0:
        return ""
    return error_of(ended)


@contextmanager
def _mounted(
    state: State, layers: Sequence[str], name: str
) -> Iterator["subprocess.CompletedProcess[str]"]:
    """Create ``containers/NAME/root`` from the layers, top first, and remove it at the end.

    The container is removed, too. Yields the result of the command that created the folder.
    """
    place = f"../containers/{name}"
    if state.file_system == "copy":
        words = ["cp", "-a", "--reflink=auto", "--remove-destination"]
        words += [f"{layer}/." for layer in reversed(layers)]
    else:
        options = f"lowerdir={':'.join(layers)},upperdir={place}/upper,workdir={place}/work"
        if os.geteuid() != 0:
            options += ",userxattr"
        words = ["mount", "-t", "overlay", "-o", f"nodev,{options}", "overlay"]
    # It ends with this process, so that it cannot mount after the removal.
    mount = ["sh", "-c", _MOUNT, "sh", place, *words, f"{place}/root"]
    argv = ["setpriv", "--pdeathsig=KILL", *state.inside(), *mount]
    env = state.environment()
    lock = _lock_of(state.workspace, name)
    removal = f"{_removal(state, name)} && rm -f {shlex.quote(str(lock))}"
    task = f"podman, which removes the container {name}"
    with state.in_use(), _held(lock), finally_run(["sh", "-c", removal], env, task):
        yield captured(argv, ENGINE, env=env)


def _removal(state: State, name: str) -> str:
    """Return the shell command that removes a container and its folder."""
    remove = shlex.join([*state.podman(), "rm", "--force", "--ignore", "--time=0", name])
    unmount = shlex.join([*state.inside(), "sh", "-c", _UNMOUNT, "sh", f"containers/{name}"])
    return f"{remove}; removed=$?; {unmount} && [ $removed = 0 ]"


def _client(state: State, name: str) -> Client:
    image = ["--rootfs", f"{state.workspace}/containers/{name}/root"]
    return Client(words=state.podman(), env=state.environment(), container=name, image=image)


def _lock_of(workspace: Path, name: str) -> Path:
    return workspace / "containers" / f"{name}{_LOCK}"


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold the lock file of a container. Whoever gets it knows that its command has ended."""
    path.parent.mkdir(exist_ok=True)
    handle = _opened(path)
    try:
        yield
    finally:
        os.close(handle)


def _opened(path: Path) -> int:
    """Create a lock file, and return its descriptor, which holds it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # A sweep may have taken the new file for an old one, and removed it.
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)


def sweep(cache: Path) -> None:
    """Remove this user's containers that outlived their commands, and what those set aside."""
    workspace = workspace_of(cache)
    containers = workspace / "containers"
    # Folders first: a container has its lock file before and after it has a folder.
    names = [path.name for path in _inside(containers) if path.suffix != _LOCK]
    locks = [path.stem for path in _inside(containers) if path.suffix == _LOCK]
    alive = 0
    removed = 0
    for name in dict.fromkeys([*locks, *names]):
        with _free(_lock_of(workspace, name)) as free:
            if not free:
                alive += 1
            elif _remove_container(workspace, name):
                removed += 1
    if removed:
        say(f"removed {counted(removed, 'container')} of commands that were killed")
    if alive == 0:
        _remove_set_aside(workspace)


@contextmanager
def _free(lock: Path) -> Iterator[bool]:
    """Hold the lock file while the block runs, if no living command holds it."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        yield try_lock(handle)
    finally:
        os.close(handle)


def _remove_container(workspace: Path, name: str) -> bool:
    """Remove a container and its folder. Returns whether both are gone."""
    folder = workspace / "containers" / name
    if programs.find("podman"):
        for state in all_states(workspace):
            captured(["sh", "-c", _removal(state, name)], ENGINE, env=state.environment())
    if folder.exists():
        subprocess.run(["umount", str(folder / "root")], capture_output=True, check=False)
        remove_tree(folder)
    if folder.exists():
        return False
    _lock_of(workspace, name).unlink(missing_ok=True)
    return True


def _remove_set_aside(workspace: Path) -> None:
    """Remove folders of layers that were replaced while a container used them."""
    if not any((workspace / "layers").glob(f"*-*{PARTIAL}")):
        return
    with locked(workspace):
        for path in (workspace / "layers").glob(f"*-*{PARTIAL}"):
            remove_tree(path)


def _inside(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []
