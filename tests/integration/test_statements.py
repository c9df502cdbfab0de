"""One small image, published and signed for real; then every way to tamper with it, each named by
`verify --image`.
"""

import json
import os
import re
import shutil
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard

import gits
from amd_channel import registry, restore
from changes import Change, put
from host_tools import needs
from primus_images.engine.pipeline import Options, build
from primus_images.errors import CheckFailed, HostError, InputError, PrimusError
from primus_images.gates.check import judge
from primus_images.gates.examined import examine_image
from primus_images.oci.store import INDEX_TYPE, MANIFEST_TYPE, canonical_json, digest_of
from primus_images.plan.action import compose
from primus_images.plan.layers import plan_images
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.progress import Progress
from primus_images.release.artifact import WITHDRAWAL, Document, artifact, digest_tag
from primus_images.release.documents import VALIDATION, documents, statement
from primus_images.release.git import Checkout
from primus_images.release.policy import Policy
from primus_images.release.publish import Ready, publish
from primus_images.release.registry import Repository
from primus_images.release.statement import (
    BUNDLE,
    PROVENANCE,
    SIGNATURE,
    TEST_RESULT,
    Signer,
    Trust,
    requests,
    require_unedited,
    statements,
)
from primus_images.release.tags import move_tag
from primus_images.release.verification import Verified, verified_text, verify_image
from primus_images.training.judge import suite
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import Rates, RecordedImage
from primus_images.versions.lock import Lock, LockedFile, dumps
from project_kit import SOURCE, Kit, make_project

pytestmark = [pytest.mark.integration, needs("docker-registry", "skopeo", "cosign")]

BILL, TAG = "https://spdx.dev/Document", "v26.11-demo"


def record(content: str, digest: str) -> Document:
    """The record of a validation of the image, whose jobs ran nowhere."""
    request = suite.Request(recipe="llama3-proxy", among=SOURCE.parent / "recipes")
    jobs = suite.plan(request, Path("/out"))
    place = suite.Place(
        target="demo",
        image=RecordedImage(ref=TAG, manifest=digest, content=content),
        gpu="none",
        made="2026-11-26",
    )
    made = suite.record(jobs, {}, [Verdict("loss falls", True, "it does")], place)
    rates = Rates(faults=100, named=99, healthy=100, refused=1)
    made = replace(
        made,
        passed=True,
        jobs=tuple(replace(job, ran=True, seconds=1.0) for job in made.jobs),
        suite=replace(made.suite, rates=rates),
    )
    return Document(
        media_type=VALIDATION,
        name="validation-llama3-proxy.json",
        data=canonical_json(made.as_json()),
    )


def small_image(kit: Kit) -> tuple[Ready, Any]:
    """A built image with one wheel and one Debian package, and its documents."""
    inside = "parts/alpha/lib/python3.11/site-packages/small-1.0.dist-info/METADATA"
    kit.write(
        inside, "Metadata-Version: 2.4\nName: small\nVersion: 1.0\nLicense-Expression: MIT\n\n"
    )
    kit.write("parts/beta/blob", "b" * 5000)
    project = Project(kit.root)
    (built,) = build(
        plan_images([resolve(project, "demo")], project.workspace.stats),
        project.workspace,
        Options(quiet=True, judge=False),
    )
    plan = built.image.plan
    files = [
        LockedFile(
            kind="wheel",
            name=name,
            version="1.0",
            file=f"{name}-1.0-py3-none-any.whl",
            size=9,
            sha256=sha256,
        )
        for name, sha256 in (("small", "a" * 64), ("tool", "b" * 64))
    ]
    lock = Lock(
        target="demo", channel="local", pins={}, files=(files[0], replace(files[1], base="build"))
    )
    plan.resolved.lock_path.parent.mkdir(parents=True)
    plan.resolved.lock_path.write_text(dumps(lock))
    plan = replace(plan, resolved=replace(plan.resolved, lock=lock))
    image = compose(project.workspace.store, plan)
    assert image
    examined = examine_image(image, project.workspace, Progress())
    evidence = (
        *documents(image, judge(examined), examined.facts, Checkout("c" * 40, [])),
        record(digest_of(image.config), image.digest),
    )
    return Ready(image=image, tag=TAG, documents=evidence, objections=()), project.workspace.store


@dataclass(frozen=True)
class World:
    """A registry with the image, and the keys of its publisher and of somebody else."""

    root: Path
    name: str
    ready: Ready
    attached: list[Document]

    @property
    def there(self) -> Repository:
        return Repository(self.name)

    @property
    def digest(self) -> str:
        return self.ready.image.digest

    def key(self, name: str) -> str:
        return str(self.root / f"{name}.key")

    def verify(
        self, reference: str = f":{TAG}", policy: Policy | None = None, key: str = "ours.pub"
    ) -> Verified:
        return verify_image(self.name + reference, Trust(key=str(self.root / key)), policy=policy)

    def blob(self, digest: str) -> Path:
        """The file in which the registry keeps a blob or a manifest."""
        number = digest.removeprefix("sha256:")
        return (
            self.root
            / "registry/data/docker/registry/v2/blobs/sha256"
            / number[:2]
            / number
            / "data"
        )

    def relist(self, change: Callable[[list[Document]], list[Document]]) -> None:
        """Replace what is attached to the image by other documents, whose digests are right."""
        there, new = self.there, change(list(self.attached))
        there.attach(
            [document for document in new if document not in self.attached], self.ready.subject
        )
        digests = {digest_of(artifact(document, self.ready.subject)) for document in new}
        rows = [row for row in there.referrers(self.digest) if row["digest"] in digests]
        listed = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows})
        there.request(
            "PUT",
            f"manifests/{digest_tag(self.digest)}",
            data=listed,
            headers={"Content-Type": INDEX_TYPE},
        )


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("statements")
    os.environ["COSIGN_PASSWORD"] = "a word"
    for name in ("ours", "others"):
        subprocess.run(
            ["cosign", "generate-key-pair", f"--output-key-prefix={name}"],
            cwd=root,
            check=True,
            capture_output=True,
        )
    ready, store = small_image(make_project(root / "project"))
    with registry(root / "registry") as port:
        name = f"127.0.0.1:{port}/rocm/primus"
        publish(ready, store, name, Progress(), signing=Signer(key=str(root / "ours.key")))
        shutil.copytree(root / "registry/data", root / "whole")
        yield World(root, name, ready, Repository(name).documents(ready.image.digest))


@pytest.fixture
def world(published: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    # cosign verifies each bundle; the same one is not verified twice.
    monkeypatch.setattr(Trust, "rejects", REJECTS)
    yield published
    restore(published.root)


REJECTS = cache(Trust.rejects)


def payload(bundle: Document) -> Any:
    return json.loads(b64decode(json.loads(bundle.data)["dsseEnvelope"]["payload"]))


def is_about(document: Document, what: str) -> bool:
    """Whether it is the document of this name, or the bundle with this type of predicate."""
    if document.media_type == BUNDLE:
        return bool(payload(document)["predicateType"] == what)
    return document.name.startswith(what)


def edited(document: Document, change: Change) -> Document:
    content = json.loads(document.data)
    change(content)
    return replace(document, data=canonical_json(content))


def each(what: str, change: Callable[[Document], list[Document]]) -> Callable[[World], None]:
    return lambda world: world.relist(
        lambda those: [
            new for one in those for new in (change(one) if is_about(one, what) else [one])
        ]
    )


def stored(
    what: str, damage: Callable[[bytes], bytes], *, contents: bool
) -> Callable[[World], None]:
    """Change a document, or its manifest, in the registry's own files."""

    def tamper(world: World) -> None:
        for descriptor in world.there.referrers(world.digest):
            if is_about(world.there.document(descriptor), what):
                digest = descriptor["digest"]
                if contents:
                    digest = json.loads(world.blob(digest).read_bytes())["layers"][0]["digest"]
                world.blob(digest).write_bytes(damage(world.blob(digest).read_bytes()))

    return tamper


def inside(part: str, damage: Callable[[bytes], bytes] | None) -> Callable[[World], None]:
    """Change a part of the image in the registry's own files, or remove it."""

    def tamper(world: World) -> None:
        content = json.loads(world.ready.image.manifest)
        digest = {"manifest": world.digest, "config": content["config"]["digest"]}.get(part, "")
        path = world.blob(digest or content["layers"][int(part)]["digest"])
        path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()

    return tamper


def forged(
    change: Change, *, what: str = "", by: str = "others", tag: str = TAG
) -> Callable[[World], None]:
    """Sign a changed statement with another key (or with ours), in place of the right one."""

    def again(bundle: Document, world: World) -> list[Document]:
        statement = payload(bundle)
        change(statement)
        return [replace(bundle, data=Signer(key=world.key(by)).bundle(statement))]

    return lambda world: each(what, lambda bundle: again(bundle, world))(world)


def resigned(name: str, change: Change) -> Callable[[World], None]:
    """A publisher with the key who changes a document: all is signed, and nothing fits."""

    def tamper(world: World) -> None:
        plain = [
            d if not d.name.startswith(name) else edited(d, change) for d in world.ready.documents
        ]
        about = statements(plain, TAG, world.digest)
        by = {
            json.dumps(payload(d), sort_keys=True): d
            for d in world.attached
            if d.media_type == BUNDLE
        }
        signer = Signer(key=world.key("ours"))
        bundles = [
            by.get(json.dumps(s, sort_keys=True))
            or Document(media_type=BUNDLE, name="", data=signer.bundle(s))
            for s in about
        ]
        world.relist(lambda _: [*plain, *bundles])

    return tamper


def moved(change: Callable[[Any], object]) -> Callable[[World], None]:
    """Let the tag name a changed image, with the evidence of the right one."""

    def tamper(world: World) -> None:
        content = json.loads(world.ready.image.manifest)
        change(content)
        manifest = canonical_json(content)
        there = world.there
        subject = {"mediaType": MANIFEST_TYPE, "digest": digest_of(manifest), "size": len(manifest)}
        there.tag(TAG, manifest)
        there.attach(world.attached, subject)

    return tamper


def signature(bundle: Document, change: Callable[[str], str]) -> Document:
    def swap(content: Any) -> None:
        (entry,) = content["dsseEnvelope"]["signatures"]
        entry["sig"] = change(entry["sig"])

    return edited(bundle, swap)


def said(bundle: Document, change: Change) -> Document:
    """The bundle with another payload under the old signature."""
    statement = payload(bundle)
    change(statement)
    data = b64encode(canonical_json(statement)).decode()
    return edited(bundle, lambda content: content["dsseEnvelope"].update(payload=data))


def flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


DOCUMENTS = (
    "sbom.spdx.json",
    "sbom.cdx.json",
    "provenance.json",
    "lock.json",
    "gates.json",
    "validation-",
)
STATEMENTS = {
    SIGNATURE: "signature",
    PROVENANCE: "provenance.json",
    BILL: "sbom.spdx.json",
    "https://cyclonedx.org/bom": "sbom.cdx.json",
    TEST_RESULT: "validation-",
}


def bundled(change: Change, what: str = SIGNATURE) -> Callable[[World], None]:
    """Change a bundle itself, as who has no key can."""
    return each(what, lambda b: [edited(b, change)])


def added(what: str, change: Callable[[Document], Document]) -> Callable[[World], None]:
    """Attach a changed copy beside a document or bundle."""
    return lambda w: w.relist(
        lambda those: [*those, *(change(d) for d in those if is_about(d, what))]
    )


def tagged(
    manifest: Callable[[World], Any], tag: Callable[[World], str] = lambda _: TAG
) -> Callable[[World], object]:
    """Let a tag name something else."""

    def tamper(world: World) -> None:
        content = manifest(world)
        headers = {"Content-Type": content["mediaType"]}
        world.there.request(
            "PUT", f"manifests/{tag(world)}", data=canonical_json(content), headers=headers
        )

    return tamper


def moving(tag: str) -> Callable[[World], None]:
    """Let another tag name the image."""
    return lambda world: world.there.tag(tag, world.ready.image.manifest)


def listing(world: World) -> str:
    return digest_tag(world.digest)


def words(change: Change, what: str = TEST_RESULT) -> Callable[[World], None]:
    """Sign a statement more with the right key, which no document says."""
    return lambda world: added(
        what,
        lambda bundle: replace(
            bundle, data=Signer(key=world.key("ours")).bundle(said_by(bundle, change))
        ),
    )(world)


def said_by(bundle: Document, change: Change) -> Any:
    statement = payload(bundle)
    change(statement)
    return statement


def failing(content: Any) -> None:
    """Let the record of a validation say that it failed."""
    content["passed"] = False
    content["verdicts"][0]["passed"] = False


def rewired(what: str, change: Callable[[Any], object]) -> Callable[[World], None]:
    """Change the manifest of a document, and list it in place of the right one."""

    def tamper(world: World) -> None:
        rows = []
        for row in world.there.referrers(world.digest):
            if not is_about(world.there.document(row), what):
                rows.append(row)
                continue
            content = json.loads(world.there.manifest(row["digest"]) or b"")
            change(content)
            data = canonical_json(content)
            world.there._put(digest_of(data), data, MANIFEST_TYPE)
            rows.append({**row, "digest": digest_of(data), "size": len(data)})
        listed = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows}
        world.there._put(digest_tag(world.digest), canonical_json(listed), INDEX_TYPE)

    return tamper


def spaced(bundle: Document) -> Document:
    """The bundle with the same statement, written with spaces."""
    data = b64encode(json.dumps(payload(bundle), indent=1).encode()).decode()
    return edited(bundle, lambda content: content["dsseEnvelope"].update(payload=data))


def twice(bundle: bytes) -> bytes:
    """A bundle in which a second envelope, by nobody, follows the right one."""
    envelope = json.loads(bundle)["dsseEnvelope"]
    other = json.dumps({**envelope, "signatures": [{"sig": "AAAA"}]})
    return bundle.rstrip().removesuffix(b"}") + f',"dsseEnvelope":{other}}}'.encode()


def in_other_alphabet(text: str) -> str:
    """The text in the alphabet of base64 for addresses; a digit is put in if it is the same."""
    other = text.replace("+", "-").replace("/", "_")
    return other if other != text else f"-{text[1:]}"


def compressed_anew(data: bytes) -> bytes:
    """A layer with the same files, in other bytes."""
    with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
        content = stream.read()
    again = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(content)
    assert again != data
    return again


def consistent(name: str, change: Change) -> Callable[[World], None]:
    """As ``resigned``, by a publisher who also corrects the hash in the provenance."""

    def tamper(world: World) -> None:
        plain = [
            d if not d.name.startswith(name) else edited(d, change) for d in world.ready.documents
        ]
        hashes = {d.name: digest_of(d.data).removeprefix("sha256:") for d in plain}

        def correct(content: Any) -> None:
            for product in content["predicate"]["runDetails"]["byproducts"]:
                product["digest"]["sha256"] = hashes[product["name"]]

        plain = [edited(d, correct) if d.name == "provenance.json" else d for d in plain]
        world.relist(lambda _: [*plain, *signed(world, plain, TAG)])

    return tamper


def signed(world: World, plain: list[Document], tag: str) -> list[Document]:
    """The statements of documents, signed with the right key."""
    signer = Signer(key=world.key("ours"))
    return [
        Document(media_type=BUNDLE, name="", data=signer.bundle(content))
        for content in statements(plain, tag, world.digest)
    ]


def as_preview(world: World) -> None:
    """Sign the image as a preview, and let the tag of the release name it."""
    plain = list(world.ready.documents)
    world.relist(lambda _: [*plain, *signed(world, plain, f"{TAG}-preview")])


def withdrawing(
    predicate: object, name: str = TAG, change: Change | None = None
) -> Callable[[World], None]:
    """Attach a withdrawal by the right key, of which ``change`` edits the words afterwards."""

    def tamper(world: World) -> None:
        content = statement(name, world.digest, WITHDRAWAL, predicate)
        data = Signer(key=world.key("ours")).bundle(content)
        bundle = Document(media_type=BUNDLE, name="", data=data)
        if change:
            bundle = said(bundle, change)
        world.relist(lambda those: [*those, bundle])

    return tamper


def another_version(content: Any) -> None:
    for component in content["components"]:
        if "purl" in component:
            component["version"] = "9"


FAILED_GATE = {"gate": "versions", "passed": False, "summary": "", "findings": []}
WHY = {"reason": "wrong", "date": "2026-11-29"}
NAMED = r"names the image that was signed as v26\.11-demo"
DIFFERENT = put("subject", 0, "digest", "sha256", value="e" * 64)
OTHER = put("predicate", "more", value=1)
OTHER_KEY = put("more", value=1)
TABLE = Path(__file__).parents[1] / "fixtures/tamperings.yaml"
# A document or a statement that the owner of the key changes and signs; a bundle that anybody can
# change.
CHANGES: dict[str, Callable[[str, Change], Callable[[World], None]]] = {
    "document": resigned,
    "statement": lambda of, change: forged(change, what=of, by="ours"),
    "bundle": lambda of, change: bundled(change, of),
}


TAMPERINGS: dict[str, tuple[Callable[[World], None], str]] = {
    **{
        f"{d} removed": (each(d, lambda _: []), f"{d}.*it is missing, but signed")
        for d in DOCUMENTS
    },
    **{
        f"{d} changed": (
            stored(d, flip, contents=True),
            rf"{d}.* was changed: its contents have other bytes",
        )
        for d in DOCUMENTS
    },
    **{
        f"{d} replaced": (
            each(d, lambda one: [edited(one, put("more", value=1))]),
            f"{d}.*it was changed, other bytes are signed",
        )
        for d in DOCUMENTS
    },
    "a document emptied": (
        stored("lock.json", lambda _: b"", contents=True),
        "lock.json.* was changed: its contents",
    ),
    "a document's manifest": (
        stored("lock.json", flip, contents=False),
        "was changed: its manifest has other bytes|not a document",
    ),
    **{
        f"statement of {n} removed": (
            each(s, lambda _: []),
            f"{n}.*(no signed statement|not signed)",
        )
        for s, n in STATEMENTS.items()
    },
    **{
        f"{n} signed by another": (
            forged(lambda _: None, what=s),
            f"{n}.*(no signed statement|not signed).*: ",
        )
        for s, n in STATEMENTS.items()
    },
    "a statement that says more": (
        each(BILL, lambda b: [said(b, OTHER)]),
        "sbom.spdx.json.*no signed statement.*its signature is not by",
    ),
    "a statement about another": (
        each(SIGNATURE, lambda b: [said(b, DIFFERENT)]),
        "signature.*not signed.*its signature is not by",
    ),
    "a broken signature": (
        each(PROVENANCE, lambda b: [signature(b, lambda sig: sig[:-8] + "AAAAAAA=")]),
        "provenance.json.*no signed statement.*its signature is not by",
    ),
    "every statement removed": (
        lambda w: w.relist(lambda those: [d for d in those if d.media_type != BUNDLE]),
        "signature: no statement .* nothing is attached",
    ),
    "everything removed": (
        lambda w: w.relist(lambda _: []),
        "signature: no statement .* nothing is attached",
    ),
    "an envelope without a statement": (
        each(SIGNATURE, lambda b: [replace(b, data=b"{}")]),
        "signature: the image itself is not signed",
    ),
    "manifest changed": (
        inside("manifest", lambda data: data.replace(b"2026", b"2027")),
        "manifest: the registry returns other bytes|not that of an image",
    ),
    "config changed": (inside("config", flip), "config: its bytes are not those of"),
    "config missing": (inside("config", None), "config: it is missing"),
    "layer changed": (inside("0", flip), r"layer alpha: .*(hash to|does not decompress|no tar)"),
    "layer cut": (inside("1", lambda data: data[:-20]), "layer beta: "),
    "layer missing": (inside("1", None), "layer beta: it is missing"),
    "layer longer": (inside("2", lambda data: data + b"\0" * 99), "layer recipes: "),
    "image without a layer": (
        moved(lambda m: m["layers"].pop()),
        "it is about sha256:.* void for this image",
    ),
    "layers swapped": (moved(lambda m: m["layers"].reverse()), "layer .*: its content hashes to"),
    "other annotations": (
        moved(lambda m: m["annotations"].update(x="y")),
        "it is about sha256:.* void for this image",
    ),
    "tag of another release": (
        lambda w: w.there.tag("v26.12-demo", w.ready.image.manifest),
        "tag: v26.12-demo names the image that was signed as v26.11-demo",
    ),
    # The owner of the key is wrong, or lies.
    "bill without a package": (
        resigned("sbom.spdx", put("relationships", value=lambda r: [r[0], *r[2:]])),
        "sbom.*small 1.0 is in the image, sbom.* has no such wheel",
    ),
    "bill with a package more": (
        resigned(
            "sbom.spdx",
            put(
                "relationships",
                value=lambda r: [*r, {**r[1], "relatedSpdxElement": r[2]["spdxElementId"]}],
            ),
        ),
        "sbom.*tool 1.0 is in sbom.*, the image has no such",
    ),
    "record without a job": (
        resigned("validation", put("jobs", value=lambda jobs: jobs[:1])),
        "validation.*runs and limits are not those of suite",
    ),
    "bill that hides a package": (
        resigned("sbom.spdx", put("relationships", 1, "relationshipType", value="BUILD_TOOL_OF")),
        "sbom.*small 1.0 is in the image, sbom.* has no such wheel",
    ),
    "lock with a file more": (
        resigned("lock", put("files", value=lambda f: [*f, {**f[0], "name": "more"}])),
        "sbom.*only lock.json has more 1.0",
    ),
    # Words that the owner of the key signs, and that nothing else says.
    "a failed validation beside the good one": (
        words(put("predicate", "result", value="FAILED")),
        "a validation of llama3-proxy that says FAILED is signed, and no document says the same",
    ),
    "a validation of another recipe": (
        words(put("predicate", "primus", "recipe", "name", value="llama3.1-8b")),
        "a validation of llama3.1-8b that says PASSED is signed, and no document",
    ),
    "a validation with more ranks": (
        words(put("predicate", "primus", "recipe", "ranks", value=64)),
        "a validation of llama3-proxy that says PASSED is signed, and no document",
    ),
    "another provenance": (
        words(put("predicate", "runDetails", "builder", "id", value="x"), PROVENANCE),
        "a statement of type https://slsa.dev/provenance/v1 is signed, and no document",
    ),
    "another bill": (
        words(OTHER, BILL),
        "a statement of type https://spdx.dev/Document is signed, and no document",
    ),
    "a statement with another name": (
        words(put("subject", 0, "name", value="v26.12-demo"), BILL),
        "a statement calls the image v26.12-demo, which was signed as v26.11-demo",
    ),
    "a failed validation with its document": (
        resigned("validation", failing),
        r"the validation of llama3-proxy \(fp32\) says FAILED: loss falls",
    ),
    "a validation without a check that passed": (
        resigned("validation", lambda content: content.update(passed=False, verdicts=[])),
        "says FAILED: it has no check",
    ),
    "the same words in other bytes": (
        each(PROVENANCE, lambda b: [spaced(b)]),
        "provenance.json.*no signed statement.*its signature is not by",
    ),
    "two signatures": (
        bundled(put("dsseEnvelope", "signatures", value=lambda rows: rows * 2), PROVENANCE),
        "provenance.json.*no signed statement",
    ),
    "two envelopes": (
        each(PROVENANCE, lambda b: [replace(b, data=twice(b.data))]),
        "provenance.json.*no signed statement",
    ),
    "payload in another alphabet": (
        bundled(put("dsseEnvelope", "payload", value=in_other_alphabet), PROVENANCE),
        "provenance.json.*no signed statement",
    ),
    "document in a folder": (
        each("lock", lambda d: [replace(d, name="../lock.json")]),
        "lock.json.*missing, but signed",
    ),
    "document with two files": (
        rewired("lock", lambda m: m["layers"].append(m["layers"][0])),
        "is not a manifest with one file",
    ),
    "document without a file": (
        rewired("lock", lambda m: m["layers"].clear()),
        "is not a manifest with one file",
    ),
    "layer compressed anew": (
        inside("0", compressed_anew),
        "layer alpha: .*hash",
    ),
    "empty config": (
        moved(lambda m: m["config"].update(digest=digest_of(b"{}"), size=2)),
        "void for this image",
    ),
    # As reported of cosign, notation, oras, skopeo and distribution, or close to it.
    "payload with a line end": (
        bundled(put("dsseEnvelope", "payload", value=lambda data: data + "\n")),
        "signature.*not signed",
    ),
    "bundle of a message": (
        bundled(lambda b: b.update(messageSignature=b.pop("dsseEnvelope"))),
        "signature.*not signed",
    ),
    "bundle cut": (
        each(SIGNATURE, lambda b: [replace(b, data=b.data[:-40])]),
        "signature.*not signed",
    ),
    "bundle of brackets": (
        each(SIGNATURE, lambda b: [replace(b, data=b"[" * 100_000)]),
        "signature.*not signed",
    ),
    "bundle as text": (
        each(SIGNATURE, lambda b: [replace(b, media_type="text/plain")]),
        "signature.*not signed",
    ),
    "statement about two images": (
        forged(
            put("subject", value=lambda s: [*s, {"name": "x", "digest": {"sha256": "e" * 64}}]),
            what=SIGNATURE,
            by="ours",
        ),
        "signature.*it is about sha256:.*, sha256:eeee.* void",
    ),
    "statement in capitals": (
        forged(put("subject", 0, "digest", "sha256", value=str.upper), what=SIGNATURE, by="ours"),
        "signature.*it is about.* void",
    ),
    "bill beside the bill": (
        added("sbom.spdx", lambda d: edited(d, OTHER_KEY)),
        "sbom.spdx.json: no signed statement",
    ),
    "lock beside the lock": (
        added("lock", lambda d: edited(d, OTHER_KEY)),
        "lock.json: it was changed, other bytes are signed",
    ),
    "gates beside the gates": (
        added("gates", lambda d: replace(edited(d, put("gates", value=[])), name="x.json")),
        "x.json: the signature does not name it",
    ),
    "validation more": (
        added(
            "validation",
            lambda d: replace(edited(d, put("made", value="2020")), name="validation-x.json"),
        ),
        "validation-x.json: no signed statement",
    ),
    "document of no name": (
        each("lock", lambda d: [replace(d, name="")]),
        "lock.json.*missing, but signed",
    ),
    "document under another name": (
        each("lock", lambda d: [replace(d, name="look.json")]),
        "lock.json.*missing, but signed",
    ),
    "gates as text": (
        each("gates", lambda d: [replace(d, media_type="text/plain")]),
        "gates.json: it is missing, but signed",
    ),
    "bill as text": (
        each("sbom.spdx", lambda d: [replace(d, media_type="text/plain")]),
        "sbom.spdx.json: it is missing, but signed",
    ),
    "tag of a list of images": (
        tagged(
            lambda w: {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [w.ready.subject]}
        ),
        "manifest: it is not that of an image",
    ),
    "layer as config": (
        moved(lambda m: m["config"].update(digest=m["layers"][0]["digest"])),
        "manifest: it is not that of an image|void for this image",
    ),
    "layer twice": (moved(lambda m: m["layers"].append(m["layers"][0])), "void for this image"),
    "layer of another type": (
        moved(
            lambda m: m["layers"][0].update(mediaType="application/vnd.oci.image.layer.v1.tar+gzip")
        ),
        "void for this image",
    ),
    "layer elsewhere": (
        moved(lambda m: m["layers"][0].update(urls=["http://127.0.0.1:1/x"])),
        "void for this image",
    ),
    "layer emptied": (inside("0", lambda _: b""), "layer alpha: "),
    "layer of zeros": (inside("0", lambda data: bytes(len(data))), "layer alpha: "),
    "config emptied": (inside("config", lambda _: b""), "config: its bytes are not those of"),
    "manifest emptied": (
        inside("manifest", lambda _: b""),
        "manifest: the registry returns other bytes|has no image|refuses",
    ),
    "an image as list of documents": (
        tagged(lambda w: json.loads(w.ready.image.manifest), listing),
        "manifests/sha256-.* is not a list of manifests",
    ),
    "moving tag of another target": (moving("latest-cpu"), f"tag: latest-cpu {NAMED}"),
    "short name of another release": (moving("v26.12"), f"tag: v26.12 {NAMED}"),
    "short name of a patch": (moving("v26.11.1"), f"tag: v26.11.1 {NAMED}"),
    "preview of a release": (moving(f"{TAG}-preview"), f"tag: {TAG}-preview {NAMED}"),
    "release of a preview": (as_preview, f"tag: {TAG} {NAMED}-preview"),
    "record that ran elsewhere": (
        consistent("validation", put("gpu", value="mi300x")),
        "validation.*it ran on mi300x, and its recipe is for cpu",
    ),
    "record with a job more": (
        consistent("validation", lambda c: c["jobs"].append({**c["jobs"][0], "name": "resume"})),
        "validation.*its runs and limits are not those of suite",
    ),
    "record with another verdict of a gate": (
        consistent("validation", put("gates", value={"gates": [FAILED_GATE]})),
        "gates.json: a validation has another verdict of gate versions",
    ),
    "no gates at all": (consistent("gates", put("gates", value=[])), "gates.json: it has no gate"),
    "components of another image, named by all": (
        consistent(
            "sbom.cdx", put("metadata", "component", "hashes", 0, "content", value="f" * 64)
        ),
        "sbom.cdx.json: it is about another image",
    ),
    "components with another version": (
        consistent("sbom.cdx", another_version),
        "sbom.cdx.json: pkg:.* has the version 9 there",
    ),
    "lock of another target, named by all": (
        consistent("lock", put("target", value="other")),
        "lock.json: its target is other, not demo",
    ),
    "lock of another channel": (
        consistent("lock", put("channel", value="amd")),
        "lock.json: its channel is amd, not local",
    ),
    "bill with another licence": (
        consistent("sbom.spdx", put("packages", 1, "licenseDeclared", value="0BSD")),
        "sbom.*the licence of small is MIT in the image, 0BSD in sbom",
    ),
    "signature of no name": (
        forged(lambda c: c["subject"][0].pop("name"), what=SIGNATURE, by="ours"),
        f"tag: {TAG} names the image that was signed as None",
    ),
    "bill of no name": (
        forged(lambda c: c["subject"][0].pop("name"), what=BILL, by="ours"),
        f"a statement calls the image None, which was signed as {TAG}",
    ),
    "subject with a hash more": (
        forged(put("subject", 0, "digest", "sha512", value="e" * 128), what=SIGNATURE, by="ours"),
        "signature.*not signed.*sha512:eeee.* void",
    ),
    "withdrawal with other words": (
        withdrawing(WHY, change=put("predicate", "reason", value="none")),
        f"a statement of type {WITHDRAWAL} names the key and does not count: its signature is not by",
    ),
    "withdrawal of another name": (
        withdrawing(WHY, name="v26.12-demo"),
        "a statement calls the image v26.12-demo",
    ),
    "document said to be smaller": (
        rewired("lock", put("layers", 0, "size", value=3)),
        "lock.json.* was changed: its contents have other bytes",
    ),
    "document said to be larger": (
        rewired("lock", put("layers", 0, "size", value=10**9)),
        "lock.json.* was changed: its manifest states another size",
    ),
    "document with a line end in its name": (
        each("lock", lambda d: [replace(d, name="lock.json\n")]),
        "lock.json.*missing, but signed",
    ),
    "a document lost": (
        lambda w: w.blob(w.there.referrers(w.digest)[0]["digest"]).unlink(),
        "is listed for the image, but missing",
    ),
    **{
        name: (CHANGES[row["change"]](row["of"], put(*row["at"], value=row["to"])), row["named"])
        for name, row in yaml.safe_load(TABLE.read_text()).items()
    },
}


# One document and one statement stand for the others, which the same code compares.
ALIKE = re.compile(
    rf"({'|'.join([*DOCUMENTS[1:], *list(STATEMENTS.values())[1:]])})\S* "
    r"(removed|changed|replaced|signed by another)"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * bool(ALIKE.fullmatch(name)))
        for name in TAMPERINGS
    ],
)
def test_each_tampering_is_named(world: World, name: str) -> None:
    tamper, expected = TAMPERINGS[name]
    tamper(world)
    references = {
        "tag of another release": ":v26.12-demo",
        "moving tag of another target": ":latest-cpu",
        "short name of another release": ":v26.12",
        "short name of a patch": ":v26.11.1",
        "preview of a release": f":{TAG}-preview",
        "manifest changed": f"@{world.digest}",
        "manifest emptied": f"@{world.digest}",
    }
    try:
        result = world.verify(references.get(name, f":{TAG}"))
        named = (*result.faults, *result.void)
        assert verified_text("x", result).endswith("FAILED")
    except PrimusError as error:
        named = (str(error),)
    assert any(re.search(expected, fault) for fault in named), "\n".join(named)


@pytest.mark.parametrize(
    "name",
    [
        "the same words in other bytes",
        "two signatures",
        "two envelopes",
        "payload in another alphabet",
        "provenance of another type",
        "provenance in an envelope of text",
        "a broken signature",
    ],
)
def test_stock_cosign_refuses_what_primus_refuses(world: World, name: str) -> None:
    words = ["cosign", "verify-attestation", "--insecure-ignore-tlog", "--type", "slsaprovenance1"]
    words += ["--key", world.key("ours")[:-4] + ".pub", f"{world.name}:{TAG}"]
    assert subprocess.run(words, check=False, capture_output=True).returncode == 0
    tamper, _ = TAMPERINGS[name]
    tamper(world)
    assert subprocess.run(words, check=False, capture_output=True).returncode != 0


def test_stock_cosign_sees_that_a_withdrawal_was_changed(world: World) -> None:
    words = ["cosign", "verify-attestation", "--insecure-ignore-tlog", "--type", WITHDRAWAL]
    words += ["--key", world.key("ours")[:-4] + ".pub", f"{world.name}:{TAG}"]
    withdrawing(WHY)(world)
    assert subprocess.run(words, check=False, capture_output=True).returncode == 0
    TAMPERINGS["withdrawal with other words"][0](world)
    assert subprocess.run(words, check=False, capture_output=True).returncode != 0


@needs("oras")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_others_attach_is_not_judged(world: World, tmp_path: Path, number: int) -> None:
    """Such as the report of a scanner, of none, one or several files."""
    names = ["a.txt", "b.txt"][:number]
    for name in names:
        (tmp_path / name).write_text(name)
    words = ["oras", "attach", "--plain-http", "--artifact-type", "application/vnd.scan"]
    words += ["--annotation", "a=b", f"{world.name}:{TAG}", *names]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    assert len(world.there.referrers(world.digest)) == len(world.attached) + 1
    assert world.verify().faults == []
    kit = make_project(tmp_path / "project")
    assert kit.primus("diff", f"{world.name}:{TAG}", "versions.yaml").code == 0


SCAN = "https://cosign.sigstore.dev/attestation/vuln/v1"


def test_what_the_publisher_states_of_a_scan_is_not_judged(world: World, tmp_path: Path) -> None:
    # cosign writes in-toto's older format, and calls the image by its repository.
    statement_of_scan = {
        "_type": "https://in-toto.io/Statement/v0.1",
        "predicateType": SCAN,
        "subject": [{"name": world.name, "digest": {"sha256": world.digest[7:]}}],
        "predicate": {"scanner": {"uri": "x"}},
    }
    data = Signer(key=world.key("ours")).bundle(statement_of_scan)
    scan = Document(media_type=BUNDLE, name="", data=data)
    world.relist(lambda those: [*those, scan])
    assert world.verify().faults == []
    changed = said(scan, put("predicate", "scanner", "uri", value="y"))
    world.relist(lambda those: [*those, changed])
    (fault,) = world.verify().faults
    assert f"a statement of type {SCAN} names the key and does not count" in fault


ABOUT_ANOTHER: dict[str, Change] = {
    "validation-": put("image", "content", value=f"sha256:{'e' * 64}"),
    "gates.json": put("digest", value=f"sha256:{'e' * 64}"),
    "sbom.spdx.json": put("packages", 0, "checksums", 0, "checksumValue", value="e" * 64),
}


@pytest.mark.parametrize("name", ABOUT_ANOTHER)
def test_diff_takes_no_evidence_of_another_image(world: World, tmp_path: Path, name: str) -> None:
    kit = make_project(tmp_path / "project")
    words = ("diff", "v26.11", f"{world.name}:{TAG}", "--json")
    gits.commit(kit.root, {})
    kit.edit("versions.yaml", "release: v26.11", "release: v26.12")
    world.relist(lambda those: [d for d in those if not d.name.startswith(name)])
    without = kit.primus(*words)
    change = ABOUT_ANOTHER[name]
    world.relist(lambda those: [edited(d, change) if is_about(d, name) else d for d in those])
    shown = kit.primus(*words)
    assert (shown.code, shown.out) == (0, without.out), shown.err
    assert re.search(f"! {name}.* is about another image, and is left out", shown.err)


def test_stock_cosign_verifies_what_primus_verifies(world: World) -> None:
    for kind in ("slsaprovenance1", "spdxjson", TEST_RESULT):
        words = [
            "cosign",
            "verify-attestation",
            "--insecure-ignore-tlog",
            "--key",
            world.key("ours")[:-4] + ".pub",
        ]
        subprocess.run(
            [*words, "--type", kind, f"{world.name}:{TAG}"], check=True, capture_output=True
        )
    (result,) = world.verify().validations
    assert result["primus"]["suite"]["rates"]["named"] == 99
    assert world.verify(f"@{world.digest}").passed
    # Another validation under the same name, signed as well, does not make the first one wrong.
    later = edited(world.ready.documents[-1], put("made", value="2026-11-27"))
    more, store = (
        replace(world.ready, documents=(*world.ready.documents, later)),
        Project(world.root / "project"),
    )
    publish(
        more, store.workspace.store, world.name, Progress(), signing=Signer(key=world.key("ours"))
    )
    assert (world.verify().faults, len(world.verify().validations)) == ([], 2)
    layers = list[str]()
    stranger = verify_image(
        f"{world.name}:{TAG}", Trust(key=str(world.root / "others.pub")), say=layers.append
    )
    assert ("its signature is not by" in stranger.faults[0], layers) == (True, [])


def test_a_tag_moves_to_what_is_signed(world: World) -> None:
    there = world.there
    trust = Trust(key=str(world.root / "ours.pub"))
    assert move_tag(there, "latest-demo", TAG, trust) == (None, world.digest)
    assert move_tag(there, "latest-demo", TAG, trust) == (world.digest, world.digest)
    assert move_tag(there, "v26.11", world.digest, trust) == (None, world.digest)
    with pytest.raises(CheckFailed, match=r"v26\.12 is the name of another release"):
        move_tag(there, "v26.12", TAG, trust)
    stranger = Trust(key=str(world.root / "others.pub"))
    with pytest.raises(
        CheckFailed, match=r"latest-demo does not move to .* its signature is not by"
    ):
        move_tag(there, "latest-demo", TAG, stranger)
    content = json.loads(world.ready.image.manifest)
    content["annotations"]["x"] = "y"
    there.tag("v26.12-demo", canonical_json(content))
    with pytest.raises(CheckFailed, match=r"latest-demo does not move .* nothing is attached"):
        move_tag(there, "latest-demo", "v26.12-demo", trust)
    for release in ("v26.13-demo", f"{TAG}.by-{world.digest[7:19]}"):
        with pytest.raises(InputError, match="its releases: v26"):
            move_tag(there, "latest-demo", release, trust)
    assert there.digest("latest-demo") == world.digest


def test_a_withdrawn_image_says_so_first(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = make_project(tmp_path / "project")
    monkeypatch.chdir(kit.root)
    there = world.there
    there.tag("latest-demo", world.ready.image.manifest)
    words = ("--to", world.name, "--key", world.key("ours"), "--reason", "wrong gradients")
    done = kit.primus("withdraw", TAG, *words)
    assert done.code == 0, done.err
    assert "! latest-demo still names it" in done.err
    assert "wrong gradients" in (kit.root / "withdrawn.yaml").read_text()
    result = world.verify()
    assert not result.passed
    text = verified_text("x", result)
    assert text.startswith("✗ withdrawn on ")
    assert "  release v26.11, target demo\n" in text
    trust = Trust(key=str(world.root / "ours.pub"))
    with pytest.raises(CheckFailed, match=r"does not move to .*: withdrawn on .*: wrong gradients"):
        move_tag(there, "latest-demo", TAG, trust)
    kit.primus("build", "demo", "--offline")
    shown = kit.primus("diff", f"{world.name}:{TAG}", "versions.yaml")
    assert shown.code == 0, shown.err
    assert shown.out.startswith(f"! {world.name}:{TAG} was withdrawn on ")
    for verb in (("run", "demo", "--", "true"), ("plan", "demo")):
        told = kit.primus(*verb)
        assert f"! {TAG} was withdrawn on " in told.err + told.out
    by_others = kit.primus("withdraw", TAG, *words[:3], world.key("others"), *words[4:])
    assert by_others.code == 0
    assert world.verify(key="others.pub").withdrawn
    for reason in (" ", "\x1b[2J", "a\x00b"):
        assert kit.primus("withdraw", TAG, *words[:4], "--reason", reason).code == 2
    spaced = kit.primus("withdraw", TAG, *words[:4], "--reason", "of\ntwo\tlines")
    assert (spaced.code, ": of two lines" in spaced.out) == (0, True), spaced.err
    assert kit.primus("plan", "demo").code == 0
    other = f"sha256:{'0' * 64}"
    kit.write("withdrawn.yaml", f"{TAG}: {{reason: old, date: '2026-01-01', digest: '{other}'}}\n")
    again = kit.primus("withdraw", TAG, *words)
    assert f"! withdrawn.yaml no longer names {other}, another image {TAG}" in again.err


NEXT = "v26.11.1-demo"


def mended(world: World, folder: Path, key: str = "ours") -> None:
    """Publish the patch of the image."""
    kit = make_project(folder)
    kit.edit("versions.yaml", "release: v26.11", "release: v26.11.1")
    ready, store = small_image(kit)
    signer = Signer(key=world.key(key))
    publish(replace(ready, tag=NEXT), store, world.name, Progress(), signing=signer)


def test_a_successor_must_verify(world: World, tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    words = ("withdraw", TAG, "--to", world.name, "--key", world.key("ours"), "--reason", "wrong")
    absent = kit.primus(*words, "--successor", NEXT)
    assert (absent.code, f"has no image {NEXT}" in absent.err) == (2, True)
    mended(world, tmp_path / "theirs", "others")
    refused = kit.primus(*words, "--successor", NEXT)
    assert refused.code == 1, refused.out
    assert f"--successor {NEXT} does not verify: " in refused.err
    assert not world.verify().withdrawn
    mended(world, tmp_path / "ours")
    for tag in ("v26.11", "v26.12"):
        world.there.tag(tag, world.ready.image.manifest)
    done = kit.primus(*words, "--successor", NEXT)
    assert done.code == 0, done.err
    assert f"! v26.11 still names it: primus tag v26.11 {NEXT} --to" in done.err
    assert f"! v26.12 still names it: {NEXT} is of another release" in done.err
    assert world.verify().withdrawn.endswith(f": wrong; use {NEXT} instead")


def test_verify_says_what_is_wrong_with_the_successor(world: World, tmp_path: Path) -> None:
    withdrawing({"reason": "wrong", "date": "2026-12-01", "successor": NEXT})(world)
    use = f"withdrawn on 2026-12-01: wrong; use {NEXT} instead"
    assert (
        world.verify().withdrawn
        == f"{use}, which does not verify: {world.name} has no image {NEXT}"
    )
    mended(world, tmp_path / "ours")
    assert world.verify().withdrawn == use
    kit = Kit(tmp_path)
    again = ("withdraw", NEXT, "--to", world.name, "--key", world.key("ours"), "--reason", "worse")
    assert kit.primus(*again).code == 0
    assert re.search(
        f"{use}, which does not verify: withdrawn on .*: worse", world.verify().withdrawn
    )


EDITS: dict[str, Change] = {
    "more ranks": put("statements", -1, "predicate", "primus", "recipe", "ranks", value=4),
    "passed": put("statements", -1, "predicate", "result", value="FAILED"),
    "a statement less": put("statements", value=lambda those: those[:-1]),
    "a statement more": put("statements", value=lambda those: [*those, those[-1]][1:]),
    "another hash": put("statements", 0, "predicate", "documents", "lock.json", value="sha256:0"),
    "another document": put("statements", 1, "predicate", "name", value="x"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_was_edited_before_it_is_signed_is_refused(
    world: World, tmp_path: Path, name: str
) -> None:
    there = world.there
    store = Project(world.root / "project").workspace.store
    publish(world.ready, store, there.name, Progress(), signing=tmp_path)
    (path,) = tmp_path.glob("*/request.json")
    (request,) = requests(tmp_path)
    require_unedited(there, request)
    content = json.loads(path.read_text())
    EDITS[name](content)
    path.write_text(json.dumps(content))
    (request,) = requests(tmp_path)
    with pytest.raises(InputError, match=r"the request to sign .* was edited"):
        require_unedited(there, request)


def test_a_key_that_cannot_be_used_is_no_verdict_on_the_image(world: World) -> None:
    (world.root / "garbage.pub").write_text("no key")
    for key in ("garbage.pub", "ours.key"):
        with pytest.raises(HostError, match="cosign cannot verify signatures: loading verifier"):
            world.verify(key=key)
    for key in ("garbage.pub", "ours.pub"):
        with pytest.raises(HostError, match="cosign failed: "):
            Signer(key=str(world.root / key)).check("--key")
    with pytest.raises(InputError, match="--key: there is no file nothing"):
        Signer(key="nothing").check("--key")
    Signer(key=world.key("ours")).check("--key")


@pytest.mark.parametrize(
    ("policy", "lacking"),
    [
        (Policy(runs=("base", "another")), "no validation in this image repeated a run"),
        (Policy(found=0.995), "the suite finds 99 of 100 faults"),
        (Policy(alarms=0.001), "the suite refuses 1 of 100 healthy runs"),
    ],
)
def test_a_policy_names_what_a_release_lacks(world: World, policy: Policy, lacking: str) -> None:
    assert any("names no recipe" in reason for reason in world.verify(policy=policy).lacking)
    needs_one = put(
        "predicate", "buildDefinition", "externalParameters", "recipes", value=["llama3-proxy"]
    )
    resigned("provenance", needs_one)(world)
    assert world.verify(policy=Policy()).passed
    assert any(lacking in reason for reason in world.verify(policy=policy).lacking)


def test_signing_elsewhere_ends_with_the_tag(world: World, tmp_path: Path) -> None:
    project = Project(world.root / "project")
    there = Repository(f"{world.name}/later")
    publish(world.ready, project.workspace.store, there.name, Progress(), signing=tmp_path / "sign")
    assert there.digest(TAG) is None
    kit = Kit(tmp_path)
    nobody = kit.primus("sign", "sign")
    assert (nobody.code, "who signs?" in nobody.err) == (2, True)
    for number in (5, 5):  # the second time, nothing is attached anew
        done = kit.primus("sign", "sign", "--key", world.key("ours"))
        assert (done.code, f"{number} statements signed" in done.out) == (0, True), done.err
        assert len(there.documents(world.digest, BUNDLE)) == 5
    words = ("verify", "--image", f"{there.name}:{TAG}", "--key", str(world.root / "ours.pub"))
    assert kit.primus(*words).out.splitlines()[-1] == "verified"
    nothing = kit.primus(*words[:-1], "nothing.pub")
    assert (nothing.code, "there is no file nothing.pub" in nothing.err) == (2, True)
    wrong = kit.primus(*words[:-1], str(world.root / "others.pub"))
    assert (wrong.code, wrong.out.splitlines()[-1]) == (1, "FAILED")
