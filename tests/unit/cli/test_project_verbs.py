"""Verbs about a project: what they print of its images, releases and folders."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.host import build as of_build
from project_kit import Kit, make_project

BUILT = "v26.11-demo"


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_project(tmp_path / "project")


class Said:
    """What commands print, word for word, in a folder."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self.err = ""

    def of(self, *words: str, code: int = 0) -> str:
        done = self._kit.primus(*words)
        assert done.code == code, done.err
        self.err = done.err
        return done.out

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.of(*words, "--json", code=code))


@pytest.fixture
def said(kit: Kit) -> Said:
    return Said(kit)


def test_several_targets_are_named_once_or_all(kit: Kit, said: Said) -> None:
    refs = [row["ref"] for row in said.json("plan", "demo", "other", "demo")]
    assert refs == ["v26.11-demo", "v26.11-other"]
    assert [row["target"] for row in said.json("plan", "--all")] == ["demo", "other"]
    said.of("plan", code=2)
    assert "name a target" in said.err
    assert "targets: demo, other" in said.err


def test_one_plan_is_shown_in_full_and_several_in_a_line_each(kit: Kit, said: Said) -> None:
    assert len(said.of("plan", "demo").splitlines()) > 3
    assert "v26.11-demo: not built yet" in said.of("plan", "--all")
    assert len(said.of("plan", "--all").splitlines()) == 2
    assert len(said.of("plan", "--all", "--full").splitlines()) > 8


def test_the_state_of_a_release_is_beside_its_plan(kit: Kit, said: Said) -> None:
    kit.write("withdrawn.yaml", f"{BUILT}: {{reason: wrong, date: '2026-11-29'}}\n")
    kit.edit(
        "versions.yaml", "created: 2026-11-20", "created: 2026-11-20\nsupported_until: 2999-01-01"
    )
    text = " ".join(said.of("plan", "demo").split())
    assert f"! {BUILT} was withdrawn on 2026-11-29: wrong" in text
    assert "supported until 2999-01-01" in text
    assert said.json("plan", "demo")[0]["supported_until"] == "2999-01-01"
    assert "withdrawn" not in said.of("plan", "--all")
    assert "was withdrawn" not in said.of("plan", "other")
    kit.edit("versions.yaml", "supported_until: 2999-01-01", "supported_until: 2026-11-21")
    text = " ".join(said.of("plan", "demo").split())
    assert "! support ended on 2026-11-21: use a later release" in text


def test_a_build_says_its_layers_and_its_digest_last(kit: Kit, said: Said) -> None:
    assert "v26.11-demo: not built yet" in said.of("plan", "--all")
    digest = said.of("build", "demo").splitlines()[-1]
    assert re.fullmatch("sha256:[0-9a-f]{64}", digest)
    assert "v26.11-demo  (channel local: the " in said.err
    assert re.search(r"alpha +[\d.]+ k?B +built", said.err)
    assert re.search(r"\d layers built, 0 reused, [\d.]+ s", said.err)
    assert said.of("build", "demo").strip() == digest
    assert re.fullmatch(r"v26.11-demo: nothing to do, [\d.]+ s\n", said.err)
    kit.write("parts/beta/blob", "new")
    document = said.json("build", "demo", "other")
    built = {row["name"]: row["built"] for row in document["images"][0]["layers"]}
    assert (built["alpha"], built["beta"]) == (False, True)
    assert said.err == ""


def test_a_dry_build_changes_nothing(kit: Kit, said: Said) -> None:
    plan = said.of("plan", "demo")
    assert said.of("build", "demo", "--dry-run") == plan
    assert not (kit.root / ".primus/store/index.json").exists()


def test_a_preview_says_so_above_its_layers(kit: Kit, said: Said) -> None:
    kit.edit("images/demo.yaml", "[local]\n", "[local]\npreviews: {local: no GPU code}\n")
    said.of("build", "demo")
    assert "PREVIEW, no release: no GPU code" in said.err
    assert "v26.11-demo-preview" in said.err


def test_explain_fails_where_there_is_something_to_build(kit: Kit, said: Said) -> None:
    said.of("build", "demo")
    assert said.of("explain", "demo") == "v26.11-demo: nothing to do\n"
    assert said.json("explain", "demo") == {"demo": []}
    kit.write("parts/beta/blob", "new")
    (change,) = said.json("explain", "demo", code=1)["demo"]
    assert (change["action"], change["input"]) == ("beta", "parts/beta/blob")
    assert "to build: beta" in said.of("explain", "demo", code=1)


def test_releases_are_those_of_the_project_and_the_published_ones(kit: Kit, said: Said) -> None:
    kit.write("withdrawn.yaml", f"{BUILT}: {{reason: wrong, date: '2026-11-29'}}\n")
    rows = said.json("releases")["releases"]
    assert rows[0]["tag"] == "v26.11"
    assert rows[0]["notes"][0] == f"{BUILT} was withdrawn on 2026-11-29: wrong."
    assert len(rows) > 10
    (row,) = said.json("releases", BUILT)["releases"]
    assert sorted(row["components"]) == ["alpha", "beta", "recipes"]
    assert "was withdrawn on 2026-11-29" in " ".join(said.of("releases", BUILT).split())
    (row,) = said.json("releases", "v26.11-other")["releases"]
    assert not any("withdrawn" in note for note in row["notes"])
    said.of("releases", "v1-absent", code=2)
    assert "v1-absent" in said.err


def test_without_a_project_the_published_releases_are_listed(kit: Kit, tmp_path: Path) -> None:
    said = Said(Kit(tmp_path))
    tags = [row["tag"] for row in said.json("releases")["releases"]]
    assert "v26.11" not in tags
    assert said.json("releases", "--project", str(kit.root))["releases"][0]["tag"] == "v26.11"
    assert said.of("releases", "v26.11-demo", code=2) == ""


def test_clean_says_what_it_would_free(kit: Kit, said: Said) -> None:
    said.of("build", "demo")
    assert said.of("clean").splitlines()[-1] == "nothing to remove"
    said.of("clean", "--image", "v26.11-dmo", code=2)
    assert "the store has no image called 'v26.11-dmo'" in said.err
    assert "did you mean 'v26.11-demo'?" in said.err
    text = said.of("clean", "--image", BUILT, "--dry-run")
    assert "would free " in text.splitlines()[-1]
    document = said.json("clean", "--image", BUILT, "--dry-run")
    assert (document["removed"], document["images"]) == (False, [BUILT])
    assert document["bytes"] == sum(row["bytes"] for row in document["waste"]) > 0
    assert said.of("clean", "--image", BUILT).splitlines()[-1].startswith("freed ")
    said.of("clean", "--image", BUILT, code=2)
    assert "images: none" in said.err


def test_a_build_needs_what_the_others_do_not_lack(
    kit: Kit, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --rehash, a finished image is built again from files that are read again."""
    said.of("build", "demo")
    monkeypatch.setattr(of_build, "_finished", lambda *_: pytest.fail("the store was trusted"))
    assert said.of("build", "demo", "--rehash").startswith("sha256:")


def test_files_for_madengine_are_of_the_only_built_image(
    kit: Kit, said: Said, tmp_path: Path
) -> None:
    folder = str(tmp_path / "mad")
    words = ("release", "mad", folder)
    said.of(*words, code=2)
    assert "the store has no such image of v26.11" in said.err
    assert "primus build TARGET" in said.err
    digest = said.of("build", "demo").splitlines()[-1]
    document = said.json(*words)
    assert document["image"] == f"rocm/primus@{digest}"
    assert sorted(Path(path).name for path in document["files"]) == [
        "models.json",
        "primus.ubuntu.Dockerfile",
        "run.sh",
    ]
    said.of(*words, code=2)
    assert f"{folder} is not empty" in said.err
    said.of("build", "other")
    other = ("release", "mad", str(tmp_path / "two"))
    said.of(*other, code=2)
    assert "the store has images for demo, other of v26.11" in said.err
    text = said.of(*other, "--target", "demo", "--from", "localhost/a/b")
    assert text.splitlines()[0] == f"localhost/a/b@{digest}"
