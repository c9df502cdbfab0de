"""What an action reads is what its key names, and a record of another version is missing."""

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.engine import workshop
from primus_images.engine.kinds import wheels
from primus_images.engine.workshop import (
    Kind,
    Task,
    Wheel,
    Workshop,
    own_code,
    record_of,
    wheel_of,
)
from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.files import sha256_of
from primus_images.oci.layer import write_layer
from primus_images.oci.store import Store
from primus_images.oci.tar import Entry
from primus_images.plan.action import Action, Input
from primus_images.plan.project import Workspace
from primus_images.progress import Progress, choose_progress
from primus_images.sandbox.container import Command, RootFs
from primus_images.sandbox.engine import Engine
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


class Tools(Engine):
    """An engine that notes what it is told, prints ``says`` and ends with ``code``."""

    name = "tools"

    def __init__(self, says: str = "", code: int = 0) -> None:
        self.says = says
        self.code = code
        self.told: list[tuple[RootFs, Command]] = []

    def run(self, root: RootFs, command: Command, *, stdin: Any, stdout: Any, stderr: Any) -> int:
        self.told.append((root, command))
        stdout.write(self.says.encode())
        assert stdin.read() == b""
        return self.code


@pytest.fixture
def tool(shop: Workshop) -> Action:
    """An action whose layer is in the store."""
    action = Action(name="compiler", kind="files", inputs=())
    layer = write_layer(shop.workspace.store, [Entry(path="bin/cc", source=b"cc", size=2)])
    shop.workspace.store.save("actions", action.key, record_of(action, layer))
    return action


def compiled(
    shop: Workshop, engine: Engine, tool: Action, monkeypatch: pytest.MonkeyPatch
) -> Action:
    monkeypatch.setattr(workshop, "choose", lambda name: engine)
    action = Action(name="build a", kind="build", inputs=(), tools=(tool,))
    folder = shop.workspace.folder
    task = Task(
        argv=("cc", "-v"),
        inputs={"/src": folder, "/in": folder},
        outputs=folder / "made",
        env={"JOBS": "2"},
    )
    shop.run_with_tools(action, task, "the compiler")
    return action


def test_a_tool_runs_as_root_of_its_layers_and_keeps_one_folder(
    shop: Workshop, tool: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Tools(says="compiled")
    action = compiled(shop, engine, tool, monkeypatch)
    ((root, command),) = engine.told
    layer = shop.workspace.store.layer(tool.key)
    assert layer
    assert [row.diff_id for row in root.layers] == [layer.diff_id]
    assert b"".join(root.tar(root.layers[0])).count(b"bin/cc") == 1
    assert command.argv[-2:] == ("cc", "-v")
    assert (command.user, command.cwd, command.hostname) == ("0", "/", "build")
    assert (command.network, command.entrypoint) == (False, False)
    assert command.env["JOBS"] == "2"
    assert command.env["SOURCE_DATE_EPOCH"]
    places = [(mount.target, mount.read_only) for mount in command.mounts]
    assert places == [("/in", True), ("/src", True), ("/out", False)]
    assert (shop.workspace.folder / "made").is_dir()
    assert shop.log(action).read_text() == "compiled"
    assert shop.log(action).name == f"build-a-{action.key[:12]}.log"


def test_a_tool_that_fails_is_told_with_the_end_of_its_log(
    shop: Workshop, tool: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Tools(says="first\nlast\n", code=2)
    with pytest.raises(CheckFailed, match="the compiler ended with exit code 2:\nfirst\nlast"):
        compiled(shop, engine, tool, monkeypatch)


@pytest.mark.parametrize(
    "words",
    ["No space left on device", "Disk quota exceeded", "You don't have enough free space in"],
)
def test_a_tool_that_fills_the_disk_says_so(
    words: str, shop: Workshop, tool: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Tools(says=f"cc: {words} /tmp\n", code=1)
    store = shop.workspace.store.root
    with pytest.raises(HostError, match=f"the disk that holds {store} is full"):
        compiled(shop, engine, tool, monkeypatch)


def test_the_disk_that_is_full_is_named(
    shop: Workshop, tool: Action, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("roomy", "full"):
        (tmp_path / name).mkdir()

    def room(path: Path) -> Any:
        return SimpleNamespace(f_bavail=0 if path.name == "full" else 1)

    monkeypatch.setattr(workshop.os, "statvfs", room)
    log = tmp_path / "log"
    log.write_text("killed")
    error = workshop.disk_is_full(log, tmp_path / "roomy", tmp_path / "full", tmp_path / "absent")
    assert error is not None
    assert error.message == f"the disk that holds {tmp_path / 'full'} is full"
    assert workshop.disk_is_full(log, tmp_path / "roomy", tmp_path / "absent") is None


def test_a_tool_whose_layer_is_gone_is_named(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Action(name="gone", kind="files", inputs=())
    with pytest.raises(HostError, match="a layer that build a needs is not in the store"):
        compiled(shop, Tools(), gone, monkeypatch)


def test_a_file_that_a_pin_names_wrongly_has_the_pins_line(shop: Workshop) -> None:
    def make(*_: object) -> Wheel:
        raise InputError("there is no such folder", hint="name another one")

    inputs = (Input(name="a", value="b"), Input(name="c", value="d", where="versions.yaml:3:4"))
    action = Action(name="alpha", kind="files", inputs=inputs)
    with pytest.raises(InputError, match="alpha: there is no such folder") as caught:
        shop.run(action, Kind(make=make))
    assert (caught.value.where, caught.value.hint) == ("versions.yaml:3:4", "name another one")


def test_an_action_is_told_with_its_product_and_run_once(
    shop: Workshop, build: Action, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Wheel(**WHEEL)  # type: ignore[arg-type]
    with choose_progress() as progress:
        told = replace(shop, progress=progress)
        seconds = told.run(build, Kind(make=lambda *_: made))
        assert seconds is not None
        assert 0 <= seconds < 60
        assert told.run(build, Kind(make=lambda *_: made)) is None
    assert capsys.readouterr().err == f"✓ build a  {WHEEL['file']}, {seconds:.1f} s\n"


class Building(Tools):
    """An engine whose command writes these files to /out."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def run(self, root: RootFs, command: Command, **streams: Any) -> int:
        (out,) = [mount.source for mount in command.mounts if mount.target == "/out"]
        for name in self.names:
            (out / name).write_text(f"bytes of {name}")
        return super().run(root, command, **streams)


@pytest.fixture
def source(tool: Action) -> Action:
    """An action that builds a wheel of a fetched source archive."""
    order = Input(name="sorted folders", value=f"sha256:{sha256_of(wheels.ORDER)}")
    archive = replace(FILE, kind="sdist", file="a-1.tar.gz")
    spec = {"script": "build it", "python": "3.11", "environment": {"CC": "mine"}, "package": "a"}
    return Action(
        name="build a", kind="build", inputs=(order,), files=(archive,), spec=spec, tools=(tool,)
    )


def test_a_wheel_is_built_of_its_source_alone(
    shop: Workshop, source: Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Building("a-1-cp311.whl", "log.txt")
    monkeypatch.setattr(workshop, "choose", lambda name: engine)
    monkeypatch.setattr(wheels.os, "sched_getaffinity", lambda _: range(3))
    monkeypatch.setattr(wheels, "_JOB_BYTES", 1)
    made = wheels.build(source, shop, tmp_path)
    data = b"bytes of a-1-cp311.whl"
    sha256 = hashlib.sha256(data).hexdigest()
    assert made == Wheel(file="a-1-cp311.whl", sha256=sha256, size=len(data))
    assert shop.workspace.files.path(sha256).read_bytes() == data
    ((_, command),) = engine.told
    assert command.argv[-3:] == ("wheel", "/in/a-1.tar.gz", "3.11")
    assert (command.env["CC"], command.env["MAX_JOBS"]) == ("mine", "3")
    # A machine with little memory runs one job at least.
    monkeypatch.setattr(wheels, "_JOB_BYTES", 1 << 60)
    (tmp_path / "again").mkdir()
    wheels.build(source, shop, tmp_path / "again")
    assert engine.told[-1][1].env["CMAKE_BUILD_PARALLEL_LEVEL"] == "1"


@pytest.mark.parametrize(
    ("names", "said"),
    [((), "none"), (("b.whl", "a.whl"), "a.whl, b.whl"), (("a.txt",), "none")],
)
def test_a_build_of_no_or_several_wheels_is_refused(
    names: tuple[str, ...],
    said: str,
    shop: Workshop,
    source: Action,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workshop, "choose", lambda name: Building(*names))
    with pytest.raises(CheckFailed) as caught:
        wheels.build(source, shop, tmp_path)
    assert caught.value.message == f"build a must build one wheel, but built {said}"
    assert caught.value.where == str(shop.log(source))
