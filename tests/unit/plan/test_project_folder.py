"""A project folder: where it is found, its targets, and names that it does not know."""

from collections.abc import Callable
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.plan.project import Project
from project_kit import Kit
from tables import text_of

TARGET = text_of("images/extra.yaml").replace("bookworm", "small")


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = Kit(tmp_path / "project")
    kit.write("versions.yaml", text_of("versions/layers.yaml"))
    kit.write("images/demo.yaml", TARGET)
    return kit


def refusal(act: Callable[[], object]) -> InputError:
    with pytest.raises(InputError) as caught:
        act()
    return caught.value


@pytest.mark.parametrize("folder", ["", "images", "images/locks/debian"])
def test_the_nearest_project_upwards_is_used(
    folder: str, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = kit.root / folder
    place.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(place)
    assert Project.find().root == kit.root
    kit.write("images/versions.yaml", "")
    assert Project.find().root == (kit.root / "images" if folder else kit.root)


def test_a_named_folder_is_taken_as_it_is(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "change to a checkout of the project, or name its folder with --project"
    monkeypatch.chdir(kit.root)
    error = refusal(lambda: Project.find(kit.root / "images"))
    assert error.message == f"there is no versions.yaml in {kit.root}/images"
    assert error.hint == hint
    monkeypatch.chdir(tmp_path)
    error = refusal(Project.find)
    assert error.message == f"there is no versions.yaml in {tmp_path} or above it"
    assert error.hint == hint
    project = Project.find(Path("project"), store=Path("elsewhere"), channel="amd")
    assert (project.root, project.channel) == (kit.root, "amd")
    assert project.workspace.store.root == Path("elsewhere")
    assert Project.find(kit.root).workspace.store.root == kit.root / ".primus/store"


def test_a_broken_link_to_pins_is_a_project(kit: Kit) -> None:
    (kit.root / "versions.yaml").unlink()
    (kit.root / "versions.yaml").symlink_to("absent")
    assert Project.find(kit.root).root == kit.root


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("dmeo", "no target is called 'dmeo'", "did you mean 'demo'?"),
        ("zebra", "no target is called 'zebra'", "targets: demo, other"),
        (
            "mi300a",
            "no image is built for mi300a: the image of mi300x has its code",
            "targets: demo, other",
        ),
    ],
)
def test_an_unknown_target_is_refused(name: str, message: str, hint: str, kit: Kit) -> None:
    kit.write("images/other.yaml", TARGET)
    error = refusal(lambda: Project(kit.root).target(name))
    assert error.message.startswith(message)
    assert error.hint == hint


def test_a_project_without_targets_says_so(kit: Kit) -> None:
    (kit.root / "images/demo.yaml").unlink()
    assert refusal(lambda: Project(kit.root).target("demo")).hint == "targets: none"


@pytest.mark.parametrize(
    ("name", "is_name"),
    [
        ("mi300x", True),
        ("a.b-c_d", True),
        ("a" * 64, True),
        ("a" * 65, False),
        ("Demo", False),
        ("-demo", False),
        ("de mo", False),
    ],
)
def test_a_target_has_a_name_that_can_be_in_a_tag(name: str, is_name: bool, kit: Kit) -> None:
    kit.write(f"images/{name}.yaml", TARGET)
    project = Project(kit.root)
    if is_name:
        assert project.target(name)[0] is project.target(name)[0]
        return
    error = refusal(lambda: project.target(name))
    assert error.message == (
        f"{name!r} cannot be the name of a target, because it is part of an image's tag"
    )
    assert error.where == f"images/{name}.yaml"
    assert "at most 64 lower-case letters" in str(error.hint)


@pytest.mark.parametrize(
    ("targets", "hint"),
    [
        ("[demo]", None),
        ("[mi300x]", None),
        ("[zebra]", None),
        ("[demo, dmeo]", "did you mean 'demo'?"),
    ],
)
def test_a_misspelled_target_of_a_pin_is_refused(targets: str, hint: str | None, kit: Kit) -> None:
    pin = f"{{channel: pypi, wheel: einops, version: 1.0.0, targets: {targets}}}"
    kit.edit(
        "versions.yaml",
        "components: {}",
        f"components:\n  einops:\n    name: einops\n    pins:\n      - {pin}",
    )
    if hint is None:
        assert "einops" in Project(kit.root).versions.components
        return
    error = refusal(lambda: Project(kit.root).versions)
    assert error.message == "no target is called 'dmeo'"
    assert error.hint == hint
    line, column = str(error.where).removeprefix("versions.yaml:").split(":")
    lines = (kit.root / "versions.yaml").read_text().splitlines()
    assert lines[int(line) - 1][int(column) - 1 :].startswith("dmeo")


@pytest.mark.parametrize(
    ("recipes", "expected"),
    [
        ("[b, a]", ("b", "a")),
        ("[all]", ("a", "b", "c")),
        ("[c, all]", ("c", "a", "b")),
        ("[all, a]", ("b", "c", "a")),
    ],
)
def test_all_means_the_recipes_that_are_not_named(
    recipes: str, expected: tuple[str, ...], kit: Kit
) -> None:
    for name in "abc":
        kit.write(f"recipes/{name}.yaml", "")
    kit.write("images/demo.yaml", f"{TARGET}recipes: {recipes}\n")
    assert Project(kit.root).target("demo")[0].recipes == expected


@pytest.mark.parametrize(
    ("name", "hint"), [("lama", "did you mean 'llama'?"), ("qwen", "add it to recipes/")]
)
def test_an_unknown_recipe_is_refused(name: str, hint: str, kit: Kit) -> None:
    kit.write("recipes/llama.yaml", "")
    kit.write("images/demo.yaml", f"{TARGET}recipes: [llama, {name}]\n")
    error = refusal(lambda: Project(kit.root).target("demo"))
    assert error.message == f"no recipe is called {name!r}"
    assert str(error.where).startswith("images/demo.yaml:")
    assert error.hint == hint


def test_a_checkout_without_recipes_takes_every_name(kit: Kit) -> None:
    kit.write("images/demo.yaml", f"{TARGET}recipes: [llama]\n")
    assert Project(kit.root).target("demo")[0].recipes == ("llama",)


def test_a_lock_is_below_its_channel_and_may_be_absent(kit: Kit) -> None:
    project = Project(kit.root)
    path = project.lock_path("demo", "amd")
    assert path == kit.root / "images/locks/amd/demo.json"
    assert project.lock(path) is None


def test_layers_are_unpacked_where_no_link_leads(tmp_path: Path) -> None:
    project = Project(tmp_path)
    assert project.workspace.unpacked == tmp_path / ".primus/unpacked"
    (tmp_path / "other").mkdir()
    (tmp_path / ".primus").symlink_to(tmp_path / "other")
    assert Project(tmp_path).workspace.unpacked == tmp_path / "other/unpacked"
