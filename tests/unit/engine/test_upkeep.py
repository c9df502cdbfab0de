"""`primus clean` removes what nothing needs, and nothing else."""

import errno
import fcntl
import json
import os
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from gits import git
from primus_images.cli.host.common import SourceOptions, open_project
from primus_images.engine.upkeep import Waste, find_waste, remove
from primus_images.errors import HostError
from primus_images.oci.store import DiskFull, Store, storage_error
from primus_images.plan.project import Project
from primus_images.sandbox.container import layer_folder
from project_kit import Kit, make_project


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_project(tmp_path / "project")


def contents(kit: Kit) -> dict[str, tuple[int, int]]:
    """Every file of the workspace but the locks of the store."""
    paths = sorted((kit.root / ".primus").rglob("*"))
    return {
        str(p.relative_to(kit.root)): (p.stat().st_ino, p.stat().st_mtime_ns)
        for p in paths
        if p.is_file() and "locks" not in p.parts
    }


def kinds(kit: Kit, *words: str) -> dict[str, int]:
    result = kit.primus("clean", "--json", *words)
    assert result.code == 0, result.err
    return {row["kind"]: row["number"] for row in json.loads(result.out)["waste"]}


def test_nothing_of_a_fresh_build_is_waste(kit: Kit) -> None:
    kit.build("demo", "other")
    before = contents(kit)
    result = kit.primus("clean")
    assert (result.code, result.out, result.err) == (0, "nothing to remove\n", "")
    assert contents(kit) == before


def test_layers_of_earlier_builds_go(kit: Kit) -> None:
    kit.build()
    kit.write("parts/beta/blob", b"new")
    new = kit.build().digest
    before = contents(kit)
    # The old layer, manifest and configuration. Both layers have the same list of paths.
    assert kinds(kit, "--dry-run")["layers and manifests"] == 3
    assert contents(kit) == before
    assert kinds(kit)["records of builds"] == 1
    assert set(contents(kit)) < set(before)
    assert kinds(kit) == {}
    assert "nothing to do" in kit.build().err
    assert kit.primus("verify", "demo").code == 0
    kit.write("parts/alpha/more", b"more")
    assert kit.layers() == {"alpha": True, "beta": False, "recipes": False}
    assert kit.build().digest != new


@pytest.mark.parametrize("caches", [True, False])
def test_a_full_disk_is_freed(kit: Kit, monkeypatch: pytest.MonkeyPatch, caches: bool) -> None:
    kit.build("demo", "other")
    store = kit.root / ".primus/store"
    if caches:
        kit.write(".primus/logs/old-0123.log", "x")
    blobs = len(list((store / "blobs/sha256").iterdir()))
    untag = Store.untag

    def full(self: Store, ref: str) -> None:
        logs = kit.root / ".primus/logs"
        freed = blobs - len(list((store / "blobs/sha256").iterdir()))
        if not freed and not (caches and not list(logs.glob("old*"))):
            raise storage_error(OSError(errno.ENOSPC, "full"), store)
        untag(self, ref)

    monkeypatch.setattr(Store, "untag", full)
    assert kit.primus("clean", "--image", "v26.11-other").code == 0
    assert "v26.11-other" not in (store / "index.json").read_text()
    monkeypatch.undo()
    assert "nothing to do" in kit.build("demo").err


def test_an_image_that_is_named_goes_with_its_layers(kit: Kit) -> None:
    kit.build("demo", "other")
    assert kit.primus("clean", "--image", "v26.11-othr").code == 2
    refused = kit.primus("clean", "--image", "v26.11-othr").err
    assert "no image called 'v26.11-othr'" in refused
    assert "did you mean 'v26.11-other'?" in refused
    assert kinds(kit, "--image", "v26.11-other") == {
        "records of builds": 1,
        "layers and manifests": 1,
    }
    (left,) = json.loads((kit.root / ".primus/store/index.json").read_bytes())["manifests"]
    assert left["annotations"]["org.opencontainers.image.ref.name"] == "v26.11-demo"
    assert "nothing to do" in kit.build("demo").err


def test_caches_go_when_asked_for_and_the_images_stay(kit: Kit) -> None:
    # A process of its own: a fork has the hashes that this process knows, and writes none.
    built = subprocess.run(
        kit.command("build", "demo"), cwd=kit.root, env=kit.env, check=True, stdout=subprocess.PIPE
    )
    digest = built.stdout.decode().split()[-1]
    (blob, *_) = json.loads((kit.root / ".primus/store/blobs/sha256" / digest[7:]).read_bytes())[
        "layers"
    ]
    layer = layer_folder(blob["digest"])
    for path in (
        "unpacked/0123/etc/passwd",
        "unpacked/root/containers/x/upper/f",
        "unpacked/root/layers/0123/f",
        f"unpacked/root/layers/{layer}/f",
        "files/sha256/" + "0" * 64,
        "verify-x/store/index.json",
    ):
        kit.write(f".primus/{path}", "x")
    assert kinds(kit, "--dry-run") == {
        "unpacked layers": 3,
        "downloaded files": 1,
        "stores of verify": 1,
    }
    # The files of a container go first, with the container.
    assert kinds(kit) == {"unpacked layers": 2, "downloaded files": 1, "stores of verify": 1}
    assert [
        str(path.relative_to(kit.root)) for path in (kit.root / ".primus/unpacked").rglob("f")
    ] == [f".primus/unpacked/root/layers/{layer}/f"]
    kit.write(".primus/files/sha256/" + "0" * 64, "x")
    found = kinds(kit, "--caches")
    assert set(found) == {
        "unpacked layers",
        "downloaded files",
        "findings of gates",
        "hashes of files",
    }
    assert kit.build().digest == digest


def test_locked_files_stay(kit: Kit) -> None:
    kit.build()
    kit.write(".primus/files/sha256/" + "1" * 64, "x")
    (one,) = find_waste(Project.find(kit.root).workspace, set())
    assert (one.kind, [path.name for path in one.paths]) == ("downloaded files", ["1" * 64])
    assert find_waste(Project.find(kit.root).workspace, {"1" * 64}) == []


def test_a_store_in_use_is_left_alone(kit: Kit) -> None:
    kit.build()
    kit.write("parts/beta/blob", b"new")
    with ExitStack() as stack:
        index = stack.enter_context((kit.root / ".primus/store/locks/index").open("w"))
        fcntl.flock(index, fcntl.LOCK_EX)
        build = subprocess.Popen(
            kit.command("build", "demo"), cwd=kit.root, env=kit.env, stdout=subprocess.PIPE
        )
        stack.callback(build.kill)
        # The build has written its layers, and waits for the index to name its image.
        blobs = kit.root / ".primus/store/blobs/sha256"
        deadline = time.monotonic() + 30
        while (
            len(find_waste(Project.find(kit.root).workspace, set())) < 2
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        before = sorted(blobs.iterdir())
        result = kit.primus("clean")
        assert result.code == 3
        assert "another command uses the store" in result.err
        assert set(before) <= set(blobs.iterdir())
        index.close()
        out, _ = build.communicate(timeout=30)
    assert build.returncode == 0
    assert kit.primus("clean").code == 0
    assert kit.build().digest == out.decode().split()[-1]


def test_downloads_and_unpacked_layers_in_use_are_left_alone_whatever_the_store(kit: Kit) -> None:
    kit.build("demo", "--store", "other")
    kit.write(".primus/unpacked/0123/etc/passwd", "x")
    workspace = Project.find(kit.root).workspace
    workspace.hold()
    before = contents(kit)
    result = kit.primus("clean", "--store", "other", "--caches")
    assert result.code == 3
    assert (
        f"{workspace.folder}: another command uses the downloads and unpacked layers" in result.err
    )
    assert contents(kit) == before


def test_a_first_command_holds_the_folder_that_it_creates(kit: Kit) -> None:
    open_project(SourceOptions(project=kit.root, store=None, channel=None))
    assert kit.primus("clean").code == 3


def test_an_interrupt_at_any_file_leaves_a_valid_store(kit: Kit) -> None:
    for text in (b"zero", b"one", b"two"):
        kit.write("parts/beta/blob", text)
        digest = kit.build().digest
    kit.write(".primus/unpacked/0123/etc/passwd", "x")
    store = Project.find(kit.root).workspace.store
    cuts = 0
    while waste := find_waste(Project.find(kit.root).workspace, set()):
        first = replace(waste[0], paths=waste[0].paths[:1])
        remove([first], Project.find(kit.root).workspace.store)
        cuts += 1
        for path in (store.root / "actions").glob("*.json"):
            layer = store.layer(path.stem)
            assert layer is not None, f"{path.stem} names a blob that is gone"
    assert cuts >= 10
    assert "nothing to do" in kit.build().err
    assert kit.primus("verify", "demo").code == 0
    assert kit.build().digest == digest


def test_a_half_removed_layer_never_counts_as_unpacked(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.build()
    kit.write(".primus/unpacked/0123/etc/passwd", "x")
    monkeypatch.setattr("primus_images.engine.upkeep.remove_tree", lambda _path: None)
    with pytest.raises(HostError, match="cannot be removed"):
        workspace = Project.find(kit.root).workspace
        remove(find_waste(workspace, set()), workspace.store)
    assert [p.name for p in (kit.root / ".primus/unpacked").iterdir()] == ["0123.tmp"]


def test_a_read_only_disk_is_no_lack_of_rights(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.build()
    kit.write(".primus/unpacked/0123.tmp/etc/passwd", "x")
    workspace = Project.find(kit.root).workspace
    waste = find_waste(workspace, set())
    monkeypatch.setattr("primus_images.engine.upkeep.remove_tree", lambda _path: None)
    real = os.statvfs

    def read_only(path: Path) -> os.statvfs_result:
        fields = list(real(path))
        fields[8] |= os.ST_RDONLY
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", read_only)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        remove(waste, workspace.store)
    assert caught.value.filename == str(kit.root / ".primus/unpacked/0123.tmp")


@pytest.mark.parametrize("inputs", [None, [], {"actions": None}, {"actions": {"alpha": "key"}}])
def test_records_of_another_version_count_as_missing(kit: Kit, inputs: object) -> None:
    digest = kit.build().digest
    store = Project.find(kit.root).workspace.store
    (name,) = (path.stem for path in (store.root / "targets").iterdir())
    state = store.record("targets", name)
    assert state is not None
    store.save("targets", name, {**state, "inputs": inputs})
    store.save("actions", "0" * 64, {"wheel": {"path": "x"}})
    assert "its first build" in kit.primus("explain", "demo").out
    assert kinds(kit) == {"records of builds": 2}
    assert store.images()["v26.11-demo"]["digest"] == digest
    assert kit.build().digest == digest


def test_a_damaged_manifest_stops_it(kit: Kit) -> None:
    digest = kit.build().digest
    blob = kit.root / ".primus/store/blobs/sha256" / digest.removeprefix("sha256:")
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes().replace(b"layer", b"laser", 1))
    before = contents(kit)
    result = kit.primus("clean")
    assert result.code == 3
    assert "is damaged" in result.err
    assert "--rehash" in result.err
    assert contents(kit) == before


def test_layers_of_an_image_whose_record_is_lost_stay(kit: Kit) -> None:
    digest = kit.build().digest
    (kit.root / ".primus/store/targets/demo.json").unlink()
    assert kinds(kit) == {}
    assert kit.layers() == {"alpha": False, "beta": False, "recipes": False}
    assert kit.build().digest == digest


@pytest.mark.parametrize("name", ["unpacked/root/containers.conf", "store/index.json", "link"])
@pytest.mark.parametrize("verb", ["plan", "clean"])
def test_a_workspace_that_somebody_committed_is_refused(kit, name, verb):
    path = kit.write(f".primus/{name}", "x")
    if name == "link":
        path.unlink()
        path.symlink_to("/")
    git(kit.root, "init", "-q")
    target = ["alpha"] if verb != "clean" else []
    assert "is committed" not in kit.primus(verb, *target).err
    if name != "link":
        kit.write(f".primus/{name}", "x")
    git(kit.root, "add", "--force", f".primus/{name}")
    refused = kit.primus(verb, *target)
    assert refused.code == 2
    assert f"{kit.root}/.primus/{name}: this file is committed" in refused.err
    assert "git rm -r --cached .primus" in refused.err


def test_a_committed_workspace_is_seen_whatever_repository_git_is_told(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a hook of another repository that runs primus.
    git(tmp_path, "init", "-q", "other")
    kit.write(".primus/file", "x")
    git(kit.root, "init", "-q")
    git(kit.root, "add", "--force", ".primus/file")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    assert "this file is committed" in kit.primus("plan", "demo").err


def test_on_a_full_disk_records_then_the_largest_blobs_make_room_for_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the index is written, the image counts as damaged: no blob more than needed is gone."""
    sizes = {"record": 100, "small": 10_000, "large": 1_000_000, "middle": 100_000}
    paths = {}
    for name, size in sizes.items():
        paths[name] = tmp_path / name
        paths[name].write_bytes(b"x" * size)
    left: list[list[str]] = []

    def untag(_store: Store, _ref: str) -> None:
        left.append([name for name, path in paths.items() if path.exists()])
        # A disk without free inodes needs several.
        if len(left) < 4:
            raise DiskFull("the disk is full")

    monkeypatch.setattr(Store, "untag", untag)
    record, *blobs = paths.values()
    waste = [
        Waste(kind="layers and manifests", paths=tuple(blobs), size=1_110_000),
        Waste(kind="records of builds", paths=(record,), size=100),
    ]
    remove(waste, Store(tmp_path / "store"), ["v26.11-cpu"])
    assert left == [
        ["record", "small", "large", "middle"],
        ["small", "large", "middle"],
        ["small", "middle"],
        ["small"],
    ]
    assert not any(path.exists() for path in paths.values())
