"""Bounds of layers: what a compressed size may unpack to, sources that change, missing parents."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from primus_images.errors import CheckFailed, InputError
from primus_images.oci.layer import require_sane, save_paths, write_layer
from primus_images.oci.store import Store, digest_of
from primus_images.oci.tar import Entry, in_order, part

FREE = 100 << 20


@pytest.mark.parametrize(
    ("unpacked", "packed", "is_bomb"),
    [
        (FREE, 0, False),
        (FREE + 1, 0, True),
        (FREE + 100_000, 1000, False),
        (FREE + 100_001, 1000, True),
    ],
)
def test_a_layer_may_unpack_to_a_hundred_times_its_size(
    unpacked: int, packed: int, is_bomb: bool
) -> None:
    if not is_bomb:
        require_sane(unpacked, packed)
        return
    with pytest.raises(ValueError, match=f"{packed:,} bytes unpack to {unpacked:,} or more"):
        require_sane(unpacked, packed)


def test_paths_of_a_layer_are_listed_with_kind_mode_and_owner(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.prepare()
    entries = [
        Entry(path="opt/b", mode=0o4755, uid=1, gid=2),
        Entry(path="opt/a", kind="symlink", mode=0o777, link="b"),
    ]
    layer = write_layer(store, entries)
    assert store.read(layer.paths).decode().splitlines() == [
        "dir 755 0:0 opt",
        "file 4755 1:2 opt/b",
        "symlink 777 0:0 opt/a",
    ]
    assert save_paths(store, ["b", "a"]) == save_paths(store, ["a", "b"])


@pytest.mark.parametrize(
    ("size", "sha256"),
    [(4, None), (6, None), (5, "0" * 64)],
)
def test_a_source_has_the_size_and_hash_that_were_stated(size: int, sha256: str | None) -> None:
    entry = Entry(path="opt/a", size=size, source=b"hello", sha256=sha256)
    with pytest.raises(CheckFailed, match="opt/a changed while the build read it") as caught:
        list(entry.chunks())
    assert caught.value.hint == "build again, and do not change the files meanwhile"


@pytest.mark.parametrize("kind", ["absent", "link", "folder", "below a file"])
def test_a_file_that_is_no_longer_one_has_changed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if kind == "link":
        (tmp_path / "b").write_text("hello")
        path.symlink_to("b")
    if kind == "folder":
        path.mkdir()
    if kind == "below a file":
        path.write_text("hello")
        path = path / "a"
    with pytest.raises(CheckFailed) as caught:
        list(Entry(path="opt/a", size=5, source=path).chunks())
    assert caught.value.message == f"{path} changed while the build read it"


def test_a_source_that_keeps_growing_is_left() -> None:
    pulled = []

    def endless() -> Iterator[bytes]:
        while True:
            pulled.append(1)
            yield b"12"

    with pytest.raises(CheckFailed):
        list(Entry(path="a", size=5, source=endless).chunks())
    assert len(pulled) == 3


@pytest.mark.parametrize(
    ("offset", "size", "data"), [(0, 3, b"abc"), (2, 3, b"cde"), (4, 9, b"ef"), (1, 0, b"")]
)
def test_a_part_of_a_file_begins_and_ends_where_asked(
    offset: int, size: int, data: bytes, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(b"abcdef")
    assert b"".join(part(tmp_path / "a", offset, size)) == data


def test_missing_parents_are_folders_of_root_and_hard_links_are_last() -> None:
    entries = in_order(
        [
            Entry(path="a/b/c", kind="hardlink", link="z"),
            Entry(path="z", uid=7),
            Entry(path="a.b"),
            Entry(path="a", kind="dir", mode=0o700, uid=5),
        ]
    )
    rows = [(entry.path, entry.kind, entry.mode, entry.uid) for entry in entries]
    assert rows == [
        ("a", "dir", 0o700, 5),
        ("a/b", "dir", 0o755, 0),
        ("a.b", "file", 0o644, 0),
        ("z", "file", 0o644, 7),
        ("a/b/c", "hardlink", 0o644, 0),
    ]


@pytest.mark.parametrize("kind", ["file", "symlink"])
def test_nothing_lies_below_what_is_no_folder(kind: str) -> None:
    below = Entry(path="a/b/c")
    above = Entry(path="a", kind=kind, link="x" if kind == "symlink" else "")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"the path a/b/c lies below a, which is a {kind}"):
        in_order([below, above])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"path": "../a"}, "the path '../a' cannot be in an image: "),
        ({"path": "a", "kind": "symlink", "link": ""}, "the target '' of the link a cannot be"),
        ({"path": "a", "kind": "hardlink", "link": "/b"}, "the target '/b' of the link a cannot"),
    ],
)
def test_unclean_paths_and_targets_are_named(fields: dict[str, str], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        Entry(**fields)  # type: ignore[arg-type]
    assert caught.value.message.startswith(sentence)


def test_a_layer_states_the_bytes_of_its_tar(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.prepare()
    advanced: list[int] = []
    entries = [Entry(path="opt/a", size=700, source=bytes(700))]
    layer = write_layer(store, entries, advance=advanced.append)
    tar = (
        zstandard.ZstdDecompressor()
        .decompressobj()
        .decompress(store.blob_path(layer.blob.digest).read_bytes())
    )
    assert layer.unpacked == len(tar) == sum(advanced)
    assert layer.diff_id == digest_of(tar)
    assert layer.blob.size == store.blob_path(layer.blob.digest).stat().st_size
