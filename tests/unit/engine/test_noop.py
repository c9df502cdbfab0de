"""A build with nothing to do: it says so exactly while the image is what a build into an empty
store would make.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from primus_images.cli.main import main
from primus_images.errors import HostError
from primus_images.files import seal, write_sealed
from primus_images.gates.rules import rules_hash
from primus_images.oci.store import Store
from primus_images.plan.action import finished, stored
from primus_images.plan.layers import plan_image
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from project_kit import Kit, make_project


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    kit = make_project(tmp_path_factory.mktemp("built") / "project")
    (kit.root / "parts/alpha/empty").mkdir()
    time.sleep(0.06)
    kit.build("demo", "other")
    return kit


@pytest.fixture
def kit(built: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    shutil.copytree(built.root, tmp_path / "project", symlinks=True)
    monkeypatch.chdir(tmp_path / "project")
    return Kit(tmp_path / "project")


def build(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[str, bool]:
    """Return the digest and whether there was nothing to do."""
    capfd.readouterr()
    assert main(["build", "demo", *words]) == 0
    out, err = capfd.readouterr()
    return out.splitlines()[-1], "nothing to do" in err


def same_size_same_times(kit: Kit) -> None:
    path = kit.root / "parts/beta/blob"
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def layer(kit: Kit) -> Path:
    blobs = kit.root / ".primus/store/blobs/sha256"
    entry = json.loads((kit.root / ".primus/store/index.json").read_bytes())["manifests"][0]
    manifest = json.loads((blobs / entry["digest"][7:]).read_bytes())
    return blobs / str(manifest["layers"][0]["digest"][7:])


def behind_link(kit: Kit) -> None:
    (kit.root / "parts/alpha").rename(kit.root / "real")
    (kit.root / "parts/alpha").symlink_to("../real")
    kit.write("real/new", "")


def stats(kit: Kit, *row: object) -> None:
    path = str(kit.root / "parts/beta/blob")
    write_sealed(kit.root / ".primus/cache/stats.json", {path: list(row)})


TOUCHES: dict[str, Callable[[Kit], object]] = {
    "nothing": lambda kit: None,
    "pins": lambda kit: kit.edit("versions.yaml", "/opt/beta", "/opt/bets"),
    "target": lambda kit: kit.edit("images/demo.yaml", "red", "rod"),
    "recipe": lambda kit: kit.write("recipes/one.yaml", "a: 2\n"),
    "content of the same size and time": same_size_same_times,
    "mode": lambda kit: (kit.root / "parts/alpha/sub/run").chmod(0o644),
    "added file": lambda kit: kit.write("parts/alpha/new", ""),
    "added in an empty folder": lambda kit: kit.write("parts/alpha/empty/new", ""),
    "added behind a link": behind_link,
    "removed file": lambda kit: (kit.root / "parts/alpha/link").unlink(),
    "removed folder": lambda kit: shutil.rmtree(kit.root / "parts/alpha/sub"),
    "missing blob": lambda kit: layer(kit).unlink(),
    "cut blob": lambda kit: os.truncate(layer(kit), 10),
    "layout file": lambda kit: kit.write(".primus/store/oci-layout", "{}"),
    "no record": lambda kit: (kit.root / ".primus/store/targets/demo.json").unlink(),
    "odd record": lambda kit: (kit.root / ".primus/store/targets/demo.json").write_bytes(
        seal(b'{"digest": 1}')
    ),
    "copy of the project": lambda kit: [os.utime(path) for path in kit.root.rglob("parts/*/*")],
    "short row of hashes": lambda kit: stats(kit, 1000),
    "odd rows of hashes": lambda kit: stats(kit, [], None, {"a": 1}, "x", 5),
    "no hash": lambda kit: stats(
        kit,
        *(
            getattr((kit.root / "parts/beta/blob").stat(), f"st_{name}")
            for name in ("size", "mtime_ns", "ctime_ns", "ino")
        ),
        "",
    ),
}
NOTHING_TO_DO = {
    "nothing",
    "copy of the project",
    "short row of hashes",
    "odd rows of hashes",
    "no hash",
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_nothing_to_do_is_said_exactly_if_it_is_true(
    touch: str, kit: Kit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    TOUCHES[touch](kit)
    digest, nothing = build(capfd)
    assert nothing == (touch in NOTHING_TO_DO)
    shutil.rmtree(kit.root / ".primus/cache")
    assert build(capfd, "--store", str(tmp_path / "fresh")) == (digest, False)
    assert build(capfd) == (digest, True), "the store is whole again"


def test_a_flipped_bit_in_a_small_file_of_the_store_is_seen(kit: Kit) -> None:
    """In the index, the manifest and the config, wherever it is. Layers are compared by
    ``--rehash``.
    """
    shutil.rmtree(kit.root / "images/locks", ignore_errors=True)
    store = Store(kit.root / ".primus/store")
    store.untag("v26.11-other")
    plan = plan_image(resolve(Project(kit.root), "demo"), Project(kit.root).workspace.stats)
    image = stored(store, plan)
    assert image is not None
    assert finished(store, plan, rules_hash()) is not None
    config = json.loads(image.manifest)["config"]["digest"]
    for path in (store.root / "index.json", store.blob_path(image.digest), store.blob_path(config)):
        data = path.read_bytes()
        for place in range(0, len(data), 3):
            path.write_bytes(
                data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
            )
            try:
                assert stored(store, plan) is None, (path, place)
            except HostError as error:
                assert "primus build --rehash creates it again" in str(error)
        path.write_bytes(data)
    assert finished(store, plan, rules_hash()) is not None


def test_other_rules_judge_again(kit: Kit) -> None:
    store = Store(kit.root / ".primus/store")
    plan = plan_image(resolve(Project(kit.root), "demo"), Project(kit.root).workspace.stats)
    assert finished(store, plan, "other rules") is None
