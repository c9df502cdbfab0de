"""Optional layers (`extras` of a base in versions.yaml, and of a target) and names of layers."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.oci.store import Store
from primus_images.plan.explain import outline
from primus_images.plan.project import Project
from primus_images.plan.resolve import lock_target, resolve
from primus_images.versions import relock
from primus_images.versions.lock import Kind, Lock, LockedFile
from project_kit import Kit, plan_over
from tables import text_of

VERSIONS = text_of("versions/layers.yaml")
TARGET = text_of("images/extra.yaml").replace("bookworm", "small")


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = Kit(tmp_path)
    kit.write("versions.yaml", VERSIONS)
    kit.write("images/demo.yaml", TARGET)
    return kit


def _file(name: str, base: str) -> LockedFile:
    return LockedFile(
        kind="deb", name=name, version="1", file=f"{name}.deb", size=1, sha256="1" * 64, base=base
    )


def _lock(kit: Kit, *files: LockedFile) -> Lock:
    pins = resolve(Project(kit.root), "demo").request.flat()
    return Lock(target="demo", channel="pypi", pins=pins, files=files)


def test_an_extra_is_a_layer_a_label_and_a_line_of_image_json(kit: Kit) -> None:
    lock = _lock(kit, _file("python3.11-minimal", "small"), _file("libibverbs1", "small rdma"))
    plan = plan_over(kit.root, "demo", lock)
    (extra,) = (action for action in plan.layers if action.name == "extra rdma")
    assert [file.name for file in extra.files] == ["libibverbs1"]
    assert extra.inputs[-1].where == "versions.yaml:8:14"
    assert plan.config["config"]["Labels"] == {"io.primus.extras": "rdma"}  # type: ignore[index]
    (facts,) = (action for action in plan.layers if action.name == "facts")
    assert '"extras": [\n  "rdma"\n ]' in str(facts.spec["inline"]["etc/primus/image.json"]["text"])  # type: ignore[index]
    assert [file.name for file in plan.resolved.debs] == ["python3.11-minimal", "libibverbs1"]


def test_the_outline_counts_the_files_of_each_layer(kit: Kit) -> None:
    lock = _lock(kit, _file("python3.11-minimal", "small"), _file("libibverbs1", "small rdma"))
    plan = plan_over(kit.root, "demo", lock)
    rows = {row["name"]: row for row in outline(Store(kit.root / "store"), plan)}
    assert (rows["extra rdma"]["inputs"], rows["extra rdma"]["bytes"]) == (1, 1)
    assert {row["do"] for row in rows.values()} == {"build"}


def test_without_the_extra_the_image_is_as_before(kit: Kit) -> None:
    lock = _lock(kit, _file("python3.11-minimal", "small"), _file("libibverbs1", "small rdma"))
    layers = plan_over(kit.root, "demo", lock).layers
    kit.edit("images/demo.yaml", "extras: {pypi: [rdma]}\n", "")
    bare = plan_over(kit.root, "demo", lock)
    assert [a.key for a in bare.layers if a.name != "facts"] == [
        a.key for a in layers if a.name not in ("facts", "extra rdma")
    ]
    assert bare.config["config"]["Labels"] == {}  # type: ignore[index]


def test_the_lock_asks_for_the_base_and_the_extra_together(kit: Kit) -> None:
    bases = resolve(Project(kit.root), "demo").request.bases
    assert bases["small rdma"].packages == (
        "python3.11-minimal",
        "ibverbs-providers",
        "libibverbs1",
    )
    assert (bases["small rdma"].over, bases["small"].over) == ("small", None)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "images/demo.yaml",
            "[rdma]",
            "[rmda]",
            "images/demo.yaml:5:17: base small has no extra 'rmda'",
        ),
        (
            "images/demo.yaml",
            "[rdma]",
            "[rdma, rdma]",
            "images/demo.yaml:5:23: rdma is listed twice",
        ),
        (
            "images/demo.yaml",
            "{pypi:",
            "{amd:",
            "images/demo.yaml:5:10: extras: there is no channel 'amd' here",
        ),
        ("versions.yaml", "rdma:", "build:", "extras: 'build' is not a name"),
    ],
)
def test_a_wrong_extra_is_one_sentence_with_its_place(
    kit: Kit, file: str, old: str, new: str, said: str
) -> None:
    kit.edit(file, old, new)
    done = kit.primus("plan", "demo")
    assert done.code == 2
    assert said in done.err


def test_an_extra_of_a_channel_without_a_base_is_one_sentence(kit: Kit) -> None:
    kit.edit("images/demo.yaml", "base: small\n", "")
    with pytest.raises(InputError, match="has no extra 'rdma'") as caught:
        resolve(Project(kit.root), "demo")
    assert str(caught.value.where).startswith("images/demo.yaml:")


def test_a_pin_that_drifts_is_shown_where_it_stands(kit: Kit) -> None:
    resolved = resolve(Project(kit.root), "demo")
    places = {
        "base small suite": "versions.yaml:5:5",
        "base small rdma packages": "versions.yaml:8:14",
        "base gone suite": "versions.yaml",
    }
    for pin, where in places.items():
        assert resolved.drift_place(pin) == ("", where), pin


def test_an_extra_that_adds_nothing_is_named(kit: Kit) -> None:
    lock = _lock(kit, _file("python3.11-minimal", "small"))
    with pytest.raises(
        InputError, match=re.escape("extra rdma adds nothing to demo: base small already has")
    ):
        plan_over(kit.root, "demo", lock)


@pytest.mark.parametrize("name", ["facts", "environment"])
def test_a_component_called_like_a_layer_of_the_engine_is_refused(kit: Kit, name: str) -> None:
    """The gates would judge only one of the two layers: a secret in the folder `facts` would enter
    the image.
    """
    pin = (
        f"components:\n  {name}:\n    name: Part\n    pins:\n      - "
        f"{{path: part, to: /opt/part, channel: local}}\n"
    )
    kit.edit("versions.yaml", "components: {}\n", pin)
    kit.edit("images/demo.yaml", "components: []\nextras: {pypi: [rdma]}", f"components: [{name}]")
    kit.write("part/file", "")
    with pytest.raises(InputError, match=f"no component can be called '{name}'") as caught:
        plan_over(kit.root, "demo", _lock(kit, _file("python3.11-minimal", "small")))
    assert caught.value.where == "versions.yaml:13:9"


def test_the_image_has_the_data_of_the_single_modules_in_it() -> None:
    root = Path(__file__).parents[3]
    (pin,) = Project(root).versions.components["primus"].pins
    modules = (
        (root / "src/primus_images" / name).read_text()
        for name in pin.include
        if re.fullmatch(r"\w+\.py", name)
    )
    names = {name for text in modules for name in re.findall(r'with_name\("(.+?)"', text)}
    # The descriptions of fields are beside the modules of their classes.
    assert names - {"fields.yaml"} <= {*pin.include}


PINS = """\
release: v26.11
created: 2026-11-20
bases:
  small: {suite: bookworm, python: 3.11.2, packages: [python3.11-minimal]}
components:
  torch:
    name: PyTorch
    pins:
      - {wheel: torch, version: 1.0, channel: pypi}
      - {wheel: torch, version: 2.0, channel: pypi, targets: [demo]}
  native:
    name: Native
    pins:
      - {sdist: native, version: 1.0, channel: pypi, build: {}, requires: [torch, einops]}
  to: {name: To, pins: [{path: to, to: /opt/to, channel: local}]}
"""
PINNED = """\
description: d
base: small
channels: [pypi]
components: [torch, native, to]
"""


@pytest.fixture
def pinned(tmp_path: Path) -> Kit:
    kit = Kit(tmp_path)
    kit.write("versions.yaml", PINS)
    kit.write("images/demo.yaml", PINNED)
    kit.write("to/file", "one")
    return kit


def _python(kind: Kind, name: str, version: str, size: int = 1) -> LockedFile:
    file = _file("python3.11-minimal", "small")
    return replace(file, kind=kind, name=name, version=version, size=size, base=None)


def test_a_pin_for_the_target_precedes_and_what_a_build_requires_keeps_its_pin(
    pinned: Kit,
) -> None:
    wheels = resolve(Project(pinned.root), "demo").request.wheels
    assert wheels == {"torch": "2.0", "einops": ""}


def test_large_wheels_have_layers_of_their_own(pinned: Kit) -> None:
    files = [
        _file("python3.11-minimal", "small"),
        _python("wheel", "torch", "2.0"),
        _python("sdist", "native", "1.0"),
        _python("wheel", "large", "1", size=8_000_000),
        _python("wheel", "small", "1", size=7_999_999),
        _python("wheel", "tiny", "1"),
    ]
    plan = plan_over(pinned.root, "demo", _lock(pinned, *files))
    python = {
        action.name: [file.name for file in action.files]
        for action in plan.layers
        if action.name.startswith("python")
    }
    assert python == {"python-large": ["large"], "python": ["small", "tiny"]}


def test_a_folder_called_like_an_input_is_in_the_key(pinned: Kit) -> None:
    files = [
        _file("python3.11-minimal", "small"),
        _python("wheel", "torch", "2.0"),
        _python("sdist", "native", "1.0"),
    ]
    keys = set()
    for text in ("one", "two"):
        pinned.write("to/file", text)
        plan = plan_over(pinned.root, "demo", _lock(pinned, *files))
        keys |= {action.key for action in plan.layers if action.name == "to"}
    assert len(keys) == 2


@pytest.mark.parametrize(("options", "kept"), [({}, True), ({"refresh": True}, False)])
def test_versions_of_a_lock_are_kept_unless_they_are_refreshed(
    options: dict[str, bool], kept: bool, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = replace(resolve(Project(kit.root), "demo"), lock=_lock(kit))
    previous = []
    monkeypatch.setattr(relock, "resolve", lambda request, lock, *rest: previous.append(lock))
    nothing: Any = None
    lock_target(resolved, nothing, nothing, **options)
    assert previous == [resolved.lock if kept else None]
