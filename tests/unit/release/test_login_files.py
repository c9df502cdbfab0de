"""Which file has the login for a registry, and what a program that keeps logins says."""

import json
from pathlib import Path

import pytest

from primus_images.errors import HostError
from primus_images.release.logins import Login, login_files, login_for

# Keeps one login. HELPER_SAYS is what it says in its place.
HELPER = """#!/bin/sh
read server
echo "$1 $server" >> "$LEDGER"
if [ -n "$HELPER_SAYS" ]; then echo "$HELPER_SAYS"; exit 1; fi
echo '{"Username": "me", "Secret": "word"}'
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    program = tmp_path / "bin/docker-credential-safe"
    program.parent.mkdir()
    program.write_text(HELPER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("LEDGER", str(tmp_path / "ledger"))
    monkeypatch.setenv("HELPER_SAYS", "")
    return tmp_path


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_files_are_asked_in_the_order_of_skopeo(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = [
        home / "run/containers/auth.json",
        home / ".config/containers/auth.json",
        home / ".docker/config.json",
        home / ".dockercfg",
    ]
    assert list(login_files()) == usual
    monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
    assert list(login_files())[1] == Path("/config/containers/auth.json")
    monkeypatch.setenv("DOCKER_CONFIG", "/docker")
    assert list(login_files()) == [Path("/docker/config.json")]
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/mine.json")
    assert list(login_files()) == [Path("/mine.json")]


def test_the_first_file_with_a_login_counts_and_a_path_before_its_host(home: Path) -> None:
    def auth(letter: str) -> dict[str, str]:
        return {"auth": {"a": "YTph", "b": "Yjpi", "c": "Yzpj"}[letter]}

    write(home / ".dockercfg", {"r.example": auth("c")})
    assert login_for("r.example/team/image") == Login("c", "c")
    write(home / ".docker/config.json", {"auths": {"https://r.example/v1/": auth("b")}})
    assert login_for("r.example/team/image") == Login("b", "b")
    auths = {"r.example": auth("b"), "r.example/team": auth("a"), "r.example/te": auth("c")}
    write(home / "run/containers/auth.json", {"auths": auths})
    assert login_for("r.example/team/image") == Login("a", "a")
    assert login_for("r.example/other") == Login("b", "b")
    assert login_for("x.example/team") == Login()


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({"credHelpers": {"r.example/team": "safe"}}, "r.example/team"),
        ({"credHelpers": {"r.example": "safe"}, "credsStore": "none"}, "r.example"),
        ({"credsStore": "safe"}, "r.example"),
        ({"credsStore": "safe", "auths": {"r.example": {}}}, "r.example"),
    ],
)
def test_a_program_that_keeps_logins_is_asked(
    home: Path, config: dict[str, object], asked: str
) -> None:
    write(home / ".docker/config.json", config)
    assert login_for("r.example/team/image") == Login("me", "word")
    assert (home / "ledger").read_text() == f"get {asked}\n"


def test_dockers_store_has_the_hub_under_an_address(home: Path) -> None:
    write(home / ".docker/config.json", {"credsStore": "safe"})
    assert login_for("docker.io/a/b") == Login("me", "word")
    assert (home / "ledger").read_text() == "get https://index.docker.io/v1/\n"


def test_a_program_without_the_login_is_none_and_one_that_fails_says_why(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home / ".docker/config.json", {"credsStore": "safe"})
    monkeypatch.setenv("HELPER_SAYS", "credentials not found in native keychain")
    assert login_for("r.example/a") == Login()
    monkeypatch.setenv("HELPER_SAYS", "the key ring is locked")
    with pytest.raises(HostError) as caught:
        login_for("r.example/a")
    assert caught.value.message == (
        "docker-credential-safe, which keeps the login for r.example, says: the key ring is locked"
    )
    assert "echo r.example | docker-credential-safe get" in str(caught.value.hint)


@pytest.mark.parametrize(
    "content", [[1], {"auths": [1]}, {"auths": {"r.example": {"auth": "bm8tY29sb24="}}}]
)
def test_a_login_that_cannot_be_read_names_its_host(home: Path, content: object) -> None:
    write(home / ".docker/config.json", content)
    with pytest.raises(HostError, match=r"the login for r\.example cannot be read") as caught:
        login_for("r.example/a")
    assert caught.value.hint == "log in again: skopeo login r.example"
