"""What an action reads is what its key names, and a record of another version is missing."""

import hashlib
from pathlib import Path

import pytest

from primus_images.engine.workshop import Kind, Wheel, Workshop, own_code, wheel_of
from primus_images.errors import CheckFailed, HostError
from primus_images.oci.store import Store
from primus_images.plan.action import Action, Input
from primus_images.plan.project import Workspace
from primus_images.progress import Progress
from primus_images.versions.lock import LockedFile

WHEEL = {"file": "a-1-py3-none-any.whl", "sha256": "1" * 64, "size": 1}


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    workspace = Workspace(Store(tmp_path / "store"), tmp_path)
    workspace.store.prepare()
    workspace.files.path(WHEEL["sha256"]).parent.mkdir(parents=True)
    workspace.files.path(WHEEL["sha256"]).write_bytes(b"x")
    return Workshop(workspace=workspace, progress=Progress())


@pytest.fixture
def build() -> Action:
    return Action(name="build a", kind="build", inputs=(), spec={"package": "a"})


def test_a_wheel_is_read(shop: Workshop, build: Action) -> None:
    shop.workspace.store.save("actions", build.key, {"wheel": WHEEL})
    assert wheel_of(shop.workspace.store, build.key) == Wheel(**WHEEL)
    assert shop.done(build)


@pytest.mark.parametrize(
    "wheel",
    [
        None,
        [],
        "a.whl",
        {},
        {**WHEEL, "tag": "any"},
        {**WHEEL, "size": "1"},
        {"file": "a.whl", "sha256": "1" * 64},
    ],
)
def test_a_wheel_in_another_shape_is_missing(shop: Workshop, build: Action, wheel: object) -> None:
    shop.workspace.store.save("actions", build.key, {} if wheel is None else {"wheel": wheel})
    assert not shop.done(build)
    layer = Action(name="a", kind="wheels", inputs=(), spec={}, needs=(build,))
    with pytest.raises(HostError, match="build a has no result in the store"):
        shop.read_by(layer)


DATA = b"bytes of a file"
FILE = LockedFile(
    kind="layer",
    name="a",
    version="1",
    file="a.tar",
    size=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
)


@pytest.fixture
def fetched(shop: Workshop) -> Path:
    path = shop.workspace.files.path(FILE.sha256)
    path.write_bytes(DATA)
    return path


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_file_that_changes_before_or_while_it_is_read_is_refused(
    shop: Workshop, fetched: Path, moment: str
) -> None:
    action = Action(name="a", kind="image", inputs=(), files=(FILE,))

    def make(action: Action, shop: Workshop, scratch: Path) -> Wheel:
        fetched.write_bytes(DATA[::-1])
        return Wheel(**WHEEL)

    if moment == "before":
        fetched.write_bytes(DATA[::-1])
    with pytest.raises(HostError, match=r"the fetched a\.tar is damaged"):
        shop.run(action, Kind(make))
    assert not fetched.exists()
    assert shop.workspace.store.record("actions", action.key) is None


def test_a_script_that_changed_since_the_plan_does_not_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_bytes(DATA)
    (tmp_path / "scratch").mkdir()
    inputs = (Input(name="bytecode", value=f"sha256:{FILE.sha256}"),)
    action = Action(name="a", kind="wheels", inputs=inputs)
    assert own_code(action, "bytecode", script, tmp_path / "scratch").read_bytes() == DATA
    script.write_bytes(b"other")
    with pytest.raises(CheckFailed, match="changed while the build read it"):
        own_code(action, "bytecode", script, tmp_path / "scratch")
