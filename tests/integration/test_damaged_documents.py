"""Documents that are cut, no JSON, or of other types: each command names them, and none breaks.

The owner of the key has signed each of them, so that nothing but its contents is wrong.
"""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from test_statements import DOCUMENTS, TAG, small_image

from primus_images.cli.main import main
from primus_images.errors import CheckFailed, PrimusError
from primus_images.oci.store import Store, canonical_json, digest_of
from primus_images.release import policy, sides, verification
from primus_images.release.artifact import Document
from primus_images.release.documents import VALIDATION
from primus_images.release.publish import Ready
from primus_images.release.registry import Repository
from primus_images.release.statement import BUNDLE, SIGNATURE, Signer, Trust, statement, statements
from primus_images.release.tags import move_tag, withdraw, withdrawable
from primus_images.release.verification import verified_text, verify_image
from primus_images.release.withdrawal import Withdrawal
from project_kit import SOURCE, make_project

pytestmark = pytest.mark.integration

NAME = "registry.example/rocm/primus"
POLICY = policy.load(SOURCE.parent / "policy.yaml")
WHOLE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "no JSON": lambda _: b"hello",
    "no text": lambda _: b"\xff\xfe\x00",
    "a list": lambda _: b"[]",
    "a number": lambda _: b"7",
    "nothing": lambda _: b"null",
    "no keys": lambda _: b"{}",
    "brackets": lambda _: b"[" * 99_999,
    "a large number": lambda _: b"9" * 9_999,
}
VALUES: tuple[Any, ...] = (7, None, {}, "x", [7], {"a": []}, True, -1.5, [])


def bundle(content: Mapping[str, Any]) -> Document:
    """A statement in an envelope, as if it was signed."""
    payload = b64encode(canonical_json(content)).decode()
    data = canonical_json({"dsseEnvelope": {"payload": payload}, "verificationMaterial": {}})
    return Document(media_type=BUNDLE, name="", data=data)


class Shelf:
    """A repository with one image and its documents, in memory."""

    name = NAME

    def __init__(self, ready: Ready, store: Store, documents: tuple[Document, ...]) -> None:
        self.ready = ready
        self.store = store
        self.moved: dict[str, bytes] = {}
        self.attached: list[Document] = []
        signed = []
        hashes = {document.name: digest_of(document.data) for document in documents}
        signed.append(bundle(statement(TAG, self.digest(), SIGNATURE, {"documents": hashes})))
        for document in documents:
            try:
                ours = statements([document], TAG, self.digest())[1:]
            except Exception:  # noqa: BLE001 - whatever is wrong, nothing is signed of it
                continue
            signed += [bundle(content) for content in ours]
        self.all = [*documents, *signed]

    def digest(self, _word: str = "") -> str:
        return self.ready.image.digest

    def manifest(self, word: str) -> bytes | None:
        return self.moved.get(word, self.ready.image.manifest if "latest" not in word else None)

    def blob(self, digest: str, path: Path, _most: int = 0) -> bool:
        path.write_bytes(self.store.blob_path(digest).read_bytes())
        return True

    def image(self, _digest: str) -> tuple[Any, Any]:
        return json.loads(self.ready.image.manifest), json.loads(self.ready.image.config)

    def referrers(self, _digest: str) -> list[dict[str, Any]]:
        return [{"digest": str(number)} for number in range(len(self.all))]

    def document(self, entry: Mapping[str, str]) -> Document:
        return self.all[int(entry["digest"])]

    def documents(self, _digest: str, media_type: str = "") -> list[Document]:
        return [one for one in self.all if media_type in ("", one.media_type)]

    whole_documents = documents

    def tags(self, _beginning: str = "") -> list[str]:
        return [TAG]

    def tags_with(self, _tag: str, _beginning: str = "") -> list[str]:
        return [TAG]

    def tag(self, tag: str, manifest: bytes) -> None:
        self.moved[tag] = manifest

    def attach(self, documents: list[Document], _subject: object) -> None:
        self.attached += documents


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ready, Store]:
    return small_image(make_project(tmp_path_factory.mktemp("damaged") / "project"))


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trust, "rejects", lambda *_: "")
    monkeypatch.setattr(Signer, "bundle", lambda _, content: bundle(content).data)


def with_document(image: tuple[Ready, Store], name: str, data: bytes) -> Shelf:
    """The image, of whose documents one has other bytes."""
    ready, store = image
    changed = []
    for document in ready.documents:
        changed.append(replace(document, data=data) if document.name.startswith(name) else document)
    return Shelf(ready, store, tuple(changed))


def told(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each command says of the image."""
    there = cast(Repository, shelf)
    trust = Trust(key="key")
    monkeypatch.setattr(verification.Repository, "to_read", lambda _: there)
    monkeypatch.setattr(sides.Repository, "to_read", lambda _: there)

    def verify() -> None:
        result = verify_image(f"{NAME}:{TAG}", trust, policy=POLICY)
        text = verified_text(NAME, result)
        if not result.passed:
            raise CheckFailed(text, hint="see above")

    def withdrawn() -> None:
        found = withdrawable(there, TAG, None)
        withdraw(there, found, Withdrawal(reason="x", date="2026-11-29"), Signer(key="key"))

    commands: dict[str, Callable[[], object]] = {
        "verify": verify,
        "diff": lambda: sides._of_registry(NAME, TAG),
        "tag": lambda: move_tag(there, "latest-demo", TAG, trust),
        "withdraw": withdrawn,
    }
    said = {}
    for command, run in commands.items():
        said[command] = ""
        try:
            run()
        except PrimusError as error:
            said[command] = error.message
            assert error.hint, error.message
            assert not re.search(r"[a-z]Error\b|Traceback|Exception|NoneType|<class", str(error))
    return said


def test_the_whole_image_has_but_what_a_policy_misses(
    image: tuple[Ready, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(image[0], image[1], image[0].documents)
    said = told(shelf, monkeypatch)
    monkeypatch.setattr("primus_images.release.verification._unmet", lambda *_, **__: [])
    assert told(shelf, monkeypatch)["verify"] == ""
    assert (said["diff"], said["tag"], said["withdraw"]) == ("", "", "")
    assert "verify --image" not in said["verify"]


@pytest.mark.parametrize("damage", WHOLE)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_damaged_document_is_named(
    image: tuple[Ready, Store], monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    (document,) = (one for one in image[0].documents if one.name.startswith(name))
    shelf = with_document(image, name, WHOLE[damage](document.data))
    said = told(shelf, monkeypatch)
    assert f"{document.name}: it is damaged: " in said["verify"]
    assert "does not move" in said["tag"]
    assert shelf.moved == {}
    assert said["withdraw"] == ""
    assert len(shelf.attached) == 1
    # A difference needs neither of these.
    if name in ("lock.json", "gates.json", "sbom.spdx.json", "validation-"):
        assert document.name in said["diff"]


def paths(content: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places in a document, of lists those of the first entry."""
    if path:
        yield path
    entries: Any = ()
    if isinstance(content, dict):
        entries = content.items()
    elif isinstance(content, list):
        entries = [*enumerate(content)][:1]
    if len(path) < 6:
        for key, value in entries:
            yield from paths(value, (*path, key))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_value_of_another_type_breaks_nothing(
    image: tuple[Ready, Store], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (document,) = (one for one in image[0].documents if one.name.startswith(name))
    places = list(paths(json.loads(document.data)))
    assert len(places) > 5
    for number, path in enumerate(places):
        content = json.loads(document.data)
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = VALUES[number % len(VALUES)]
        shelf = with_document(image, name, canonical_json(content))
        try:
            told(shelf, monkeypatch)
        except Exception as error:
            raise AssertionError(f"{path} → {parent[path[-1]]!r}") from error


@pytest.mark.parametrize("damage", WHOLE)
def test_damaged_records_and_withdrawals_of_a_project_are_named_or_left_out(
    image: tuple[Ready, Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    kit = make_project(tmp_path / "project")
    monkeypatch.chdir(kit.root)
    (record,) = (one for one in image[0].documents if one.media_type == VALIDATION)
    path = kit.root / "out/validation/demo/v26.11-demo-0123456789ab/llama3-proxy/record.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(WHOLE[damage](record.data))
    assert main(["releases"]) == 0
    (kit.root / "withdrawn.yaml").write_bytes(WHOLE[damage](b"v26.11-demo: {reason: x"))
    code = main(["releases"])
    said = capsys.readouterr()
    assert code == 2 or damage in ("empty", "nothing", "no keys")
    assert "Traceback" not in said.err
