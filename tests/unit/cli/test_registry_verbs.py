"""`primus publish`, `sign`, `tag` and `withdraw`, with a registry in memory and no cosign."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from memory_registry import NAME, MemoryRegistry, connect
from primus_images.cli.host import publish as of_publish, tag as of_tag
from primus_images.cli.main import main
from primus_images.oci.store import MANIFEST_TYPE, canonical_json, digest_of
from primus_images.release import registry as of_registry, statement as of_statement
from primus_images.release.artifact import Document
from primus_images.release.documents import GATES
from primus_images.release.publish import Ready
from primus_images.release.registry import Repository
from primus_images.release.statement import Request, Signer, Trust, statements
from project_kit import Kit, make_project

TAG = "v26.11-demo"
MANIFEST = canonical_json({"mediaType": MANIFEST_TYPE, "layers": []})
OTHER = canonical_json({"mediaType": MANIFEST_TYPE, "layers": [], "x": 1})
DIGEST = digest_of(MANIFEST)
SUBJECT = {"mediaType": MANIFEST_TYPE, "digest": DIGEST, "size": len(MANIFEST)}


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    kit = make_project(tmp_path / "project")
    monkeypatch.chdir(kit.root)
    (kit.root / "cosign.key").touch()
    monkeypatch.setattr(of_registry.time, "sleep", lambda _: None)
    monkeypatch.setattr(of_statement, "need_cosign", lambda: None)
    monkeypatch.setattr(of_statement, "cosign", lambda *words: "")
    monkeypatch.setattr(
        Signer, "bundle", lambda signer, content: json.dumps({"says": content}).encode()
    )
    return kit


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> MemoryRegistry:
    registry = connect(monkeypatch, MemoryRegistry())
    registry.manifests = {DIGEST: MANIFEST, digest_of(OTHER): OTHER}
    return registry


def withdraw(*words: str, key: str = "cosign.key", reason: str = "wrong  gradients") -> int:
    signer = ("--key", key) if key else ()
    return main(["withdraw", TAG, "--to", NAME, *signer, "--reason", reason, *words])


def test_a_release_is_withdrawn_in_the_registry_and_the_project(
    kit: Kit, registry: MemoryRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.tags = {TAG: DIGEST, "latest-demo": DIGEST, "latest-cpu": digest_of(OTHER)}
    kit.write("withdrawn.yaml", f"{TAG}: {{reason: old, date: '2026-01-01', digest: 'sha256:0'}}\n")
    assert withdraw() == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith(f"{NAME}:{TAG}: withdrawn on 20")
    assert lines[0].endswith(": wrong gradients")
    assert lines[1] == f"{NAME}@{DIGEST}"
    assert "→ commit" in lines[2] and "withdrawn.yaml" in lines[2]
    assert f"! latest-demo still names it: primus tag latest-demo RELEASE --to {NAME}" in said.err
    assert "latest-cpu" not in said.err
    assert f"! withdrawn.yaml no longer names sha256:0, another image {TAG}" in said.err
    noted = yaml.safe_load((kit.root / "withdrawn.yaml").read_text())[TAG]
    assert (noted["reason"], noted["digest"]) == ("wrong gradients", DIGEST)
    (attached,) = Repository(NAME).documents(DIGEST)
    assert json.loads(attached.data)["says"]["predicate"]["reason"] == "wrong gradients"
    assert withdraw("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ref"], document["digest"]) == (f"{NAME}:{TAG}", DIGEST)
    assert (document["tags"], document["reason"]) == (["latest-demo"], "wrong gradients")
    assert document["file"].endswith("withdrawn.yaml")


def test_a_release_is_withdrawn_without_a_project(
    kit: Kit,
    registry: MemoryRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry.tags = {TAG: DIGEST}
    monkeypatch.chdir(tmp_path)
    assert withdraw("--json", key=str(kit.root / "cosign.key")) == 0
    assert json.loads(capsys.readouterr().out)["file"] is None
    assert withdraw("--project", str(kit.root), key=str(kit.root / "cosign.key")) == 0
    assert (kit.root / "withdrawn.yaml").is_file()


@pytest.mark.parametrize(
    ("words", "fields", "said"),
    [
        ([], {"reason": "  "}, "--reason is empty: users must know why"),
        ([], {"reason": "a\x1b[2J"}, "--reason has characters that cannot be printed"),
        ([], {"key": ""}, "--key or --keyless is missing: who signs?"),
        (["--keyless"], {}, "--key and --keyless exclude each other"),
        ([], {"key": "gone.key"}, "--key: there is no file gone.key"),
        (["--successor", TAG], {}, f"--successor {TAG} is not another release"),
    ],
)
def test_what_cannot_be_withdrawn_so_is_refused_before_anything_is_sent(
    kit: Kit,
    registry: MemoryRegistry,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    fields: dict[str, str],
    said: str,
) -> None:
    registry.tags = {TAG: DIGEST}
    assert withdraw(*words, **fields) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not any(line.startswith(("PUT", "POST")) for line in registry.asked)


def test_a_damaged_list_of_the_project_is_refused_before_anything_is_signed(
    kit: Kit, registry: MemoryRegistry
) -> None:
    registry.tags = {TAG: DIGEST}
    kit.write("withdrawn.yaml", "- 1\n")
    assert withdraw() == 2
    assert registry.asked == []


@pytest.mark.parametrize("verb", ["publish demo", "withdraw v26.11-demo --reason x", "tag a b"])
def test_a_repository_is_named(
    kit: Kit, registry: MemoryRegistry, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main(verb.split()) == 2
    said = capsys.readouterr().err
    assert "--to is missing: it names the repository to publish to" in said
    assert main([*verb.split(), "--to", "no repository"]) == 2


def test_requests_of_a_folder_are_signed_attached_and_tagged(
    kit: Kit, registry: MemoryRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper = Document(media_type=GATES, name="gates.json", data=b"{}")
    there = Repository(NAME)
    there.attach([paper], SUBJECT)
    request = Request(f"{NAME}:{TAG}", SUBJECT, statements([paper], TAG, DIGEST))
    request.write(tmp_path / "to-sign")
    assert main(["sign", str(tmp_path / "to-sign")]) == 2
    assert "--key or --keyless is missing: who signs?" in capsys.readouterr().err
    assert main(["sign", str(tmp_path / "to-sign"), "--key", "cosign.key"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{NAME}:{TAG}: 1 statement signed", f"{NAME}@{DIGEST}"]
    assert registry.tags[TAG] == DIGEST
    assert main(["sign", str(tmp_path / "to-sign"), "--keyless", "--json"]) == 0
    row = {"ref": f"{NAME}:{TAG}", "digest": DIGEST, "signed": 1}
    assert json.loads(capsys.readouterr().out) == {"signed": [row]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "who must have signed it? Name either --key, or --identity and --issuer"),
        (["--identity", "a"], "who must have signed it?"),
        (["--issuer", "a"], "who must have signed it?"),
        (["--key", "cosign.key", "--identity", "a"], "--key and --identity with --issuer exclude"),
        (["--key", "cosign.key", "--issuer", "a"], "--key and --identity with --issuer exclude"),
        (["--key", "gone.pub"], "--key: there is no file gone.pub"),
    ],
)
def test_who_must_have_signed_is_said_in_one_way(
    kit: Kit,
    registry: MemoryRegistry,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    for verb in (["tag", "latest-demo", TAG, "--to", NAME], ["verify", "--image", f"{NAME}:{TAG}"]):
        assert main([*verb, *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("before", "shown"), [(None, "new"), ("sha256:0", "sha256:0")])
def test_a_tag_that_moves_says_from_where(
    kit: Kit,
    registry: MemoryRegistry,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before: str | None,
    shown: str,
) -> None:
    moved: list[Any] = []

    def move(there: Repository, *words: Any) -> tuple[str | None, str]:
        moved.append((there.name, *words))
        return before, DIGEST

    monkeypatch.setattr(of_tag, "move_tag", move)
    words = ["tag", "latest-demo", TAG, "--to", NAME, "--identity", "me", "--issuer", "them"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{NAME}:latest-demo: {shown} → {DIGEST} ({TAG})\n"
    trust = Trust(key=None, identity="me", issuer="them")
    assert moved == [(NAME, "latest-demo", TAG, trust)]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"tag": f"{NAME}:latest-demo", "old": before, "new": DIGEST}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--image", f"{NAME}:{TAG}", "demo", "--key", "cosign.key"], "--image names a published"),
        (["--image", f"{NAME}:{TAG}", "--all", "--key", "cosign.key"], "--image names a published"),
        (["demo", "--key", "k", "--policy", "p"], "--key and --policy without --image"),
        (["demo", "--identity", "k", "--issuer", "p"], "--identity and --issuer without --image"),
    ],
)
def test_a_published_image_is_verified_or_a_target_is_built_again(
    kit: Kit, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["verify", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


Published = Callable[..., list[Any]]


@pytest.fixture
def publishing(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Published:
    """Let the image have these objections, and the upload answer so."""

    def act(*objections: str, **answer: Any) -> list[Any]:
        called: list[Any] = []
        image: Any = SimpleNamespace(digest=DIGEST, size=2_500_000)
        papers = (Document(media_type=GATES, name="gates.json", data=b"{}"),)

        def prepare(plan: Any, workspace: Any, needs: Any, progress: Any) -> Ready:
            called.append(needs)
            return Ready(image=image, tag=TAG, documents=papers, objections=objections)

        def upload(ready: Ready, store: Any, to: str, progress: Any, signing: Any) -> Any:
            called.append((to, signing))
            usual = {"ref": f"{to}:{TAG}", "digest": DIGEST, "new": True, "bytes": 2_500_000}
            usual |= {"bytes_sent": 500_000, "attached": ["a", "b"], "to_sign": None}
            return {**usual, **answer}

        monkeypatch.setattr(of_publish, "prepare", prepare)
        monkeypatch.setattr(of_publish, "upload", upload)
        return called

    return act


def test_an_image_with_objections_is_judged_and_not_sent(
    publishing: Published, capsys: pytest.CaptureFixture[str]
) -> None:
    called = publishing("no validation", "gate x fails")
    assert main(["publish", "demo", "--to", NAME]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"✗ {NAME}:{TAG}  {DIGEST}  2.5 MB",
        "    ✗ no validation",
        "    ✗ gate x fails",
        "    + gates.json",
    ]
    assert len(called) == 1
    assert main(["publish", "demo", "--to", NAME, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["passed"], document["published"]) == (False, [])
    assert document["judged"][0]["objections"] == ["no validation", "gate x fails"]


def test_a_dry_run_sends_nothing(
    publishing: Published, kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    called = publishing()
    assert main(["publish", "demo", "--to", NAME, "--dry-run", "--preview"]) == 0
    assert capsys.readouterr().out.startswith(f"✓ {NAME}:{TAG}")
    (needs,) = called
    assert (needs.records, needs.preview) == (kit.root / "out/validation", True)
    assert main(["publish", "demo", "--to", NAME, "--dry-run", "--records", "mine"]) == 0
    assert (called[1].records, called[1].preview) == (kit.root / "mine", False)


@pytest.mark.parametrize(
    ("answer", "sent"),
    [
        ({}, "sent 0.5 of 2.5 MB"),
        ({"new": False, "bytes_sent": 0}, "already published"),
        ({"new": True, "bytes_sent": 0}, "sent 0.0 of 2.5 MB"),
        ({"new": False, "bytes_sent": 1_000_000}, "sent 1.0 of 2.5 MB"),
    ],
)
def test_what_was_sent_is_said(
    publishing: Published,
    capsys: pytest.CaptureFixture[str],
    answer: dict[str, Any],
    sent: str,
) -> None:
    called = publishing(**answer)
    assert main(["publish", "demo", "--to", NAME, "--key", "cosign.key"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{NAME}:{TAG}: {sent}, 2 documents attached", f"{NAME}@{DIGEST}"]
    assert called[1] == (NAME, Signer(key="cosign.key"))


def test_what_is_signed_later_says_how(
    publishing: Published, capsys: pytest.CaptureFixture[str]
) -> None:
    called = publishing(to_sign="folder/x")
    assert main(["publish", "demo", "--to", NAME, "--sign-later", "folder"]) == 0
    said = capsys.readouterr().err
    assert "! not signed and not tagged: run `primus sign folder --key KEY`" in said
    assert called[1] == (NAME, Path("folder"))
    for words in (["--key", "cosign.key"], ["--keyless"]):
        assert main(["publish", "demo", "--to", NAME, "--sign-later", "folder", *words]) == 2
        assert "--sign-later leaves the signing to `primus sign`" in capsys.readouterr().err


def test_a_preview_that_is_published_as_a_release_is_warned_of(
    publishing: Published, kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    kit.edit("images/demo.yaml", "[local]\n", "[local]\npreviews: {local: no GPU code}\n")
    publishing("it is a preview")
    assert main(["publish", "demo", "--to", NAME]) == 1
    said = capsys.readouterr().err
    assert "! demo is a preview of channel local: no GPU code" in said
    assert "--preview publishes the preview" in said
    assert main(["publish", "demo", "--to", NAME, "--preview"]) == 1
    assert "is a preview of channel" not in capsys.readouterr().err
