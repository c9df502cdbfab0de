"""Handing an image of the store to other programs: as an OCI layout, and into a Docker engine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from primus import programs
from primus.errors import HostError
from primus.sandbox.container import RootFs
from primus.waits import answer_of

_CHUNK = 1 << 20
_PATIENCE_S = 3
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@contextmanager
def layout(root: RootFs) -> Iterator[Path]:
    """Yield a folder that contains ``root`` alone as an OCI layout. Its layers are links to the store's blobs."""
    root.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="layout-", dir=root.cache.absolute()) as scratch:
        # podman makes a name of the path that it is given, in which few characters are allowed.
        folder = Path(scratch) / "layout"
        blobs = folder / "blobs/sha256"
        blobs.mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}', encoding="ascii")
        digest = hashlib.sha256(root.manifest).hexdigest()
        entry = {"mediaType": _MANIFEST, "digest": f"sha256:{digest}", "size": len(root.manifest)}
        index = {"schemaVersion": 2, "manifests": [entry]}
        (folder / "index.json").write_text(json.dumps(index), encoding="ascii")
        (blobs / root.id).write_bytes(root.config_bytes)
        (blobs / digest).write_bytes(root.manifest)
        for layer in {layer.digest: layer for layer in root.layers}.values():
            (blobs / layer.digest.partition(":")[2]).symlink_to(root.blob(layer.digest).absolute())
        yield folder


def refusal(program: str, root: RootFs, message: str) -> HostError:
    """Return the error for ``message``, with which ``program`` refused ``root``."""
    reason = (message.strip().splitlines() or ["it gives no reason"])[-1].removeprefix("Error: ")
    full = "no space left" in reason
    if not full and re.search("blob|[Dd]igest|diff ?ID|unexpected EOF", reason):
        hint = "primus build TARGET --rehash finds and rebuilds it"
        return HostError(f"a blob of {root.name} is damaged: {reason}", hint=hint)
    hint = "free disk space (primus clean, docker system df)"
    return HostError(f"{program} refuses {root.name}: {reason}", hint=hint if full else None)


def docker(*words: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run Docker's client. Raises HostError if it is not installed."""
    program = programs.find("docker")
    if program is None:
        raise HostError("Docker's client is not installed", hint="as root: apt-get install docker.io")
    argv, nothing = [str(program), *words], subprocess.DEVNULL
    with answer_of(f"docker {words[0]}"):
        return subprocess.run(argv, capture_output=True, text=True, check=False, stdin=nothing, timeout=timeout)


def need_docker() -> None:
    """Raise HostError unless the Docker engine of DOCKER_HOST, or of the default socket, answers within 3 s."""
    try:
        answer = docker("version", "--format", "{{.Server.Version}}", timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise HostError(f"no Docker engine answers: it is silent for {_PATIENCE_S} s", hint="look at its log") from None
    if answer.returncode != 0:
        message = (answer.stderr.strip().splitlines() or ["no reason is given"])[-1][:200]
        hint = "start one (systemctl start docker) or point DOCKER_HOST at one"
        if "permission denied" in message:
            message, hint = "you may not use its socket", "as root: usermod -aG docker USER, then log in again"
        raise HostError(f"no Docker engine answers: {message}", hint=hint)


def load(root: RootFs, tag: str) -> tuple[str, int]:
    """Load ``root`` into the Docker engine as ``tag``. Returns the engine's image ID and the number of bytes sent.

    Nothing is sent if the engine has the image. Raises HostError if no engine answers, if it refuses the image, or if a
    blob is damaged.
    """
    need_docker()
    for name in (tag, root.id):
        if loaded := _loaded(root, name):
            docker("tag", loaded, tag)
            return loaded, 0
    command = [str(programs.find("docker")), "load", "--quiet"]
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log) as engine:
            try:
                with tarfile.open(fileobj=engine.stdin, mode="w|", bufsize=_CHUNK) as archive:
                    _add_image(archive, root, tag)
            except BrokenPipeError:
                pass  # its message follows
            except BaseException:
                # An archive that was cut short must not be loaded.
                engine.kill()
                raise
        log.seek(0)
        if engine.returncode:
            raise refusal("the Docker engine", root, log.read())
    if loaded := _loaded(root, tag):
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
    return str(image["Id"]) if equal else None


def _add_image(archive: tarfile.TarFile, root: RootFs, tag: str) -> None:
    """Write the image as ``docker save`` does, with plain layers: Docker engines before 23 cannot read zstd."""
    # Seam "compression": most commands that run an image send it to no Docker engine.
    import zstandard

    root.cache.mkdir(parents=True, exist_ok=True)
    config = f"{root.id}.json"
    names = [f"{layer.diff_id.partition(':')[2]}/layer.tar" for layer in root.layers]
    manifest = json.dumps([{"Config": config, "RepoTags": [tag], "Layers": names}]).encode()
    for name, data in ((config, root.config_bytes), ("manifest.json", manifest)):
        _add_file(archive, name, io.BytesIO(data))
    for name, layer in dict(zip(names, root.layers, strict=True)).items():
        blob = root.blob(layer.digest)
        try:
            with blob.open("rb") as packed, tempfile.TemporaryFile(dir=root.cache) as plain:
                zstd = layer.media_type.endswith("zstd")
                if zstd:
                    reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
                    shutil.copyfileobj(reader, plain, _CHUNK)
                # Of a blob that was cut, nothing may be unpacked: the engine then names the layer's digest.
                _add_file(archive, name, plain if zstd else packed)
        except (FileNotFoundError, zstandard.ZstdError) as error:
            raise refusal("the Docker engine", root, f"blob {blob}: {error}") from error


def _add_file(archive: tarfile.TarFile, name: str, file: IO[bytes]) -> None:
    info = tarfile.TarInfo(name)
    info.size = file.seek(0, os.SEEK_END)
    file.seek(0)
    archive.addfile(info, file)
