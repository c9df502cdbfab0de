"""A repository that is read from its mirrors, as registries.conf names them."""

from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter

from memory_registry import NAME, MemoryRegistry
from primus_images.errors import HostError
from primus_images.oci.store import MANIFEST_TYPE, canonical_json, digest_of
from primus_images.release import mirrors, registry as of_registry
from primus_images.release.registry import Repository

CONF = """\
[[registry]]
location = "localhost:1"
[[registry.mirror]]
location = "localhost:2"
insecure = true
"""
MANIFEST = canonical_json({"mediaType": MANIFEST_TYPE, "layers": []})
DIGEST = digest_of(MANIFEST)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, MemoryRegistry]:
    """The registry at port 1, and its mirror at port 2. One that is gone does not answer."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(mirrors, "_SYSTEM", tmp_path / "etc")
    monkeypatch.setattr(of_registry.time, "sleep", lambda _: None)
    (tmp_path / ".config/containers").mkdir(parents=True)
    (tmp_path / ".config/containers/registries.conf").write_text(CONF)
    known = {1: MemoryRegistry(), 2: MemoryRegistry()}

    def send(_: object, request: PreparedRequest, **__: object) -> Response:
        there = known.get(urlsplit(str(request.url)).port or 0)
        if there is None:
            answer = Response()
            answer.status_code = 403
            answer.url = str(request.url)
            answer.raw = BytesIO(b"")
            return answer
        return there.send(request)

    monkeypatch.setattr(HTTPAdapter, "send", send)
    return known


def fill(*there: MemoryRegistry) -> None:
    for registry in there:
        registry.manifests = {DIGEST: MANIFEST}
        registry.tags = {"v1": DIGEST}


def test_a_mirror_that_has_it_is_read_in_place_of_the_registry(
    hosts: dict[int, MemoryRegistry],
) -> None:
    fill(hosts[2])
    assert Repository.to_read(NAME).manifest(DIGEST) == MANIFEST
    assert Repository.to_read(NAME).digest("v1") == DIGEST
    assert hosts[1].asked == []
    assert Repository(NAME).manifest(DIGEST) is None, "to write, no mirror is asked"


def test_what_a_mirror_lacks_comes_from_the_registry(hosts: dict[int, MemoryRegistry]) -> None:
    fill(hosts[1])
    assert Repository.to_read(NAME).manifest("v1") == MANIFEST
    assert hosts[2].asked


def test_a_mirror_that_fails_is_said_and_not_asked_again(
    hosts: dict[int, MemoryRegistry], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(*hosts.values())
    hosts[2].manifests[DIGEST] = b'{"other": 1}'
    there = Repository.to_read(NAME)
    assert there.manifest(DIGEST) == MANIFEST
    assert "! mirror: " in capsys.readouterr().err
    before = len(hosts[2].asked)
    assert there.manifest("v1") == MANIFEST
    assert len(hosts[2].asked) == before


def test_a_list_is_the_registrys_and_a_mirrors_only_if_it_does_not_answer(
    hosts: dict[int, MemoryRegistry], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(*hosts.values())
    hosts[2].tags["v0"] = DIGEST
    listed: Any = Repository.to_read(NAME).tags()
    assert list(listed) == ["v1"]
    del hosts[1]
    assert list(Repository.to_read(NAME).tags()) == ["v0", "v1"]
    assert "its mirror localhost:2/rocm/demo lists what it knows" in capsys.readouterr().err
    del hosts[2]
    with pytest.raises(HostError):
        Repository.to_read(NAME).tags()
