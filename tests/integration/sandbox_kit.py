"""Tiny images of busybox and a few files, for all tests that run images."""

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host_tools import needs
from primus_images.oci.layer import unpacked
from primus_images.oci.store import Blob, manifest_of
from primus_images.sandbox.container import LayerRef, RootFs

BUSYBOX = shutil.which("busybox") or "/bin/busybox"
_APPLETS = (
    "sh cat ls echo id env pwd sleep kill true false stat hostname ifconfig ip ping nc dd mount "
    "ps tty stty "
    "head wc test touch rm mkdir yes seq uname awk grep df readlink tail sort"
)
APPLETS = _APPLETS.split()
PASSWD = "root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1000:w:/home/worker:/bin/sh\n"
GROUP = "root:x:0:\nworker:x:1000:\nrender:x:109:worker\n"


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    data: bytes | None = None
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    link: str | None = None
    kind: bytes | None = None
    mtime: int = 315532800
    pax: Mapping[str, str] = field(default_factory=dict)


def directory(name: str, mode: int = 0o755, **more: Any) -> Entry:
    return Entry(name=name, mode=mode, kind=tarfile.DIRTYPE, **more)


def tar(entries: Iterable[Entry]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.mode, info.uid, info.gid, info.mtime = (
                entry.mode,
                entry.uid,
                entry.gid,
                entry.mtime,
            )
            info.pax_headers = dict(entry.pax)
            if entry.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
            elif entry.kind is not None:
                info.type = entry.kind
            info.size = len(entry.data or b"")
            archive.addfile(info, io.BytesIO(entry.data or b""))
    return out.getvalue()


def sha(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def add_layer(blobs: Path, plain: bytes, kind: str = "tar+zstd") -> LayerRef:
    packed = plain
    if kind == "tar+zstd":
        import zstandard

        packed = zstandard.ZstdCompressor(level=1).compress(plain)
    elif kind == "tar+gzip":
        packed = gzip.compress(plain, 1, mtime=0)
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / sha(packed).partition(":")[2]).write_bytes(packed)
    return LayerRef(
        digest=sha(packed),
        diff_id=sha(plain),
        size=len(packed),
        media_type=f"application/vnd.oci.image.layer.v1.{kind}",
    )


def base_entries() -> list[Entry]:
    return [
        *(directory(n) for n in ("bin", "etc", "home", "root", "usr", "usr/bin", "var")),
        directory("home/worker", uid=1000, gid=1000),
        directory("tmp", 0o1777),
        Entry(name="bin/busybox", data=Path(BUSYBOX).read_bytes(), mode=0o755),
        *(Entry(name=f"bin/{applet}", link="busybox") for applet in APPLETS),
        Entry(name="etc/passwd", data=PASSWD.encode()),
        Entry(name="etc/group", data=GROUP.encode()),
        Entry(name="etc/not-a-program", data=b"hello", mode=0o644),
    ]


def image(place: Path, *layers: list[Entry], kind: str = "tar+zstd", **settings: Any) -> RootFs:
    """Create an image of busybox and ``layers``. ``settings`` is the config's ``config`` object."""
    blobs = place / "blobs" / "sha256"
    refs = [add_layer(blobs, tar(entries), kind) for entries in (base_entries(), *layers)]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": "1980-01-01T00:00:00Z",
        "config": {"Env": ["PATH=/bin:/usr/bin", "FROM_IMAGE=yes"], **settings},
        "rootfs": {"type": "layers", "diff_ids": [ref.diff_id for ref in refs]},
        "history": [{"created_by": "test"} for _ in refs],
    }
    raw = json.dumps(config, sort_keys=True).encode()
    (blobs / sha(raw).partition(":")[2]).write_bytes(raw)
    manifest = manifest_of(
        raw, [Blob(digest=r.digest, media_type=r.media_type, size=r.size) for r in refs], {}
    )
    return RootFs(
        name="tiny",
        manifest=manifest,
        config_bytes=raw,
        tar=lambda layer: unpacked(layer, blobs / layer.digest.partition(":")[2]),
        cache=place / "unpacked",
    )


needs_busybox = needs("busybox")
