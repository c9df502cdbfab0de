"""What `primus verify --image` says of a published image: a registry in memory, a stand-in for
cosign. tests/integration/test_statements.py has a real registry, and real signatures.
"""

import gzip
import io
import json
import re
import tarfile
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from changes import Change, put
from primus_images.errors import CheckFailed, InputError
from primus_images.gpus.detect import DetectedGpus
from primus_images.oci.store import MANIFEST_TYPE, canonical_json, digest_of
from primus_images.release import verification
from primus_images.release.artifact import WITHDRAWAL, Document
from primus_images.release.bills import IMAGE
from primus_images.release.documents import (
    CYCLONEDX,
    GATES,
    IN_TOTO,
    LOCK,
    SPDX,
    VALIDATION,
    statement,
)
from primus_images.release.policy import Policy
from primus_images.release.registry import Repository
from primus_images.release.statement import (
    BILLS,
    BUNDLE,
    PROVENANCE,
    TEST_RESULT,
    Trust,
    statements,
)
from primus_images.release.verification import (
    Verified,
    problem_of_successor,
    verified_text,
    verify_image,
    verify_statements,
)
from primus_images.training.judge import suite
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import Rates, RecordedImage
from project_kit import SOURCE
from tables import FIXTURES

TAG = "v26.11-demo"
METADATA = b"Metadata-Version: 2.4\nName: small\nVersion: 1.0\nLicense-Expression: MIT\n\n"
BILL = BILLS[SPDX]
NAMED = "names the image that was signed as v26.11-demo"


def tar_of(**files: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


TAR = tar_of(**{"opt/venv/lib/python3.11/site-packages/small-1.0.dist-info/METADATA": METADATA})
LAYER = gzip.compress(TAR, mtime=0)
CONFIG = canonical_json(
    {
        "history": [{"created_by": "primus path alpha", "comment": "key of alpha"}],
        "rootfs": {"type": "layers", "diff_ids": [digest_of(TAR)]},
    }
)
MANIFEST = canonical_json(
    {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"digest": digest_of(CONFIG), "size": len(CONFIG)},
        "layers": [
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                "digest": digest_of(LAYER),
                "size": len(LAYER),
            }
        ],
    }
)
DIGEST = digest_of(MANIFEST)
HEX = DIGEST.removeprefix("sha256:")


@cache
def validation() -> str:
    request = suite.Request(recipe="llama3-proxy", among=SOURCE.parent / "recipes")
    jobs = suite.plan(request, Path("/out"))
    place = suite.Place(
        target="demo",
        image=RecordedImage(ref=TAG, manifest=DIGEST, content=digest_of(CONFIG)),
        gpu="none",
        made="2026-11-26",
    )
    made = suite.record(jobs, {}, [Verdict("loss falls", True, "it does")], place)
    ran = tuple(replace(job, ran=True, seconds=1.0) for job in made.jobs)
    rates = Rates(faults=100, named=99, healthy=100, refused=1)
    whole = replace(made, passed=True, jobs=ran, suite=replace(made.suite, rates=rates))
    return json.dumps(whole.as_json())


def evidence(
    change: Mapping[str, Change] | None = None, *, corrected: bool = True
) -> list[Document]:
    """The documents, of which ``change`` edits some by the beginnings of their names.

    With ``corrected``, the provenance has the hashes of what was edited.
    """
    small: dict[str, Any] = {
        "SPDXID": "SPDXRef-small",
        "name": "small",
        "versionInfo": "1.0",
        "checksums": [{"checksumValue": "a" * 64}],
        "externalRefs": [{"referenceLocator": "pkg:pypi/small@1.0"}],
        "licenseDeclared": "MIT",
    }
    tool = {"SPDXID": "SPDXRef-tool", "name": "tool", "versionInfo": "1.0"}
    tool["licenseDeclared"] = "ISC"
    whole: dict[str, Any] = {"SPDXID": IMAGE, "name": "demo", "licenseDeclared": "NOASSERTION"}
    whole |= {"checksums": [{"checksumValue": HEX}]}
    relation = {"spdxElementId": IMAGE, "relationshipType": "CONTAINS"}
    files = [{"name": "small", "version": "1.0", "sha256": "a" * 64}]
    component = {"hashes": [{"content": HEX}]}
    contents: dict[str, tuple[str, Any]] = {
        "gates.json": (
            GATES,
            {"digest": DIGEST, "gates": [{"gate": "versions", "passed": True, "findings": []}]},
        ),
        "lock.json": (LOCK, {"target": "demo", "channel": "pypi", "files": files}),
        "sbom.spdx.json": (
            SPDX,
            {
                "packages": [whole, small, tool],
                "relationships": [
                    {**relation, "relatedSpdxElement": "SPDXRef-small"},
                    {**relation, "relationshipType": "BUILD_TOOL_OF"},
                ],
            },
        ),
        "sbom.cdx.json": (
            CYCLONEDX,
            {
                "components": [{"purl": "pkg:pypi/small@1.0", "version": "1.0"}, {"name": "file"}],
                "metadata": {"component": component},
            },
        ),
        "validation-llama3-proxy.json": (VALIDATION, json.loads(validation())),
    }
    documents = []
    products = []
    for name, (kind, content) in contents.items():
        plain = canonical_json(content)
        edit(content, name, change)
        documents.append(Document(media_type=kind, name=name, data=canonical_json(content)))
        data = canonical_json(content) if corrected else plain
        sha256 = digest_of(data).removeprefix("sha256:")
        if kind != VALIDATION:
            products.append({"name": name, "digest": {"sha256": sha256}})
    parameters = {
        "release": "v26.11",
        "target": "demo",
        "channel": "pypi",
        "preview": "",
        "gpu": None,
        "recipes": [],
        "components": {},
    }
    definition = {
        "externalParameters": {**parameters, "supported_until": "2099-01-01"},
        "internalParameters": {"layers": {"alpha": "key of alpha"}},
        "resolvedDependencies": [
            {"name": "source", "digest": {"gitCommit": "c" * 40}},
            {"digest": {"sha256": "a" * 64}},
        ],
    }
    details = {"builder": {"version": {"primus-images": "1"}}, "byproducts": products}
    provenance: Any = statement(
        TAG, DIGEST, PROVENANCE, {"buildDefinition": definition, "runDetails": details}
    )
    edit(provenance, "provenance.json", change)
    data = canonical_json(provenance)
    return [*documents, Document(media_type=IN_TOTO, name="provenance.json", data=data)]


def edit(content: Any, name: str, change: Mapping[str, Change] | None) -> None:
    for beginning, act in (change or {}).items():
        if name.startswith(beginning):
            act(content)


def bundle(content: object, by: str = "ours") -> Document:
    """A statement as the stand-in signs it: a signature names who signed which bytes."""
    data = b64encode(canonical_json(content)).decode()
    envelope = {"payload": data, "signatures": [{"by": by, "of": data}]}
    hint = {"publicKey": {"hint": "ours"}}
    whole = {"dsseEnvelope": envelope, "verificationMaterial": hint}
    return Document(media_type=BUNDLE, name="", data=canonical_json(whole))


class Registry:
    """What an image's registry answers, in memory."""

    def __init__(self, documents: Sequence[Document], tags: Sequence[str] = (TAG,)) -> None:
        self.attached = list(documents)
        self.tags = tags
        self.manifests = {DIGEST: MANIFEST}
        self.blobs = {digest_of(CONFIG): CONFIG, digest_of(LAYER): LAYER}

    def manifest(self, word: str) -> bytes | None:
        return self.manifests.get(DIGEST if word in self.tags else word)

    def lacks(self, word: str) -> InputError:
        return InputError(f"demo has no image {word}")

    def blob(self, digest: str, path: Path, most: int) -> bool:
        data = self.blobs.get(digest)
        if data is not None:
            path.write_bytes(data)
        return data is not None

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        if digest != DIGEST:
            return []
        return [{"digest": str(number)} for number in range(len(self.attached))]

    def document(self, descriptor: Mapping[str, Any]) -> Document:
        return self.attached[int(descriptor["digest"])]


@pytest.fixture(autouse=True)
def cosign(monkeypatch: pytest.MonkeyPatch) -> None:
    def rejects(trust: Trust, data: bytes, kind: str) -> str:
        envelope = json.loads(data)["dsseEnvelope"]
        by = {"by": trust.key, "of": envelope["payload"]}
        if envelope["signatures"] == [by]:
            return ""
        return f"its signature is not by {trust.key}"

    monkeypatch.setattr(Trust, "rejects", rejects)
    monkeypatch.setattr(verification, "detect", DetectedGpus)


def signed(documents: Sequence[Document], tag: str = TAG) -> list[Document]:
    bundles = [bundle(content) for content in statements(documents, tag, DIGEST)]
    return [*documents, *bundles]


def verified(registry: Registry, word: str = f":{TAG}", policy: Policy | None = None) -> Verified:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repository, "to_read", lambda _: registry)
        return verify_image(f"localhost/demo{word}", Trust(key="ours"), policy=policy)


def assert_named(result: Verified, expected: str) -> None:
    named = (*result.faults, *result.void)
    assert any(re.search(expected, fault) for fault in named), "\n".join(named)
    assert not result.passed


def test_an_image_that_was_published_so_is_verified() -> None:
    said: list[str] = []
    registry: Any = Registry(signed(evidence()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repository, "to_read", lambda _: registry)
        result = verify_image(f"localhost/demo@{DIGEST}", Trust(key="ours"), say=said.append)
    assert (result.faults, result.void, result.lacking) == ([], [], [])
    assert said == ["layer alpha: 0.0 MB"]
    assert result.passed
    assert (result.digest, result.tag, result.signed) == (DIGEST, TAG, 5)
    assert (result.target, result.release) == ("demo", "v26.11")
    assert verified_text("x", result).splitlines() == [
        f"x {DIGEST}",
        "  release v26.11, target demo",
        "  supported until 2099-01-01",
        "  signed: 5 statements",
        "  passed: llama3-proxy torchtitan pretrain fp32 on the CPU: 1 checks passed, 0 failed; "
        "its suite names 99 of 100 faults",
        "verified",
    ]


def rows(part: str) -> list[Any]:
    """Rows of the table about documents or statements; cosign judges its bundles."""
    table = yaml.safe_load((FIXTURES / "tamperings.yaml").read_text())
    found = []
    for name, row in table.items():
        if row["change"] == part:
            change = put(*row["at"], value=row["to"])
            found.append(pytest.param(row["of"], change, row["named"], id=name))
    return found


@pytest.mark.parametrize(("name", "change", "expected"), rows("document"))
def test_a_document_that_the_owner_of_the_key_changes_is_named(
    name: str, change: Change, expected: str
) -> None:
    attached = signed(evidence({name: change}, corrected=False))
    assert_named(verified(Registry(attached)), expected)


@pytest.mark.parametrize(("kind", "change", "expected"), rows("statement"))
def test_a_statement_that_the_owner_of_the_key_changes_is_named(
    kind: str, change: Change, expected: str
) -> None:
    documents = evidence()
    attached = list(documents)
    for content in statements(documents, TAG, DIGEST):
        if content["predicateType"] == kind:
            change(content)
        attached.append(bundle(content))
    assert_named(verified(Registry(attached)), expected)


FAILED_GATE = {"gate": "versions", "passed": False, "summary": "", "findings": []}


def another_version(content: Any) -> None:
    content["components"][0]["version"] = "9"


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("validation", put("gpu", value="mi300x"), "it ran on mi300x, and its recipe is for cpu"),
        (
            "validation",
            lambda c: c["jobs"].append({**c["jobs"][0], "name": "resume"}),
            "validation.*its runs and limits are not those of suite",
        ),
        (
            "validation",
            put("gates", value={"gates": [FAILED_GATE]}),
            "gates.json: a validation has another verdict of gate versions",
        ),
        (
            "validation",
            lambda c: c.update(passed=False, verdicts=[]),
            r"the validation of llama3-proxy \(fp32\) says FAILED: it has no check",
        ),
        ("gates", put("gates", value=[]), "gates.json: it has no gate"),
        ("sbom.cdx", another_version, "sbom.cdx.json: pkg:.* has the version 9 there"),
        (
            "sbom.cdx",
            put("metadata", "component", "hashes", 0, "content", value="f"),
            "sbom.cdx.json: it is about another image",
        ),
        ("lock", put("target", value="other"), "lock.json: its target is other, not demo"),
        ("lock", put("channel", value="amd"), "lock.json: its channel is amd, not pypi"),
        ("lock", put("files", 0, "name", value=1), "lock.json: it is damaged"),
        (
            "lock",
            put("files", value=lambda f: [*f, {**f[0], "name": "more"}]),
            "sbom.spdx.json: only lock.json has more 1.0 with sha256 aaaaaaaaaaaa$",
        ),
        (
            "sbom.spdx",
            put("packages", 1, "licenseDeclared", value="0BSD"),
            "the licence of small is MIT in the image, 0BSD in sbom.spdx.json",
        ),
        (
            "sbom.spdx",
            put("relationships", 0, "relationshipType", value="BUILD_TOOL_OF"),
            "small 1.0 is in the image, sbom.spdx.json has no such wheel",
        ),
        (
            "sbom.spdx",
            put("relationships", 0, "spdxElementId", value="SPDXRef-tool"),
            "small 1.0 is in the image, sbom.spdx.json has no such wheel",
        ),
        (
            "provenance",
            put("predicate", "buildDefinition", "internalParameters", "layers", value={}),
            "layer alpha: action None built it, in the image key of alpha",
        ),
        (
            "provenance",
            put("predicate", "buildDefinition", "externalParameters", "release", value=26),
            "provenance.json: it is damaged",
        ),
    ],
)
def test_a_fault_that_all_hashes_confirm_is_named(name: str, change: Change, expected: str) -> None:
    assert_named(verified(Registry(signed(evidence({name: change})))), expected)


def test_a_source_that_builds_a_wheel_counts_as_its_package() -> None:
    generated = put("relationships", 0, "relationshipType", value="GENERATED_FROM")
    assert verified(Registry(signed(evidence({"sbom.spdx": generated})))).passed


def test_the_command_primus_has_the_version_of_the_provenance() -> None:
    def primus(content: Any) -> None:
        content["packages"].append({"SPDXID": "SPDXRef-local-primus", "name": "primus"})

    result = verified(Registry(signed(evidence({"sbom.spdx": primus}))))
    assert_named(result, "primus-images 1 is in sbom.spdx.json, the image has no such wheel")


@pytest.mark.parametrize(
    ("tags", "word", "expected"),
    [
        ((TAG, "v26.12-demo"), ":v26.12-demo", f"tag: v26.12-demo {NAMED}"),
        (("latest-cpu",), ":latest-cpu", f"tag: latest-cpu {NAMED}"),
        (("v26.12",), ":v26.12", f"tag: v26.12 {NAMED}"),
        ((f"{TAG}-preview",), f":{TAG}-preview", f"tag: {TAG}-preview {NAMED}"),
        (("latest-demo",), ":latest-demo", ""),
        (("stable",), ":stable", ""),
    ],
)
def test_a_tag_may_name_no_other_release_or_target(
    tags: Sequence[str], word: str, expected: str
) -> None:
    result = verified(Registry(signed(evidence()), tags), word)
    if expected:
        assert_named(result, expected)
    else:
        assert result.passed
    assert result.tag == TAG


def test_all_statements_give_the_image_one_name() -> None:
    more = bundle(statement("v26.12-demo", DIGEST, BILL, {}))
    result = verified(Registry([*signed(evidence()), more]))
    assert_named(result, "a statement calls the image v26.12-demo, which was signed as v26.11-demo")


@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [
        (
            TEST_RESULT,
            put("predicate", "result", value="FAILED"),
            "a validation of llama3-proxy that says FAILED",
        ),
        (PROVENANCE, put("predicate", "more", value=1), f"a statement of type {PROVENANCE}"),
        (BILL, put("predicate", "more", value=1), f"a statement of type {BILL}"),
        (
            BILLS[CYCLONEDX],
            put("predicate", "more", value=1),
            f"a statement of type {BILLS[CYCLONEDX]}",
        ),
    ],
)
def test_signed_words_that_no_document_says_are_named(kind: str, change: Change, what: str) -> None:
    documents = evidence()
    attached = signed(documents)
    for content in statements(documents, TAG, DIGEST):
        if content["predicateType"] == kind:
            change(content)
            attached.append(bundle(content))
    expected = f"signature: {what} is signed, and no document says the same"
    assert expected in verified(Registry(attached)).faults


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda those: those[1:], "gates.json: it is missing, but signed"),
        (lambda those: [], "signature: no statement about this image counts: nothing is attached"),
        (
            lambda those: [replace(those[0], name="x.json"), *those],
            "x.json: the signature does not name it",
        ),
        (
            lambda those: [replace(those[0], data=b'{"digest": 1}'), *those[1:]],
            "gates.json: it was changed, other bytes are signed",
        ),
        (
            lambda those: [*those[:6], *those[7:]],
            "signature: the image itself is not signed: nothing is attached",
        ),
        (
            lambda those: [*those[:6], replace(those[6], data=b"{}"), *those[7:]],
            "signature: the image itself is not signed: an envelope has no in-toto statement in it",
        ),
        (
            lambda those: those[:-1],
            "provenance.json: no signed statement says the same",
        ),
    ],
)
def test_what_is_attached_is_what_was_signed(
    change: Callable[[list[Document]], list[Document]], expected: str
) -> None:
    assert expected in verified(Registry(change(signed(evidence())))).faults


def test_signatures_of_others_do_not_count() -> None:
    documents = evidence()
    by_others = [bundle(content, by="others") for content in statements(documents, TAG, DIGEST)]
    result = verified(Registry([*documents, *by_others]))
    why = "its signature is not by ours"
    assert result.faults == [f"signature: no statement about this image counts: {why}"]
    assert result.signed == 0
    # Beside ours, one that claims our key was changed.
    result = verified(Registry([*signed(documents), by_others[1]]))
    kind = statements(documents, TAG, DIGEST)[1]["predicateType"]
    assert result.faults == [
        f"signature: a statement of type {kind} names the key and does not count: {why}"
    ]


def test_a_statement_about_another_image_is_void() -> None:
    documents = evidence()
    contents = statements(documents, TAG, DIGEST)
    other = "sha256:" + "e" * 64
    contents[0]["subject"].append({"name": "x", "digest": {"sha256": "e" * 64}})
    attached = [*documents, *(bundle(content) for content in contents)]
    reason = f"it is about {DIGEST}, {other}, so it is void for this image"
    assert (
        f"signature: the image itself is not signed: {reason}"
        in verified(Registry(attached)).faults
    )


def test_a_manifest_of_other_bytes_ends_the_verification() -> None:
    registry = Registry(signed(evidence()))
    registry.manifests[DIGEST] = MANIFEST + b" "
    result = verified(registry, f"@{DIGEST}")
    assert result.faults == [f"manifest: the registry returns other bytes for {DIGEST}"]
    with pytest.raises(InputError, match="has no image v1-other"):
        verified(registry, ":v1-other")


@pytest.mark.parametrize(
    ("digest", "data", "expected"),
    [
        (digest_of(CONFIG), None, "config: it is missing"),
        (digest_of(CONFIG), b"{}", f"config: its bytes are not those of {digest_of(CONFIG)}"),
        (digest_of(LAYER), None, "layer alpha: it is missing"),
        (digest_of(LAYER), LAYER[:-9], "layer alpha: .+"),
        (digest_of(LAYER), gzip.compress(tar_of(other=b"")), "layer alpha: .*hash"),
    ],
)
def test_bytes_of_an_image_are_those_that_it_names(
    digest: str, data: bytes | None, expected: str
) -> None:
    registry = Registry(signed(evidence()))
    del registry.blobs[digest]
    if data is not None:
        registry.blobs[digest] = data
    assert_named(verified(registry), f"^{expected}$" if data is None else f"^{expected}")


def test_layers_are_read_only_for_who_asks_and_of_images_that_are_signed() -> None:
    registry: Any = Registry(signed(evidence()))
    del registry.blobs[digest_of(LAYER)]
    assert verify_statements(registry, TAG, Trust(key="ours")).passed
    assert verify_statements(registry, DIGEST, Trust(key="ours")).passed
    registry.attached = evidence()
    assert not any("layer" in fault for fault in verified(registry).faults)


def test_what_is_no_image_is_named() -> None:
    registry = Registry([], tags=())
    data = canonical_json({"manifests": []})
    registry.manifests["list"] = data
    assert "manifest: it is not that of an image" in verified(registry, ":list").faults


def withdrawal(**words: str) -> Document:
    return bundle(statement(TAG, DIGEST, WITHDRAWAL, words))


def test_a_withdrawn_image_says_so_first_and_names_its_successor() -> None:
    why = withdrawal(reason="wrong", date="2026-11-29", successor="v26.12-demo")
    result = verified(Registry([*signed(evidence()), why]))
    assert result.faults == []
    assert not result.passed
    assert result.withdrawn == (
        "withdrawn on 2026-11-29: wrong; use v26.12-demo instead, which does not verify: "
        "demo has no image v26.12-demo"
    )
    assert verified_text("x", result).startswith("✗ withdrawn on 2026-11-29: wrong; use ")
    assert verified_text("x", result).endswith("FAILED")


@pytest.mark.parametrize(
    ("attached", "tag", "problem"),
    [
        (signed, "v26.12-demo", ""),
        (signed, "v1-absent", "demo has no image v1-absent"),
        (list, "v26.12-demo", "signature: no statement about this image counts"),
        (
            lambda d: [*signed(d), withdrawal(reason="too", date="2027-01-01")],
            "v26.12-demo",
            "withdrawn on 2027",
        ),
    ],
)
def test_a_successor_must_verify_itself(
    attached: Callable[[Sequence[Document]], list[Document]], tag: str, problem: str
) -> None:
    # The stand-in has one image, which the successor's tag names.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_signed_tag", lambda *_: TAG)
        registry: Any = Registry(attached(evidence()), ("v26.12-demo",))
        found = problem_of_successor(registry, tag, Trust(key="ours"))
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_a_preview_may_fail_the_gates_that_its_findings_name() -> None:
    def gates(content: Any) -> None:
        content["gates"] = [
            {"gate": "codeobjects", "passed": False, "findings": [{"severity": "error"}]},
            {"gate": "versions", "passed": True, "findings": [{"severity": "note"}]},
        ]

    def failed(*names: str) -> Change:
        def change(content: Any) -> None:
            content["passed"] = False
            content["verdicts"] = [{"name": name, "passed": False, "reason": ""} for name in names]

        return change

    said = r"the validation of llama3-proxy \(fp32\) says FAILED: "
    for tag, names, expected in (
        (f"{TAG}-preview", ["gate codeobjects"], ""),
        (
            f"{TAG}-preview",
            ["gate codeobjects", "gate versions"],
            said + "gate codeobjects, gate v",
        ),
        (f"{TAG}-preview", [], said + "it has no check"),
        (TAG, ["gate codeobjects"], said + "gate codeobjects$"),
    ):
        changes = {"gates": gates, "validation": failed(*names)}
        registry = Registry(signed(evidence(changes), tag), (tag,))
        result = verified(registry, f":{tag}")
        if expected:
            assert_named(result, expected)
        else:
            assert result.faults == []


def test_a_policy_names_what_is_lacking_of_an_image_without_faults() -> None:
    recipes = put(
        "predicate", "buildDefinition", "externalParameters", "recipes", value=["llama3-proxy"]
    )
    whole = Registry(signed(evidence({"provenance": recipes})))
    assert verified(whole, policy=Policy()).lacking == []
    result = verified(whole, policy=Policy(runs=("base", "another")))
    assert result.faults == []
    assert any("no validation in this image repeated a run" in one for one in result.lacking)
    licences = Policy(refused_licences=("MIT",))
    assert verified(whole, policy=licences).lacking == ["small 1.0 is under MIT"]
    damaged = Registry(signed(evidence({"lock": put("target", value="other")})))
    assert verified(damaged, policy=licences).lacking == []


@pytest.mark.parametrize(
    ("machine", "hardware", "expected"),
    [
        (DetectedGpus(), {"gpu": "none"}, []),
        (DetectedGpus(generation="mi300x", driver="2"), {"gpu": "mi325x", "driver": "1"}, []),
        (
            DetectedGpus(generation="mi300x", driver="2", firmware="9"),
            {"gpu": "mi300x", "driver": "1", "firmware": "9"},
            ["is void here: it had driver 1, this machine has 2"],
        ),
        (
            DetectedGpus(generation="mi300x", driver="2", firmware="9"),
            {"gpu": "mi300x", "driver": "2"},
            ["is void here: it had firmware unknown, this machine has 9"],
        ),
    ],
)
def test_a_validation_holds_for_the_driver_and_firmware_that_it_ran_with(
    machine: DetectedGpus,
    hardware: dict[str, str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verification, "detect", lambda: machine)
    recipe = {"name": "one", "precision": "bf16"}
    about = {"hardware": hardware, "recipe": recipe, "suite": {"format": verification.FORMAT}}
    void = list(verification._void([{"primus": about}]))
    assert void == [f"the validation of one (bf16) {reason}" for reason in expected]


def test_a_line_of_a_validation_names_the_machine_and_the_rates() -> None:
    recipe = {"name": "one", "backend": "megatron", "mode": "pretrain", "precision": "fp8"}
    hardware = {"gpu": "mi300x", "driver": "6.1", "firmware": ""}
    suite_of = {"rates": {"faults": 100, "named": 99}}
    validation = {
        "primus": {"recipe": recipe, "hardware": hardware, "suite": suite_of},
        "result": "FAILED",
        "passedTests": ["a", "b"],
        "failedTests": ["c"],
    }
    result = Verified(digest="d", validations=[validation], faults=["f"], void=["v"], lacking=["l"])
    assert verified_text("x", result).splitlines() == [
        "x d",
        "  signed: 0 statements",
        "  failed: one megatron pretrain fp8 on mi300x 6.1: 2 checks passed, 1 failed; its suite "
        "names 99 of 100 faults",
        "  ✗ f",
        "  ✗ v",
        "  ✗ l",
        "FAILED",
    ]


def test_a_document_that_the_registry_lost_is_a_fault_unless_it_is_foreign(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = Registry(signed(evidence()))
    whole = registry.document

    def document(descriptor: Mapping[str, Any]) -> Document:
        if descriptor["digest"] == "lost":
            raise CheckFailed("lost is listed for the image, but missing")
        if descriptor["digest"] == "odd":
            raise KeyError("layers")
        return whole(descriptor)

    listed = registry.referrers(DIGEST)
    monkeypatch.setattr(registry, "document", document)
    for row, expected in (
        ({"digest": "lost"}, ["document: lost is listed for the image, but missing"]),
        ({"digest": "lost", "artifactType": "application/sarif+json"}, []),
        ({"digest": "odd"}, ["document: odd is not a document's manifest"]),
    ):
        monkeypatch.setattr(registry, "referrers", lambda _, row=row: [*listed, row])
        assert verified(registry).faults == expected
