"""Where a repository is read and written, as registries.conf says."""

from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.release import mirrors
from primus_images.release.mirrors import endpoint_of, sources_of

CONF = """\
[[registry]]
prefix = "docker.io/rocm"
location = "upstream.example/rocm/"
insecure = true
[[registry.mirror]]
location = "one.example/r"
pull-from-mirror = "digest-only"
[[registry.mirror]]
location = "two.example"
insecure = true
pull-from-mirror = "tag-only"
[[registry.mirror]]
location = "blocked.example/x"

[[registry]]
location = "docker.io"

[[registry]]
location = "blocked.example"
blocked = true

[[registry]]
prefix = "*.example.org"
mirror-by-digest-only = true
[[registry.mirror]]
location = "three.example"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(mirrors, "_SYSTEM", tmp_path / "etc")
    folder = tmp_path / ".config/containers"
    folder.mkdir(parents=True)
    (folder / "registries.conf").write_text(CONF)
    return folder


@pytest.mark.parametrize(
    ("repository", "sources"),
    [
        (
            "docker.io/rocm/primus",
            [
                ("one.example/r/primus", False, False, True),
                ("two.example/primus", True, True, False),
                ("upstream.example/rocm/primus", True, True, True),
            ],
        ),
        # A prefix ends at a part of the name.
        ("docker.io/rocmx/primus", [("docker.io/rocmx/primus", False, True, True)]),
        ("quay.io/a", [("quay.io/a", False, True, True)]),
        (
            "a.example.org/b",
            [("three.example/b", False, False, True), ("a.example.org/b", False, True, True)],
        ),
        ("example.org/b", [("example.org/b", False, True, True)]),
    ],
)
def test_mirrors_come_first_and_the_registry_last(
    home: Path, repository: str, sources: list[tuple[str, bool, bool, bool]]
) -> None:
    found = [(one.location, one.insecure, one.tags, one.digests) for one in sources_of(repository)]
    assert found == sources


def test_a_repository_is_written_under_its_own_name(home: Path) -> None:
    assert endpoint_of("docker.io/rocm/primus").location == "docker.io/rocm/primus"
    assert endpoint_of("docker.io/rocm/primus").insecure is True
    assert endpoint_of("quay.io/a").insecure is False
    for act in (endpoint_of, sources_of):
        with pytest.raises(InputError, match=r"is blocked: blocked\.example") as caught:
            act("blocked.example/a")
        assert caught.value.where == str(home / "registries.conf")


def test_the_users_file_stands_in_place_of_the_systems(home: Path, tmp_path: Path) -> None:
    system = tmp_path / "etc"
    (system / "registries.conf.d").mkdir(parents=True)
    (system / "registries.conf").touch()
    (system / "registries.conf.d/a.conf").touch()
    (home / "registries.conf.d").mkdir()
    (home / "registries.conf.d/b.conf").touch()
    (home / "registries.conf.d/a.conf").touch()
    own = [home / "registries.conf.d/a.conf", home / "registries.conf.d/b.conf"]
    assert list(mirrors.configuration_files()) == [home / "registries.conf", *own]
    (home / "registries.conf").unlink()
    assert list(mirrors.configuration_files()) == [
        system / "registries.conf",
        system / "registries.conf.d/a.conf",
        *own,
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[registry", "it is not TOML"),
        ("registry = 1", "`registry` is not a list of tables"),
        ("registry = [1]", "`registry` is not a list of tables"),
        ("[[registry]]\nprefix = 'a'", "a `registry` has no `location`"),
        ("[[registry]]\nlocation = 1", "`location` is 1, which is no text"),
        ("[[registry]]\nlocation = 'https://a'", "`location` is https://a"),
        ("[[registry]]\nlocation = 'a'\nmirror = 1", "`mirror` is not a list of tables"),
        ("[[registry]]\nlocation = 'a'\n[[registry.mirror]]", "a mirror of a has no `location`"),
        (
            "[[registry]]\nlocation = 'a'\n[[registry.mirror]]\nlocation = 'b'\n"
            "pull-from-mirror = 'x'",
            "`pull-from-mirror` of a is 'x'",
        ),
        ("[[registry]]\nlocation = 'a'\nblocked = 'x'", "blocked"),
    ],
)
def test_a_damaged_file_is_refused_with_its_path(home: Path, text: str, said: str) -> None:
    (home / "registries.conf").write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        sources_of("quay.io/a")
    assert str(caught.value.where).startswith(str(home / "registries.conf"))
