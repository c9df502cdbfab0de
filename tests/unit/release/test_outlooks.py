"""What is asked of which index for newer versions, and what is said of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from primus_images.cli.host.common import warn_of_state
from primus_images.cli.host.outdated import _amds_newest
from primus_images.cli.main import main
from primus_images.errors import HostError
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.release import bump
from primus_images.release.history import load_history, namesake, pins
from primus_images.versions.components import Image

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def outlooks() -> bump.Outlooks:
    return bump.Outlooks([resolve(Project.find(ROOT, channel="amd"), "mi300x")])


def place_of(outlooks: bump.Outlooks, name: str) -> bump.Place:
    (place,) = [place for place in outlooks.uses if place[0] == name]
    return place


@pytest.mark.parametrize(
    ("name", "own"), [("transformers", False), ("hip-python", False), ("rocm", True)]
)
def test_an_index_of_a_channel_is_asked_only_for_its_own_pins(
    outlooks: bump.Outlooks, name: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def offered(package, request, kind):
        asked.append(bool(request.indexes))
        return {Version("0.0.1")}

    monkeypatch.setattr(bump, "offered", offered)
    outlook = outlooks.of(place_of(outlooks, name))
    assert outlook.error == ""
    assert asked[0] is own


def test_a_silent_index_is_not_blamed_for_pins_of_another(
    outlooks: bump.Outlooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> None:
        raise HostError("the index rocm-core does not answer")

    monkeypatch.setattr(bump, "offered", lambda *_: {Version("99.0")})
    monkeypatch.setattr(bump, "fits_together", silent)
    outlook = outlooks.of(place_of(outlooks, "transformers"))
    assert outlook.newest == "99.0"
    assert outlook.error == (
        "whether 99.0 fits the others is unknown: the index rocm-core does not answer"
    )


def test_a_pin_of_another_channel_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["bump", "rocm=10.1.0"]) == 2
    error = capsys.readouterr().err
    assert "rocm is pinned for channel amd" in error
    assert "→ --channel amd" in error


def test_an_image_of_amd_without_known_versions_is_named() -> None:
    text = _amds_newest()
    assert "rocm/primus:v26.9, whose versions are not on record" in text
    assert "`primus releases v26.9` says what was looked for" in text


def test_amds_newest_image_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    history = load_history()
    known = tuple(release for release in history.releases if release.components)
    monkeypatch.setattr(
        "primus_images.cli.host.outdated.load_history", lambda: replace(history, releases=known)
    )
    text = _amds_newest()
    assert "rocm/primus:v26.8 of 2026-10-08: rocm 10.1.0, pytorch 2.14.0+rocm10.1.0" in text
    assert "`primus diff versions.yaml v26.8`" in text


@pytest.mark.parametrize(
    ("release", "name", "says"),
    [
        ("v26.11", "rocm/primus", ""),
        (
            "v26.8",
            "rocm/primus",
            "AMD has a release v26.8, rocm/primus:v26.8 of 2026-10-08: give `release` or "
            "`image.name` in versions.yaml another name",
        ),
        (
            "v26.9",
            "example.com/ours/primus",
            "AMD has a release v26.9, rocm/primus:v26.9: this one is example.com/ours/primus",
        ),
    ],
)
def test_a_release_that_amd_has_too_is_pointed_out(
    release: str, name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    project = Project.find(ROOT)
    versions = replace(project.versions, release=release, image=Image(name=name))
    assert namesake(versions, load_history()) == says
    assert pins(versions, (), release).image == name
    resolved = replace(resolve(project, "cpu"), versions=versions)
    warn_of_state(resolved)
    assert capsys.readouterr().err == (f"! {says}\n" if says else "")


def moved(moves: bump.Moves) -> list[str]:
    """Return the lines of versions.yaml that moves change, without blanks around them."""
    project = Project.find(ROOT)
    old = (ROOT / "versions.yaml").read_text(encoding="utf-8")
    new = bump.edit(old, project.versions_document, project.versions.components, moves)
    pairs = zip(old.split("\n"), new.split("\n"), strict=True)
    return [after.strip() for before, after in pairs if before != after]


def test_a_build_that_names_a_pin_moves_with_it() -> None:
    lines = moved({("flydsl", 0): "0.9.9"})
    assert len(lines) == 2
    # AITER's own FlyDSL, which its build takes, is another one.
    assert 'flydsl==0.1.7"/FLYDSL_VERSION = "flydsl==0.9.9"' in lines[0]
    assert lines[1] == "- {wheel: flydsl, version: 0.9.9, channel: pypi}"


def test_the_tools_of_builds_move_with_their_rocm() -> None:
    lines = moved({("rocm", 1): "10.9.9"})
    assert lines.count("- rocm-sdk-devel==10.9.9") == 2
    assert "- {inside: rocm-sdk-libraries, version: 10.9.9, channel: amd}" in lines
