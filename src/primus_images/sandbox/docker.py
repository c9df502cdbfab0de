"""Docker: its client, loading an image into an engine, and running a command there."""

import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from primus_images import programs
from primus_images.errors import HostError
from primus_images.files import text_if_readable
from primus_images.programs import finally_run, tracked
from primus_images.progress import Progress
from primus_images.sandbox.container import Command, RootFs
from primus_images.sandbox.engine import Client, Engine, client_environment, group_options
from primus_images.terminal import say
from primus_images.waits import answer_of

_PATIENCE_S = 3
# The label of a container has the command that it runs for: boot id, namespace and number of the
# process, and when it started.
_LABEL = "org.primus-images.command"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Docker(Engine):
    """The Docker engine of Docker's client, by DOCKER_HOST, DOCKER_CONTEXT or its settings."""

    name = "docker"

    def require(self) -> None:
        """Raise HostError if no engine answers."""
        need_docker()

    @contextmanager
    def _container(self, root: RootFs, name: str) -> Iterator[Client]:
        sweep()
        tag = f"primus-run:{root.id[:24]}"
        load_image(root, tag)
        words = [str(programs.find("docker"))]
        client = Client(words=words, env=_environment(), container=name, image=[tag])
        task = f"docker, which removes the container {name}"
        with finally_run([*words, "rm", "--force", name], client.env, task):
            yield client

    def _own_options(self, command: Command) -> list[str]:
        options = [*group_options(command), f"--label={_LABEL}={_this_command()}"]
        if not command.network:
            options.append(f"--add-host={command.hostname}:127.0.0.1")
        return options


def _environment() -> dict[str, str]:
    """Return the environment of Docker's client."""
    env = client_environment()
    for name, value in os.environ.items():
        if name.startswith("DOCKER_"):
            env[name] = value
    return env


def sweep() -> None:
    """Remove the engine's containers that outlived their commands on this machine."""
    form = f'{{{{.Names}}}} {{{{.Label "{_LABEL}"}}}}'
    listed = docker("ps", "--all", f"--filter=label={_LABEL}", f"--format={form}")
    for line in listed.stdout.splitlines():
        name, _, command = line.partition(" ")
        if _has_ended(command):
            docker("rm", "--force", name)
            say(f"removed container {name} of a command that was killed")


def _this_command() -> str:
    return f"{_machine()}/{os.getpid()}/{_start_of(os.getpid())}"


def _machine() -> str:
    """Return what two processes that see each other's numbers have in common."""
    boot = text_if_readable(_BOOT_ID).strip()
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot}/{namespace}"


def _has_ended(command: str) -> bool:
    """Whether a command of :func:`_this_command` has ended, as far as this machine knows."""
    machine, _, process = command.rpartition("/")[0].rpartition("/")
    start = command.rpartition("/")[2]
    if machine == _machine():
        return not process.isdigit() or _start_of(int(process)) != start
    boot = machine.partition("/")[0]
    return boot != text_if_readable(_BOOT_ID).strip() and _is_local()


def _is_local() -> bool:
    """Whether the engine has a socket here. Another one may run commands of other machines."""
    endpoint = docker("context", "inspect", "--format={{.Endpoints.docker.Host}}")
    return endpoint.returncode == 0 and endpoint.stdout.startswith("unix:")


def _start_of(process: int) -> str:
    """Return when a process started, in the kernel's ticks; empty if there is none."""
    # The name of the program, in parentheses, may contain spaces.
    fields = text_if_readable(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return "".join(fields[19:20])


def docker(*words: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run Docker's client. Raises HostError if it is not installed."""
    program = programs.find("docker")
    if program is None:
        raise HostError(
            "Docker's client is not installed", hint="as root: apt-get install docker.io"
        )
    return programs.captured([str(program), *words], f"docker {words[0]}", timeout=timeout)


def need_docker() -> None:
    """Raise HostError unless a Docker engine answers within 3 s.

    It is the one that Docker's client chooses.
    """
    try:
        answer = docker("version", "--format", "{{.Server.Version}}", timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise HostError(
            f"no Docker engine answers: it is silent for {_PATIENCE_S} s", hint="look at its log"
        ) from None
    if answer.returncode != 0:
        message = _last_line(answer.stderr) or "no reason is given"
        hint = "start one (systemctl start docker), or name one: DOCKER_HOST, docker context use"
        if "permission denied" in message:
            message = "you may not use its socket"
            hint = "as root: usermod -aG docker USER, then log in again"
        raise HostError(f"no Docker engine answers: {message}", hint=hint)


def load_image(root: RootFs, tag: str, progress: Progress | None = None) -> tuple[str, int]:
    """Load ``root`` into the Docker engine as ``tag``.

    Returns the engine's image ID and the number of bytes sent. Nothing is sent if the engine has
    the image, and nothing stays if this process is interrupted or killed. Raises HostError if no
    engine answers, if it refuses the image, or if a blob is damaged.
    """
    need_docker()
    for name in (tag, root.id):
        loaded = _loaded(root, name)
        if loaded:
            docker("tag", loaded, tag)
            return loaded, 0
    sent = _send_image(root, tag, progress or Progress())
    loaded = _loaded(root, tag)
    if loaded:
        return loaded, sent
    raise HostError(f"the Docker engine accepted {root.name}, but does not list it as {tag}")


def _send_image(root: RootFs, tag: str, progress: Progress) -> int:
    command = [str(programs.find("docker")), "load", "--quiet"]
    setpriv = programs.find("setpriv")
    if setpriv:
        # The engine drops an archive whose sender has ended.
        command = [str(setpriv), "--pdeathsig=KILL", *command]
    with tempfile.TemporaryFile("w+") as log:
        # Ctrl-C of the terminal is for this process alone, which then ends the client.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        with tracked(process):
            sent = _write_archive(process, root, tag, progress)
            with answer_of("the Docker engine, which unpacks the image"):
                process.wait()
        log.seek(0)
        if process.returncode:
            reason = _last_line(log.read()) or f"exit code {process.returncode}"
            hint = None
            if "no space left" in reason:
                hint = "free disk space (primus clean, docker system df)"
            raise HostError(f"the Docker engine refuses {root.name}: {reason}", hint=hint)
    return sent


def _write_archive(
    process: "subprocess.Popen[bytes]", root: RootFs, tag: str, progress: Progress
) -> int:
    """Write the image to the client, and return the number of bytes."""
    total = sum(layer.size for layer in root.layers)
    progress.start(tag, f"loading {root.name} (compressed)", total)
    sent = 0
    with suppress(BrokenPipeError), process.stdin as pipe:  # type: ignore[union-attr]
        try:
            with tarfile.open(fileobj=pipe, mode="w|", bufsize=1 << 20) as archive:
                _add_image(archive, root, tag, progress)
            sent = archive.offset
        except BrokenPipeError:
            pass  # the client's message follows
        except BaseException:
            # An archive that was cut short must not be loaded.
            process.kill()
            raise
    return sent


def _last_line(text: str) -> str:
    return "".join(text.strip().splitlines()[-1:])[:200]


def _loaded(root: RootFs, name: str) -> str | None:
    inspected = docker("image", "inspect", name)
    if inspected.returncode != 0:
        return None
    (image,) = json.loads(inspected.stdout)
    if "Descriptor" in image:
        # Engines with containerd's image store identify images by a manifest that they write anew.
        equal = _has_contents_of(root, image)
    else:
        equal = image["Id"] == f"sha256:{root.id}"
    return str(image["Id"]) if equal else None


def _has_contents_of(root: RootFs, image: dict[str, Any]) -> bool:
    if image["RootFS"]["Layers"] != [layer.diff_id for layer in root.layers]:
        return False
    settings = root.config.get("config") or {}
    return all(image["Config"].get(key) == value for key, value in settings.items())


def _add_image(archive: tarfile.TarFile, root: RootFs, tag: str, progress: Progress) -> None:
    """Write the image as ``docker save`` does, with plain layers.

    Docker engines before 23 cannot read zstd.
    """
    root.cache.mkdir(parents=True, exist_ok=True)
    config = f"{root.id}.json"
    names = [f"{layer.diff_id.partition(':')[2]}/layer.tar" for layer in root.layers]
    manifest = json.dumps([{"Config": config, "RepoTags": [tag], "Layers": names}]).encode()
    _add_file(archive, config, io.BytesIO(root.config_bytes))
    _add_file(archive, "manifest.json", io.BytesIO(manifest))
    for name, layer in dict(zip(names, root.layers, strict=True)).items():
        with tempfile.TemporaryFile(dir=root.cache) as plain:
            plain.writelines(root.tar(layer))
            _add_file(archive, name, plain)
        progress.advance(tag, layer.size)


def _add_file(archive: tarfile.TarFile, name: str, file: IO[bytes]) -> None:
    info = tarfile.TarInfo(name)
    info.size = file.seek(0, os.SEEK_END)
    file.seek(0)
    archive.addfile(info, file)
