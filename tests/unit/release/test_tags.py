"""A moving tag follows evidence, and stays with its target and its release."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, cast

import pytest

from primus_images.cli.host.bump import _begin, _require_later
from primus_images.cli.host.releases import _with_state
from primus_images.errors import CheckFailed, InputError
from primus_images.oci.store import digest_of
from primus_images.release import statement, tags, verification
from primus_images.release.artifact import Document, damage
from primus_images.release.documents import IN_TOTO
from primus_images.release.history import AMDS, Release
from primus_images.release.registry import Repository
from primus_images.release.statement import Signer, Trust
from primus_images.release.tags import move_tag, require_moving, withdrawable
from primus_images.release.verification import Verified
from primus_images.release.withdrawal import (
    Withdrawal,
    remember,
    withdrawal_text,
    withdrawals,
)
from primus_images.system.support import support_text
from primus_images.versions.components import Versions

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

    def tags_with(self, _tag: str, beginning: str = "") -> list[str]:
        return self.tags(beginning)

    def lacks(self, tag: str) -> InputError:
        return InputError(f"{self.name} has no image {tag}")

    def tag(self, tag: str, manifest: bytes) -> None:
        self.images[tag] = manifest

    def documents(self, _digest: str, _kind: str) -> list[Document]:
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

    def verify(where: Repository, word: str, _trust: Trust) -> Verified:
        assert where is there
        assert word == "v26.11-cpu"
        verified.digest = digest_of(b"cpu")
        return verified

    monkeypatch.setattr(tags, "verify_statements", verify)
    move_tag(cast(Repository, there), tag, "v26.11-cpu", Trust(key="key"))
    return there.images[tag]


@pytest.mark.parametrize(
    ("tag", "signed", "misleads"),
    [
        ("latest-mi300x", "v26.11-mi300x-preview", False),
        ("latest-mi300x-preview", "v26.11-mi300x-preview", False),
        ("latest-mi300x-preview", "v26.11-cpu", True),
        ("latest-cpu", "v26.11-mi300x", True),
        ("v26", "v26.11-cpu", False),
        ("v26.11", "v26.11-cpu", False),
        ("v26.1", "v26.11-cpu", True),
        ("stable", "v26.11-cpu", False),
        ("LATEST-cpu", "v26.11-mi300x", True),
        ("V26.12", "v26.11-cpu", True),
        ("26.12", "v26.11-cpu", True),
        ("v26.12.", "v26.11-cpu", True),
        ("v26.12_cpu", "v26.11-cpu", True),
        ("release-v26.12", "v26.11-cpu", True),
        ("release-v26.11", "v26.11-cpu", False),
        ("rocm7.2.1-py3.12", "v26.11-cpu", False),
        ("cpu-v2", "v26.11-cpu", False),
    ],
)
def test_verify_lets_a_tag_name_what_tag_lets_it_name(
    tag: str, signed: str, misleads: bool
) -> None:
    assert verification._misleads(tag, signed) is misleads


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
        ("stable_v26.12", {}, "cpu", "another release"),
        ("Latest-cpu", {"target": "h200"}, "cpu", "stands for target cpu, .* is of h200"),
    ],
)
def test_a_tag_does_not_move_without_evidence(
    monkeypatch: pytest.MonkeyPatch, tag: str, changes: dict[str, Any], target: str, reason: str
) -> None:
    fields = {"release": "v26.11", "target": "cpu", "tag": "v26.11-cpu", **changes}
    with pytest.raises(CheckFailed, match=reason):
        moved(monkeypatch, tag, Verified(**fields), target)


def test_a_withdrawal_names_the_moving_tags_of_the_image() -> None:
    there = Registry("cpu")
    there.images |= {
        "latest-cpu": b"cpu",
        "v26.11-cpu.by-0": b"cpu",
        "sha256-0": b"cpu",
        "v26.11.1-cpu": b"mended",
    }
    image = withdrawable(cast(Repository, there), "v26.11-cpu", "v26.11.1-cpu")
    assert (image.digest, image.moving_tags) == (digest_of(b"cpu"), ("latest-cpu",))


@pytest.mark.parametrize(
    ("release", "successor", "reason"),
    [
        ("latest-cpu", None, "latest-cpu is not the name of a release"),
        ("v26.10-cpu", None, "has no image v26.10-cpu"),
        ("v26.11-cpu", "v26.11-cpu", "is not another release of the target"),
        ("v26.11-cpu", "v26.11-h200", "is not another release of the target"),
        ("v26.11-cpu", "stable", "is not another release of the target"),
        ("v26.11-cpu", "v26.13-cpu", "has no image v26.13-cpu"),
        ("v26.11-cpu", "v26.12-cpu", "is the same image as v26.11-cpu"),
    ],
)
def test_what_cannot_be_withdrawn_is_refused(
    release: str, successor: str | None, reason: str
) -> None:
    there = Registry("cpu")
    there.images["v26.12-cpu"] = b"cpu"
    with pytest.raises(InputError, match=reason):
        withdrawable(cast(Repository, there), release, successor)


@pytest.mark.parametrize(
    ("key", "problem", "refused"),
    [
        ("my.key", "it is not signed", True),
        ("my.key", "", False),
        # Who signs without a key is known to its provider alone.
        (None, "it is not signed", False),
    ],
)
def test_a_successor_verifies_with_the_key_that_withdraws(
    key: str | None, problem: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statement, "cosign", lambda *words: "")
    monkeypatch.setattr(tags, "problem_of_successor", lambda there, tag, trust: problem)
    arguments: Any = (Repository("localhost:1/a"), "v26.12-cpu", Signer(key=key))
    if not refused:
        tags.require_good_successor(*arguments)
        return
    with pytest.raises(CheckFailed) as caught:
        tags.require_good_successor(*arguments)
    assert caught.value.message == "--successor v26.12-cpu does not verify: it is not signed"


@pytest.mark.parametrize(
    ("predicates", "text"),
    [
        ([], ""),
        (
            [{"reason": "wrong gradients", "date": "2026-12-01", "successor": "v26.11.1-cpu"}],
            "withdrawn on 2026-12-01: wrong gradients; use v26.11.1-cpu instead",
        ),
        (
            [{"reason": "new", "date": "2026-12-02"}, {"reason": "old", "date": "2026-12-01"}],
            "withdrawn on 2026-12-02: new",
        ),
        ([{}], "withdrawn on an unknown day: for no stated reason"),
        (
            [{"reason": "a\nverified\n", "date": "2026-12-01"}],
            "withdrawn on 2026-12-01: a verified",
        ),
        (["damaged"], "withdrawn on an unknown day: for no stated reason"),
    ],
)
def test_a_withdrawal_is_a_sentence(predicates: list[Any], text: str) -> None:
    assert withdrawal_text(predicates) == text


def test_a_release_says_that_an_image_of_it_was_withdrawn() -> None:
    known = {"v26.11-cpu": Withdrawal(reason="wrong", date="2026-12-01")}
    release = Release(image=AMDS, tag="v26.11", components={}, origin="pins of x", notes=("a",))
    assert _with_state(release, [], known).notes == (
        "v26.11-cpu was withdrawn on 2026-12-01: wrong.",
        "a",
    )
    assert _with_state(replace(release, tag="v26.1"), [], known).notes == ("a",)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("gates"), "'gates' is missing in it"),
        (json.JSONDecodeError("x", "", 0), "it is not JSON"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), "it is not JSON"),
        (RecursionError(), "it is not JSON"),
        (TypeError("'int' object is not iterable"), "its parts are not those of such a document"),
        (InputError("no record"), "no record"),
    ],
)
def test_damage_is_told_without_words_of_code(error: Exception, text: str) -> None:
    assert damage(error) == text


def test_a_project_remembers_what_was_withdrawn(tmp_path: Path) -> None:
    first = Withdrawal(reason="wrong: gradients", date="2026-12-01", digest="sha256:1")
    second = replace(first, successor="v26.12-cpu", digest="sha256:2")
    assert withdrawals(tmp_path) == {}
    remember(tmp_path, "v26.11-cpu", first)
    path = remember(tmp_path, "v26.11.1-cpu", second)
    assert withdrawals(tmp_path) == {"v26.11-cpu": first, "v26.11.1-cpu": second}
    for text in ("[]", "v26.11-cpu: 5", "v26.11-cpu: {reason: x}", "v26.11-cpu: {a: b}", "{"):
        path.write_text(text)
        with pytest.raises(InputError, match="withdrawn"):
            withdrawals(tmp_path)


@pytest.mark.parametrize(
    ("name", "current", "reason"),
    [
        ("v26.11.1", "v26.11", None),
        ("v26.11.2", "v26.11.1", None),
        ("v26.12", "v26.11.1", None),
        ("v26.11.1", "v26.12", "not the name of a release after"),
        ("v26.12.1", "v26.11", "is a patch of v26.12, and versions.yaml is of v26.11"),
        ("v26.11.0", "v26.11", "not the name of a release"),
        ("v26.11.1.1", "v26.11.1", "not the name of a release"),
        ("v26.11.1", "v26.11.1", "not the name of a release"),
    ],
)
def test_a_patch_begins_on_the_branch_of_its_release(
    name: str, current: str, reason: str | None
) -> None:
    if reason is None:
        _require_later(name, current)
        return
    with pytest.raises(InputError, match=reason):
        _require_later(name, current)


@pytest.mark.parametrize(("name", "until"), [("v26.11.1", "2027-05-20"), ("v26.12", "2027-06-01")])
def test_a_patch_keeps_the_support_of_its_release(name: str, until: str) -> None:
    text = "release: v26.11\ncreated: 2026-11-20\nsupported_until: 2027-05-20\n"
    versions = Versions(
        release="v26.11",
        created="2026-11-20",
        supported_until="2027-05-20",
        bases={},
        components={},
    )
    assert _begin(text, name, date(2026, 12, 1), versions) == (
        f"release: {name}\ncreated: 2026-12-01\nsupported_until: {until}\n"
    )
    if name == "v26.11.1":
        with pytest.raises(
            InputError, match=r"the support of v26\.11 ended on 2027-05-20"
        ) as ended:
            _begin(text, name, date(2027, 5, 21), versions)
        assert "supported_until" in str(ended.value.hint)


@pytest.mark.parametrize(
    ("until", "day", "text"),
    [
        (None, "2026-12-01", ""),
        ("2027-05-20", "2026-12-01", "supported until 2027-05-20"),
        ("2027-05-20", "2027-05-20", "supported until 2027-05-20"),
        ("2027-05-20", "2027-05-21", "support ended on 2027-05-20: use a later release"),
        ("soon", "2027-05-21", ""),
    ],
)
def test_support_in_words(until: str | None, day: str, text: str) -> None:
    assert support_text(until, date.fromisoformat(day)) == text


@pytest.mark.parametrize(
    ("tag", "release"),
    [
        ("v26.12-cpu", "v26.11-cpu"),
        ("v26.12-cpu.by-0123", "v26.11-cpu"),
        ("sha256-0", "v26.11-cpu"),
        ("latest-h200", "v26.11-cpu"),
        ("latest-cpu", "stable"),
        ("stable", "sha256:abc"),
        ("stable", f"sha256:{'A' * 64}"),
        ("Latest-cpu", "v26.11-h200"),
    ],
)
def test_some_names_never_move(tag: str, release: str) -> None:
    with pytest.raises(InputError):
        require_moving(tag, release)
