"""Running a command in an image by the command line of an engine: what podman and Docker share."""

import csv
import io
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from primus_images.errors import HostError, InputError
from primus_images.programs import captured, received_signals, tracked
from primus_images.sandbox.container import (
    Command,
    Mount,
    RootFs,
    Stream,
    check_mounts,
    with_settings,
)

ENGINE = "the container engine"
CRUN_HINT = (
    "crun fails here; as root: apt-get install runc, and podman is tried with it; Docker takes it "
    "by --runtime runc, or by default-runtime in its daemon.json"
)
# The engines' clients read some variables themselves: the values of these go into the arguments of
# a container, all others stay out of them.
_READ_BY_CLIENTS = re.compile(
    "PATH|HOME|USER|TMPDIR|TERM|(XDG|DBUS|LD|_?CONTAINERS?|STORAGE|NOTIFY|LISTEN)_.*|GO[A-Z]+"
    "|DOCKER_(HOST|CONFIG|CONTEXT|CERT_PATH|API_VERSION|TLS.*)"
)
_CLIENT_ENVIRONMENT = [
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "TERM",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
]
# What a container ends with that did not start: refused by the engine, not executable, not found.
# Podman ends with 1 if it cannot read its configuration. Both engines end with 2 if they get too
# little memory.
_NOT_STARTED = (1, 2, 125, 126, 127)
_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, kw_only=True)
class Client:
    """An engine's client, to be called about one container.

    ``words`` are the client with its first arguments, ``image`` the arguments that name a root file
    system.
    """

    words: Sequence[str]
    env: Mapping[str, str]
    container: str
    image: Sequence[str]

    def answer(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call the client, and return what it prints."""
        return captured([*self.words, *words], ENGINE, env=self.env)


class Engine:
    """A program that runs containers."""

    name = ""

    def require(self) -> None:
        """Raise HostError, with the remedy, if this engine cannot run here."""
        raise NotImplementedError

    def prepare_host(self, cache: Path) -> None:
        """Install what this engine needs, if it is allowed to, and try it.

        ``cache`` is the folder of unpacked layers. Raises HostError if that fails.
        """

    def verify(self, root: RootFs) -> None:
        """Compare what a container of ``root`` would read with the bytes of the image.

        An engine that keeps a copy of its own compares it when it is loaded.
        """

    def _container(self, root: RootFs, name: str) -> AbstractContextManager[Client]:
        """Give the engine what the container ``name`` of ``root`` needs.

        Both are removed when the block ends.
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
        command = with_settings(root, command)
        if command.hostname is None:
            hostname = re.sub(r"[^A-Za-z0-9-]+", "-", root.name).strip("-")[:63]
            command = replace(command, hostname=hostname or "primus")
        terminal = stdin is None and stdout is None and os.isatty(0) and os.isatty(1)
        variables, values = variable_options(command, terminal)
        options = [*general_options(command, terminal), *variables, *self._own_options(command)]
        name = f"primus-{uuid.uuid4().hex[:12]}"
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        for stream in (stdout, stderr):
            if stream:
                stream.flush()
        with self._container(root, name) as client:
            # The shell says which program is missing, with the exit code for it, whereas an init
            # ends with 1.
            arguments = ["-c", 'exec "$@"', "primus", *command.argv]
            words = [f"--name={name}", *options, *client.image, *arguments]
            code = _exit_code(client, words, values, streams)
            if code in _NOT_STARTED:
                self._check_result(code, root, command, client, words)
        if code == _KILLED and command.memory_bytes:
            limit = f"{command.memory_bytes >> 20} MiB"
            text = f"primus: the command was killed, probably over the memory limit of {limit}\n"
            os.write(stderr.fileno() if stderr else 2, text.encode())
        if code < 0:
            return 128 - code
        return code

    def _check_result(
        self, code: int, root: RootFs, command: Command, client: Client, words: Sequence[str]
    ) -> None:
        """Raise HostError or InputError unless the exit code is the command's own."""
        state = client.answer(
            "container",
            "inspect",
            "--format={{.State.ExitCode}} {{.State.StartedAt}}",
            client.container,
        )
        ended, _, started = state.stdout.partition(" ")
        # It fails in the same way again, and this time its message is ours.
        again = ["create", "--pull=never", *words]
        if state.returncode == 0:
            if not started.startswith("0001-01-01"):
                if ended == str(code):
                    return
                raise HostError(
                    f"{self.name} lost the result of the command in {root.name}",
                    hint="run it again; what the engine says is above",
                )
            again = ["start", client.container]
        message = error_of(client.answer(*again))
        if command.user and re.search(r"no matching entries|unable to find (user|group)", message):
            raise InputError(
                f"the image has no user {command.user!r}",
                hint="name one of its users, or a uid[:gid]",
            )
        hint = CRUN_HINT if "crun" in message else None
        raise HostError(f"{self.name} cannot run {root.name}: {message}", hint=hint)


def _exit_code(
    client: Client, words: Sequence[str], values: Mapping[str, str], streams: Mapping[str, Any]
) -> int:
    """Run the container, and forward to it the signals that this process gets."""
    # The client ends with this process, so that it cannot create the container after its removal.
    # Signals go around it: podman 4.3's client drops one that arrives in the first moments of a
    # container.
    argv = ["setpriv", "--pdeathsig=KILL", *client.words, "run", "--pull=never"]
    argv += ["--sig-proxy=false", *words]
    with received_signals() as signals:
        process = subprocess.Popen(
            argv, env={**client.env, **values}, start_new_session=True, **streams
        )
        threading.Thread(target=_forward, args=(signals, process, client)).start()
        with tracked(process):
            return process.wait()


def _forward(signals: SimpleQueue[int], process: subprocess.Popen[bytes], client: Client) -> None:
    for number in iter(signals.get, 0):
        if number == signal.SIGWINCH:
            process.send_signal(number)
        elif process.returncode is None:
            sent = client.answer("kill", client.container, f"--signal={number}")
            # A container that does not run yet gets it as soon as it does.
            if sent.returncode != 0:
                time.sleep(0.05)
                signals.put(number)


def general_options(command: Command, terminal: bool) -> list[str]:
    """Return the options of a new container that podman and Docker have in common."""
    options = ["--interactive", "--init", "--cap-drop=MKNOD", f"--shm-size={command.shm_bytes}"]
    options.append("--entrypoint=/bin/sh")
    if command.network:
        options.append("--network=host")
    else:
        options += ["--network=none", f"--hostname={command.hostname}"]
    if terminal:
        options.append("--tty")
    options += map(_mount_option, command.mounts)
    options += [f"--device={device}" for device in command.devices.names]
    if command.cwd:
        options.append(f"--workdir={command.cwd}")
    if command.user:
        options.append(f"--user={command.user}")
    if command.memory_bytes is not None:
        options.append(f"--memory={command.memory_bytes}")
        options.append(f"--memory-swap={command.memory_bytes}")
    return options


def _mount_option(mount: Mount) -> str:
    source = str(mount.source.absolute())
    if ":" not in source:
        mode = "ro" if mount.read_only else "rw"
        return f"--volume={source}:{mount.target}:{mode}"
    # The other option of the engines, a row of CSV, does not separate the paths by colons.
    row = ["type=bind", f"source={source}", f"target={mount.target}"]
    if mount.read_only:
        row.append("readonly")
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(row)
    return f"--mount={text.getvalue()}"


def group_options(command: Command) -> list[str]:
    """Return the options that give a container the groups of its devices."""
    return [f"--group-add={group}" for group in command.devices.groups]


def variable_options(command: Command, terminal: bool) -> tuple[list[str], dict[str, str]]:
    """Return the options for the variables of a container, and the values that stay out of them."""
    variables = dict(command.env)
    if terminal:
        variables.setdefault("TERM", os.environ.get("TERM", "xterm"))
    options = []
    values = {}
    for name, value in variables.items():
        if _READ_BY_CLIENTS.fullmatch(name):
            options.append(f"--env={name}={value}")
        else:
            options.append(f"--env={name}")
            values[name] = value
    return options, values


def client_environment() -> dict[str, str]:
    """Return the environment of an engine's client: nothing that is meant for a container."""
    env = {name: os.environ[name] for name in _CLIENT_ENVIRONMENT if name in os.environ}
    env["PATH"] = f"{env.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    return env


def error_of(refused: subprocess.CompletedProcess[str]) -> str:
    """Return the message of a client that failed."""
    lines = refused.stderr.splitlines()
    message = lines[-1] if lines else "it gives no reason"
    for line in lines:
        if line.startswith(("Error", "fatal error: ")):
            message = line
            break
    return message.removeprefix("Error: ").removeprefix("Error response from daemon: ")
