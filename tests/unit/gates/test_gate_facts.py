"""Facts about a layer: what one pass over its files collects, and when the cache is used."""

from pathlib import Path
from typing import Any

import pytest

from gpu_files import elf, member
from primus_images.errors import HostError, InputError
from primus_images.files import seal
from primus_images.gates import examined
from primus_images.gates.examined import LayerFacts, examine_layer, machine_paths, observe
from primus_images.oci.layer import write_layer
from primus_images.oci.store import Layer, Store
from primus_images.oci.tar import Entry, Member
from primus_images.plan.project import Workspace


class Silent:
    def start(self, *_: object) -> None: ...
    def finish(self, *_: object) -> None: ...


def link(path: str, target: str) -> Member:
    return Member(path=path, kind="symlink", link=target)


def test_bytes_are_counted_by_folder_and_only_those_of_files() -> None:
    files = [member("a/x", "12"), member("a/y", "345"), member("a/b/z", "6"), link("a/l", "x")]
    assert observe(files).folders == {"a": 5, "a/b": 1}


def test_licences_are_those_of_packages_and_of_links_between_them() -> None:
    files = [
        member("usr/share/doc/libc6/copyright", "GPL"),
        link("usr/share/doc/libc-bin", "/usr/share/doc/libc6"),
        link("usr/share/other/a", "libc6"),
        member("opt/readme", "text"),
    ]
    assert observe(files).copyrights == {"libc6": "GPL", "libc-bin": "libc6"}


def test_a_damaged_library_is_named_and_the_rest_is_examined() -> None:
    files = [member("lib/a.so", elf({".text": b"x"})[:70]), member("root/.netrc", "")]
    facts = observe(files)
    assert list(facts.unreadable) == ["lib/a.so"]
    assert facts.libraries == []
    assert observe([member("lib/b.so", elf({".text": b"x"}))]).unreadable == {}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(Store(tmp_path / "store"), tmp_path / "work")
    workspace.store.prepare()
    return workspace


def layer_of(workspace: Workspace) -> Layer:
    return write_layer(workspace.store, [Entry(path="opt/a", size=5, source=b"hello")])


def test_a_layer_is_read_once_for_the_same_rules(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(workspace)
    silent: Any = Silent()
    facts = examine_layer(workspace, "a", layer, silent)
    assert facts.folders == {"opt": 5}
    (cached,) = workspace.facts.iterdir()
    workspace.store.blob_path(layer.blob.digest).unlink()
    assert examine_layer(workspace, "a", layer, silent) == facts
    monkeypatch.setattr(examined, "rules_hash", lambda: "f" * 64)
    with pytest.raises((HostError, InputError, OSError)):
        examine_layer(workspace, "a", layer, silent)
    examined.save(workspace, layer, LayerFacts())
    (replaced,) = workspace.facts.iterdir()
    assert replaced != cached
    assert replaced.name.endswith(f"-{'f' * 16}.json")
    assert examine_layer(workspace, "a", layer, silent) == LayerFacts()


@pytest.mark.parametrize("data", [b"", b"{}", seal(b'{"folders": 1}')])
def test_a_damaged_cache_is_written_again(data: bytes, workspace: Workspace) -> None:
    layer = layer_of(workspace)
    silent: Any = Silent()
    facts = examine_layer(workspace, "a", layer, silent)
    (cached,) = workspace.facts.iterdir()
    whole = cached.read_bytes()
    cached.write_bytes(data)
    assert examine_layer(workspace, "a", layer, silent) == facts
    assert cached.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_no_error(workspace: Workspace) -> None:
    workspace.facts.parent.mkdir(parents=True)
    workspace.facts.write_text("not a folder")
    assert examine_layer(workspace, "a", layer_of(workspace), Silent()).folders  # type: ignore[arg-type]


def test_paths_that_folders_of_an_image_may_have_are_no_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/root"))
    workspace = Workspace(Store(Path("/srv/images/store")), Path("/build/.primus"))
    assert machine_paths(workspace) == [b"/srv/images/store"]
    workspace = Workspace(Store(Path("/store")), Path("/srv/build/demo/.primus"))
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert machine_paths(workspace) == [b"/home/me/.cache", b"/srv/build/demo"]
