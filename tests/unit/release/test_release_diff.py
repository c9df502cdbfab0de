"""Comparing releases: golden text, laws of the comparison, names that mean several, and the present
pins.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from primus_images.cli.main import main
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.release.diff import component_order, diff, diff_page, notes
from primus_images.release.history import Release, load_history, pin_names, pins, select
from primus_images.release.sides import Side, one_of
from project_kit import Kit, copied, make_project
from records import recipe, record

GOLDEN = Path(__file__).parents[2] / "golden"
HISTORY = load_history()


def one(word: str) -> Release:
    return one_of(select(HISTORY, word), word)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_golden(
    request: pytest.FixtureRequest, nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "v25.10", "v26.8"]) == 0
    text, golden = capsys.readouterr().out, GOLDEN / "diff.txt"
    if request.config.getoption("--regenerate-golden"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), (
        "run pytest --regenerate-golden if it should say this"
    )


def test_component_order() -> None:
    names = component_order(["zlib", "lib10", "lib9", "aiter", "rocm", "zlib"])
    assert names == ["rocm", "aiter", "lib9", "lib10", "zlib"]


def test_an_ambiguous_name_names_the_choices(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(select(HISTORY, "v25.10")) == 2, "but their tables are equal"
    assert one("v25.10").reference == "rocm/primus:v25.10"
    assert main(["diff", "v25.8", "v26.8"]) == 2
    assert capsys.readouterr().err == (
        "primus diff: v25.8 stands for 2 images: rocm/megatron-lm:v25.8_py310, "
        "rocm/pytorch-training:v25.8\n"
        "  → name one, for example rocm/pytorch-training:v25.8\n"
    )
    assert main(["diff", "pytorch-training:v25.8", "v26.8"]) == 0


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    kit = make_project(tmp_path / "project")
    shutil.rmtree(kit.root / "images")
    copied(kit.root, "packages")
    monkeypatch.chdir(kit.root)
    return kit


def test_the_present_pins_as_a_release(kit: Kit) -> None:
    project = Project.find(kit.root)
    names = project.target_names()
    assert pin_names(project.versions, names) == (
        "v26.11",
        "versions.yaml",
        "v26.11-cpu",
        "v26.11-mi300x",
    )
    targets = [resolve(project, name) for name in names]
    whole = pins(project.versions, targets, "v26.11")
    assert whole.components["pytorch"] == "2.13.0+cpu (cpu), 2.14.0 (mi300x)"
    assert whole.components["flash_attention"] == "2.8.1"
    assert whole.components["alpha"] == "parts/alpha of this repository"
    assert whole.components["python"] == "3.11.2"
    assert (whole.gpus, whole.gfx, whole.date) == (("mi300x",), ("gfx942",), "2026-11-20")
    cpu = pins(project.versions, targets[:1], "v26.11-cpu")
    assert (cpu.gpus, cpu.components["pytorch"]) == ((), "2.13.0+cpu")


@pytest.mark.parametrize("name", ["v26.11-cpu", "rocm/primus:v26.11-cpu"])
def test_history_against_the_present_file(
    name: str, kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "v26.8", name]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "rocm/primus:v26.8 → rocm/primus:v26.11-cpu (pins of versions.yaml)"
    for line in (
        "- rocm 10.1.0 → not there",
        "~ flash_attention 2.8.4 → 2.8.1",
        "+ alpha not published → local",
        "- size 56.4 GB → not stated",
        "~ GPUs mi300x, mi325x, mi350x, mi355x → none",
    ):
        assert line in lines, line


def test_a_broken_file_of_pins_does_not_hide_the_history(
    kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    kit.write("versions.yaml", "releas: v26.11\n")
    assert main(["diff", "v26.7", "v26.8"]) == 0
    capsys.readouterr()
    assert main(["diff", "v26.7", "v26.11"]) == 2
    assert "versions.yaml:1:1" in capsys.readouterr().err


def test_a_typo_in_a_projects_own_name(kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "v26.8", "v26.11-cpi"]) == 2
    assert "'v26.11-cpu'" in capsys.readouterr().err


def image(tag: str, count: int, **parts: dict[str, str]) -> Side:
    """An image of the store with so many components, packages and files."""
    release = Release(
        image="rocm/primus",
        tag=tag,
        date="2026-11-20",
        components={f"part{number}": tag for number in range(count)},
        origin="image of the store",
    )
    packages = {f"package{number}": tag for number in range(count * 20)}
    return Side(release=release, parts={"packages": packages, "layers": {}, **parts})


@pytest.mark.parametrize("count", [0, 1, 12, 13, 60])
def test_release_notes_fit_one_screen(count: int) -> None:
    new = image("v26.12-cpu", count, licences={"a": "MIT"})
    new = replace(
        new,
        records=[record(recipe=recipe(name=f"recipe{number}")) for number in range(count)],
    )
    difference = diff(image("v26.11-cpu", count), new, [f"issue {n}" for n in range(count)])
    text = notes(difference)
    visible = re.sub("<details>.*?</details>\n?", "", text, flags=re.S).splitlines()
    assert len(visible) <= 60
    for number in range(count):
        assert f"package{number * 20} " in text
        assert f"recipe{number} " in text
        assert f"issue {number}\n" in f"{text}\n"
    assert "stated by one side only" in text.lower()
    assert ": 0 differences" not in text


def test_what_one_side_does_not_state_is_not_said_to_be_absent() -> None:
    pinned = Release(
        image="rocm/primus",
        tag="v26.11",
        date="2026-11-20",
        drivers="6.12",
        components={"python": "3.11.2", "pytorch": "2.13.0"},
        origin="pins of versions.yaml",
    )
    built = Release(
        image="rocm/primus",
        tag="v26.12-cpu",
        date="2026-12-20",
        components={"pytorch": "2.14.0", "apex": "1"},
        origin="image of the store",
    )
    difference = diff(Side(release=pinned), Side(release=built))
    page = diff_page(difference)
    assert "python   3.11.2 → not stated" in page
    assert "drivers  6.12 → not stated" in page
    assert "apex     not there → 1" in page
    text = notes(difference)
    assert "python" not in text
    assert "| pytorch | 2.13.0 | 2.14.0 |" in text
    assert "| apex | – | 1 |" in text


def test_pins_do_not_state_the_whole_environment_of_their_image() -> None:
    def of(origin: str, **variables: str) -> Side:
        release = Release(image="rocm/primus", tag="v26.11", components={}, origin=origin)
        return Side(release=release, parts={"environment": variables})

    built = of("image of the store", PATH="/bin", NCCL_DEBUG="INFO")
    pinned = of("pins of versions.yaml", NCCL_DEBUG="WARN")
    assert "PATH        /bin → not stated" in diff_page(diff(built, pinned))
    assert "PATH        /bin → not there" in diff_page(diff(built, of("image of the store")))


words = st.sampled_from(["rocm", "aiter", "python", "lib9", "lib10"])
versions = st.one_of(
    st.none(), st.sampled_from(["1.0", "1.1", "1.10", "2.0a1", "3c0ffee", "v1.0.1"])
)
gpus = st.one_of(
    st.none(), st.lists(st.sampled_from(["mi300x", "mi355x", "h200"]), unique=True).map(tuple)
)
releases = st.builds(
    Release,
    image=st.just("rocm/a"),
    tag=st.sampled_from(["v1.0", "v1.1_x"]),
    gpus=gpus,
    size_gb=st.one_of(st.none(), st.integers(1, 900).map(lambda n: n / 10)),
    image_id=st.one_of(st.none(), st.sampled_from(["0" * 12, "1" * 12])),
    components=st.dictionaries(words, versions),
    origin=st.sampled_from(["", "pins of versions.yaml"]),
)


@given(releases, releases)
def test_every_version_is_accounted_for_once(old: Release, new: Release) -> None:
    _, components = diff(Side(release=old), Side(release=new)).sections
    stated = {name for side in (old, new) for name, version in side.components.items() if version}
    assert sorted(stated) == sorted([*(c.what for c in components.changes), *components.same])
    for change in components.changes:
        assert (old.components.get(change.what), new.components.get(change.what)) == (
            change.old,
            change.new,
        )
        assert (change.kind == "added") == (change.old is None)
        assert (change.kind == "removed") == (change.new is None)
