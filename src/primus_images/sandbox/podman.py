"""Podman: each layer is unpacked once, and a container's root file system is an overlay of them.

A layer is unpacked with tar into a folder of its own below the workspace. The user's own containers
and images are not touched.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from primus_images import programs
from primus_images.errors import HostError
from primus_images.files import json_if_readable, reason_of, write_file
from primus_images.programs import captured, finally_run, stop_all, tracked
from primus_images.sandbox.container import Command, LayerRef, RootFs, layer_folder
from primus_images.sandbox.engine import (
    CRUN_HINT,
    ENGINE,
    Client,
    Engine,
    client_environment,
    error_of,
    group_options,
)
from primus_images.terminal import counted, say
from primus_images.waits import lock

# Shell scripts that run in the folder of podman's files. GNU tar does not write through a link of
# its own archive, and no folder gets the files of two archives.
_UNPACK = (
    'umask 022 && mkdir "$1" && exec tar --extract --file=- --directory="$1" '
    "--preserve-permissions --numeric-owner --xattrs --xattrs-include='*'"
)
_MOUNT = 'cd layers && umask 022 && mkdir -p "$1/upper" "$1/work" "$1/root" && shift && exec "$@"'
# Best first. Where the kernel has no overlay, as in some containers, each container gets a copy.
_FILE_SYSTEMS = ("overlay", "copy")
_UNMOUNT = 'umount "$1/root"; rm -rf --one-file-system "$1"'


class _Mode(NamedTuple):
    """A way to run a container: how layers become one file system, by which runtime."""

    file_system: str
    runtime: str
    cgroups: str


class Podman(Engine):
    """Podman 4 or newer, as root or as a regular user."""

    name = "podman"

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

    @contextmanager
    def _container(self, root: RootFs, name: str) -> Iterator[Client]:
        settings = self.prepare_host(root.cache)
        folder = Path(settings["folder"])
        layers = _unpacked_layers(root, folder)
        with _mounted(settings["file_system"], folder, layers, name) as mounted:
            if mounted.returncode != 0:
                raise HostError(f"{self.name} cannot run {root.name}: {error_of(mounted)}")
            yield _client(folder, name)

    def prepare_host(self, cache: Path) -> dict[str, Any]:
        """Install podman, an init for containers, and an OCI runtime; then start a container."""
        user = "root" if os.geteuid() == 0 else f"user-{os.geteuid()}"
        folder = cache.absolute() / user
        settings = _settings(folder)
        if settings:
            return settings
        with _locked(folder):
            return _settings(folder) or self._probe(folder)

    def _probe(self, folder: Path) -> dict[str, Any]:
        lacking = _lacking()
        if lacking:
            programs.install(lacking)
        for place in (folder / "layers", folder / "probe"):
            place.mkdir(exist_ok=True)
        shutil.copy(str(programs.find("catatonit")), folder / "probe/init")
        reasons: dict[str, str] = {}
        for mode in _modes():
            attempt = _attempt(folder, mode)
            if attempt.returncode == 0:
                break
            reasons.setdefault(mode.file_system, error_of(attempt))
        else:
            # A copy needs no mount, so that the reason is podman's.
            reason = reasons.get("copy", "there is no OCI runtime")
            hint = "in a container: start it with --privileged; else use --engine docker"
            if "crun" in reason:
                hint = CRUN_HINT
            raise HostError(f"{self.name} cannot run a container here: {reason}", hint=hint)
        if mode.file_system == "copy":
            say(f"whole file systems are copied: there are no overlays in {folder}")
        settings = {
            "folder": str(folder),
            "runtimes": _runtimes(),
            "file_system": mode.file_system,
        }
        write_file(folder / "settings.json", json.dumps(settings))
        return settings

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
    if not _runtimes():
        packages["runc"] = "runc"
    return {name: package for name, package in packages.items() if programs.find(name) is None}


def _runtimes() -> list[str]:
    # crun alone can give a container the groups of a regular user. That of Debian 12 refuses mixed
    # control groups.
    names = ("runc", "crun") if os.geteuid() == 0 else ("crun", "runc")
    return [str(path) for path in map(programs.find, names) if path]


def _modes() -> Iterator[_Mode]:
    for file_system in _FILE_SYSTEMS:
        for runtime in _runtimes():
            yield _Mode(file_system, runtime, "enabled")
        for runtime in _runtimes():
            # Only crun can do without control groups.
            if runtime.endswith("/crun"):
                yield _Mode(file_system, runtime, "disabled")


def _attempt(folder: Path, mode: _Mode) -> subprocess.CompletedProcess[str]:
    """Run a container whose only file is an init, and return how that ended."""
    remove_tree(folder / "storage")
    template = Path(__file__).with_name("containers.conf").read_text(encoding="utf-8")
    settings = template.format(
        folder=folder,
        init=programs.find("catatonit"),
        run=_run_folder(folder),
        runtime=mode.runtime,
        cgroups=mode.cgroups,
    )
    write_file(folder / "containers.conf", settings)
    name = f"probe-{uuid.uuid4().hex[:12]}"
    with _mounted(mode.file_system, folder, ["../probe"], name) as mounted:
        if mounted.returncode != 0:
            return mounted
        client = _client(folder, name)
        options = [f"--name={name}", "--network=none", *client.image]
        return client.answer("run", *options, "/init", "-V")


def _settings(folder: Path) -> dict[str, Any]:
    settings = json_if_readable(folder / "settings.json")
    # A runtime that is installed later may work better.
    if settings.get("folder") != str(folder) or settings.get("runtimes") != _runtimes():
        return {}
    if settings.get("file_system") not in _FILE_SYSTEMS:
        return {}
    return settings


def _unpacked_layers(root: RootFs, folder: Path) -> list[str]:
    """Unpack the layers that are not yet there, and return their folders, top first."""
    # What an image contains twice counts where it is higher.
    layers = {}
    for layer in reversed(root.layers):
        layers[folder / "layers" / layer_folder(layer.digest)] = layer
    if not all(path.exists() for path in layers):
        with _locked(folder):
            absent = {path: layer for path, layer in layers.items() if not path.exists()}
            if absent:
                _unpack_all(root, folder, absent)
    return [path.name for path in layers]


def _unpack_all(root: RootFs, folder: Path, absent: Mapping[Path, LayerRef]) -> None:
    megabytes = sum(layer.size for layer in absent.values()) / 1e6
    layers = counted(len(absent), "layer")
    say(f"unpacking {layers} ({megabytes:.0f} MB compressed) of {root.name}, once")
    # The largest decides how long it takes.
    largest_first = sorted(absent, key=lambda path: -absent[path].size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            list(pool.map(lambda path: _unpack(root, folder, path, absent[path]), largest_first))
        except BaseException:
            stop_all()
            raise


def _unpack(root: RootFs, folder: Path, path: Path, layer: LayerRef) -> None:
    partial = path.with_suffix(".tmp")
    remove_tree(partial)
    argv = [*_inside(folder), "sh", "-c", _UNPACK, "sh", f"layers/{partial.name}"]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process: Any = subprocess.Popen(
            argv,
            env=_environment(folder),
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
        with tracked(process):
            with suppress(BrokenPipeError), process.stdin:  # its message follows
                process.stdin.writelines(root.tar(layer))
            process.wait()
        log.seek(0)
        if process.returncode != 0:
            reason = log.readline().strip() or "tar was stopped"
            hint = "free some space: primus clean" if "No space left" in reason else None
            raise HostError(f"a layer of {root.name} cannot be unpacked: {reason}", hint=hint)
    partial.rename(path)


@contextmanager
def _mounted(
    file_system: str, folder: Path, layers: Sequence[str], name: str
) -> Iterator[subprocess.CompletedProcess[str]]:
    """Create ``containers/NAME/root`` from the layers, top first, and remove it at the end.

    The container is removed, too. Yields the result of the command that created the folder.
    """
    place = f"../containers/{name}"
    if file_system == "copy":
        words = ["cp", "-a", "--reflink=auto", "--remove-destination"]
        words += [f"{layer}/." for layer in reversed(layers)]
    else:
        options = f"lowerdir={':'.join(layers)},upperdir={place}/upper,workdir={place}/work"
        if os.geteuid() != 0:
            options += ",userxattr"
        words = ["mount", "-t", "overlay", "-o", f"nodev,{options}", "overlay"]
    remove = shlex.join([*_podman(folder), "rm", "--force", "--ignore", "--time=0", name])
    unmount = shlex.join([*_inside(folder), "sh", "-c", _UNMOUNT, "sh", f"containers/{name}"])
    # It ends with this process, so that it cannot mount after the removal.
    mount = ["sh", "-c", _MOUNT, "sh", place, *words, f"{place}/root"]
    argv = ["setpriv", "--pdeathsig=KILL", *_inside(folder), *mount]
    env = _environment(folder)
    with finally_run(["sh", "-c", f"{remove}; {unmount}"], env):
        yield captured(argv, ENGINE, env=env)


def _client(folder: Path, name: str) -> Client:
    image = ["--rootfs", f"{folder}/containers/{name}/root"]
    return Client(words=_podman(folder), env=_environment(folder), container=name, image=image)


def _podman(folder: Path) -> list[str]:
    # Conmon notes a command over its memory limit in a file of the current folder. Podman stores no
    # image, and its default storage driver does not work in all folders.
    return [
        "env",
        f"--chdir={folder}",
        str(programs.find("podman")),
        f"--root={folder}/storage",
        f"--runroot={_run_folder(folder)}",
        "--storage-driver=vfs",
    ]


def _inside(folder: Path) -> list[str]:
    """Return what precedes a command that is to run in ``folder``, in podman's namespaces."""
    if os.geteuid() == 0:
        return ["env", f"--chdir={folder}"]
    return [*_podman(folder), "unshare"]


def _environment(folder: Path) -> dict[str, str]:
    return client_environment() | {"CONTAINERS_CONF": str(folder / "containers.conf")}


def _run_folder(folder: Path) -> Path:
    """Return the folder of what podman must forget when the machine starts anew.

    Its path must be short.
    """
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    if os.geteuid() == 0:
        return Path("/run/primus") / name
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"primus-{os.geteuid()}-{name}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise HostError(
            f"podman cannot keep its files in {folder}: {reason_of(error)}",
            hint="the folder must be yours and on a writable file system",
        ) from error
    with file:
        lock(file.fileno(), f"another command that prepares {folder}", folder / "lock")
        yield


def remove_tree(path: Path) -> None:
    """Remove a folder, including files of a regular user's subordinate ids.

    A missing folder is not an error.
    """
    shutil.rmtree(path, ignore_errors=True)
    podman = programs.find("podman")
    if path.exists() and podman and os.geteuid() != 0:
        words = [str(podman), "unshare", "rm", "-rf", str(path)]
        captured(words, ENGINE, env=client_environment())
