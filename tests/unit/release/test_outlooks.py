"""What is asked of which index for newer versions, and what is said of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from memory_index import FOLLOWED, MemoryIndex, connect
from primus_images.cli.host.common import warn_of_state
from primus_images.cli.host.outdated import _amds_newest
from primus_images.cli.main import main
from primus_images.errors import HostError
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.release import bump
from primus_images.release.history import load_history, namesake, pins
from primus_images.versions.components import Image
from project_kit import Kit
from tables import text_of

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


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> MemoryIndex:
    return connect(monkeypatch, MemoryIndex(FOLLOWED))


@pytest.fixture
def followed(tmp_path: Path, index: MemoryIndex) -> bump.Outlooks:
    """The pins of two targets; jit follows frame, and trainer 2.0 needs a newer frame."""
    kit = Kit(tmp_path)
    kit.write("versions.yaml", text_of("versions/lock.yaml") + text_of("versions/followed.yaml"))
    text = "description: d\nbase: bookworm\nchannels: [pypi]\ncomponents: [frame, jit, trainer"
    kit.write("images/demo.yaml", f"{text}, kernels]\n")
    kit.write("images/plain.yaml", f"{text}]\n")
    project = Project.find(tmp_path)
    return bump.Outlooks([resolve(project, name) for name in ("demo", "plain")])


def test_the_newest_version_that_fits_takes_those_along_that_follow_it(
    followed: bump.Outlooks,
) -> None:
    found = {}
    for place in followed.uses:
        outlook = followed.of(place)
        assert outlook.error == ""
        found[place] = (outlook.compatible, outlook.newest, outlook.versions)
    together = {"frame": "1.1", "jit": "3.1"}
    assert found == {
        ("frame", 0): ("1.1", "1.1", together),
        ("frame", 1): ("1.2+cpu", "1.2+cpu", {"frame": "1.2+cpu"}),
        ("jit", 0): ("3.1", "3.2", together),
        ("jit", 1): (None, "3.2", {}),
        ("kernels", 0): ("6.0", "6.0", {**together, "kernels": "6.0"}),
        ("trainer", 0): (None, "2.0", {}),
    }


def test_moves_that_were_decided_before_are_kept(followed: bump.Outlooks) -> None:
    before = {("frame", 0): "1.1", ("jit", 0): "3.1"}
    outlook = followed.of(("kernels", 0), None, before)
    assert outlook.moves == {**before, ("kernels", 0): "6.0"}
    other = {("kernels", 0): "5.0"}
    assert followed.of(("kernels", 0), None, other).compatible is None


def test_a_version_that_is_asked_for_is_taken_though_it_may_not_fit(
    followed: bump.Outlooks,
) -> None:
    assert followed.as_offered(("trainer", 0), "2") == "2.0"
    assert followed.as_offered(("trainer", 0), "2.0.1") == "2.0.1"
    assert followed.of(("trainer", 0), "2.0").moves == {("trainer", 0): "2.0"}
    assert followed.of(("frame", 0), "1.0").moves == {("frame", 0): "1.0"}
    for place, version, reason in (
        (("frame", 0), "7", "no index offers frame 7"),
        (("frame", 0), "1.2+cpu", "frame 1.2+cpu is another build than the pinned one"),
        (("jit", 0), "3.2", "jit 3.2 does not fit: it follows frame, whose wheel names 3.0"),
        (("trainer", 0), "2.0", "trainer 2.0 does not fit the pins that move with it"),
    ):
        assert followed.refusal(place, version) == reason


def test_a_package_that_no_index_has_is_said(followed: bump.Outlooks, index: MemoryIndex) -> None:
    index.wheels["trainer"] = {}
    outlook = followed.of(("trainer", 0))
    assert (outlook.error, outlook.moves) == ("no index lists a file of trainer", {})
    index.silent = {"frame"}
    assert followed.of(("frame", 0)).error == "the index of frame does not answer"


def test_a_version_before_its_release_is_only_for_pins_that_have_one(
    followed: bump.Outlooks, index: MemoryIndex
) -> None:
    index.wheels["trainer"] = {"1.0": "", "1.1": "", "1.2rc1": ""}
    assert followed.of(("trainer", 0)).compatible == "1.1"


def test_components_of_one_rocm_move_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = MemoryIndex(
        "transformers==1.0+rocm10.0.0 transformers==1.0+rocm9.5.0 transformers==1.1+rocm10.1.0 "
        "transformers==1.2+rocm10.2.0 transformers==3.0+cpu device==1.0+rocm10.0.0 "
        "device==1.1+rocm10.1.0 tool==1.0"
    )
    connect(monkeypatch, index)
    kit = Kit(tmp_path)
    pins = "".join(
        f"  {name}:\n    name: N\n    held: true\n    pins:\n"
        f"      - {{wheel: {name}, version: 1.0+rocm10.0.0, channel: pypi}}\n"
        for name in ("transformers", "device")
    )
    kit.write("versions.yaml", text_of("versions/lock.yaml") + pins)
    kit.write(
        "images/demo.yaml",
        "description: d\nbase: bookworm\nchannels: [pypi]\n"
        "components: [tool, transformers, device]\n",
    )
    outlooks = bump.Outlooks([resolve(Project.find(tmp_path), "demo")])
    for name in ("transformers", "device"):
        outlook = outlooks.of((name, 0))
        assert outlook.newest == "1.1+rocm10.1.0", "there is no device for the newer one"
        assert outlook.versions == dict.fromkeys(("transformers", "device"), "1.1+rocm10.1.0")
    assert outlooks.of(("tool", 0)).newest is None
