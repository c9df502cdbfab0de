"""Blobs, names and the index of the store when something is absent, damaged or cannot be read."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import HostError
from primus_images.oci.store import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Blob,
    DiskFull,
    Store,
    canonical_json,
    digest_of,
    key_of,
    manifest_of,
    storage_error,
)

ABSENT = digest_of(b"absent")
AGAIN = "primus build --rehash creates it again"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.prepare()
    return store


def refusal(act: Callable[[], object]) -> HostError:
    with pytest.raises(HostError) as caught:
        act()
    return caught.value


def test_canonical_json_is_sorted_short_and_plain_utf8() -> None:
    data = {"b": [1, None], "a": "é"}
    assert canonical_json(data) == '{"a":"é","b":[1,null]}'.encode()
    assert key_of(data) == digest_of(canonical_json(data)).removeprefix("sha256:")
    assert len(key_of(data)) == 64


def test_a_manifest_names_config_and_layers_in_order() -> None:
    layers = [Blob.of(b"b", "layer"), Blob.of(b"aa", "layer")]
    assert json.loads(manifest_of(b"{}", layers, {"k": "v"})) == {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(b"{}"), "size": 2},
        "layers": [
            {"mediaType": "layer", "digest": digest_of(b"b"), "size": 1},
            {"mediaType": "layer", "digest": digest_of(b"aa"), "size": 2},
        ],
        "annotations": {"k": "v"},
    }


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [Path.unlink, _truncated, _folder])
def test_a_blob_without_its_whole_file_is_absent_and_is_put_again(
    damage: Callable[[Path], None], store: Store
) -> None:
    blob = store.put(b"config", "text/plain")
    assert store.has(blob)
    damage(store.blob_path(blob.digest))
    assert not store.has(blob)
    assert store.put(b"config", "text/plain") == blob
    assert store.read(blob.digest) == b"config"


def test_an_intact_blob_is_not_written_again(store: Store) -> None:
    blob = store.put(b"config", "text/plain")
    before = store.blob_path(blob.digest).stat().st_ino
    store.put(b"config", "text/plain")
    assert store.blob_path(blob.digest).stat().st_ino == before


def test_what_is_wrong_with_a_blob_is_a_sentence(store: Store) -> None:
    blob = store.put(b"config", "text/plain")
    assert store.check(blob.digest) is None
    store.blob_path(blob.digest).write_bytes(b"gifnoc")
    damaged = f"blob {blob.digest} is damaged"
    assert store.check(blob.digest) == f"{damaged}: its bytes hash to {digest_of(b'gifnoc')}"
    error = refusal(lambda: store.read(blob.digest))
    assert (error.message, error.hint) == (damaged, AGAIN)
    absent = f"blob {ABSENT} cannot be read: no such file or directory"
    assert str(store.check(ABSENT)).lower() == absent
    error = refusal(lambda: store.read(ABSENT))
    assert (error.message.lower(), error.hint) == (absent, AGAIN)


def test_a_store_of_another_user_is_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the refusal of the system is planted."""
    blob = store.put(b"config", "text/plain")

    def refuse(*_: object, **__: object) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    for act in (lambda: store.has(blob), lambda: store.read(blob.digest), store.images):
        with pytest.raises(PermissionError):
            act()


def test_a_name_points_to_the_last_image_that_got_it(store: Store) -> None:
    old = store.put(b"old", MANIFEST_TYPE)
    new = store.put(b"newer", MANIFEST_TYPE)
    store.tag("v1", old)
    assert store.names("v1", old)
    store.tag("v1", new)
    store.tag("v0", old)
    assert not store.names("v1", old)
    assert not store.names("v2", new)
    index = json.loads((store.root / "index.json").read_text())
    assert (index["schemaVersion"], index["mediaType"]) == (2, INDEX_TYPE)
    assert index["manifests"] == [
        {
            "mediaType": MANIFEST_TYPE,
            "digest": blob.digest,
            "size": blob.size,
            "platform": {"architecture": "amd64", "os": "linux"},
            "annotations": {"org.opencontainers.image.ref.name": ref},
        }
        for ref, blob in (("v0", old), ("v1", new))
    ]
    store.untag("v1")
    assert list(store.images()) == ["v0"]


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
def test_an_image_is_named_only_in_a_layout_as_it_is_written_here(name: str, store: Store) -> None:
    blob = store.put(b"image", MANIFEST_TYPE)
    store.tag("v1", blob)
    path = store.root / name
    path.write_bytes(path.read_bytes() + b"\n")
    assert not store.names("v1", blob)
    store.prepare()
    store.tag("v1", blob)
    assert store.names("v1", blob)


def test_a_layout_without_its_first_file_gets_it_again(store: Store) -> None:
    (store.root / "oci-layout").unlink()
    store.prepare()
    assert (store.root / "oci-layout").read_text() == '{"imageLayoutVersion":"1.0.0"}'


def test_an_absent_index_has_no_images(store: Store) -> None:
    (store.root / "index.json").unlink()
    assert store.images() == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "it is not an index of images"),
        ("{}", "it is not an index of images"),
        ('{"manifests": [{"annotations": {}}]}', "it is not an index of images"),
    ],
)
def test_a_damaged_index_names_its_place_and_is_replaced(
    text: str, reason: str, store: Store
) -> None:
    (store.root / "index.json").write_text(text)
    error = refusal(store.images)
    assert error.message == f"the store's index is damaged: {reason}"
    assert (error.where, error.hint) == (str(store.root / "index.json"), AGAIN)
    store.reset_index()
    assert store.images() == {}


def test_an_entry_with_a_size_in_words_is_damage(store: Store) -> None:
    store.tag("v1", store.put(b"image", MANIFEST_TYPE))
    path = store.root / "index.json"
    path.write_text(path.read_text().replace('"size":5', '"size":"five"'))
    assert "the store's index is damaged: " in refusal(store.images).message


def test_a_folder_in_the_place_of_a_file_is_replaced(store: Store) -> None:
    (store.root / "actions/key.json").mkdir()
    store.save("actions", "key", {"number": 1})
    assert store.record("actions", "key") == {"number": 1}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"number": 2}'])
def test_a_damaged_or_absent_record_is_none(text: str, store: Store) -> None:
    assert store.record("actions", "key") is None
    store.save("actions", "key", {"number": 1})
    (store.root / "actions/key.json").write_text(text)
    assert store.record("actions", "key") is None


def test_a_scratch_file_is_removed_unless_adopted(store: Store) -> None:
    blob = Blob.of(b"data", "text/plain")
    with store.temporary() as stream:
        stream.write(b"data")
        stream.flush()
        store.adopt(Path(stream.name), blob)
    with store.temporary() as stream:
        stream.write(b"other")
    with store.folder("work") as folder:
        assert folder.name.startswith("work-")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list((store.root / "tmp").iterdir()) == []
    assert store.read(blob.digest) == b"data"


@pytest.mark.parametrize(
    ("number", "full", "message", "hint"),
    [
        (errno.ENOSPC, True, "the disk that holds /store is full", "free space and run it again"),
        (errno.EDQUOT, True, "the disk that holds /store is full", "free space and run it again"),
        (errno.EEXIST, False, "/store/x is not a folder", "remove it, or choose another"),
        (errno.ENOTDIR, False, "/store/x is not a folder", "remove it, or choose another"),
        (errno.EACCES, False, "cannot write /store/x: ", "run this as a user who may write there"),
        (errno.EPERM, False, "cannot write /store/x: ", "run this as a user who may write there"),
        (errno.EROFS, False, "cannot write /store/x: ", "run this as a user who may write there"),
        (errno.EIO, False, "cannot write /store/x: ", None),
    ],
)
def test_a_failed_write_says_what_to_do(
    number: int, full: bool, message: str, hint: str | None
) -> None:
    error = storage_error(OSError(number, os.strerror(number), "/store/x"), Path("/store/x"))
    assert isinstance(error, DiskFull) is full
    assert error.message.startswith(message)
    assert str(error.hint).startswith(str(hint))


def test_a_file_in_the_place_of_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    error = refusal(Store(tmp_path / "store").prepare)
    assert "store" in error.message
    assert str(error.hint).startswith("remove it, or choose another")
