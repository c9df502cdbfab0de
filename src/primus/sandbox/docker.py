"""The engine for machines with a Docker daemon where plain namespaces do not work."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from primus.errors import HostError
from primus.sandbox import relay
from primus.sandbox.container import (
    Command,
    Devices,
    Mount,
    RootFs,
    Stream,
    check_mounts,
    final_argv,
    host_name,
    image_env,
    merged,
)
from primus.sandbox.inside import FORWARDED
from primus.sandbox.load import connect, load

if TYPE_CHECKING:
    import docker

_LABEL = "io.primus.run"
_OWNER = "io.primus.owner"
_CHUNK = 65536


class DockerEngine:
    """Runs commands through the Docker SDK. ``say`` is called with a line if something takes long."""

    name = "docker"

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or (lambda _: None)

    def available(self) -> str | None:
        """Return None if an engine answers within 2 s, else one sentence with the remedy."""
        try:
            connect().close()
        except HostError as error:
            return f"{error.message} ({error.hint})"
        return None

    def prepare_host(self) -> None:
        """Do nothing: installing a Docker engine is left to the user."""

    def run(
        self,
        root: RootFs,
        command: Command,
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> int:
        """Run ``command``; see :class:`primus.sandbox.container.Engine`."""
        import docker
        import requests

        client = connect()
        try:
            _sweep(client)
            image = load(root, None, client=client)
            terminal = relay.wants_terminal(command, stdin, stdout)
            options = _options(root, command, image, terminal)
            _add_devices(options["host"], command.devices, client)
            return _run(client, options, _Streams(stdin, stdout, stderr, terminal))
        except docker.errors.APIError as error:
            raise HostError(f"the Docker engine refuses to run {root.name}: {error.explanation or error}") from error
        except requests.RequestException as error:
            raise HostError(f"the Docker engine stopped answering: {error}", hint="look at its log") from error
        finally:
            client.close()


def _owner() -> str:
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        started = file.read().rpartition(")")[2].split()[19]
    return f"{_machine()} {os.getpid()} {started}"


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _alive(owner: str) -> bool:
    machine, _, rest = owner.partition(" ")
    pid, _, started = rest.partition(" ")
    if machine != _machine() or not pid.isdigit():
        return True
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[19] == started
    except OSError:
        return False


def _sweep(client: docker.DockerClient) -> None:
    """Remove containers of runs on this machine whose runner was killed."""
    import docker

    for entry in client.api.containers(all=True, filters={"label": _LABEL}):
        if not _alive(entry.get("Labels", {}).get(_OWNER, "")):
            with contextlib.suppress(docker.errors.APIError):
                client.api.remove_container(entry["Id"], force=True)


def _options(root: RootFs, command: Command, image: str, terminal: bool) -> dict[str, Any]:
    check_mounts(command)
    settings = root.config.get("config") or {}
    host: dict[str, Any] = {
        "binds": [_bind(mount) for mount in command.mounts],
        "network_mode": "host" if command.network else "none",
        "shm_size": command.shm_bytes,
        "read_only": command.read_only_root,
        # As in the embedded engine.
        "cap_drop": ["MKNOD"],
    }
    if command.limits.memory_bytes is not None:
        host["mem_limit"] = command.limits.memory_bytes
        host["memswap_limit"] = command.limits.memory_bytes
    if command.limits.cpus is not None:
        host["nano_cpus"] = round(command.limits.cpus * 1e9)
    options: dict[str, Any] = {
        "image": image,
        # Pass the whole argument list as the entrypoint, so that the engine cannot add to it.
        "entrypoint": final_argv(root, command),
        "command": [],
        "environment": image_env(root, command),
        "working_dir": command.cwd or settings.get("WorkingDir") or "/",
        "user": command.user or settings.get("User") or "",
        "tty": terminal,
        "stdin_open": True,
        "labels": {_LABEL: str(uuid.uuid4()), _OWNER: _owner()},
        "host": host,
    }
    if not command.network:
        options["hostname"] = host_name(root, command)
        host["extra_hosts"] = {options["hostname"]: "127.0.0.1"}
    return options


def _add_devices(host: dict[str, Any], devices: tuple[Devices, ...], client: docker.DockerClient) -> None:
    """Add devices to the host options. Engines from version 25 on read CDI specifications themselves."""
    from docker.types import DeviceRequest

    names = [part.cdi for part in devices if part.cdi]
    if names and client.info().get("CDISpecDirs"):
        host["device_requests"] = [DeviceRequest(driver="cdi", device_ids=names)]
        devices = tuple(part for part in devices if not part.cdi)
    ours = merged(devices)
    if ours.hooks:
        raise HostError(
            f"{', '.join(names)} needs hooks, which this Docker engine cannot run: it reads no CDI specifications",
            hint="use --engine embedded, or Docker 28.2 or newer, or set features.cdi in /etc/docker/daemon.json",
        )
    host["binds"] += [_bind(mount) for mount in ours.mounts]
    host["devices"] = [f"{node.source}:{node.target}:{node.permissions}" for node in ours.nodes]
    host["group_add"] = [str(group) for group in ours.groups]


def _bind(mount: Mount) -> str:
    return f"{mount.source.absolute()}:{mount.target}:{'ro' if mount.read_only else 'rw'}"


def _run(client: docker.DockerClient, options: dict[str, Any], streams: _Streams) -> int:
    host = options.pop("host")
    try:
        return _once(client, options, {**host, "init": True}, streams)
    except _NoInit:
        # Without an init, the command is process 1, which ignores SIGTERM unless it handles it.
        return _once(client, options, host, streams)


class _NoInit(Exception):
    """The engine was installed without docker-init."""


def _once(client: docker.DockerClient, options: dict[str, Any], host: dict[str, Any], streams: _Streams) -> int:
    import docker

    api = client.api
    config = api.create_host_config(**host)
    if streams.terminal:
        # Engines from 23 on accept the size before the start. Older ones get it right after.
        config["ConsoleSize"] = list(relay.window_size(streams.stdin))
    container = api.create_container(**options, host_config=config)["Id"]
    try:
        with _attached(api, container) as wire:
            try:
                api.start(container)
            except docker.errors.APIError as error:
                return _not_started(str(error.explanation or error), options["entrypoint"][0], streams)
            try:
                with _signal_pipe() as wake:
                    _Wire(api, container, wire, streams, wake).carry()
            except BrokenPipeError:
                # Nobody reads the output (`| head`). The command may be endless, so it ends as by SIGPIPE.
                return 128 + signal.SIGPIPE
        code = int(api.wait(container)["StatusCode"])
        state = api.inspect_container(container)["State"]
        if state.get("OOMKilled"):
            amount = host.get("mem_limit", 0) / (1 << 20)
            streams.print_error(f"primus: the kernel killed a process: over the memory limit of {amount:.0f} MiB\n")
        return code
    finally:
        with contextlib.suppress(docker.errors.APIError):
            api.remove_container(container, force=True, v=True)


@contextlib.contextmanager
def _attached(api: docker.APIClient, container: str) -> Iterator[socket.socket]:
    wrapper = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    wire = getattr(wrapper, "_sock", wrapper)
    try:
        yield wire
    finally:
        # Three objects share the descriptor, which is closed with the last of them.
        for part in (getattr(wrapper, "_response", None), wrapper, wire):
            if part is not None:
                part.close()


def _not_started(reason: str, name: str, streams: _Streams) -> int:
    if "docker-init" in reason:
        raise _NoInit
    if "executable file not found" in reason or "no such file" in reason:
        streams.print_error(f"primus: {name}: not found in the image\n")
        return 127
    if "permission denied" in reason or "exec format" in reason:
        streams.print_error(f"primus: {name}: it cannot be executed\n")
        return 126
    raise HostError(f"the Docker engine cannot start the container: {reason}")


@contextlib.contextmanager
def _signal_pipe() -> Iterator[int | None]:
    """Yield a descriptor that delivers a byte per signal; None outside the main thread, as others get none."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    former = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in FORWARDED}
    try:
        yield read
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former)
        os.close(read)
        os.close(write)


class _Streams:
    def __init__(self, stdin: Stream, stdout: Stream, stderr: Stream, terminal: bool) -> None:
        for stream in (stdout, stderr):
            if stream:
                stream.flush()
        self.stdin = stdin.fileno() if stdin else 0
        self.stdout = stdout.fileno() if stdout else 1
        self.stderr = stderr.fileno() if stderr else 2
        self.terminal = terminal

    def print_error(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self.stderr, text.encode())


class _Wire:
    """Copies bytes between our descriptors and an attached container until it ends."""

    def __init__(
        self, api: docker.APIClient, container: str, wire: socket.socket, streams: _Streams, wake: int | None
    ) -> None:
        self._api = api
        self._container = container
        self._wire = wire
        self._streams = streams
        self._wake = wake
        self._stdin_open = True
        self._to_container = b""
        self._from_container = b""

    def carry(self) -> None:
        saved = relay.raw_mode(self._streams.stdin) if self._streams.terminal else None
        self._wire.setblocking(False)
        try:
            if self._streams.terminal:
                self._resize()
            while self._step():
                pass
        finally:
            relay.restore(self._streams.stdin, saved)

    def _step(self) -> bool:
        reads: list[Any] = [self._wire]
        if self._wake is not None:
            reads.append(self._wake)
        if self._stdin_open and not self._to_container:
            reads.append(self._streams.stdin)
        ready, writable, _ = select.select(reads, [self._wire] if self._to_container else [], [])
        if self._wake in ready and self._wake is not None:
            self._signals(os.read(self._wake, 512))
        if self._streams.stdin in ready:
            self._take_stdin()
        if writable:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                self._to_container = self._to_container[self._wire.send(self._to_container) :]
        if self._wire in ready:
            try:
                data = self._wire.recv(_CHUNK)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not data:
                return False
            self._deliver(data)
        return True

    def _take_stdin(self) -> None:
        try:
            self._to_container = os.read(self._streams.stdin, _CHUNK)
        except OSError:
            self._to_container = b""
        if not self._to_container:
            self._stdin_open = False
            with contextlib.suppress(OSError):
                self._wire.shutdown(socket.SHUT_WR)

    def _signals(self, numbers: bytes) -> None:
        import docker

        for number in numbers:
            if number == signal.SIGWINCH:
                if self._streams.terminal:
                    self._resize()
                continue
            # It may have ended in the meantime.
            with contextlib.suppress(docker.errors.APIError):
                self._api.kill(self._container, number)

    def _resize(self) -> None:
        import docker

        rows, columns = relay.window_size(self._streams.stdin)
        with contextlib.suppress(docker.errors.APIError):
            self._api.resize(self._container, height=rows, width=columns)

    def _deliver(self, data: bytes) -> None:
        if self._streams.terminal:
            _write_all(self._streams.stdout, data)
            return
        # Without a terminal, the engine sends frames: stream number, three zeros, length, bytes.
        self._from_container += data
        while len(self._from_container) >= 8:
            size = int.from_bytes(self._from_container[4:8], "big")
            if len(self._from_container) < 8 + size:
                return
            number = self._streams.stderr if self._from_container[0] == 2 else self._streams.stdout
            _write_all(number, self._from_container[8 : 8 + size])
            self._from_container = self._from_container[8 + size :]


def _write_all(number: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]
