"""Publishing an image and its documents: what a registry is sent, in which order, and what stops
it.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_verification import bundle

from memory_registry import NAME, MemoryRegistry, connect
from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.oci.store import MANIFEST_TYPE, canonical_json, digest_of
from primus_images.progress import Progress
from primus_images.release import publish as module, registry as of_registry
from primus_images.release.artifact import EMPTY, WITHDRAWAL, Document, digest_tag
from primus_images.release.documents import GATES, IN_TOTO, statement
from primus_images.release.publish import Ready, finish, publish
from primus_images.release.registry import Repository
from primus_images.release.statement import (
    BUNDLE,
    PROVENANCE,
    Request,
    Signer,
    Trust,
    requests,
    require_unedited,
    statements,
)
from primus_images.release.tags import move_tag, withdrawable

TAG = "v26.11-demo"
LAYER = b"a layer"
CONFIG = b"{}"
MANIFEST = canonical_json(
    {
        "mediaType": MANIFEST_TYPE,
        "config": {"digest": digest_of(CONFIG), "size": len(CONFIG)},
        "layers": [{"digest": digest_of(LAYER), "size": len(LAYER)}],
    }
)
DIGEST = digest_of(MANIFEST)
SUBJECT = {"mediaType": MANIFEST_TYPE, "digest": DIGEST, "size": len(MANIFEST)}
PAPERS = (
    Document(media_type=GATES, name="gates.json", data=b'{"gates": []}'),
    Document(media_type=IN_TOTO, name="provenance.json", data=b'{"predicate": {"a": 1}}'),
)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_registry.time, "sleep", lambda _: None)
    monkeypatch.setattr(Signer, "bundle", lambda signer, content: bundle(content).data)


@pytest.fixture(params=[True, False], ids=["with the API", "with a list"])
def registry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MemoryRegistry:
    return connect(monkeypatch, MemoryRegistry(api=request.param))


@pytest.fixture
def there(registry: MemoryRegistry) -> Repository:
    return Repository(NAME)


def pushed(registry: MemoryRegistry, *tags: str, manifest: bytes = MANIFEST) -> None:
    digest = digest_of(manifest)
    registry.manifests[digest] = manifest
    registry.blobs |= {digest_of(CONFIG): CONFIG, digest_of(LAYER): LAYER}
    registry.tags |= dict.fromkeys(tags, digest)


def ready(**fields: Any) -> Ready:
    blob = SimpleNamespace(digest=digest_of(LAYER), size=len(LAYER))
    layer = SimpleNamespace(blob=blob)
    image: Any = SimpleNamespace(
        digest=DIGEST,
        manifest=MANIFEST,
        config=CONFIG,
        layers=[layer],
        size=len(LAYER),
        plan=SimpleNamespace(ref=TAG),
    )
    usual: dict[str, Any] = {"image": image, "tag": TAG, "documents": PAPERS, "objections": ()}
    return Ready(**{**usual, **fields})


@pytest.fixture
def sent(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Publish with a stand-in for skopeo; the words that it was called with are noted."""

    def skopeo(command: str, *words: str) -> str:
        registry.asked.append(f"skopeo {command} {words[-1]}")
        pushed(registry)
        return ""

    monkeypatch.setattr(module, "skopeo", skopeo)
    store: Any = SimpleNamespace(root=tmp_path, check=lambda digest: "")

    def act(signing: Signer | Path | None = None, **fields: Any) -> dict[str, Any]:
        return publish(ready(**fields), store, NAME, Progress(), signing)

    return act


def test_an_image_is_pushed_signed_and_gets_its_tag_last(
    registry: MemoryRegistry, there: Repository, sent: Callable[..., dict[str, Any]]
) -> None:
    result = sent(Signer(key="ours"))
    assert result == {
        "ref": f"{NAME}:{TAG}",
        "digest": DIGEST,
        "new": True,
        "bytes_sent": len(LAYER),
        "bytes": len(LAYER),
        "attached": ["gates.json", "provenance.json"],
        "signed": True,
        "to_sign": None,
    }
    assert registry.tags[TAG] == DIGEST
    sets = [line for line in registry.asked if line == f"PUT manifests/{TAG}"]
    assert len(sets) == 1
    last_put = [line for line in registry.asked if line.startswith("PUT")][-1]
    assert last_put == f"PUT manifests/{TAG}"
    assert f"skopeo copy docker://{NAME}@{DIGEST}" in registry.asked
    kinds = sorted(document.media_type for document in there.documents(DIGEST))
    assert kinds == sorted([GATES, IN_TOTO, BUNDLE, BUNDLE])


def test_what_is_there_is_not_sent_again(
    registry: MemoryRegistry, sent: Callable[..., dict[str, Any]]
) -> None:
    sent(Signer(key="ours"))
    registry.asked.clear()
    result = sent(Signer(key="ours"))
    assert (result["new"], result["bytes_sent"]) == (False, 0)
    assert not any(line.startswith(("PUT", "POST", "skopeo")) for line in registry.asked)


def test_a_layer_that_the_registry_lost_is_sent_again(
    registry: MemoryRegistry, sent: Callable[..., dict[str, Any]]
) -> None:
    sent()
    del registry.blobs[digest_of(LAYER)]
    assert sent()["bytes_sent"] == len(LAYER)
    del registry.blobs[digest_of(CONFIG)]
    assert sent()["bytes_sent"] == 0
    assert digest_of(CONFIG) in registry.blobs


def test_an_image_with_objections_is_not_published(
    registry: MemoryRegistry, sent: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(CheckFailed, match=f"{TAG} may not be published: one; two"):
        sent(objections=("one", "two"))
    assert registry.asked == []


OTHER = canonical_json({"mediaType": MANIFEST_TYPE, "other": True})


def test_a_release_is_never_replaced_and_a_preview_moves(
    registry: MemoryRegistry, sent: Callable[..., dict[str, Any]]
) -> None:
    pushed(registry, TAG, f"{TAG}-preview", manifest=OTHER)
    with pytest.raises(CheckFailed, match="a release is never replaced"):
        sent()
    assert registry.tags[TAG] == digest_of(OTHER)
    assert sent(tag=f"{TAG}-preview")["new"] is True
    assert registry.tags[f"{TAG}-preview"] == DIGEST


def test_an_image_that_is_signed_later_has_no_tag_yet(
    registry: MemoryRegistry,
    there: Repository,
    sent: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    result = sent(tmp_path / "to-sign")
    path = tmp_path / "to-sign" / TAG / "request.json"
    assert (result["to_sign"], result["signed"]) == (str(path), False)
    assert TAG not in registry.tags
    (request,) = requests(tmp_path / "to-sign")
    assert request == Request(f"{NAME}:{TAG}", SUBJECT, statements(PAPERS, TAG, DIGEST))
    require_unedited(there, request)
    assert finish(there, request, Signer(key="ours")) == 2
    assert registry.tags[TAG] == DIGEST


def put(*path: str | int, value: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        *above, last = path
        for part in above:
            content = content[part]
        content[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("ref", value=1),
        put("subject", "mediaType", value="text/plain"),
        put("subject", "digest", value="sha256:" + "0" * 64),
        put("statements", 0, "subject", 0, "name", value="v26.12-demo"),
        put("statements", 1, "subject", 0, "digest", value={"sha512": "0"}),
        put("statements", value=1),
        lambda content: content.pop("subject"),
    ],
)
def test_what_is_no_request_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    request = Request(f"{NAME}:{TAG}", SUBJECT, statements(PAPERS, TAG, DIGEST))
    path = request.write(tmp_path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="not a request of `primus publish --sign-later`") as no:
        requests(tmp_path)
    assert no.value.where == str(path)


def test_a_folder_without_a_request_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"nothing to sign in {tmp_path}"):
        requests(tmp_path)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (put(1, "predicate", value={"a": 2}), PROVENANCE),
        (lambda those: those.append(statement(TAG, DIGEST, "odd", {})), "odd"),
        (lambda those: those.pop(1), PROVENANCE),
    ],
)
def test_an_edited_request_is_not_signed(
    there: Repository, registry: MemoryRegistry, change: Callable[[Any], Any], kind: str
) -> None:
    pushed(registry)
    there.attach(PAPERS, SUBJECT)
    contents = statements(PAPERS, TAG, DIGEST)
    change(contents)
    with pytest.raises(InputError) as caught:
        require_unedited(there, Request(f"{NAME}:{TAG}", SUBJECT, contents))
    assert caught.value.message == (
        f"the request to sign {NAME}:{TAG} was edited: its statement of type {kind} is not that "
        "of the documents that were published"
    )


def test_an_image_that_is_gone_gets_no_tag(there: Repository, registry: MemoryRegistry) -> None:
    request = Request(f"{NAME}:{TAG}", SUBJECT, [])
    with pytest.raises(CheckFailed, match=f"{NAME} does not have the image {DIGEST}"):
        finish(there, request, None)
    registry.manifests[DIGEST] = OTHER
    with pytest.raises(CheckFailed, match=f"{NAME} does not have the image {DIGEST}"):
        finish(there, request, None)
    assert TAG not in registry.tags


def test_a_tag_that_another_publisher_set_first_stays(
    there: Repository, registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(registry)
    # Another one announced itself, and sets its tag while this one waits.
    pushed(registry, f"{TAG}.by-000000000000", manifest=OTHER)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pushed(registry, TAG, manifest=OTHER))
    with pytest.raises(CheckFailed, match=r"another publish was first: .* is sha256:"):
        finish(there, Request(f"{NAME}:{TAG}", SUBJECT, []), None)
    assert registry.tags[TAG] == digest_of(OTHER)


@pytest.mark.parametrize(("other", "rounds"), [("0" * 12, 2), ("f" * 13, 1), (None, 0)])
def test_of_two_publishers_the_one_with_the_smaller_digest_goes_first(
    there: Repository,
    registry: MemoryRegistry,
    monkeypatch: pytest.MonkeyPatch,
    other: str | None,
    rounds: int,
) -> None:
    waited: list[float] = []
    pushed(registry)
    if other:
        pushed(registry, f"{TAG}.by-{other}", manifest=OTHER)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: seconds and waited.append(seconds))
    finish(there, Request(f"{NAME}:{TAG}", SUBJECT, []), None)
    assert waited == [2.0] * rounds
    assert registry.tags[f"{TAG}.by-{DIGEST[7:19]}"] == DIGEST
    assert registry.tags[TAG] == DIGEST


def test_documents_are_attached_once(there: Repository, registry: MemoryRegistry) -> None:
    pushed(registry)
    there.attach(PAPERS, SUBJECT)
    before = len(registry.manifests)
    asked = len(registry.asked)
    there.attach(PAPERS, SUBJECT)
    assert len(registry.manifests) == before
    assert not any(line.startswith(("PUT", "POST")) for line in registry.asked[asked:])
    there.attach(PAPERS[:1], SUBJECT)
    assert sorted(document.name for document in there.documents(DIGEST)) == [
        "gates.json",
        "provenance.json",
    ]
    assert (digest_tag(DIGEST) in registry.tags) is not registry.api


def test_documents_of_one_type_are_read_alone(there: Repository, registry: MemoryRegistry) -> None:
    pushed(registry)
    there.attach(PAPERS, SUBJECT)
    assert there.documents(DIGEST, GATES) == [PAPERS[0]]
    assert there.documents(DIGEST, BUNDLE) == []
    assert there.whole_documents(DIGEST, IN_TOTO) == [PAPERS[1]]


def artifact_of(registry: MemoryRegistry, name: str) -> str:
    for digest, data in registry.manifests.items():
        content = json.loads(data)
        title = "org.opencontainers.image.title"
        for layer in content.get("layers", []):
            if layer.get("annotations", {}).get(title) == name:
                return digest
    raise AssertionError(name)


def rewritten(registry: MemoryRegistry, name: str, change: Callable[[Any], object]) -> None:
    """Attach a changed manifest in place of the right one of a document."""
    digest = artifact_of(registry, name)
    content = json.loads(registry.manifests.pop(digest))
    change(content)
    data = canonical_json(content)
    registry.manifests[digest_of(data)] = data
    for tag, of_list in registry.tags.items():
        if tag.startswith("sha256-"):
            index = registry.manifests[of_list].replace(digest.encode(), digest_of(data).encode())
            registry.manifests[of_list] = index


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda there: there.blobs.pop(digest_of(PAPERS[0].data)),
            r"\(gates.json\) has lost its contents",
        ),
        (
            lambda there: there.blobs.update({digest_of(PAPERS[0].data): b"other"}),
            r"\(gates.json\) was changed: its contents have other bytes",
        ),
        (
            lambda there: rewritten(there, "gates.json", put("layers", 0, "size", value=99)),
            r"\(gates.json\) was changed: its manifest states another size",
        ),
        (
            lambda there: rewritten(there, "gates.json", put("layers", value=[])),
            "is not a manifest with one file",
        ),
        (
            lambda there: there.manifests.update(
                {artifact_of(there, "gates.json"): OTHER[:-1] + b" }"}
            ),
            "was changed: its manifest has other bytes",
        ),
        (
            lambda there: there.lost.add(artifact_of(there, "gates.json")),
            "is listed for the image, but missing",
        ),
    ],
)
def test_a_document_that_is_not_whole_is_named_and_left_out_of_whole_ones(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[MemoryRegistry], object], said: str
) -> None:
    registry = connect(monkeypatch, MemoryRegistry(api=False))
    there = Repository(NAME)
    pushed(registry)
    there.attach(PAPERS, SUBJECT)
    damage(registry)
    with pytest.raises(CheckFailed, match=said):
        there.documents(DIGEST)
    assert there.whole_documents(DIGEST, GATES) == []
    assert there.whole_documents(DIGEST, IN_TOTO) == [PAPERS[1]]


@pytest.mark.parametrize("what", ["contents", "empty config", "manifest"])
def test_a_document_that_the_registry_lost_is_attached_again(
    there: Repository, registry: MemoryRegistry, what: str
) -> None:
    pushed(registry)
    there.attach(PAPERS, SUBJECT)
    if what == "manifest":
        registry.manifests.pop(artifact_of(registry, "gates.json"))
    else:
        registry.blobs.pop(digest_of(EMPTY if what == "empty config" else PAPERS[0].data))
    there.attach(PAPERS, SUBJECT)
    assert [document.name for document in there.whole_documents(DIGEST, GATES)] == ["gates.json"]


def test_a_registry_that_lists_nothing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = connect(monkeypatch, MemoryRegistry(api=True))
    monkeypatch.setattr(registry, "_referrers", lambda image: [])
    pushed(registry)
    with pytest.raises(HostError, match=r"accepts documents for .*, but does not list them"):
        Repository(NAME).attach(PAPERS, SUBJECT)


def attached_withdrawal(there: Repository, reason: str = "wrong") -> bytes:
    content = statement(TAG, DIGEST, WITHDRAWAL, {"reason": reason})
    data = bundle(content).data
    there.attach([Document(media_type=BUNDLE, name="", data=data, predicate=WITHDRAWAL)], SUBJECT)
    return data


@pytest.mark.parametrize(
    ("loss", "stays"), [("manifest", True), ("altered", True), ("contents", False), ("none", True)]
)
def test_a_signature_without_its_contents_leaves_the_list_for_a_new_one(
    loss: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = connect(monkeypatch, MemoryRegistry(api=False))
    there = Repository(NAME)
    pushed(registry)
    data = attached_withdrawal(there)
    (first,) = [row["digest"] for row in there.referrers(DIGEST)]
    if loss == "manifest":
        registry.lost.add(first)
    elif loss == "altered":
        absent = {"digest": f"sha256:{'0' * 64}"}
        registry.manifests[first] = json.dumps({"layers": [absent]}).encode()
    elif loss == "contents":
        registry.blobs.pop(digest_of(data))
    attached_withdrawal(there, "wrong again")
    listed = [
        row["digest"] for row in json.loads(registry.manifests[tag_of(registry)])["manifests"]
    ]
    assert len(listed) == 1 + stays
    assert (first in listed) is stays


def tag_of(registry: MemoryRegistry) -> str:
    """The digest of the list of an image's documents."""
    return registry.tags[digest_tag(DIGEST)]


def test_what_was_lost_leaves_a_list_that_the_registry_compares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = connect(monkeypatch, MemoryRegistry(api=False))
    there = Repository(NAME)
    pushed(registry)
    there.attach(PAPERS[:1], SUBJECT)
    lost = artifact_of(registry, "gates.json")
    registry.lost.add(lost)
    compared = registry._answer

    def answer(method: str, path: str, query: Any, data: bytes) -> Any:
        if method == "PUT" and path.endswith(digest_tag(DIGEST)) and lost.encode() in data:
            return 400, b"", {}
        return compared(method, path, query, data)

    monkeypatch.setattr(registry, "_answer", answer)
    there.attach(PAPERS[1:], SUBJECT)
    assert f"! {NAME} has lost {lost}, which leaves its list" in capsys.readouterr().err
    assert [document.name for document in there.documents(DIGEST)] == ["provenance.json"]


def test_a_lost_withdrawal_does_not_leave_the_list_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = connect(monkeypatch, MemoryRegistry(api=False))
    there = Repository(NAME)
    pushed(registry)
    attached_withdrawal(there)
    (lost,) = [row["digest"] for row in there.referrers(DIGEST)]
    registry.lost.add(lost)
    registry.refuses = (f"manifests/{digest_tag(DIGEST)}",)
    with pytest.raises(HostError, match="has lost the signed withdrawal of this image"):
        there.attach(PAPERS, SUBJECT)
    # A refusal that no loss explains is the registry's own.
    registry.lost.clear()
    with pytest.raises(HostError, match=r"status 400|refuses"):
        there.attach(PAPERS, SUBJECT)


def test_an_image_of_several_platforms_is_that_of_this_one(
    there: Repository, registry: MemoryRegistry
) -> None:
    pushed(registry)
    rows = [
        {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "arm64"}},
        {"digest": DIGEST, "platform": {"os": "linux", "architecture": "amd64"}},
    ]
    index = canonical_json({"manifests": rows})
    registry.manifests[digest_of(index)] = index
    assert there.image(digest_of(index)) == (json.loads(MANIFEST), {})
    assert there.image(DIGEST) == (json.loads(MANIFEST), {})
    for content in ({"manifests": rows[:1]}, {"config": {}}):
        data = canonical_json(content)
        registry.manifests[digest_of(data)] = data
        with pytest.raises(CheckFailed, match="is not an image with a config"):
            there.image(digest_of(data))


def test_no_more_of_a_blob_is_read_than_it_may_have(
    there: Repository, registry: MemoryRegistry, tmp_path: Path
) -> None:
    pushed(registry)
    path = tmp_path / "blob"
    assert there.blob(digest_of(LAYER), path, 100) is True
    assert path.read_bytes() == LAYER
    assert there.blob(digest_of(LAYER), path, 3) is True
    assert path.read_bytes() == LAYER[:4]
    assert there.blob("sha256:" + "0" * 64, path, 3) is False


def test_tags_are_listed_by_their_beginning(there: Repository, registry: MemoryRegistry) -> None:
    pushed(registry, "v26.11-demo", "v26.11-cpu", "latest", f"v1{'.by-'}0", "sha256-0")
    assert there.tags() == ["latest", "sha256-0", "v1.by-0", "v26.11-cpu", "v26.11-demo"]
    assert there.tags("v26") == ["v26.11-cpu", "v26.11-demo"]
    assert there.tags_with("latest", "l") == ["latest"]
    with pytest.raises(HostError, match="has the tag absent, and does not list it"):
        there.tags_with("absent")
    assert there.lacks("v26.11-dem").hint == "did you mean 'v26.11-demo' or 'v26.11-cpu'?"
    assert there.lacks("xyz").hint == "its tags: latest, v26.11-cpu, v26.11-demo"
    assert there.lacks("xyz").message == f"{NAME} has no image xyz"
    assert there.digest("v26.11-demo") == DIGEST
    assert there.digest("absent") is None
    assert there.missing("manifests", [DIGEST, "sha256:1"]) == ["sha256:1"]


@pytest.mark.parametrize(
    ("release", "successor", "said"),
    [
        (TAG, None, ""),
        (TAG, "v26.12-demo", ""),
        ("latest-demo", None, "latest-demo is not the name of a release"),
        ("v26.9-demo", None, "has no image v26.9-demo"),
        (TAG, "v26.12-cpu", "is not another release of the target of v26.11-demo"),
        (TAG, TAG, "is not another release of the target of v26.11-demo"),
        (TAG, "latest-demo", "is not another release of the target of v26.11-demo"),
        (TAG, "v26.13-demo", "has no image v26.13-demo"),
        (TAG, "v26.11.1-demo", "is the same image as v26.11-demo"),
    ],
)
def test_a_release_is_withdrawn_for_another_one_of_its_target(
    there: Repository,
    registry: MemoryRegistry,
    release: str,
    successor: str | None,
    said: str,
) -> None:
    pushed(registry, TAG, "v26.11.1-demo", "latest-demo", f"{TAG}.by-0", "sha256-0", "stable")
    pushed(registry, "v26.12-demo", "latest", manifest=OTHER)
    if said:
        with pytest.raises(InputError, match=said):
            withdrawable(there, release, successor)
        return
    image = withdrawable(there, release, successor)
    assert (image.tag, image.digest, image.manifest) == (TAG, DIGEST, MANIFEST)
    assert image.moving_tags == ("latest-demo", "stable")


def test_a_statement_of_this_key_is_not_attached_twice(
    there: Repository, registry: MemoryRegistry
) -> None:
    pushed(registry)
    contents: Sequence[Any] = statements(PAPERS, TAG, DIGEST)
    request = Request(f"{NAME}:{TAG}", SUBJECT, contents)
    for _ in range(2):
        assert finish(there, request, Signer(key="ours")) == 2
        assert len(there.documents(DIGEST, BUNDLE)) == 2


@pytest.mark.parametrize("release", ["v26.9-demo", f"{TAG}.by-0"])
def test_only_published_releases_get_a_moving_tag(
    there: Repository, registry: MemoryRegistry, release: str
) -> None:
    pushed(registry, TAG, "v26.10-demo", "latest-demo", f"{TAG}.by-0", "vague")
    with pytest.raises(InputError) as caught:
        move_tag(there, "latest-demo", release, Trust(key="ours"))
    assert caught.value.message == f"{NAME} has no {release}; its releases: v26.10-demo, {TAG}"
    registry.tags = {}
    with pytest.raises(InputError, match="its releases: none"):
        move_tag(there, "latest-demo", release, Trust(key="ours"))
