"""A moving tag follows evidence, and stays with its target and its release."""

import json
from typing import Any, cast

import pytest

from primus_images.errors import CheckFailed, InputError
from primus_images.oci.store import digest_of
from primus_images.release import tags
from primus_images.release.artifact import Document
from primus_images.release.documents import IN_TOTO
from primus_images.release.registry import Repository
from primus_images.release.statement import Trust
from primus_images.release.tags import move_tag, require_moving
from primus_images.release.verification import Verified

OURS = Verified(release="v26.11", target="cpu", tag="v26.11-cpu", signed=6)


class Registry:
    """A repository with a release of cpu, and a tag ``stable`` of an image of another target."""

    name = "localhost:1/a"

    def __init__(self, target: str) -> None:
        self.images = {"v26.11-cpu": b"cpu", "v26.11": b"other", "stable": b"other"}
        self.target = target

    def manifest(self, reference: str) -> bytes | None:
        for manifest in self.images.values():
            if reference == digest_of(manifest):
                return manifest
        return self.images.get(reference)

    def digest(self, reference: str) -> str | None:
        manifest = self.manifest(reference)
        return digest_of(manifest) if manifest else None

    def tags(self, beginning: str = "") -> list[str]:
        return [tag for tag in self.images if tag.startswith(beginning)]

    def tag(self, tag: str, manifest: bytes) -> None:
        self.images[tag] = manifest

    def whole_documents(self, _digest: str, _kind: str) -> list[Document]:
        parameters: dict[str, Any] = {"target": self.target}
        content: dict[str, Any] = {
            "predicate": {"buildDefinition": {"externalParameters": parameters}}
        }
        if not self.target:
            content = {}
        data = json.dumps(content).encode()
        return [Document(media_type=IN_TOTO, name="provenance.json", data=data)]


def moved(
    monkeypatch: pytest.MonkeyPatch, tag: str, verified: Verified = OURS, target: str = "cpu"
) -> bytes:
    """Move a tag to the release, and return what it names then."""
    there = Registry(target)

    def verify(name: str, _trust: Trust, *, with_layers: bool) -> Verified:
        assert name == "localhost:1/a:v26.11-cpu"
        assert not with_layers
        verified.digest = digest_of(b"cpu")
        return verified

    monkeypatch.setattr(tags, "verify_image", verify)
    move_tag(cast(Repository, there), tag, "v26.11-cpu", Trust(key="key"))
    return there.images[tag]


@pytest.mark.parametrize("tag", ["latest-cpu", "stable", "new", "v26.11", "v26", "latest"])
def test_a_tag_moves_to_an_image_that_verifies(monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    assert moved(monkeypatch, tag) == b"cpu"


def test_a_tag_whose_image_says_nothing_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moved(monkeypatch, "stable", target="") == b"cpu"


@pytest.mark.parametrize(
    ("tag", "changes", "target", "reason"),
    [
        ("latest-cpu", {"faults": ["signature: none"]}, "cpu", "does not move to v26.11-cpu: sign"),
        ("stable", {"faults": ["config: it is missing"]}, "cpu", "config: it is missing"),
        ("latest-cpu", {"withdrawn": "withdrawn on a day"}, "cpu", "withdrawn on a day"),
        ("latest-cpu", {"target": "h200"}, "cpu", "stands for target cpu, .* is of h200"),
        ("stable", {}, "h200", "stands for target h200, .* is of cpu"),
        ("v26.11", {}, "h200", "stands for target h200"),
        ("v26.12", {}, "cpu", "v26.12 is the name of another release .* v26.11"),
        ("v26.1", {}, "cpu", "another release"),
        ("v26.11.1", {}, "cpu", "another release"),
        ("v27", {}, "cpu", "another release"),
    ],
)
def test_a_tag_does_not_move_without_evidence(
    monkeypatch: pytest.MonkeyPatch, tag: str, changes: dict[str, Any], target: str, reason: str
) -> None:
    fields = {"release": "v26.11", "target": "cpu", "tag": "v26.11-cpu", **changes}
    with pytest.raises(CheckFailed, match=reason):
        moved(monkeypatch, tag, Verified(**fields), target)


@pytest.mark.parametrize(
    ("tag", "release"),
    [
        ("v26.12-cpu", "v26.11-cpu"),
        ("v26.12-cpu.by-0123", "v26.11-cpu"),
        ("sha256-0", "v26.11-cpu"),
        ("latest-h200", "v26.11-cpu"),
        ("latest-cpu", "stable"),
    ],
)
def test_some_names_never_move(tag: str, release: str) -> None:
    with pytest.raises(InputError):
        require_moving(tag, release)
