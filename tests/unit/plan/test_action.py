"""Actions, and the image of their layers: keys, order, and when the store holds the image."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.oci.layer import write_layer
from primus_images.oci.store import CONFIG_TYPE, MANIFEST_TYPE, Blob, Store, digest_of
from primus_images.oci.tar import Entry
from primus_images.plan import explain
from primus_images.plan.action import (
    Action,
    Built,
    Composed,
    ImagePlan,
    Input,
    compose,
    finished,
    judged_by,
    ordered,
    stored,
    tree_record,
)

ROCM = Action(name="rocm", kind="debs", inputs=(Input("hip", "7.0", "versions.yaml:3:5"),))
BUILD = Action(name="build aiter", kind="build", inputs=(Input("git", "a1b2"),), tools=(ROCM,))
WHEELS = Action(name="aiter", kind="wheels", inputs=(), needs=(BUILD,))


def plan_of(*layers: Action, **fields: Any) -> ImagePlan:
    choice = SimpleNamespace(suffix="-preview")
    resolved: Any = SimpleNamespace(
        name="demo", ref="v1-demo", choice=choice, budget_gb=4.5, arch="gfx942"
    )
    return ImagePlan(
        resolved=resolved,
        layers=layers,
        config=fields.get("config", {"os": "linux"}),
        annotations=fields.get("annotations", {"title": "demo"}),
    )


PLAN = plan_of(ROCM, WHEELS)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "files"},
        {"inputs": (Input("hip", "7.1", "versions.yaml:3:5"),)},
        {"inputs": ()},
        {"spec": {"strip": True}},
        {"needs": (BUILD,)},
    ],
)
def test_what_affects_the_bytes_changes_the_key(fields: Mapping[str, Any]) -> None:
    assert replace(ROCM, **fields).key != ROCM.key


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "hip"},
        {"inputs": (Input("hip", "7.0", "versions.yaml:9:9"),)},
        {"tools": (BUILD,)},
        {"root": "parts"},
        {"tree": (("a", "file", "1"),)},
    ],
)
def test_what_does_not_affect_the_bytes_keeps_the_key(fields: Mapping[str, Any]) -> None:
    assert replace(ROCM, **fields).key == ROCM.key


def test_a_key_changes_with_the_key_of_what_is_needed() -> None:
    other = replace(WHEELS, needs=(replace(BUILD, inputs=(Input("git", "c3d4"),)),))
    assert other.key != WHEELS.key


@pytest.mark.parametrize(
    "other",
    [
        plan_of(WHEELS, ROCM),
        plan_of(ROCM),
        plan_of(ROCM, WHEELS, config={"os": "other"}),
        plan_of(ROCM, WHEELS, annotations={}),
    ],
)
def test_the_key_of_an_image_is_of_its_layers_in_order_and_its_settings(other: ImagePlan) -> None:
    assert other.key != PLAN.key
    assert plan_of(ROCM, WHEELS).key == PLAN.key


def test_the_last_build_has_the_name_of_target_and_channel() -> None:
    assert (PLAN.ref, PLAN.state) == ("v1-demo", "demo-preview")


@pytest.mark.parametrize(
    ("done", "names"),
    [
        ([], ["rocm", "build aiter", "aiter"]),
        ([ROCM], ["build aiter", "aiter"]),
        ([BUILD], ["aiter"]),
        ([WHEELS], []),
    ],
)
def test_each_action_is_once_and_after_what_it_needs(done: list[Action], names: list[str]) -> None:
    actions = ordered([WHEELS, WHEELS], lambda action: action in done)
    assert [action.name for action in actions] == names


def test_an_action_that_another_layer_needs_as_well_is_not_left_out() -> None:
    assert ordered([WHEELS, ROCM], lambda action: action is WHEELS) == [ROCM]


def test_the_record_of_a_plan_has_every_action_with_its_inputs_and_files() -> None:
    tree = (("a", "exec", "12"), ("b", "link", "a"))
    files = Action(name="facts", kind="files", inputs=(), tree=tree)
    record = tree_record(plan_of(WHEELS, files))
    assert list(record["actions"]) == ["rocm", "build aiter", "aiter", "facts"]
    assert record["actions"]["rocm"] == {
        "key": ROCM.key,
        "kind": "debs",
        "inputs": {"hip": ["7.0", "versions.yaml:3:5"]},
        "tree": {},
    }
    assert record["actions"]["facts"]["tree"] == {"a": "exec 12", "b": "link a"}
    assert record["config"] == {"os": "linux"}
    assert record["annotations"] == {"title": "demo"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.prepare()
    return store


def _run(store: Store, action: Action) -> None:
    data = action.name.encode()
    layer = write_layer(store, [Entry(path="opt/name", size=len(data), source=data)])
    store.save("actions", action.key, {"layer": asdict(layer)})


def _built(store: Store) -> Composed:
    for action in PLAN.layers:
        _run(store, action)
    image = compose(store, PLAN)
    assert image
    store.put(image.config, CONFIG_TYPE)
    store.tag(PLAN.ref, store.put(image.manifest, MANIFEST_TYPE))
    return image


def test_an_image_is_composed_when_all_its_layers_are_there(store: Store) -> None:
    assert compose(store, PLAN) is None
    _run(store, ROCM)
    assert compose(store, PLAN) is None
    _run(store, WHEELS)
    image = compose(store, PLAN)
    assert image
    bottom, top = image.layers
    assert image.rows == [(ROCM, bottom), (WHEELS, top)]
    assert image.size == bottom.blob.size + top.blob.size
    assert image.digest == digest_of(image.manifest)
    config = json.loads(image.config)
    assert config["os"] == "linux"
    assert config["rootfs"] == {"type": "layers", "diff_ids": [bottom.diff_id, top.diff_id]}
    assert config["history"] == [
        {"created_by": "primus debs rocm", "comment": ROCM.key},
        {"created_by": "primus wheels aiter", "comment": WHEELS.key},
    ]
    manifest = json.loads(image.manifest)
    assert manifest["schemaVersion"] == 2
    assert manifest["annotations"] == {"title": "demo"}
    assert manifest["config"] == Blob.of(image.config, CONFIG_TYPE).descriptor
    assert manifest["layers"] == [bottom.blob.descriptor, top.blob.descriptor]


@pytest.mark.parametrize("part", ["nothing", "name", "manifest", "config", "layer"])
def test_the_store_holds_an_image_only_as_a_whole(part: str, store: Store) -> None:
    image = _built(store)
    if part == "name":
        store.untag(PLAN.ref)
    if part == "manifest":
        store.blob_path(image.digest).write_bytes(b"x")
    if part == "config":
        store.blob_path(digest_of(image.config)).write_bytes(b"x" * len(image.config))
    if part == "layer":
        store.blob_path(image.layers[0].blob.digest).unlink()
    held = stored(store, PLAN)
    assert held == (image if part == "nothing" else None)
    lost = explain.lost(store, PLAN)
    names = [change.action for change in lost]
    assert names == {"nothing": [], "layer": ["rocm"]}.get(part, ["image"])


@pytest.mark.parametrize(
    ("change", "is_finished"),
    [
        ({}, True),
        ({"failed": ["size: too large"]}, True),
        ({"digest": "sha256:1"}, False),
        ({"judged": "rules-1 budget 9 arch gfx942"}, False),
        ({"judged": None}, False),
    ],
)
def test_a_finished_image_was_judged_by_these_gates(
    change: Mapping[str, Any], is_finished: bool, store: Store
) -> None:
    image = _built(store)
    assert finished(store, PLAN, "rules-1") is None
    record = {"digest": image.digest, "judged": judged_by(PLAN, "rules-1"), **change}
    store.save("targets", PLAN.state, record)
    built = finished(store, PLAN, "rules-1")
    assert (built is not None) is is_finished
    if built:
        failed = tuple(change.get("failed", ()))
        assert built == Built(image=image, changed=False, failed=failed, ran={})
    assert finished(store, PLAN, "rules-2") is None


def test_the_verdict_depends_on_rules_budget_and_architecture() -> None:
    assert judged_by(PLAN, "rules-1") == "rules-1 budget 4.5 arch gfx942"


def test_a_built_image_tells_which_layers_this_build_made(store: Store) -> None:
    image = _built(store)
    built = Built(image=image, changed=True, failed=("size: 5 GB",), ran={WHEELS.key: 2.5})
    data = built.as_json()
    rows = [(row["name"], row["built"], row["seconds"]) for row in data.pop("layers")]
    assert rows == [("rocm", False, 0.0), ("aiter", True, 2.5)]
    assert data == {
        "target": "demo",
        "ref": "v1-demo",
        "digest": image.digest,
        "content": digest_of(image.config),
        "changed": True,
        "failed": ("size: 5 GB",),
    }
