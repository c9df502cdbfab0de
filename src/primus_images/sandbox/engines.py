"""Running a command in an image, by the command line of podman or Docker.

For podman, each layer is unpacked once, with tar, into a folder of its own below the workspace. A
container's root file system is an overlay of these folders. The user's own containers and images
are not touched.
"""

import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from primus_images import programs
from primus_images.errors import HostError, InputError
from primus_images.files import json_if_readable, reason_of, write_file
from primus_images.programs import captured, finally_run, received_signals, stop_all, tracked
from primus_images.sandbox.container import (
    Command,
    LayerRef,
    RootFs,
    Stream,
    check_mounts,
    layer_folder,
    with_settings,
)
from primus_images.sandbox.docker import load_image, need_docker
from primus_images.terminal import counted, say
from primus_images.waits import lock
from primus_images.yamlfile import read_values

_ENGINE = "the container engine"

# A client with its first arguments, its environment, and its arguments that name a root file
# system.
_Client = tuple[list[str], dict[str, str], list[str]]

_DATA: Mapping[str, str] = read_values(Path(__file__).with_name("engines.yaml")).data
_READ_BY_CLIENTS = re.compile(_DATA["read_by_clients"])
_CLIENT_ENVIRONMENT = re.compile(_DATA["client_environment"])


class Engine:
    """A program that runs containers."""

    name = ""

    def require(self) -> None:
        """Raise HostError, with the remedy, if this engine cannot run here."""
        raise NotImplementedError

    def prepare_host(self, cache: Path) -> dict[str, Any]:
        """Install what this engine needs, if it is allowed to, and try it. Raises HostError if that
        fails.

        Returns the settings that this machine needs. ``cache`` is the folder of unpacked layers.
        """
        return {}

    def _container(self, root: RootFs, name: str) -> AbstractContextManager[_Client]:
        """Give the engine what the container ``name`` of ``root`` needs, and remove both when the
        block ends.
        """
        raise NotImplementedError

    def _own_options(self, command: Command) -> list[str]:
        raise NotImplementedError

    def run(
        self,
        root: RootFs,
        command: Command,
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> int:
        """Run ``command`` in a new container and return its exit code.

        The code is 128+n for a command ended by signal n, 127 if it is not found, 126 if it cannot
        be executed. Signals are forwarded. The command has a terminal if stdin and stdout are
        inherited ones. The container is removed afterwards, even if this process is killed.

        Raises InputError for an invalid mount, user or option, and HostError if the machine cannot
        run it.
        """
        check_mounts(command)
        hostname = re.sub(r"[^A-Za-z0-9-]+", "-", root.name).strip("-")[:63] or "primus"
        command = replace(with_settings(root, command), hostname=command.hostname or hostname)
        # The shell says which program is missing, with the exit code for it, whereas an init ends
        # with 1.
        arguments = ["-c", 'exec "$@"', "primus", *command.argv]
        own_options = self._own_options(command)
        terminal = stdin is None and stdout is None and os.isatty(0) and os.isatty(1)
        variables, values = _variables(command, terminal)
        name = f"primus-{uuid.uuid4().hex[:12]}"
        for stream in (stdout, stderr):
            if stream:
                stream.flush()
        with self._container(root, name) as (client, env, image):
            words = [
                f"--name={name}",
                *_options(command, terminal),
                *variables,
                *own_options,
                *image,
                *arguments,
            ]
            with received_signals() as signals:
                # The client ends with this process, so that it cannot create the container after
                # its removal. Signals go around it: podman 4.3's client drops one that arrives in
                # the first moments of a container.
                argv = [
                    "setpriv",
                    "--pdeathsig=KILL",
                    *client,
                    "run",
                    "--pull=never",
                    "--sig-proxy=false",
                    *words,
                ]
                streams: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
                process = subprocess.Popen(
                    argv, env={**env, **values}, start_new_session=True, **streams
                )
                threading.Thread(
                    target=_forward, args=(signals, process, [*client, "kill", name], env)
                ).start()
                with tracked(process):
                    code = process.wait()
            if code in (125, 126, 127):
                self._raise_refusal(root, command, client, env, name, words)
        if code == 137 and (limit := command.memory_bytes):
            text = (
                "primus: the command was killed, probably over the memory limit of "
                f"{limit >> 20} MiB\n"
            )
            os.write(stderr.fileno() if stderr else 2, text.encode())
        if code < 0:
            return 128 - code
        return code

    def _raise_refusal(
        self,
        root: RootFs,
        command: Command,
        client: list[str],
        env: dict[str, str],
        name: str,
        words: list[str],
    ) -> None:
        # If the container started, the exit code is the command's own.
        state = captured(
            [*client, "container", "inspect", "--format={{.State.StartedAt}}", name],
            _ENGINE,
            env=env,
        )
        if state.returncode == 0 and not state.stdout.startswith("0001-01-01"):
            return
        # It fails in the same way again, and this time its message is ours.
        if state.returncode == 0:
            again = [*client, "start", name]
        else:
            again = [*client, "create", *words]
        message = _error(captured(again, _ENGINE, env=env))
        if command.user and re.search(r"no matching entries|unable to find (user|group)", message):
            raise InputError(
                f"the image has no user {command.user!r}",
                hint="name one of its users, or a uid[:gid]",
            )
        if "crun" in message:
            raise HostError(
                f"{self.name} cannot run {root.name}: {message}",
                hint="crun fails here; as root: apt-get install runc, and podman is tried with it; "
                "Docker takes it by --runtime runc, or by default-runtime in its daemon.json",
            )
        raise HostError(f"{self.name} cannot run {root.name}: {message}")


class Podman(Engine):
    """Podman 4 or newer, as root or as a regular user."""

    name = "podman"

    def require(self) -> None:
        """Raise HostError unless podman is installed or can be installed, and this user has the ids
        that it needs.
        """
        if platform.system() != "Linux":
            raise HostError(f"this is {platform.system()}, not Linux", hint="use --engine docker")
        lacking = _lacking()
        if lacking and not programs.installable():
            programs_text = " and ".join(lacking)
            packages = " ".join(lacking.values())
            raise HostError(f"{programs_text} missing", hint=f"as root: apt-get install {packages}")
        problem = programs.lacks_ids()
        if problem:
            raise HostError(problem[0], hint=problem[1])

    @contextmanager
    def _container(self, root: RootFs, name: str) -> Iterator[_Client]:
        settings = self.prepare_host(root.cache)
        folder = Path(settings["folder"])
        # Top first: what an image contains twice counts where it is higher.
        layers = {
            folder / "layers" / layer_folder(layer.digest): layer for layer in reversed(root.layers)
        }
        if not all(path.exists() for path in layers):
            with _locked(folder):
                absent = {path: layer for path, layer in layers.items() if not path.exists()}
                if absent:
                    self._unpack(root, folder, absent)
        with _mounted(
            settings["file_system"], folder, [path.name for path in layers], name
        ) as mounted:
            if mounted.returncode != 0:
                raise HostError(f"{self.name} cannot run {root.name}: {_error(mounted)}")
            yield (
                _podman(folder),
                _client_environment(folder),
                ["--rootfs", f"{folder}/containers/{name}/root"],
            )

    def prepare_host(self, cache: Path) -> dict[str, Any]:
        """Install podman, an init for containers, and runc if there is no OCI runtime; then start a
        container.
        """
        folder = cache.absolute() / ("root" if os.geteuid() == 0 else f"user-{os.geteuid()}")
        settings = _settings(folder)
        if settings:
            return settings
        with _locked(folder):
            return _settings(folder) or self._probe(folder)

    def _probe(self, folder: Path) -> dict[str, Any]:
        lacking = _lacking()
        if lacking:
            programs.install(lacking)
        init = str(programs.find("catatonit"))
        # Only crun can do without control groups.
        modes = [(runtime, "enabled") for runtime in _runtimes()]
        modes += [(runtime, "disabled") for runtime in _runtimes() if runtime.endswith("/crun")]
        reasons = []
        for place in (folder / "layers", folder / "probe"):
            place.mkdir(exist_ok=True)
        shutil.copy(init, folder / "probe/init")
        for file_system, (runtime, cgroups) in itertools.product(_file_systems(), modes):
            remove_tree(folder / "storage")
            values = {
                "cgroups": cgroups,
                "init": init,
                "runtime": runtime,
                "run": _run_folder(folder),
            }
            conf = Path(__file__).with_name("containers.conf").read_text(encoding="utf-8")
            write_file(folder / "containers.conf", conf.format(folder=folder, **values))
            name = f"probe-{uuid.uuid4().hex[:12]}"
            env = _client_environment(folder)
            words = [
                "run",
                f"--name={name}",
                "--network=none",
                "--rootfs",
                f"{folder}/containers/{name}/root",
            ]
            with _mounted(file_system, folder, ["../probe"], name) as mounted:
                started = mounted.returncode == 0
                if started:
                    attempt = captured([*_podman(folder), *words, "/init", "-V"], _ENGINE, env=env)
                else:
                    attempt = mounted
            if attempt.returncode == 0:
                if file_system == "copy":
                    say(
                        f"whole file systems are copied: there are no overlays in {folder}, or "
                        "fuse-overlayfs"
                    )
                settings = {
                    "folder": str(folder),
                    "runtimes": _runtimes(),
                    "file_system": file_system,
                }
                write_file(folder / "settings.json", json.dumps(settings))
                return settings
            reasons.append(_error(attempt))
        # A copy needs no mount, so that the reason is podman's.
        reason = reasons[-len(modes)]
        what = "a container here"
        if "crun" in reason:
            raise HostError(
                f"{self.name} cannot run {what}: {reason}",
                hint="crun fails here; as root: apt-get install runc, and podman is tried with it; "
                "Docker takes it by --runtime runc, or by default-runtime in its daemon.json",
            )
        raise HostError(
            f"{self.name} cannot run {what}: {reason}",
            hint="in a container: start it with --privileged; else use --engine docker",
        )

    def _unpack(self, root: RootFs, folder: Path, absent: Mapping[Path, LayerRef]) -> None:
        size = sum(layer.size for layer in absent.values()) / 1e6
        say(
            f"unpacking {counted(len(absent), 'layer')} ({size:.0f} MB compressed) of "
            f"{root.name}, once"
        )

        def unpack(path: Path) -> None:
            partial = path.with_suffix(".tmp")
            env = _client_environment(folder)
            remove_tree(partial)
            argv = [*_inside(folder), "sh", "-c", _DATA["unpack"], "sh", f"layers/{partial.name}"]
            with tempfile.TemporaryFile("w+", errors="replace") as log:
                streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
                process: Any = subprocess.Popen(argv, env=env, start_new_session=True, **streams)
                with tracked(process):
                    with suppress(BrokenPipeError), process.stdin:  # its message follows
                        process.stdin.writelines(root.tar(absent[path]))
                    process.wait()
                log.seek(0)
                if process.returncode != 0:
                    reason = log.readline().strip() or "tar was stopped"
                    hint = None
                    if "No space left" in reason:
                        hint = "free some space: primus clean"
                    raise HostError(
                        f"a layer of {root.name} cannot be unpacked: {reason}", hint=hint
                    )
            partial.rename(path)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                # The largest decides how long it takes.
                list(pool.map(unpack, sorted(absent, key=lambda path: -absent[path].size)))
            except BaseException:
                stop_all()
                raise

    def _own_options(self, command: Command) -> list[str]:
        # With SELinux, the files of the workspace lack the labels that a container may read.
        options = ["--security-opt=label=disable"]
        options += ["--volume=/etc/hosts:/etc/hosts:ro"] if command.network else []
        if os.geteuid() == 0:
            return [*options, *(f"--group-add={group}" for group in command.devices.groups)]
        if command.memory_bytes and not Path("/sys/fs/cgroup/cgroup.controllers").exists():
            raise HostError(
                "control groups of version 1 let only root set a limit",
                hint="run as root, or leave the limit out",
            )
        if command.devices.names:
            return [*options, "--group-add=keep-groups"]
        return options


class Docker(Engine):
    """A Docker engine: that of DOCKER_HOST, or of the default socket."""

    name = "docker"

    def require(self) -> None:
        """Raise HostError if no engine answers."""
        need_docker()

    @contextmanager
    def _container(self, root: RootFs, name: str) -> Iterator[_Client]:
        tag = f"primus-run:{root.id[:24]}"
        load_image(root, tag)
        client = [str(programs.find("docker"))]
        env = _client_environment(None)
        with finally_run([*client, "rm", "--force", name], env):
            yield client, env, [tag]

    def _own_options(self, command: Command) -> list[str]:
        if command.network:
            hosts = []
        else:
            hosts = [f"--add-host={command.hostname}:127.0.0.1"]
        return [*hosts, *(f"--group-add={group}" for group in command.devices.groups)]


def choose(name: str = "auto") -> Engine:
    """Return the engine called ``name``; ``auto`` prefers podman, which needs no daemon.

    Raises HostError, with what each engine lacks, if none can run.
    """
    problems = []
    for engine in (Podman(), Docker()):
        if name in ("auto", engine.name):
            try:
                engine.require()
            except HostError as error:
                problems.append(f"{engine.name}: {error.message} ({error.hint})")
            else:
                return engine
    raise HostError("no container engine can run here: " + "; ".join(problems))


def remove_tree(path: Path) -> None:
    """Remove a folder, including files of a regular user's subordinate ids. A missing folder is not
    an error.
    """
    shutil.rmtree(path, ignore_errors=True)
    if path.exists() and os.geteuid() != 0 and (podman := programs.find("podman")):
        captured(
            [str(podman), "unshare", "rm", "-rf", str(path)], _ENGINE, env=_client_environment(None)
        )


def _lacking() -> dict[str, str]:
    packages = {
        "podman": "podman",
        "catatonit": "catatonit",
        **({} if _runtimes() else {"runc": "runc"}),
    }
    return {
        program: package for program, package in packages.items() if programs.find(program) is None
    }


def _runtimes() -> list[str]:
    # crun alone can give a container the groups of a regular user. That of Debian 12 refuses mixed
    # control groups.
    if os.geteuid() == 0:
        names = ("runc", "crun")
    else:
        names = ("crun", "runc")
    return [str(path) for path in map(programs.find, names) if path]


def _settings(folder: Path) -> dict[str, Any]:
    settings = json_if_readable(folder / "settings.json")
    # A runtime that is installed later may work better.
    valid = settings.get("folder") == str(folder) and settings.get("runtimes") == _runtimes()
    if valid and "file_system" in settings:
        return settings
    return {}


def _podman(folder: Path) -> list[str]:
    # Conmon notes a command over its memory limit in a file of the current folder. Podman stores no
    # image, and its default storage driver does not work in all folders.
    options = [
        f"--root={folder}/storage",
        f"--runroot={_run_folder(folder)}",
        "--storage-driver=vfs",
    ]
    return ["env", f"--chdir={folder}", str(programs.find("podman")), *options]


def _inside(folder: Path) -> list[str]:
    """Return what precedes a command that is to run in ``folder``, in the namespaces of podman's
    containers.
    """
    if os.geteuid() == 0:
        return ["env", f"--chdir={folder}"]
    return [*_podman(folder), "unshare"]


def _file_systems() -> list[str]:
    fuse = programs.find("fuse-overlayfs") and Path("/dev/fuse").exists()
    return ["overlay", *(["fuse-overlayfs"] if fuse else []), "copy"]


@contextmanager
def _mounted(
    file_system: str, folder: Path, layers: Sequence[str], name: str
) -> Iterator[subprocess.CompletedProcess[str]]:
    """Create ``containers/NAME/root`` from the layers, top first, and remove it and the container
    at the end.

    Yields the result of the command that created it.
    """
    place = f"../containers/{name}"
    env = _client_environment(folder)
    options = f"lowerdir={':'.join(layers)},upperdir={place}/upper,workdir={place}/work"
    if os.geteuid() == 0:
        kernel = f"nodev,{options}"
    else:
        kernel = f"nodev,{options},userxattr"
    words = {
        "overlay": ["mount", "-t", "overlay", "-o", kernel, "overlay"],
        "fuse-overlayfs": ["fuse-overlayfs", "-o", options],
        "copy": [
            "cp",
            "-a",
            "--reflink=auto",
            "--remove-destination",
            *(f"{path}/." for path in reversed(layers)),
        ],
    }[file_system]
    remove = shlex.join([*_podman(folder), "rm", "--force", "--ignore", "--time=0", name])
    unmount = shlex.join(
        [*_inside(folder), "sh", "-c", _DATA["unmount"], "sh", f"containers/{name}"]
    )
    # It ends with this process, so that it cannot mount after the removal.
    mount = ["sh", "-c", _DATA["mount"], "sh", place, *words, f"{place}/root"]
    argv = ["setpriv", "--pdeathsig=KILL", *_inside(folder), *mount]
    with finally_run(["sh", "-c", f"{remove}; {unmount}"], env):
        yield captured(argv, _ENGINE, env=env)


def _run_folder(folder: Path) -> Path:
    """Return the folder of what podman must forget when the machine starts anew. Its path must be
    short.
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


def _client_environment(folder: Path | None) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if _CLIENT_ENVIRONMENT.fullmatch(name)}
    env["PATH"] = os.pathsep.join([env.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    if folder:
        return {**env, "CONTAINERS_CONF": str(folder / "containers.conf")}
    return env


def _options(command: Command, terminal: bool) -> list[str]:
    memory = command.memory_bytes
    return [
        *(
            "--interactive",
            "--init",
            "--cap-drop=MKNOD",
            f"--shm-size={command.shm_bytes}",
            "--entrypoint=/bin/sh",
        ),
        *(
            ["--network=host"]
            if command.network
            else ["--network=none", f"--hostname={command.hostname}"]
        ),
        *(["--tty"] if terminal else []),
        *(
            f"--volume={m.source.absolute()}:{m.target}:{'ro' if m.read_only else 'rw'}"
            for m in command.mounts
        ),
        *(f"--device={device}" for device in command.devices.names),
        *([f"--workdir={command.cwd}"] if command.cwd else []),
        *([f"--user={command.user}"] if command.user else []),
        *([f"--memory={memory}", f"--memory-swap={memory}"] if memory is not None else []),
    ]


def _variables(command: Command, terminal: bool) -> tuple[list[str], dict[str, str]]:
    if terminal:
        variables = {"TERM": os.environ.get("TERM", "xterm"), **command.env}
    else:
        variables = dict(command.env)
    values = {
        name: value for name, value in variables.items() if not _READ_BY_CLIENTS.fullmatch(name)
    }
    return [
        f"--env={name}" if name in values else f"--env={name}={value}"
        for name, value in variables.items()
    ], values


def _forward(
    numbers: SimpleQueue[int],
    process: subprocess.Popen[bytes],
    kill: list[str],
    env: dict[str, str],
) -> None:
    for number in iter(numbers.get, 0):
        if number == signal.SIGWINCH:
            process.send_signal(number)
        # A container that does not run yet gets it as soon as it does.
        elif (
            process.returncode is None
            and captured([*kill, f"--signal={number}"], _ENGINE, env=env).returncode
        ):
            time.sleep(0.05)
            numbers.put(number)


def _error(refused: subprocess.CompletedProcess[str]) -> str:
    lines = refused.stderr.splitlines()
    message = next(
        (line for line in lines if line.startswith("Error")),
        lines[-1] if lines else "it gives no reason",
    )
    return message.removeprefix("Error: ").removeprefix("Error response from daemon: ")
