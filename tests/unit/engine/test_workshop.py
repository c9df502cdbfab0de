"""A record that another version wrote counts as missing."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from primus_images.engine.workshop import Wheel, Workshop, wheel_of
from primus_images.errors import HostError
from primus_images.oci.store import Store
from primus_images.plan.action import Action
from primus_images.plan.project import Workspace

WHEEL = {"file": "a-1-py3-none-any.whl", "sha256": "1" * 64, "size": 1}


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    workspace = Workspace(Store(tmp_path / "store"), tmp_path)
    workspace.store.prepare()
    workspace.files.path(WHEEL["sha256"]).parent.mkdir(parents=True)
    workspace.files.path(WHEEL["sha256"]).write_bytes(b"x")
    return Workshop(workspace=workspace, progress=SimpleNamespace())


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
