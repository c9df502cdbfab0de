"""Unpacked layers: which are unpacked, when again, and what is compared."""

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.errors import HostError
from primus_images.sandbox import layers as module
from primus_images.sandbox.container import LayerRef
from primus_images.sandbox.layers import compare, unpacked_layers


def tar_of(**files: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(text)
            member.uid = os.geteuid()
            member.gid = os.getegid()
            archive.addfile(member, io.BytesIO(text.encode()))
    return stream.getvalue()


TARS = {"sha256:" + "a" * 64: tar_of(one="1", sub__two="22"), "sha256:" + "b" * 64: tar_of(b="b")}


def root_of(*digests: str, tars: dict[str, bytes] | None = None) -> Any:
    refs = [
        LayerRef(digest=digest, diff_id="", size=2_000_000, media_type="tar") for digest in digests
    ]

    def tar(layer: LayerRef) -> Iterator[bytes]:
        yield (tars or TARS)[layer.digest]

    return SimpleNamespace(name="v1-demo", layers=refs, tar=tar)


A, B = TARS


@pytest.fixture
def state(tmp_path: Path) -> Any:
    (tmp_path / "layers").mkdir()
    (tmp_path / "private").mkdir()
    return SimpleNamespace(
        workspace=tmp_path,
        place=tmp_path / "private/place",
        inside=lambda: ["env", "-C", str(tmp_path)],
        environment=lambda: dict(os.environ),
    )


def folder(state: Any, digest: str) -> Path:
    path: Path = state.workspace / "layers" / module.layer_folder(digest)
    return path


def test_layers_are_unpacked_once_and_listed_top_first(
    state: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = unpacked_layers(root_of(A, B, A), state)
    assert names == [module.layer_folder(A), module.layer_folder(B)]
    assert (folder(state, A) / "sub/two").read_text() == "22"
    said = capsys.readouterr().err
    assert "unpacking 2 layers (4 MB compressed) of v1-demo, once" in said
    assert unpacked_layers(root_of(A, B), state) == [*reversed(names)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("change", ["edited", "added", "mode", "removed", "gone", "unlisted"])
def test_a_layer_that_changed_since_is_unpacked_again(
    state: Any, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    unpacked_layers(root_of(A, B), state)
    capsys.readouterr()
    file = folder(state, A) / "one"
    if change == "edited":
        file.write_text("2")
    elif change == "added":
        (folder(state, A) / "more").touch()
    elif change == "mode":
        file.chmod(0o600)
    elif change == "removed":
        file.unlink()
    elif change == "unlisted":
        module._listing_path(folder(state, A).name, state).unlink()
    else:
        folder(state, A).rename(state.workspace / "elsewhere")
    unpacked_layers(root_of(A, B), state)
    assert file.read_text() == "1"
    assert not (folder(state, A) / "more").exists()
    said = capsys.readouterr().err
    assert "unpacking 1 layer (2 MB compressed)" in said
    again = "1 of them again: not as they were unpacked"
    assert (again in said) is (change != "gone")
    # A container may still use the old one.
    old = [path for path in (state.workspace / "layers").iterdir() if path.suffix == ".partial"]
    aside = [path for path in (state.workspace / "layers").iterdir() if "-" in path.name]
    assert len(aside or old) == (0 if change == "gone" else 1)


def test_layers_that_another_command_unpacks_meanwhile_are_not_unpacked_again(
    state: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = module.locked

    def locked_late(workspace: Path) -> AbstractContextManager[None]:
        monkeypatch.setattr(module, "locked", lock)
        unpacked_layers(root_of(A), state)
        return lock(workspace)

    monkeypatch.setattr(module, "locked", locked_late)
    unpacked_layers(root_of(A, B), state)
    said = [line for line in capsys.readouterr().err.splitlines() if "unpacking" in line]
    assert said == ["unpacking 1 layer (2 MB compressed) of v1-demo, once"] * 2


def test_the_largest_layer_is_unpacked_first(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    whole = module._tar

    def tar(argv: Any, state: Any, root: Any, layer: LayerRef, log: Any) -> int:
        order.append(layer.digest)
        return whole(argv, state, root, layer, log)

    monkeypatch.setattr(module, "_tar", tar)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 1)
    root = root_of(A, B)
    root.layers[1] = replace(root.layers[1], size=3_000_000)
    unpacked_layers(root, state)
    assert order == [B, A]


def test_a_fault_of_one_layer_stops_the_others(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []
    monkeypatch.setattr(module, "stop_all", lambda: stopped.append(True))
    with pytest.raises(HostError, match="cannot be unpacked"):
        unpacked_layers(root_of(A, tars={A: b"no tar" * 200}), state)
    assert stopped == [True]


def test_a_layer_that_no_tool_compares_is_unpacked_again(
    state: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = root_of(A)
    unpacked_layers(root, state)
    forget(state)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_COMPARE", "exit 3")
        compare(root, state)
    assert "differs from its blob (tar ended with exit code 3)" in capsys.readouterr().err
    assert (folder(state, A) / "one").read_text() == "1"


def test_a_blob_that_tar_does_not_read_is_a_sentence(state: Any) -> None:
    damaged = {A: b"no tar" * 200}
    with pytest.raises(HostError, match="a layer of v1-demo cannot be unpacked: ") as caught:
        unpacked_layers(root_of(A, tars=damaged), state)
    assert caught.value.hint is None
    assert not folder(state, A).exists()


def test_a_disk_that_is_full_says_how_to_free_some(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(argv: Any, state: Any, root: Any, layer: Any, log: Any) -> int:
        log.write("tar: x: No space left on device\n")
        return 2

    monkeypatch.setattr(module, "_tar", full)
    with pytest.raises(HostError, match="No space left on device") as caught:
        unpacked_layers(root_of(A), state)
    assert caught.value.hint == "free some space: primus clean"


def forget(state: Any) -> None:
    """As after a start of the machine."""
    module._compared_path(state).unlink()


def test_what_was_compared_is_not_read_again(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_of(A, B)
    compare(root, state)
    read: list[str] = []
    whole = module._difference

    def difference(root: Any, state: Any, name: str, layer: LayerRef) -> str:
        read.append(layer.digest)
        return whole(root, state, name, layer)

    monkeypatch.setattr(module, "_difference", difference)
    compare(root, state)
    assert read == []
    forget(state)
    compare(root, state)
    assert sorted(read) == [A, B]
    compare(root, state)
    assert len(read) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("edited", "one: Contents differ"),
        ("added", "more is not in it"),
        ("added below", "sub/more is not in it"),
    ],
)
def test_bytes_that_differ_from_the_blob_are_unpacked_again(
    state: Any, capsys: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    root = root_of(A, B)
    unpacked_layers(root, state)
    if change == "edited":
        (folder(state, A) / "one").write_text("2")
    elif change == "added":
        (folder(state, A) / "more").touch()
    else:
        (folder(state, A) / "sub/more").touch()
    # Whoever changes the listing, too, hides the change from a look at names and times.
    listing = module._listings([folder(state, A).name], state)
    module._listing_path(folder(state, A).name, state).write_text(listing[folder(state, A).name])
    forget(state)
    capsys.readouterr()
    compare(root, state)
    err = capsys.readouterr().err
    assert f"an unpacked layer of v1-demo differs from its blob ({said})" in err
    assert (folder(state, A) / "one").read_text() == "1"
    assert not list(folder(state, A).rglob("more"))
    compare(root, state)
    assert capsys.readouterr().err == ""
