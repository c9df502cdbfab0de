"""Running a command in an image: podman or Docker, by their command line.

Podman keeps unpacked layers and containers in a storage of the workspace; the user's own storage is not touched.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from primus import programs
from primus.errors import HostError, InputError
from primus.files import write_file
from primus.sandbox import images
from primus.sandbox.container import Command, RootFs, Stream, check_mounts, final_argv
from primus.sandbox.processes import finally_run, received_signals, tracked
from primus.terminal import counted
from primus.waits import answer_of, lock

ENGINES = ("auto", "podman", "docker")

# Variables that the engines' clients read themselves. Their values go into the arguments, all others stay out of them.
_READ_BY_CLIENTS = re.compile(
    r"PATH|HOME|USER|TMPDIR|TERM|(XDG|DBUS|LD|_?CONTAINERS?|STORAGE|NOTIFY|LISTEN)_.*|GO[A-Z]+"
    r"|DOCKER_(HOST|CONFIG|CONTEXT|CERT_PATH|API_VERSION|TLS.*)"
)
_CLIENT_ENVIRONMENT = re.compile(r"PATH|HOME|USER|TMPDIR|TERM|XDG_RUNTIME_DIR|DBUS_SESSION_BUS_ADDRESS|DOCKER_.*")

# Of the defaults, podman's limits of processes and files are for services, and its /etc/hosts is the host's.
_CONTAINERS_CONF = """\
[containers]
base_hosts_file = "none"
cgroups = "{cgroups}"
default_ulimits = []
http_proxy = false
log_driver = "none"
pids_limit = 0
[engine]
events_logger = "none"
init_path = "{init}"
runtime = "{runtime}"
static_dir = "{folder}/storage/libpod"
tmp_dir = "{run}/libpod"
volume_path = "{folder}/storage/volumes"
"""


class Engine:
    """A program that runs containers. ``say`` is called with a line if something takes long."""

    name = ""
    _remove: tuple[str, ...] = ("rm", "--force")

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or (lambda _: None)

    def available(self) -> str | None:
        """Return None if this engine can run here, else one sentence with the problem and the remedy."""
        raise NotImplementedError

    def prepare_host(self) -> None:
        """Install what this engine needs, if it is allowed to. Raises HostError if that fails."""

    def _image(self, root: RootFs) -> tuple[list[str], dict[str, str], str]:
        """Make ``root`` known to the engine. Returns the engine's client, its environment, and the image's name."""
        raise NotImplementedError

    def _own_options(self, command: Command) -> list[str]:
        raise NotImplementedError

    def run(
        self, root: RootFs, command: Command, *, stdin: Stream = None, stdout: Stream = None, stderr: Stream = None
    ) -> int:
        """Run ``command`` in a new container and return its exit code.

        The code is 128+n for a command ended by signal n, 127 if it is not found, 126 if it cannot be executed. Signals
        are forwarded. The container is removed afterwards, even if this process is killed.

        Raises InputError for an invalid mount, user or option, and HostError if the machine cannot run it.
        """
        check_mounts(command)
        hostname = re.sub(r"[^A-Za-z0-9-]+", "-", root.name).strip("-")[:63] or "primus"
        command = replace(command, hostname=command.hostname or hostname)
        # The shell says which program is missing, with the exit code for it, whereas an init ends with 1.
        arguments = ["-c", 'exec "$@"', "primus", *final_argv(root, command)]
        own_options = self._own_options(command)
        client, env, image = self._image(root)
        inherited = stdin is None and stdout is None and os.isatty(0) and os.isatty(1)
        terminal = inherited if command.tty is None else command.tty
        variables, values = _variables(command, terminal)
        name = f"primus-{uuid.uuid4().hex[:12]}"
        words = [f"--name={name}", *_options(command, terminal), *variables, *own_options, image, *arguments]
        for stream in (stdout, stderr):
            if stream:
                stream.flush()
        with finally_run([*client, *self._remove, name], env):
            with received_signals() as signals:
                # The client ends with this process, so that it cannot create the container after its removal. Signals
                # go around it: podman 4.3's client drops one that arrives in the first moments of a container.
                argv = ["setpriv", "--pdeathsig=KILL", *client, "run", "--pull=never", "--sig-proxy=false", *words]
                streams: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
                process = subprocess.Popen(argv, env={**env, **values}, start_new_session=True, **streams)
                threading.Thread(target=_forward, args=(signals, process, [*client, "kill", name], env)).start()
                with tracked(process):
                    code = process.wait()
            if code in (125, 126, 127):
                self._raise_refusal(root, command, client, env, name, words)
        if code == 137 and (limit := command.memory_bytes):
            text = f"primus: the command was killed, probably over the memory limit of {limit >> 20} MiB\n"
            os.write(stderr.fileno() if stderr else 2, text.encode())
        return 128 - code if code < 0 else code

    def _raise_refusal(
        self, root: RootFs, command: Command, client: list[str], env: dict[str, str], name: str, words: list[str]
    ) -> None:
        # If the container started, the exit code is the command's own.
        state = _captured([*client, "container", "inspect", "--format={{.State.StartedAt}}", name], env)
        if state.returncode == 0 and not state.stdout.startswith("0001-01-01"):
            return
        # It fails in the same way again, and this time its message is ours.
        again = _captured([*client, "start", name] if state.returncode == 0 else [*client, "create", *words], env)
        message = _error(again)
        if command.user and re.search(r"no matching entries|unable to find (user|group)", message):
            raise InputError(f"the image has no user {command.user!r}", hint="name one of its users, or a uid[:gid]")
        raise HostError(f"{self.name} cannot run {root.name}: {message}")


class Podman(Engine):
    """Podman 4 or newer, as root or as a regular user."""

    name = "podman"
    _remove = ("rm", "--force", "--ignore", "--time=0")

    def available(self) -> str | None:
        """Return None if podman is installed or can be installed, else one sentence with the remedy."""
        if platform.system() != "Linux":
            return f"this is {platform.system()}, not Linux (use --engine docker)"
        if (lacking := _lacking()) and not programs.installable():
            return f"{' and '.join(lacking)} missing (as root: apt-get install {' '.join(lacking.values())})"
        if problem := programs.lacks_ids():
            return f"{problem[0]} ({problem[1]})"
        return None

    def prepare_host(self) -> None:
        """Install podman, an init for containers, and runc if there is no OCI runtime."""
        if lacking := _lacking():
            programs.install(lacking, say=self._say)

    def _image(self, root: RootFs) -> tuple[list[str], dict[str, str], str]:
        folder = root.cache.absolute() / ("root" if os.geteuid() == 0 else f"user-{os.geteuid()}")
        name = root.id
        unpacked, settings = folder / "images" / name, _settings(folder)
        if not (settings and unpacked.exists()):
            with _locked(folder):
                settings = _settings(folder) or self._probe(folder)
                if not unpacked.exists():
                    self._unpack(root, folder, settings["options"])
                    write_file(unpacked, json.dumps([layer.diff_id for layer in root.layers]))
        # Conmon notes a command over its memory limit in a file of the current folder.
        client = ["env", f"--chdir={folder}", *_podman(folder), *settings["options"]]
        return client, _client_environment(folder), name

    def _probe(self, folder: Path) -> dict[str, Any]:
        self.prepare_host()
        remove_tree(folder / "images")
        init = str(programs.find("catatonit"))
        # Only crun can do without control groups.
        modes = [(runtime, "enabled") for runtime in _runtimes()]
        modes += [(runtime, "disabled") for runtime in _runtimes() if runtime.endswith("/crun")]
        reasons = []
        for options, (runtime, cgroups) in itertools.product(_storage_options(), modes):
            remove_tree(folder / "storage")
            (folder / "probe").mkdir(exist_ok=True)
            shutil.copy(init, folder / "probe/init")
            values = {"cgroups": cgroups, "init": init, "runtime": runtime, "run": _run_folder(folder)}
            write_file(folder / "containers.conf", _CONTAINERS_CONF.format(folder=folder, **values))
            words = ["run", "--rm", "--network=none", "--rootfs", str(folder / "probe"), "/init", "-V"]
            attempt = _captured([*_podman(folder), *options, *words], _client_environment(folder))
            if attempt.returncode == 0:
                if "--storage-driver=vfs" in options:
                    self._say(f"podman copies whole file systems: there are no overlays in {folder}, or fuse-overlayfs")
                settings = {"folder": str(folder), "runtime": runtime, "options": options}
                write_file(folder / "settings.json", json.dumps(settings))
                return settings
            reasons.append(_error(attempt))
        hint = "in a container: start it with --privileged; else use --engine docker"
        raise HostError(f"podman cannot run a container here: {reasons[0]}", hint=hint)

    def _unpack(self, root: RootFs, folder: Path, options: list[str]) -> None:
        size = sum(layer.size for layer in root.layers) / 1e6
        self._say(f"unpacking {counted(len(root.layers), 'layer')} ({size:.0f} MB compressed) of {root.name}, once")
        with images.layout(root) as layout:
            argv = [*_podman(folder), *options, "pull", "--quiet", f"oci:{layout.name}"]
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            env = {**_client_environment(folder), "TMPDIR": str(layout.parent)}
            process = subprocess.Popen(argv, cwd=layout.parent, env=env, start_new_session=True, **pipes)
            with tracked(process):
                _, message = process.communicate()
        if process.returncode != 0:
            raise images.refusal("podman", root, message.decode("utf-8", "replace"))

    def _own_options(self, command: Command) -> list[str]:
        options = ["--volume=/etc/hosts:/etc/hosts:ro"] if command.network else []
        if os.geteuid() == 0:
            return [*options, *(f"--group-add={group}" for group in command.devices.groups)]
        if command.memory_bytes and not Path("/sys/fs/cgroup/cgroup.controllers").exists():
            hint = "run as root, or leave the limit out"
            raise HostError("control groups of version 1 let only root set a limit", hint=hint)
        return [*options, "--group-add=keep-groups"] if command.devices.names else options


class Docker(Engine):
    """A Docker engine: that of DOCKER_HOST, or of the default socket."""

    name = "docker"

    def available(self) -> str | None:
        """Return None if an engine answers, else one sentence with the remedy."""
        try:
            images.need_docker()
        except HostError as error:
            return f"{error.message} ({error.hint})"
        return None

    def _image(self, root: RootFs) -> tuple[list[str], dict[str, str], str]:
        tag = f"primus-run:{root.id[:24]}"
        images.load(root, tag)
        return [str(programs.find("docker"))], _client_environment(None), tag

    def _own_options(self, command: Command) -> list[str]:
        hosts = [] if command.network else [f"--add-host={command.hostname}:127.0.0.1"]
        return [*hosts, *(f"--group-add={group}" for group in command.devices.groups)]


def choose(name: str = "auto", say: Callable[[str], None] | None = None) -> Engine:
    """Return the engine called ``name``; ``auto`` prefers podman, which needs no daemon.

    ``say`` is called with a line before an engine does something that takes long. Raises InputError for an unknown
    name, and HostError, with what each engine lacks, if none can run.
    """
    if name not in ENGINES:
        raise InputError(f"there is no engine {name!r}", hint=f"one of {', '.join(ENGINES)}")
    problems = []
    for engine in (Podman(say), Docker(say)):
        if name in ("auto", engine.name):
            problem = engine.available()
            if problem is None:
                return engine
            problems.append(f"{engine.name}: {problem}")
    raise HostError("no container engine can run here: " + "; ".join(problems))


def remove_tree(path: Path) -> None:
    """Remove a folder, including files of a regular user's subordinate ids. A missing folder is not an error."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists() and os.geteuid() != 0 and (podman := programs.find("podman")):
        _captured([str(podman), "unshare", "rm", "-rf", str(path)], _client_environment(None))


def _lacking() -> dict[str, str]:
    packages = {"podman": "podman", "catatonit": "catatonit", **({} if _runtimes() else {"runc": "runc"})}
    return {program: package for program, package in packages.items() if programs.find(program) is None}


def _runtimes() -> list[str]:
    # crun alone can give a container the groups of a regular user. That of Debian 12 refuses mixed control groups.
    names = ("runc", "crun") if os.geteuid() == 0 else ("crun", "runc")
    return [str(path) for path in map(programs.find, names) if path]


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if settings["folder"] == str(folder) and Path(settings["runtime"]).exists() else {}


def _podman(folder: Path) -> list[str]:
    return [str(programs.find("podman")), f"--root={folder}/storage", f"--runroot={_run_folder(folder)}"]


def _storage_options() -> Iterator[list[str]]:
    overlay = ["--storage-driver=overlay", "--storage-opt=overlay.skip_mount_home=true"]
    yield overlay
    if (program := programs.find("fuse-overlayfs")) and Path("/dev/fuse").exists():
        yield [*overlay, f"--storage-opt=overlay.mount_program={program}"]
    yield ["--storage-driver=vfs"]


def _run_folder(folder: Path) -> Path:
    """Return the folder of what podman must forget when the machine starts anew. Its path must be short."""
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    if os.geteuid() == 0:
        return Path("/run/primus") / name
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"primus-{os.geteuid()}-{name}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        hint = "the folder must be yours and on a writable file system"
        raise HostError(f"podman cannot keep its files in {folder}: {error.strerror}", hint=hint) from error
    with file:
        lock(file.fileno(), f"another command that prepares {folder}", folder / "lock")
        yield


def _client_environment(folder: Path | None) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if _CLIENT_ENVIRONMENT.fullmatch(name)}
    env["PATH"] = os.pathsep.join([env.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return {**env, "CONTAINERS_CONF": str(folder / "containers.conf")} if folder else env


def _options(command: Command, terminal: bool) -> list[str]:
    memory = command.memory_bytes
    return [
        *("--interactive", "--init", "--cap-drop=MKNOD", f"--shm-size={command.shm_bytes}", "--entrypoint=/bin/sh"),
        *(["--network=host"] if command.network else ["--network=none", f"--hostname={command.hostname}"]),
        *(["--tty"] if terminal else []),
        *(f"--volume={m.source.absolute()}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in command.mounts),
        *(f"--device={device}" for device in command.devices.names),
        *([f"--workdir={command.cwd}"] if command.cwd else []),
        *([f"--user={command.user}"] if command.user else []),
        *([f"--memory={memory}", f"--memory-swap={memory}"] if memory is not None else []),
    ]


def _variables(command: Command, terminal: bool) -> tuple[list[str], dict[str, str]]:
    variables = {"TERM": os.environ.get("TERM", "xterm"), **command.env} if terminal else dict(command.env)
    values = {name: value for name, value in variables.items() if not _READ_BY_CLIENTS.fullmatch(name)}
    return [f"--env={name}" if name in values else f"--env={name}={value}" for name, value in variables.items()], values


def _forward(numbers: SimpleQueue[int], process: subprocess.Popen[bytes], kill: list[str], env: dict[str, str]) -> None:
    for number in iter(numbers.get, 0):
        if number == signal.SIGWINCH:
            process.send_signal(number)
        # A container that does not run yet gets it as soon as it does.
        elif process.returncode is None and _captured([*kill, f"--signal={number}"], env).returncode != 0:
            time.sleep(0.05)
            numbers.put(number)


def _error(refused: subprocess.CompletedProcess[str]) -> str:
    message = next((line for line in refused.stderr.splitlines() if line.startswith("Error")), "it gives no reason")
    return message.removeprefix("Error: ").removeprefix("Error response from daemon: ")


def _captured(words: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    with answer_of("the container engine"):
        return subprocess.run(
            words, env=env, capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL
        )
