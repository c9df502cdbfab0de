"""The published releases: all of them are there, as published, and nothing is made up."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from docs import generated

from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.gpus.table import generation
from primus_images.release import diff as differences
from primus_images.release.history import History, load_history, select, spread
from primus_images.release.sides import Side
from primus_images.schema import build
from primus_images.yamlfile import parse
from project_kit import make_project
from tables import table_of

HISTORY = load_history()


def references(word: str) -> set[str]:
    return {r.reference for r in select(HISTORY, word)}


def broken(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        build(History, parse(text, "h"))
    return caught.value


# Small, complete, and the ground for one broken line at a time.
SMALL = """\
deprecations: []
releases:
  - {image: rocm/a, tag: v26.8, gpus: [mi300x], components: {rocm: 1.0, aiter: null}}
"""


def test_the_data_is_consistent() -> None:
    by_reference = {release.reference: release for release in HISTORY.releases}
    assert len(by_reference) == len(HISTORY.releases)
    for release in HISTORY.releases:
        assert {generation(gpu).arch for gpu in release.gpus or ()} == set(release.gfx or ()), (
            release.reference
        )
        if release.same_as:
            assert by_reference[release.same_as].components == release.components


def test_no_package_host_is_named() -> None:
    text = (Path(differences.__file__).parent / "history.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://([^/\s'\"]+)", text)) <= {"github.com"}


@pytest.mark.parametrize(("old", "new", "message"), table_of("release_history.wrong"))
def test_a_wrong_history_is_refused(old: str, new: str, message: str) -> None:
    assert SMALL.count(old) == 1
    assert message in broken(SMALL.replace(old, new)).message


@pytest.mark.parametrize(("word", "found"), table_of("release_history.select"))
def test_select(word: str, found: list[str]) -> None:
    assert references(word) == {*found}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kit = make_project(tmp_path / "project")
    monkeypatch.chdir(kit.root)
    return kit.root


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_list(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["releases"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["tag", "date", "ROCm", "PyTorch", "GPUs", "size"]
    assert rows[0].startswith("rocm/primus:v26.9 ")
    newest_known = next(row for row in rows if row.startswith("rocm/primus:v26.8 "))
    assert re.split(r"\s{2,}", newest_known) == [
        "rocm/primus:v26.8",
        "2026-10-08",
        "10.1.0",
        "2.14.0+rocm10.1.0",
        "mi300x, mi325x, mi350x, mi355x",
        "56.4 GB",
    ]
    assert sum(row.startswith("rocm/") for row in rows) == len(HISTORY.releases)
    order = [
        next(n for n, row in enumerate(rows) if f":{tag} " in row)
        for tag in ("v26.8", "v26.7", "v25.11", "v25.10")
    ]
    assert order == sorted(order)
    assert rows[-1] == "– not published."


def test_in_a_project_the_pins_stand_on_top(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["releases"]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[1]
        .startswith("rocm/primus:v26.11 (versions.yaml)  2026-11-20  –")
    )


def test_one_release_tells_all(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["releases", "v26.4"]) == 0
    out = capsys.readouterr().out
    for words in (
        "size             75.9 GB",
        "compressed size  not published",
        "hipblaslt           1.4.1-be5adb9b",
        "notes\n  - Another source, docs data and PyTorch history page, has rocm "
        "7.14.0a20260608, pytorch",
        "  - Docs and image disagree on PyTorch, hipBLASLt and RCCL.",
    ):
        assert words in out, words


def test_a_name_of_several_tags_shows_each(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["releases", "v25.9"]) == 0
    out = capsys.readouterr().out
    assert (
        len(re.findall(r"^rocm/(?:primus|megatron-lm):v25\.9_gfx9(?:42|50)$", out, re.MULTILINE))
        == 4
    )


def test_page_holds_every_tag() -> None:
    page = generated._releases(HISTORY)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    history = page.partition("## Components")[0].splitlines()
    for release in HISTORY.releases:
        tag = release.reference.replace("_", "\\_")
        assert sum(row.startswith(f"| {tag} |") for row in history) == 1, tag
    versions = (
        "3.12.3 2.17.1+130099ce4 2.8.4 1.4.1-39d8d603 3.8.0+git669b31ac.rocm10.1.0 "
        "2.30.7 f487a934 0.5.1.dev7"
    )
    cells = (f"`{version}`" for version in [*versions.split(), "0.1.22.post1"])
    assert " | ".join(["| `rocm/primus:v26.8`", *cells]) + " |" in rows
    # As many cells as its head has, in every table.
    for before, line in pairwise(page.splitlines()):
        if before.startswith("|") and line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", before)), (
                line
            )


def test_targets_are_named_where_their_values_differ() -> None:
    rows = [("b", "1", "cpu"), ("a", "2", "cpu"), ("a", "3", "h200"), ("b", "1", "h200")]
    assert spread(rows) == {"a": "2 (cpu), 3 (h200)", "b": "1"}
    assert list(spread(rows)) == ["a", "b"]


def test_a_section_of_a_page_has_sixty_changes_at_most() -> None:
    def side(count: int) -> Side:
        release = replace(HISTORY.releases[0], components={})
        return Side(release=release, parts={"files": {f"f{n}": "1" for n in range(count)}})

    page = differences.diff_page(differences.diff(side(0), side(60)))
    assert "f59 " in page
    assert "more, which --json lists" not in page
    page = differences.diff_page(differences.diff(side(0), side(62)))
    assert "f59 " in page
    assert "f60" not in page
    assert "and 2 more, which --json lists" in page
    page = differences.diff_page(differences.diff(side(2), side(1)))
    assert "files: 1 only on the old side, 1 the same" in page
