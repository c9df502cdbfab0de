"""What is asked of which index for newer versions, and what is said of them."""

from pathlib import Path

import pytest
from packaging.version import Version

from primus_images.cli.host.outdated import _amds_newest
from primus_images.cli.main import main
from primus_images.errors import HostError
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.release import bump

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


def test_amds_newest_image_is_named() -> None:
    text = _amds_newest()
    assert "rocm/primus:v26.8 of 2026-10-08: rocm 10.1.0, pytorch 2.14.0+rocm10.1.0" in text
    assert "`primus diff versions.yaml v26.8`" in text
