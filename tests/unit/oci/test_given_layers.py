"""Layers of a registry's image: the same bytes in the store, and one list of paths for all."""

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.oci.layer import adopt_layer, read_paths
from primus_images.oci.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.prepare()
    return store


def plain() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind, link in (
            ("./etc", tarfile.DIRTYPE, ""),
            ("./etc/a b", tarfile.REGTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode, member.uid = kind, link, 0o755, 7
            archive.addfile(member)
    return out.getvalue()


@pytest.mark.parametrize("parts", [1, 2])
def test_the_bytes_stay_and_what_is_inside_is_known(
    store: Store, tmp_path: Path, parts: int
) -> None:
    tar = plain()
    cut = len(tar) // parts
    # gzip files may be several members in a row, as parallel compressors write them.
    data = b"".join(gzip.compress(tar[at : at + cut], mtime=0) for at in range(0, len(tar), cut))
    path = tmp_path / "layer"
    path.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    layer = adopt_layer(store, path, sha256)
    assert (layer.blob.digest, layer.blob.size) == (f"sha256:{sha256}", len(data))
    assert store.check(layer.blob.digest) is None
    assert (layer.diff_id, layer.unpacked) == (
        f"sha256:{hashlib.sha256(tar).hexdigest()}",
        len(tar),
    )
    assert read_paths(store, layer) == {"etc": "dir 755 7:0", "etc/a b": "file 755 7:0"}


def test_zeros_behind_the_end_of_the_tar_count(store: Store, tmp_path: Path) -> None:
    """The config of an image names the digest of all unpacked bytes."""
    tar = plain() + bytes(1 << 20)
    path = tmp_path / "layer"
    path.write_bytes(gzip.compress(tar))
    layer = adopt_layer(store, path, hashlib.sha256(path.read_bytes()).hexdigest())
    assert layer.unpacked == len(tar)
    assert layer.diff_id == f"sha256:{hashlib.sha256(tar).hexdigest()}"
    assert store.check(layer.blob.digest) is None


def test_what_is_no_layer_is_named(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "layer"
    path.write_bytes(b"no gzip at all")
    with pytest.raises(InputError, match="cannot be used"):
        adopt_layer(store, path, "0" * 64)
    assert not list((store.root / "tmp").glob("blob-*"))


def header(
    *, kind: bytes = tarfile.REGTYPE, size: int = 0, pax: dict[str, str] | None = None
) -> bytes:
    member = tarfile.TarInfo("f")
    member.type, member.size, member.pax_headers = kind, size, pax or {}
    return member.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("tar", "why"),
    [
        (header(kind=b"L") * 3000, "cannot be used"),
        (header(size=1 << 60), "'f' is larger than 1 TiB"),
        (
            header(pax={"GNU.sparse.map": "0,99999999999", "GNU.sparse.size": "99999999999"}),
            "/f is not a plain file",
        ),
    ],
    ids=["chain", "size", "sparse"],
)
def test_a_hostile_header_is_refused_at_once(
    store: Store, tmp_path: Path, tar: bytes, why: str
) -> None:
    path = tmp_path / "layer"
    path.write_bytes(gzip.compress(tar))
    with pytest.raises(InputError, match=why):
        adopt_layer(store, path, hashlib.sha256(path.read_bytes()).hexdigest())


def layer_with(*members: tuple[str, bytes, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = link
            archive.addfile(member)
    return gzip.compress(out.getvalue())


DIR, FILE, LINK = tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([("d", DIR, ""), ("d", DIR, ""), ("d/f", FILE, "")], ""),
        ([("f", FILE, ""), ("f", FILE, "")], "it contains /f twice"),
        ([("f", FILE, ""), ("g", LINK, "./f")], ""),
        ([("g", LINK, "f"), ("f", FILE, "")], "/g is a link to /f, which this layer does not"),
        ([("f", tarfile.FIFOTYPE, "")], "/f is not a plain file"),
        ([("a/../f", FILE, "")], "it leaves its folder"),
    ],
)
def test_each_path_of_a_layer_is_there_once(
    members: list[tuple[str, bytes, str]], why: str, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "layer"
    path.write_bytes(layer_with(*members))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if why:
        with pytest.raises(InputError, match=why):
            adopt_layer(store, path, sha256)
    else:
        assert read_paths(store, adopt_layer(store, path, sha256))
