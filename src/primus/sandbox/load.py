"""Loading an image into a Docker engine: one streamed archive, bounded memory, no temporary files."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.errors import HostError
from primus.sandbox.blobs import BlobReader
from primus.sandbox.container import LayerRef, RootFs

if TYPE_CHECKING:
    import docker

_CHUNK = 1 << 20
_BLOCK = 512
_PATIENCE_S = 2


def connect(timeout_s: int = 600) -> docker.DockerClient:
    """Return a client for the engine that DOCKER_HOST or the default socket names, after it answered within 2 s.

    Raises HostError if there is none.
    """
    try:
        import docker
        import requests
    except ImportError as error:
        raise HostError(
            f"the Python package {error.name!r} is not installed", hint="pip install 'primus-images[images]'"
        ) from error
    try:
        _ping()
        client = docker.from_env(timeout=_PATIENCE_S)
        client.ping()
        # Loading can keep the engine busy for minutes.
        client.api.timeout = timeout_s
        return client
    except (docker.errors.DockerException, requests.RequestException, OSError, ValueError) as error:
        raise HostError(f"no Docker engine answers: {_reason(error)}", hint=_advice(error)) from error


def _ping() -> None:
    """Raise OSError unless the engine answers within two seconds (for local sockets only)."""
    # The SDK would leak a socket for each engine that does not answer.
    kind, _, path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").partition("://")
    if kind != "unix":
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PATIENCE_S)
        probe.connect(path)
        probe.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
        if not probe.recv(16).startswith(b"HTTP/"):
            raise OSError("it is no Docker engine")


def _reason(error: BaseException) -> str:
    text = str(error)
    if "Permission denied" in text or "PermissionError" in text:
        return "you may not use its socket"
    if "No such file" in text or "FileNotFoundError" in text:
        return "its socket does not exist"
    if "timed out" in text.lower():
        return "it is silent for 2 s"
    if "refused" in text:
        return "nothing listens on its socket"
    return text.splitlines()[0][:160] if text else type(error).__name__


def _advice(error: BaseException) -> str:
    if "ermission" in str(error):
        return "as root: usermod -aG docker USER, then log in again"
    return "start one (systemctl start docker) or point DOCKER_HOST at one"


def image_id(root: RootFs) -> str:
    """Return the image's id in a Docker engine: the digest of its config."""
    return "sha256:" + hashlib.sha256(root.config_bytes).hexdigest()


def load(
    root: RootFs,
    tag: str | None,
    *,
    client: docker.DockerClient | None = None,
    sent: Callable[[int], None] | None = None,
) -> str:
    """Load ``root`` into the engine as ``tag`` (or without a name) and return the image id.

    Nothing is sent if the engine has the image. ``sent`` is called with the number of bytes of each piece. Raises
    HostError if no engine answers, if it refuses the image, or if a blob is damaged.
    """
    import docker
    import requests

    engine = client or connect()
    wanted = image_id(root)
    try:
        loaded = _present(engine, wanted)
        if loaded is None:
            stream = engine.api.load_image(  # type: ignore[no-untyped-call]
                _counted(archive_chunks(root, tag), sent)
            )
            loaded = _loaded(engine, stream, wanted, root)
        if tag and tag not in engine.images.get(loaded).tags:
            name, _, version = _split(tag)
            engine.api.tag(loaded, name, version)
    except requests.exceptions.ConnectionError as error:
        raise HostError(
            f"the Docker engine closed the connection while loading {root.name}: {_reason(error)}",
            hint="look at its log and at the free space of its disk",
        ) from error
    except docker.errors.APIError as error:
        raise HostError(
            f"the Docker engine refuses {root.name}: {error.explanation or error}",
            hint="look at the free space of its disk (docker system df)",
        ) from error
    finally:
        if client is None:
            engine.close()
    return loaded


def _split(tag: str) -> tuple[str, str, str]:
    name, colon, version = tag.rpartition(":")
    return (name, colon, version) if colon and "/" not in version else (tag, "", "latest")


def _present(engine: docker.DockerClient, wanted: str) -> str | None:
    import docker

    try:
        return str(engine.images.get(wanted).id)
    except docker.errors.ImageNotFound:
        return None


def _loaded(engine: docker.DockerClient, stream: Any, wanted: str, root: RootFs) -> str:
    named: list[str] = []
    for event in stream:
        if "error" in event:
            raise HostError(
                f"the Docker engine refuses {root.name}: {event['error'].strip()}",
                hint="look at the free space of its disk (docker system df)",
            )
        text = str(event.get("stream", "")).strip()
        if text.startswith("Loaded image"):
            named.append(text.partition(": ")[2])
    found = _present(engine, wanted)
    if found is not None:
        return found
    # Engines with containerd's image store identify images by their manifest, which they write anew.
    for name in named:
        image = engine.images.get(name)
        if image.attrs.get("RootFS", {}).get("Layers") == [layer.diff_id for layer in root.layers]:
            return str(image.id)
    raise HostError(
        f"the Docker engine accepted {root.name}, but does not list image {wanted}",
        hint="`docker images` lists its images",
    )


def _counted(chunks: Iterator[bytes], sent: Callable[[int], None] | None) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        if sent:
            sent(len(chunk))


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    return info.tobuf(tarfile.USTAR_FORMAT if size < 1 << 33 else tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return b"\0" * (-size % _BLOCK)


def archive_chunks(root: RootFs, tag: str | None) -> Iterator[bytes]:
    """Yield the image in the pieces of a ``docker save`` archive.

    zstd layers are sent as plain tars, because engines before 23 cannot read zstd. Each is read twice, first for
    its size, which the archive needs in advance. Raises HostError for a damaged blob.
    """
    config_name = f"{image_id(root).partition(':')[2]}.json"
    names = [f"{layer.diff_id.partition(':')[2]}/layer.tar" for layer in root.layers]
    entry = {"Config": config_name, "RepoTags": [tag] if tag else None, "Layers": names}
    for name, data in (
        (config_name, root.config_bytes),
        ("manifest.json", json.dumps([entry]).encode()),
    ):
        yield _header(name, len(data)) + data + _padding(len(data))
    written = set()
    for name, layer in zip(names, root.layers, strict=True):
        if name in written:
            continue  # two equal layers are one file
        written.add(name)
        yield from _layer(name, layer, root.blob(layer.digest))
    yield b"\0" * (2 * _BLOCK)


def _layer(name: str, layer: LayerRef, path: Path) -> Iterator[bytes]:
    if not layer.media_type.endswith("zstd"):
        size = path.stat().st_size
        yield _header(name, size)
        with path.open("rb") as file:
            yield from iter(lambda: file.read(_CHUNK), b"")
    else:
        size = sum(len(chunk) for chunk in _plain(layer, path))
        yield _header(name, size)
        yield from _plain(layer, path)
    yield _padding(size)


def _plain(layer: LayerRef, path: Path) -> Iterator[bytes]:
    reader = BlobReader(layer, path)
    try:
        while chunk := reader.read(_CHUNK):
            yield chunk
        reader.finish()
    finally:
        reader.close()
