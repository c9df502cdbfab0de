"""The changes between two plans, and the rows of an outline that name them."""

from typing import Any

import pytest

from primus_images.plan.action import Action, ImagePlan, Input, tree_record
from primus_images.plan.explain import Change, changes, outline_text

HASH = "0123456789ab" + "c" * 52
PARTS = (("a", "file", "1"), ("b", "link", "a"))


def plan_of(*layers: Action, **fields: Any) -> ImagePlan:
    config = fields.get("config", {})
    annotations = fields.get("annotations", {})
    resolved: Any = type("Resolved", (), {"ref": "v1-demo"})
    return ImagePlan(resolved=resolved, layers=layers, config=config, annotations=annotations)


def action(*inputs: Input, name: str = "rocm", **fields: Any) -> Action:
    return Action(name=name, kind=fields.pop("kind", "debs"), inputs=inputs, **fields)


def texts(before: ImagePlan, after: ImagePlan) -> list[str]:
    rows = changes({"inputs": tree_record(before)}, after)
    return [f"{change.action}: {change.text()}" for change in rows]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([Input("hip", "7.0")], [Input("hip", "7.1", "v:1:2")], "hip: 7.0 → 7.1  (v:1:2)"),
        ([Input("hip", "7.0", "v:1:2")], [], "hip: 7.0 → removed  (v:1:2)"),
        ([], [Input("hip", "7.0", "v:1:2")], "hip: nothing → 7.0  (v:1:2)"),
        ([Input("file", HASH)], [Input("file", "2")], "file: 0123456789ab → 2"),
    ],
)
def test_a_changed_input_is_named_with_its_place(
    before: list[Input], after: list[Input], text: str
) -> None:
    assert texts(plan_of(action(*before)), plan_of(action(*after))) == [f"rocm: {text}"]


def test_changed_inputs_are_sorted_and_equal_ones_left_out() -> None:
    before = action(Input("z", "1"), Input("same", "1"), Input("a", "1"))
    after = action(Input("z", "2"), Input("same", "1", "elsewhere"), Input("a", "2"))
    assert texts(plan_of(before), plan_of(after)) == ["rocm: a: 1 → 2", "rocm: z: 1 → 2"]


def test_a_changed_folder_is_listed_by_file() -> None:
    before = action(Input("parts", "tree:1"), tree=PARTS)
    after = action(Input("parts", "tree:2"), tree=(("a", "file", "2"), ("c", "exec", "3")))
    assert texts(plan_of(before), plan_of(after)) == [
        "rocm: parts/a: file 1 → file 2",
        "rocm: parts/b: link a → removed",
        "rocm: parts/c: nothing → exec 3",
    ]


def test_a_layer_that_is_new_or_gone_has_its_first_inputs_and_place() -> None:
    inputs = [Input("assembler", "3"), Input("b", "1"), Input("c", "2", "v:1:2"), Input("d", "3")]
    layer = plan_of(action(*inputs))
    assert texts(plan_of(), layer) == ["rocm: layer: nothing → b 1, c 2  (v:1:2)"]
    assert texts(layer, plan_of()) == ["rocm: layer: b 1, c 2 → removed"]
    build = plan_of(action(Input("git", "1"), kind="build"))
    assert texts(plan_of(), build) == ["rocm: build: nothing → git 1"]


def test_only_the_cause_of_a_change_is_listed() -> None:
    before = action(name="wheels", needs=(action(Input("hip", "1")),))
    after = action(name="wheels", needs=(action(Input("hip", "2")),))
    assert texts(plan_of(before), plan_of(after)) == ["rocm: hip: 1 → 2"]


def test_settings_of_the_image_are_changes_of_the_image() -> None:
    before = plan_of(config={"config": {"User": "0", "Cmd": None}}, annotations={"title": "a"})
    after = plan_of(config={"config": {"User": "1", "Cmd": []}}, annotations={})
    assert texts(before, after) == [
        "image: config.config Cmd: nothing → []",
        "image: config.config User: 0 → 1",
        "image: annotations title: a → removed",
    ]


@pytest.mark.parametrize("record", [None, {}, {"inputs": None}, {"inputs": {"actions": []}}])
def test_a_record_in_another_shape_is_a_first_build(record: dict[str, Any] | None) -> None:
    first = Change(action="image", input="v1-demo", old=None, new="its first build")
    assert changes(record, plan_of(action())) == [first]


def row(name: str, **fields: Any) -> dict[str, Any]:
    usual = {"name": name, "kind": "debs", "do": "build", "bytes": 0, "digest": None, "inputs": 0}
    return {**usual, **fields}


KEPT = row("base", do="reuse", bytes=3_000_000, digest=f"sha256:{HASH}")
REASONS = [Change("rocm", name, "1", "2") for name in ("a", "b", "c", "d")]
UNKNOWN = "its layer is not in the store, or a layer that it needs changes"


@pytest.mark.parametrize(
    ("inputs", "changed", "origin"),
    [
        (1, None, "from 1 file"),
        (2, None, "from 2 files"),
        (0, REASONS[:1], "a: 1 → 2"),
        (2, REASONS[:2], "from 2 files; a: 1 → 2; b: 1 → 2"),
        (0, REASONS[:3], "a: 1 → 2; b: 1 → 2; and 1 more changes: primus explain"),
        (0, REASONS, "a: 1 → 2; b: 1 → 2; and 2 more changes: primus explain"),
        (0, [], UNKNOWN),
        (0, [Change("other", "a", "1", "2")], UNKNOWN),
    ],
)
def test_a_layer_to_build_says_from_what_and_why(
    inputs: int, changed: list[Change] | None, origin: str
) -> None:
    lines = outline_text(plan_of(), [row("rocm", inputs=inputs)], changed).splitlines()
    assert lines[1].split() == ["+", "rocm", "debs", *origin.split()]


@pytest.mark.parametrize(
    ("rows", "changed", "full", "first", "shown"),
    [
        ([KEPT], [], True, "v1-demo", ["="]),
        ([KEPT, row("rocm", bytes=2)], [], True, "v1-demo", ["=", "+"]),
        ([KEPT], [], False, "v1-demo: nothing to build, 1 to reuse (3.0 MB)", []),
        (
            [KEPT, row("rocm", bytes=2_000_000)],
            [],
            False,
            "v1-demo: 1 to build from 2.0 MB, 1 to reuse (3.0 MB)",
            ["+"],
        ),
        (
            [row("rocm", bytes=2_000_000)],
            None,
            False,
            "v1-demo: not built yet: 1 to build from 2.0 MB, 0 to reuse (0 B)",
            [],
        ),
    ],
)
def test_an_outline_counts_what_it_does_not_show(
    rows: list[dict[str, Any]],
    changed: list[Change] | None,
    full: bool,
    first: str,
    shown: list[str],
) -> None:
    lines = outline_text(plan_of(), rows, changed, full=full).splitlines()
    assert lines[0] == first
    signs = [line.split()[0] for line in lines[1:]]
    assert [sign for sign in signs if sign in "=+"] == shown


def test_a_layer_in_the_store_has_its_digest_and_the_image_its_changes() -> None:
    changed = [Change("image", "config User", "0", "1")]
    lines = outline_text(plan_of(), [KEPT], changed).splitlines()
    assert lines[1].split()[-1] == "0123456789ab"
    assert lines[2] == "  ~ config User: 0 → 1"
