"""Layers become directories exactly, or not at all."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from primus.errors import HostError, InputError
from primus.oci.contents import walk
from primus.sandbox.container import LayerRef
from primus.sandbox.unpack import layer_dir, unpack_layer

ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="needs root: owners, device nodes and trusted attributes")


def member(name: str, kind: bytes = tarfile.REGTYPE, *, mode: int = 0o644, link: str = "") -> tarfile.TarInfo:
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
        zstandard.ZstdCompressor().compress(plain[:700]) + zstandard.ZstdCompressor().compress(plain[700:])
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


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*") if path.suffix != ".lock")


@pytest.mark.parametrize("kind", sorted(PACK))
def test_files_links_modes_and_times(tmp_path, kind):
    exact = member("d/exact")
    exact.pax_headers = {"mtime": "1234567890.123456789"}
    plain = tar(
        member("d", tarfile.DIRTYPE, mode=0o2750),
        (member("d/f", mode=0o4755), b"data" * 1000),
        member("d/hard", tarfile.LNKTYPE, link="d/f"),
        member("d/sym", tarfile.SYMTYPE, link="/etc/passwd"),
        member("d/pipe", tarfile.FIFOTYPE, mode=0o600),
        (exact, b""),
        (member("implicit/parent/é"), b"x"),
    )
    ref, blob = layer(tmp_path, plain, kind)
    root = unpack_layer(ref, blob, tmp_path / "cache")
    assert root == tmp_path / "cache" / ref.diff_id[7:39]
    assert (root / "d/f").read_bytes() == b"data" * 1000
    assert stat.S_IMODE((root / "d/f").stat().st_mode) == 0o4755
    assert (root / "d/f").stat().st_ino == (root / "d/hard").stat().st_ino
    assert (root / "d/sym").readlink() == Path("/etc/passwd")
    assert stat.S_ISFIFO((root / "d/pipe").lstat().st_mode)
    assert stat.S_IMODE((root / "d").stat().st_mode) == 0o2750
    assert (root / "d").stat().st_mtime == 315532800
    assert (root / "d/sym").lstat().st_mtime == 315532800
    assert (root / "d/exact").stat().st_mtime_ns == 1234567890123456789
    assert (root / "implicit/parent/é").read_bytes() == b"x"
    assert left(tmp_path / "cache") == [root.name]


def test_the_umask_does_not_show(tmp_path):
    ref, blob = layer(tmp_path, tar((member("a/b", mode=0o666), b"")))
    former = os.umask(0o077)
    try:
        root = unpack_layer(ref, blob, tmp_path / "cache")
    finally:
        os.umask(former)
    assert [stat.S_IMODE((root / name).stat().st_mode) for name in (".", "a", "a/b")] == [0o755, 0o755, 0o666]


@as_root
def test_owners(tmp_path):
    info = member("f")
    info.uid, info.gid = 1234, 70000
    ref, blob = layer(tmp_path, tar((info, b"")))
    found = (unpack_layer(ref, blob, tmp_path / "cache") / "f").stat()
    assert (found.st_uid, found.st_gid) == (1234, 70000)


@as_root
@pytest.mark.parametrize(("inside", "name"), [(False, "trusted.overlay.opaque"), (True, "user.overlay.opaque")])
def test_whiteouts(tmp_path, inside, name):
    plain = tar(
        member("d", tarfile.DIRTYPE),
        member("d/.wh.gone"),
        member("full", tarfile.DIRTYPE),
        member("full/.wh..wh..opq"),
        (member("full/new"), b"new"),
        member(".wh.again"),
        member("again", tarfile.DIRTYPE),
        member("both", tarfile.DIRTYPE),
        member(".wh.both"),
        (member("kept"), b"kept"),
        member(".wh.kept"),
        member("implied/.wh..wh..opq"),
    )
    ref, blob = layer(tmp_path, plain)
    root = unpack_layer(ref, blob, tmp_path / "cache", user_namespace=inside)
    gone = (root / "d/gone").lstat()
    assert stat.S_ISCHR(gone.st_mode)
    assert gone.st_rdev == 0
    assert {p.name for p in root.iterdir() if name in os.listxattr(p)} == {"full", "again", "both", "implied"}
    assert os.getxattr(root / "full", name) == b"y"
    assert sorted(p.name for p in (root / "full").iterdir()) == ["new"]
    assert (root / "kept").read_bytes() == b"kept"


@as_root
def test_attributes(tmp_path):
    # cap_net_raw, effective, revision 2; real values hold zero bytes, newlines and bytes that are no UTF-8.
    capability = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
    info = member("f")
    info.pax_headers = {
        "SCHILY.xattr.security.capability": capability.decode("utf-8", "surrogateescape"),
        "SCHILY.xattr.user.note": b"a\n=\xff".decode("utf-8", "surrogateescape"),
        "SCHILY.xattr.trusted.overlay.redirect": "/etc",
        "SCHILY.xattr.user.overlay.redirect": "/etc",
        "SCHILY.xattr.security.selinux": "x",
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        archive.addfile(info, io.BytesIO())
    ref, blob = layer(tmp_path, out.getvalue())
    found = unpack_layer(ref, blob, tmp_path / "cache") / "f"
    assert sorted(os.listxattr(found)) == ["security.capability", "user.note"]
    assert os.getxattr(found, "security.capability") == capability
    assert os.getxattr(found, "user.note") == b"a\n=\xff"


ESCAPES = {
    "dotdot": (member("../evil"),),
    "dotdot inside": (member("a/../../evil"),),
    "through a link": (member("l", tarfile.SYMTYPE, link="/tmp"), member("l/evil")),
    "through a relative link": (member("l", tarfile.SYMTYPE, link=".."), member("l/evil")),
    "directory over a link": (member("l", tarfile.SYMTYPE, link="/tmp"), member("l", tarfile.DIRTYPE)),
    "hard link out": (member("h", tarfile.LNKTYPE, link="../../blob"),),
    "hard link absolute": (member("h", tarfile.LNKTYPE, link="/etc/passwd"),),
    "hard link through a link": (
        member("l", tarfile.SYMTYPE, link="/etc"),
        member("h", tarfile.LNKTYPE, link="l/passwd"),
    ),
    "whiteout of the parent": (member("d", tarfile.DIRTYPE), member("d/.wh...")),
    "whiteout of nothing": (member("d", tarfile.DIRTYPE), member("d/.wh.")),
    "file over a directory": (member("d", tarfile.DIRTYPE), member("d")),
    "link over a directory": (member("d", tarfile.DIRTYPE), member("d", tarfile.SYMTYPE, link="/")),
    "below a file": (member("f"), member("f/x")),
}


@pytest.mark.parametrize("name", sorted(ESCAPES))
def test_escapes_are_refused(tmp_path, name):
    (tmp_path / "evil").write_text("untouched")
    ref, blob = layer(tmp_path, tar(*ESCAPES[name]))
    before = blob.stat()
    with pytest.raises(InputError, match="unsafe entry") as caught:
        unpack_layer(ref, blob, tmp_path / "cache")
    assert ref.digest in str(caught.value)
    assert left(tmp_path / "cache") == []
    assert (tmp_path / "evil").read_text() == "untouched"
    assert blob.stat().st_nlink == before.st_nlink
    assert not Path("/tmp/evil").exists()


def wrong(**fields: object) -> tarfile.TarInfo:
    info = member("f")
    for name, value in fields.items():
        setattr(info, name, value)
    return info


HEADERS = {
    **{
        f"mtime {text}": wrong(pax_headers={"mtime": text})
        for text in ("abc", "NaN", "Infinity", "1e30", "1E+999999999")
    },
    **{f"{name} {n}": wrong(**{name: n}) for name in ("uid", "gid") for n in (-5, 1 << 50)},
    "mtime of a folder": wrong(type=tarfile.DIRTYPE, pax_headers={"mtime": "1e30"}),
    "large uid in pax": wrong(pax_headers={"uid": "9" * 30}),
    "zero byte in a path": wrong(pax_headers={"path": "a\0b"}),
    "zero byte in a link": wrong(type=tarfile.SYMTYPE, pax_headers={"linkpath": "a\0b"}),
    "zero byte in an attribute": wrong(pax_headers={"SCHILY.xattr.user.a\0b": "x"}),
}


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_impossible_headers_are_refused(tmp_path, name):
    form = tarfile.PAX_FORMAT if HEADERS[name].pax_headers else tarfile.GNU_FORMAT
    ref, blob = layer(tmp_path, HEADERS[name].tobuf(form) + bytes(1024))
    with pytest.raises(InputError, match="its header has an impossible") as caught:
        unpack_layer(ref, blob, tmp_path / "cache")
    assert ref.digest in str(caught.value)
    assert left(tmp_path / "cache") == []


@pytest.mark.parametrize("read", [unpack_layer, lambda ref, blob, _: list(walk(ref, blob))])
@pytest.mark.parametrize(
    "plain",
    [
        tar(wrong(pax_headers={"GNU.sparse.map": "abc", "GNU.sparse.size": "1"})),
        wrong(type=b"L").tobuf(tarfile.GNU_FORMAT) * 3000,
        wrong(size=1 << 60).tobuf(tarfile.GNU_FORMAT),
    ],
    ids=["sparse", "chain", "size"],
)
def test_what_tarfile_cannot_read_is_no_archive(tmp_path, plain, read):
    ref, blob = layer(tmp_path, plain)
    with pytest.raises(HostError, match="no tar"):
        read(ref, blob, tmp_path / "cache")


def test_an_absolute_name_stays_inside(tmp_path):
    ref, blob = layer(tmp_path, tar((member("/x/y"), b"1")))
    assert (unpack_layer(ref, blob, tmp_path / "cache") / "x/y").read_bytes() == b"1"


def test_a_later_file_replaces_an_earlier_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    ref, blob = layer(tmp_path, tar(member("f", tarfile.SYMTYPE, link=str(victim)), (member("f"), b"new")))
    assert (unpack_layer(ref, blob, tmp_path / "cache") / "f").read_bytes() == b"new"
    assert victim.read_text() == "untouched"


@pytest.mark.parametrize("kind", sorted(PACK))
@pytest.mark.parametrize("damage", ["flip", "cut", "append", "empty"])
def test_a_damaged_blob_leaves_nothing(tmp_path, kind, damage):
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
        unpack_layer(ref, blob, tmp_path / "cache")
    assert ref.digest in str(caught.value)
    assert str(blob) in str(caught.value)
    assert left(tmp_path / "cache") == []


def test_a_wrong_diff_id(tmp_path):
    ref, blob = layer(tmp_path, tar((member("f"), b"x")), "tar+zstd")
    wrong = LayerRef(digest=ref.digest, diff_id="sha256:" + "0" * 64, size=ref.size, media_type=ref.media_type)
    with pytest.raises(HostError, match="the config says sha256:0000"):
        unpack_layer(wrong, blob, tmp_path / "cache")
    assert left(tmp_path / "cache") == []


def test_what_is_no_archive(tmp_path):
    ref, blob = layer(tmp_path, b"no archive at all" * 100, "tar+gzip")
    with pytest.raises(HostError, match="no tar archive"):
        unpack_layer(ref, blob, tmp_path / "cache")


def test_a_missing_blob(tmp_path):
    ref, blob = layer(tmp_path, tar())
    blob.unlink()
    with pytest.raises(HostError, match="cannot be read"):
        unpack_layer(ref, blob, tmp_path / "cache")


def test_many_at_once(tmp_path):
    ref, blob = layer(tmp_path, tar(*((member(f"f{n}"), b"x" * 1000) for n in range(300))), "tar+zstd")
    problems: list[BaseException] = []

    def work() -> None:
        try:
            assert len(list(unpack_layer(ref, blob, tmp_path / "cache").iterdir())) == 300
        except (Exception, AssertionError) as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert left(tmp_path / "cache") == [layer_dir(tmp_path, ref).name]


def test_a_killed_unpacker_does_no_harm(tmp_path):
    ref, blob = layer(tmp_path, tar(*((member(f"f{n}"), b"x" * 1000) for n in range(300))))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = (
        "import sys; from pathlib import Path; from primus.sandbox.container import LayerRef; "
        "from primus.sandbox.unpack import unpack_layer; "
        f"unpack_layer(LayerRef(digest={ref.digest!r}, diff_id={ref.diff_id!r}, size=1, media_type='tar'), "
        f"Path({str(fifo)!r}), Path({str(tmp_path / 'cache')!r}))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as process, fifo.open("wb") as pipe:
        pipe.write(blob.read_bytes()[:100_000])
        pipe.flush()
        process.kill()
        process.wait()
    assert left(tmp_path / "cache") == [f"{layer_dir(tmp_path, ref).name}.tmp"]
    assert len(list(unpack_layer(ref, blob, tmp_path / "cache").iterdir())) == 300
    assert left(tmp_path / "cache") == [layer_dir(tmp_path, ref).name]


@pytest.mark.parametrize("kind", ["tar+gzip", "tar+zstd"])
def test_memory_stays_small(tmp_path, kind):
    code = (
        "import resource, sys; from pathlib import Path; from primus.sandbox.container import LayerRef; "
        "from primus.sandbox.unpack import unpack_layer; "
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "unpack_layer(LayerRef(digest=sys.argv[1], diff_id=sys.argv[2], size=1, media_type=sys.argv[5]), "
        "Path(sys.argv[3]), Path(sys.argv[4])); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"
    )
    # Highly compressible: a reader that inflates a whole input chunk at once would need hundreds of MiB.
    plain = tar((member("big"), bytes(200 << 20)))
    blob = tmp_path / "blob"
    packed = gzip.compress(plain, 1) if kind == "tar+gzip" else zstandard.ZstdCompressor(level=1).compress(plain)
    blob.write_bytes(packed)
    digest = "sha256:" + hashlib.sha256(blob.read_bytes()).hexdigest()
    diff_id = "sha256:" + hashlib.sha256(plain).hexdigest()
    del plain
    argv = [sys.executable, "-c", code, digest, diff_id, str(blob), str(tmp_path / "cache"), kind]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    grown = int(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout)
    assert grown < 64 << 10
