"""Layer blobs are read in bounded memory, and every byte is compared with both digests."""

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from primus_images.errors import HostError
from primus_images.oci.layer import walk
from primus_images.sandbox.container import LayerRef


def member(
    name: str, kind: bytes = tarfile.REGTYPE, *, mode: int = 0o644, link: str = ""
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname, info.mtime = kind, mode, link, 315532800
    info.uid, info.gid = os.getuid(), os.getgid()
    return info


def tar(*members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for item in members:
            info, data = item if isinstance(item, tuple) else (item, b"")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar+gzip": lambda plain: gzip.compress(plain[:700]) + gzip.compress(plain[700:]),
    "tar+zstd": lambda plain: (
        zstandard.ZstdCompressor().compress(plain[:700])
        + zstandard.ZstdCompressor().compress(plain[700:])
    ),
}


def layer(place: Path, plain: bytes, kind: str = "tar") -> tuple[LayerRef, Path]:
    packed = PACK[kind](plain)
    path = place / "blob"
    path.write_bytes(packed)
    ref = LayerRef(
        digest="sha256:" + hashlib.sha256(packed).hexdigest(),
        diff_id="sha256:" + hashlib.sha256(plain).hexdigest(),
        size=len(packed),
        media_type=f"application/vnd.oci.image.layer.v1.{kind}",
    )
    return ref, path


def read(ref: LayerRef, blob: Path) -> list[str]:
    return [item.path for item in walk(ref, blob)]


def wrong(**fields: object) -> tarfile.TarInfo:
    info = member("f")
    for name, value in fields.items():
        setattr(info, name, value)
    return info


@pytest.mark.parametrize(
    "plain",
    [
        tar(wrong(pax_headers={"GNU.sparse.map": "abc", "GNU.sparse.size": "1"})),
        wrong(type=b"L").tobuf(tarfile.GNU_FORMAT) * 3000,
        wrong(size=1 << 60).tobuf(tarfile.GNU_FORMAT),
    ],
    ids=["sparse", "chain", "size"],
)
def test_what_tarfile_cannot_read_is_no_archive(tmp_path, plain):
    ref, blob = layer(tmp_path, plain)
    with pytest.raises(HostError, match="no tar"):
        read(ref, blob)


@pytest.mark.parametrize("kind", sorted(PACK))
@pytest.mark.parametrize("damage", ["flip", "cut", "append", "empty"])
def test_a_damaged_blob_is_named(tmp_path, kind, damage):
    ref, blob = layer(tmp_path, tar((member("f"), os.urandom(5000))), kind)
    data = bytearray(blob.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "append":
        data += b"x"
    else:
        data.clear()
    blob.write_bytes(data)
    with pytest.raises(HostError, match="damaged") as caught:
        read(ref, blob)
    assert ref.digest in str(caught.value)
    assert str(blob) in str(caught.value)


def test_a_wrong_diff_id(tmp_path):
    ref, blob = layer(tmp_path, tar((member("f"), b"x")), "tar+zstd")
    wrong = LayerRef(
        digest=ref.digest, diff_id="sha256:" + "0" * 64, size=ref.size, media_type=ref.media_type
    )
    with pytest.raises(HostError, match="the config says sha256:0000"):
        read(wrong, blob)


def test_a_missing_blob(tmp_path):
    ref, blob = layer(tmp_path, tar())
    blob.unlink()
    with pytest.raises(HostError, match="cannot be read"):
        read(ref, blob)


@pytest.mark.parametrize("kind", ["tar+gzip", "tar+zstd"])
def test_memory_stays_small(tmp_path, kind):
    code = (
        "import resource, sys; from pathlib import Path; from primus_images.sandbox.container "
        "import LayerRef; "
        "from primus_images.oci.layer import walk; "
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "ref = LayerRef(digest=sys.argv[1], diff_id=sys.argv[2], size=1, media_type=sys.argv[4]); "
        "[None for _ in walk(ref, Path(sys.argv[3]))]; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"
    )
    # Highly compressible: a reader that inflates a whole input chunk at once would need hundreds of
    # MiB.
    plain = tar((member("big"), bytes(200 << 20)))
    blob = tmp_path / "blob"
    packed = (
        gzip.compress(plain, 1)
        if kind == "tar+gzip"
        else zstandard.ZstdCompressor(level=1).compress(plain)
    )
    blob.write_bytes(packed)
    digest = "sha256:" + hashlib.sha256(blob.read_bytes()).hexdigest()
    diff_id = "sha256:" + hashlib.sha256(plain).hexdigest()
    del plain
    argv = [sys.executable, "-c", code, digest, diff_id, str(blob), kind]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    grown = int(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout)
    assert grown < 64 << 10
