"""Names of images in a registry, and the login for one."""

import json
from base64 import b64encode
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.release.logins import Login, login_for
from primus_images.release.reference import reference, require_repository, require_tag


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("localhost/a", True),
        ("localhost:65535/a", True),
        ("localhost:65536/a", False),
        ("localhost:0/a", False),
        ("docker.io/rocm/primus", True),
        ("docker.io/Rocm", False),
        ("docker.io/a__b/c.d-e", True),
        ("docker.io/a..b", False),
        ("docker.io", False),
        ("docker.io/" + "a" * 245, True),
        ("docker.io/" + "a" * 246, False),
    ],
)
def test_names_of_repositories(name: str, fine: bool) -> None:
    if fine:
        require_repository(name, "--to")
        return
    with pytest.raises(InputError, match=r"--to .* is not a repository of a registry"):
        require_repository(name, "--to")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("localhost:5/a:v1", ("localhost:5/a", "v1", "")),
        (f"localhost/a@sha256:{'0' * 64}", ("localhost/a", "", f"sha256:{'0' * 64}")),
        (f"localhost/a:v1@sha256:{'0' * 64}", ("localhost/a", "v1", f"sha256:{'0' * 64}")),
        ("localhost:5/a", None),
        ("localhost/a@sha256:0", None),
        ("localhost/a:-v1", None),
        ("", None),
    ],
)
def test_references(text: str, parts: tuple[str, str, str] | None) -> None:
    if parts:
        assert reference(text, "--image") == parts
        return
    with pytest.raises(InputError):
        reference(text, "--image")


def test_tags_have_at_most_128_characters() -> None:
    require_tag("a" * 128, "TAG")
    with pytest.raises(InputError, match="cannot be a tag"):
        require_tag("a" * 129, "TAG")


@pytest.mark.parametrize(
    ("config", "login"),
    [
        ({}, Login()),
        ({"auths": None, "credHelpers": None}, Login()),
        ({"auths": {"a.example:5": {"auth": ""}}}, Login()),
        ({"auths": {"a.example:5": {"auth": "me:word"}}}, Login("me", "word")),
        ({"auths": {"https://a.example:5/v1/": {"auth": "me:word"}}}, Login("me", "word")),
        ({"auths": {"b.example": {"auth": "me:word"}}}, Login()),
        ({"auths": {"a.example:5": {"identitytoken": "again"}}}, Login("<token>", "again")),
    ],
)
def test_the_login_of_a_registry(
    config: dict[str, dict[str, dict[str, str]] | None],
    login: Login,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert login_for("a.example:5") == Login(), "without a file"
    for entry in (config.get("auths") or {}).values():
        if entry.get("auth"):
            entry["auth"] = b64encode(entry["auth"].encode()).decode()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert login_for("a.example:5") == login
    assert login.refresh_token == ("again" if login.username == "<token>" else "")
