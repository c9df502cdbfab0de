"""Docker's client, and loading an image into a Docker engine."""

import io
import json
import os
import subprocess
import tarfile
import tempfile
from typing import IO

from primus_images import programs
from primus_images.errors import HostError
from primus_images.sandbox.container import RootFs

_PATIENCE_S = 3


def docker(*words: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run Docker's client. Raises HostError if it is not installed."""
    program = programs.find("docker")
    if program is None:
        raise HostError(
            "Docker's client is not installed", hint="as root: apt-get install docker.io"
        )
    return programs.captured([str(program), *words], f"docker {words[0]}", timeout=timeout)


def need_docker() -> None:
    """Raise HostError unless the Docker engine of DOCKER_HOST, or of the default socket, answers
    within 3 s.
    """
    try:
        answer = docker("version", "--format", "{{.Server.Version}}", timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise HostError(
            f"no Docker engine answers: it is silent for {_PATIENCE_S} s", hint="look at its log"
        ) from None
    if answer.returncode != 0:
        message = (answer.stderr.strip().splitlines() or ["no reason is given"])[-1][:200]
        hint = "start one (systemctl start docker) or point DOCKER_HOST at one"
        if "permission denied" in message:
            message = "you may not use its socket"
            hint = "as root: usermod -aG docker USER, then log in again"
        raise HostError(f"no Docker engine answers: {message}", hint=hint)


def load_image(root: RootFs, tag: str) -> tuple[str, int]:
    """Load ``root`` into the Docker engine as ``tag``. Returns the engine's image ID and the number
    of bytes sent.

    Nothing is sent if the engine has the image. Raises HostError if no engine answers, if it
    refuses the image, or if a blob is damaged.
    """
    need_docker()
    for name in (tag, root.id):
        loaded = _loaded(root, name)
        if loaded:
            docker("tag", loaded, tag)
            return loaded, 0
    command = [str(programs.find("docker")), "load", "--quiet"]
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log
        ) as engine:
            try:
                with tarfile.open(fileobj=engine.stdin, mode="w|", bufsize=1 << 20) as archive:
                    _add_image(archive, root, tag)
            except BrokenPipeError:
                pass  # its message follows
            except BaseException:
                # An archive that was cut short must not be loaded.
                engine.kill()
                raise
        log.seek(0)
        if engine.returncode:
            reason = (log.read().strip().splitlines() or ["it gives no reason"])[-1]
            hint = None
            if "no space left" in reason:
                hint = "free disk space (primus clean, docker system df)"
            raise HostError(f"the Docker engine refuses {root.name}: {reason}", hint=hint)
    loaded = _loaded(root, tag)
    if loaded:
        return loaded, archive.offset
    raise HostError(f"the Docker engine accepted {root.name}, but does not list it as {tag}")


def _loaded(root: RootFs, name: str) -> str | None:
    inspected = docker("image", "inspect", name)
    if inspected.returncode != 0:
        return None
    (image,) = json.loads(inspected.stdout)
    equal = image["Id"] == f"sha256:{root.id}"
    if "Descriptor" in image:
        # Engines with containerd's image store identify images by a manifest that they write anew.
        settings = root.config.get("config") or {}
        equal = image["RootFS"]["Layers"] == [layer.diff_id for layer in root.layers] and all(
            image["Config"].get(key) == value for key, value in settings.items()
        )
    if equal:
        return str(image["Id"])
    return None


def _add_image(archive: tarfile.TarFile, root: RootFs, tag: str) -> None:
    """Write the image as ``docker save`` does, with plain layers: Docker engines before 23 cannot
    read zstd.
    """
    root.cache.mkdir(parents=True, exist_ok=True)
    config = f"{root.id}.json"
    names = [f"{layer.diff_id.partition(':')[2]}/layer.tar" for layer in root.layers]
    manifest = json.dumps([{"Config": config, "RepoTags": [tag], "Layers": names}]).encode()
    for name, data in ((config, root.config_bytes), ("manifest.json", manifest)):
        _add_file(archive, name, io.BytesIO(data))
    for name, layer in dict(zip(names, root.layers, strict=True)).items():
        with tempfile.TemporaryFile(dir=root.cache) as plain:
            plain.writelines(root.tar(layer))
            _add_file(archive, name, plain)


def _add_file(archive: tarfile.TarFile, name: str, file: IO[bytes]) -> None:
    info = tarfile.TarInfo(name)
    info.size = file.seek(0, os.SEEK_END)
    file.seek(0)
    archive.addfile(info, file)
