"""The store: whole blobs only, records after blobs, damage seen, two builders at once."""

import errno
import hashlib
import io
import json
import multiprocessing
import os
import signal
import tarfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import zstandard

from primus_images.errors import HostError
from primus_images.oci.layer import write_layer
from primus_images.oci.store import Store, storage_error
from primus_images.oci.tar import Entry


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.prepare()
    return store


def test_a_new_store_is_an_image_layout_for_other_programs(store: Store) -> None:
    assert json.loads((store.root / "oci-layout").read_text())["imageLayoutVersion"] == "1.0.0"
    index = json.loads((store.root / "index.json").read_text())
    assert (index["schemaVersion"], index["manifests"]) == (2, [])


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_blobs_can_be_read_by_others_whatever_the_umask(store: Store, mask: int) -> None:
    before = os.umask(mask)
    try:
        digest = write_layer(store, entries()).blob.digest
    finally:
        os.umask(before)
    assert store.blob_path(digest).stat().st_mode & 0o777 == 0o644


def test_a_store_that_is_prepared_again_keeps_its_images(store: Store) -> None:
    index = store.root / "index.json"
    text = index.read_text().replace("[]", '[{"digest": "sha256:1"}]')
    index.write_text(text)
    Store(store.root).prepare()
    assert index.read_text() == text


def entries(data: bytes = b"hello") -> list[Entry]:
    return [
        Entry(path="opt/a", size=len(data), source=data),
        Entry(path="opt/b", mode=0o755, size=0, source=b""),
    ]


def test_large_and_small_files_are_read_back_by_tarfile(store: Store) -> None:
    """What is large goes past the place where headers are gathered, and must not overtake them."""
    sizes = [1, 1 << 18, (1 << 18) - 1, 700, (1 << 20) + 5, 0, 3 << 20]
    files = {f"opt/{i}": bytes([i + 1]) * size for i, size in enumerate(sizes)}
    layer = write_layer(store, [Entry(path=p, size=len(d), source=d) for p, d in files.items()])
    plain = (
        zstandard.ZstdDecompressor()
        .decompressobj()
        .decompress(store.blob_path(layer.blob.digest).read_bytes())
    )
    assert layer.diff_id == f"sha256:{hashlib.sha256(plain).hexdigest()}"
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        found = {m.name: archive.extractfile(m) for m in archive if m.isreg()}
        assert {name: stream.read() for name, stream in found.items() if stream} == files
    assert plain.endswith(bytes(1024))


def test_zstd_bytes_do_not_depend_on_the_number_of_processors(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(i * i % 251 for i in range(3_000_000)) * 8
    digests = set()
    for count in (1, 2, 7):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        digests.add(write_layer(store, entries(data)).blob.digest)
    assert len(digests) == 1


def test_source_that_fails_leaves_nothing(store: Store) -> None:
    def broken() -> object:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(HostError, match="Input/output error"):
        write_layer(store, [Entry(path="a", size=5, source=broken)])  # type: ignore[arg-type]
    assert list((store.root / "tmp").iterdir()) == []
    assert list((store.root / "blobs/sha256").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EACCES, "another file system"), (errno.ENOSPC, "free space")]
)
def test_a_store_that_cannot_be_written_names_the_remedy(number: int, remedy: str) -> None:
    error = storage_error(OSError(number, os.strerror(number)), Path("/store/x"))
    assert remedy in str(error.hint)
    assert error.exit_code == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        *((f'{{"manifests": [{m}]}}', "not an index of images") for m in ("{}", "1")),
    ],
)
def test_broken_index_is_a_sentence(text: str, reason: str, store: Store) -> None:
    """`primus clean` would remove the layers of an image without its name."""
    (store.root / "index.json").write_text(text)
    with pytest.raises(HostError, match=reason):
        store.images()


def test_tags_of_many_processes_all_stay(store: Store) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(_tag, [(store.root, i) for i in range(12)])
    assert sorted(store.images()) == sorted(f"v1.0-t{i}" for i in range(12))


def _tag(root: Path, number: int) -> None:
    store = Store(root)
    blob = store.put(f'{{"n":{number}}}'.encode(), "application/json")
    store.tag(f"v1.0-t{number}", blob)


def _hang_before_rename(root: Path) -> None:
    def hang(self: Path, target: Path) -> None:
        (root / "ready").touch()
        time.sleep(60)

    Path.replace = hang  # type: ignore[assignment,method-assign]
    Store(root).save("actions", "key", {})


def _hang(root: Path) -> None:
    store = Store(root)
    with store.temporary() as out, store.folder("work") as folder:
        out.write(b"half")
        out.flush()
        (folder / "x").write_text("y")
        (root / "ready").touch()
        time.sleep(60)


@pytest.mark.parametrize(("at", "files"), [(_hang, 2), (_hang_before_rename, 1)])
def test_what_a_killed_builder_left_is_swept(
    store: Store, at: Callable[[Path], None], files: int
) -> None:
    process = multiprocessing.get_context("spawn").Process(target=at, args=(store.root,))
    process.start()
    while not (store.root / "ready").exists():
        time.sleep(0.02)
    store.prepare()
    assert len(list((store.root / "tmp").iterdir())) == files, "work under way must stay"
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    store.prepare()
    assert list((store.root / "tmp").iterdir()) == []
    assert list((store.root / "blobs/sha256").iterdir()) == []


def _sweep_often(root: Path) -> None:
    while not (root / "done").exists():
        Store(root).prepare()


def test_sweepers_never_take_what_was_just_made(store: Store) -> None:
    """Between its making and its locking a file must not look abandoned to a builder that starts
    just then.
    """
    sweeper = multiprocessing.get_context("spawn").Process(target=_sweep_often, args=(store.root,))
    sweeper.start()
    try:
        for number in range(150):
            layer = write_layer(store, entries(str(number).encode()))
            assert store.has(layer.blob)
            with store.folder("work") as folder:
                (folder / "x").write_text("y")
            store.save("actions", "key", {"number": number})
            assert store.record("actions", "key") == {"number": number}
    finally:
        (store.root / "done").touch()
        sweeper.join()


@pytest.mark.parametrize("damage", ["shape", "blob"])
def test_a_record_in_another_shape_or_without_its_whole_blob_is_missing(
    store: Store, damage: str
) -> None:
    layer = write_layer(store, entries())
    store.save("actions", "k" * 64, {"name": "x", "layer": asdict(layer)})
    assert store.layer("k" * 64) == layer
    if damage == "shape":
        store.save("actions", "k" * 64, {"layer": {**asdict(layer), "unpacked": [2, 9]}})
    else:
        path = store.blob_path(layer.blob.digest)
        path.write_bytes(path.read_bytes()[:-1])
    assert store.layer("k" * 64) is None


def test_a_damaged_small_blob_is_written_again(store: Store) -> None:
    blob = store.put(b"config", "text/plain")
    store.blob_path(blob.digest).write_bytes(b"gifnoc")
    assert store.check(blob.digest) is not None
    assert store.put(b"config", "text/plain") == blob
    assert store.read(blob.digest) == b"config"
