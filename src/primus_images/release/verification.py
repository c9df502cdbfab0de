"""Verifying a published image with nothing but its registry: each tampering is one sentence.

Signed statements about the image are compared with its documents, the documents with each other and
with the bytes of config and layers. Nothing of a checkout or a store is used.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import unquote

from packageurl import PackageURL

from primus_images.errors import CheckFailed, PrimusError
from primus_images.gates.contents import Stated, stated_in, states_versions
from primus_images.gates.rules.versions import versions_inside
from primus_images.gpus.detect import detect
from primus_images.oci.layer import DamagedLayer, walk
from primus_images.oci.store import canonical_json, digest_of
from primus_images.recipes.choose import CPU
from primus_images.recipes.digest import misstated
from primus_images.release.artifact import DAMAGED, WITHDRAWAL, Document, damage, is_foreign
from primus_images.release.bills import IMAGE
from primus_images.release.documents import (
    CYCLONEDX,
    GATES,
    IN_TOTO,
    LOCK,
    SPDX,
    STATEMENT,
    VALIDATION,
)
from primus_images.release.licences import Licences, unlisted
from primus_images.release.policy import Policy, evidence_in, forbidden_in, objections
from primus_images.release.reference import reference, require_tag
from primus_images.release.registry import Repository
from primus_images.release.statement import (
    BILLS,
    BUNDLE,
    PROVENANCE,
    RELEASE_TAG,
    SIGNATURE,
    TEST_RESULT,
    Trust,
    key_of,
    names_another_release,
    payload,
    statements,
    target_of,
    target_of_latest,
)
from primus_images.release.withdrawal import latest_withdrawal
from primus_images.sandbox.container import LayerRef
from primus_images.system.support import support_text
from primus_images.terminal import counted, some
from primus_images.training.judge.record import NO_GPU, Record
from primus_images.training.judge.suite import FORMAT, digest_of_suite
from primus_images.versions.lock import normalised
from primus_images.yamlfile import section


@dataclass(kw_only=True)
class Verified:
    """What was found.

    ``faults`` name tampering, ``void`` statements that hold elsewhere, ``lacking`` what the policy
    needs. ``validations`` are the signed test results. ``withdrawn`` says that the image was
    withdrawn, and why; empty if it was not. ``successor`` is the tag to use instead. ``target`` and
    ``release`` are those of its provenance.
    """

    digest: str = ""
    tag: str = ""
    target: str = ""
    release: str = ""
    withdrawn: str = ""
    successor: str = ""
    supported_until: str | None = None
    faults: list[str] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    signed: int = 0

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.faults or self.void or self.lacking or self.withdrawn)


def verify_image(
    name: str,
    trust: Trust,
    *,
    policy: Policy | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Verified:
    """Verify the image that ``name`` names, and with a ``policy``, whether it has what that needs.

    It is read where registries.conf says.

    Raises InputError for a name of nothing, HostError if the registry or cosign cannot be used.
    """
    repository, tag, digest = reference(name, "--image")
    wanted = _Wanted(Repository.to_read(repository), tag, digest)
    result, image = _verified(wanted, trust, say)
    if result.successor:
        problem = problem_of_successor(wanted.there, result.successor, trust)
        if problem:
            result.withdrawn += f", which does not verify: {problem}"
    if policy and not result.faults:
        try:
            result.lacking += _unmet(image, policy, preview=result.tag.endswith("-preview"))
        except DAMAGED as error:
            reason = damage(error)
            result.faults.append(f"what the policy asks for cannot be read: {reason}")
    return result


def verify_statements(there: Repository, word: str, trust: Trust) -> Verified:
    """Verify the image of a tag or digest as :func:`verify_image`, but read none of its layers."""
    wanted = _Wanted(there, tag=word, digest="")
    if ":" in word:
        wanted = _Wanted(there, tag="", digest=word)
    result, _ = _verified(wanted, trust, None)
    return result


def problem_of_successor(there: Repository, tag: str, trust: Trust) -> str:
    """Return why nobody should use the successor of a withdrawn image; empty if it verifies."""
    try:
        require_tag(tag, "the successor")
        successor = verify_statements(there, tag, trust)
    except PrimusError as error:
        return error.message
    if successor.faults:
        return successor.faults[0]
    return successor.withdrawn


class _Wanted(NamedTuple):
    """The image that is verified: its repository, and its tag or digest."""

    there: Repository
    tag: str
    digest: str


def _verified(
    wanted: _Wanted, trust: Trust, say: Callable[[str], None] | None
) -> tuple[Verified, "_Image"]:
    """Return what is found, and the image with its documents. Without ``say``, no layer is read."""
    there = wanted.there
    manifest = there.manifest(wanted.digest or wanted.tag)
    if manifest is None:
        raise there.lacks(wanted.digest or wanted.tag)
    result = Verified(digest=wanted.digest or digest_of(manifest))
    image = _Image(result.digest)
    if digest_of(manifest) != result.digest:
        result.faults.append(f"manifest: the registry returns other bytes for {result.digest}")
        return result, image
    documents = list(_documents(there, result))
    signatures = _Signatures.of(documents, trust, result.digest)
    _judge_signatures(documents, signatures, wanted.tag, result)
    try:
        content = json.loads(manifest)
        _read_config(there, content["config"], image, result)
        if signatures.by_key and say:
            _read_layers(there, content["layers"], image, result, say)
    except DAMAGED:
        result.faults.append("manifest: it is not that of an image")
        return result, image
    image.documents = [document for document in documents if document.media_type in _CHECKS]
    result.faults += _document_faults(image)
    result.faults += _failed_validations(result, image)
    result.void = list(_void(result.validations))
    _read_provenance(image, result)
    return result, image


def _judge_signatures(
    documents: Sequence[Document], signatures: "_Signatures", tag: str, result: Verified
) -> None:
    """Note what is wrong with the signatures, the name that they give, and a withdrawal."""
    result.signed = len(signatures.statements)
    result.faults += _signature_faults(documents, signatures, result)
    if signatures.statements:
        result.tag = _signed_tag(tag, signatures, result.faults)
        withdrawal = latest_withdrawal(signatures.predicates(WITHDRAWAL))
        if withdrawal:
            result.withdrawn = withdrawal.sentence
            result.successor = withdrawal.successor or ""


def _document_faults(image: "_Image") -> Iterator[str]:
    """Yield what is wrong with the documents, each by itself and beside the others."""
    for document in image.documents:
        check = _CHECKS[document.media_type]
        try:
            yield from check(json.loads(document.data), document, image)
        except DAMAGED as error:
            yield f"{document.name}: it is damaged: {damage(error)}"


def _read_provenance(image: "_Image", result: Verified) -> None:
    """Note target, release and support window of the image, whose name must be theirs."""
    for parameters in image.of(IN_TOTO, "predicate", "buildDefinition", "externalParameters"):
        with suppress(*DAMAGED):  # the check of the document has named what is wrong
            until = parameters.get("supported_until")
            result.target = str(parameters["target"])
            result.release = str(parameters["release"])
            result.supported_until = str(until) if until else None
            ref = f"{result.release}-{result.target}"
            if result.tag and result.tag.removesuffix("-preview") != ref:
                result.faults.append(
                    f"provenance.json: it is of {ref}, and the image was signed as {result.tag}"
                )


def _signed_tag(tag: str | None, signatures: "_Signatures", faults: list[str]) -> str:
    """Return the tag that the image was signed as. Other statements must name the same."""
    names = signatures.names(SIGNATURE)
    others = sorted(signatures.names() - names)
    if names and others:
        faults.append(
            f"signature: a statement calls the image {others[0]}, which was signed as "
            f"{', '.join(sorted(names))}"
        )
    listed = sorted(names) or others
    if tag and tag not in listed and (re.fullmatch(RELEASE_TAG, tag) or _misleads(tag, listed[0])):
        faults.append(f"tag: {tag} names the image that was signed as {', '.join(listed)}")
    return listed[0]


def _misleads(tag: str, signed: str) -> bool:
    """Whether a moving tag stands for another target or release than the image's own name."""
    if target_of_latest(tag) not in ("", target_of(signed)):
        return True
    return names_another_release(tag, signed.partition("-")[0])


@dataclass
class _Image:
    """What the bytes of an image say: its config, and layer → what its files state of packages."""

    digest: str
    config: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, list[Stated]] = field(default_factory=dict)
    documents: Sequence[Document] = ()

    def of(self, media_type: str, *keys: str) -> list[Any]:
        """Return what is under ``keys`` in the documents of a type; nothing of a damaged one.

        Its own check names what is damaged.
        """
        contents = []
        for document in self.documents:
            if document.media_type != media_type:
                continue
            with suppress(*DAMAGED):
                content = json.loads(document.data)
                for key in keys:
                    content = content[key]
                if isinstance(content, list | dict):
                    contents.append(content)
        return contents


def _read_config(
    there: Repository, entry: Mapping[str, Any], image: _Image, result: Verified
) -> None:
    with tempfile.TemporaryDirectory(prefix="primus-verify-") as folder:
        path = Path(folder) / "blob"
        if not there.blob(entry["digest"], path, entry["size"]):
            result.faults.append("config: it is missing")
        elif digest_of(path.read_bytes()) != entry["digest"]:
            result.faults.append(f"config: its bytes are not those of {entry['digest']}")
        else:
            image.config = json.loads(path.read_bytes())


def _read_layers(
    there: Repository,
    layers: Sequence[Mapping[str, Any]],
    image: _Image,
    result: Verified,
    say: Callable[[str], None],
) -> None:
    """Read what the layers state of packages, and compare all of their bytes."""
    with tempfile.TemporaryDirectory(prefix="primus-verify-") as folder:
        path = Path(folder) / "blob"
        for number, layer in enumerate(layers):
            kind, name = _created_by(image.config, number)
            if not there.blob(layer["digest"], path, layer["size"]):
                result.faults.append(f"layer {name}: it is missing")
                continue
            say(f"layer {name}: {layer['size'] / 1e6:.1f} MB")
            try:
                stated = _stated_by(_layer_ref(image.config, number, layer), path)
            except DamagedLayer as error:
                # Without a config, which is a fault of its own, the expected hash is unknown.
                if image.config:
                    result.faults.append(f"layer {name}: {error.reason}")
                continue
            # The packages of a registry's image are locked as layers, not individually.
            image.stated[name] = [i for i in stated if kind != "image" or i.kind != "deb"]


def _created_by(config: Mapping[str, Any], number: int) -> tuple[str, str]:
    """Return kind and name of the action of a layer, or its number."""
    history = config.get("history", [])
    if number >= len(history):
        return "", str(number)
    _, kind, name = history[number]["created_by"].split(maxsplit=2)
    return kind, name


def _layer_ref(config: Mapping[str, Any], number: int, layer: Mapping[str, Any]) -> LayerRef:
    diff_ids = config.get("rootfs", {}).get("diff_ids", [])
    return LayerRef(
        digest=layer["digest"],
        diff_id=diff_ids[number] if number < len(diff_ids) else "",
        size=layer["size"],
        media_type=layer["mediaType"],
    )


def _stated_by(layer: LayerRef, path: Path) -> list[Stated]:
    """Return what the files of a layer state of packages. Reads and compares all of its bytes."""
    items = []
    for member in walk(layer, path):
        if member.kind == "file" and states_versions(member.path):
            items += stated_in(member.path, member.text())
    return items


def _documents(there: Repository, result: Verified) -> Iterator[Document]:
    for descriptor in there.referrers(result.digest):
        try:
            yield there.document(descriptor)
        except CheckFailed as error:
            if not is_foreign(descriptor):
                result.faults.append(f"document: {error.message}")
        except DAMAGED:
            result.faults.append(f"document: {descriptor['digest']} is not a document's manifest")


# The types of our own statements.
_OURS = (SIGNATURE, WITHDRAWAL, PROVENANCE, TEST_RESULT, *BILLS.values())


@dataclass
class _Signatures:
    """The ``statements`` about this image whose signature counts.

    ``by_key`` says whether a signature of the key was found, about whatever image. ``rejected`` are
    reasons by the type of statement. ``broken`` are type and reason of those that name the key and
    do not count. What the key's owner states in types of others, such as a scan, is no matter here.
    """

    statements: list[dict[str, Any]] = field(default_factory=list)
    by_key: bool = False
    rejected: dict[str, str] = field(default_factory=dict)
    broken: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, documents: Sequence[Document], trust: Trust, digest: str) -> Self:
        """Judge the signatures among the documents about the image ``digest``."""
        result = cls()
        bundles = [document for document in documents if document.media_type == BUNDLE]
        with ThreadPoolExecutor(8) as pool:
            judged = list(pool.map(lambda bundle: _judged(bundle, trust), bundles))
        keys = {key_of(b.data) for b, (found, *_) in zip(bundles, judged, strict=True) if found}
        for bundle, (statement, kind, problem) in zip(bundles, judged, strict=True):
            if statement is None:
                result.rejected[kind] = problem
                if key_of(bundle.data) in keys - {""}:
                    result.broken.append((kind or "unknown", problem))
                continue
            result.by_key = True
            if kind not in _OURS:
                continue
            subjects = [_digest_in(subject["digest"]) for subject in statement["subject"]]
            if subjects == [digest]:
                result.statements.append(statement)
            else:
                names = ", ".join(subjects) or "nothing"
                result.rejected[kind] = f"it is about {names}, so it is void for this image"
        return result

    @property
    def why(self) -> str:
        """Why no signature counts."""
        return "; ".join(dict.fromkeys(self.rejected.values())) or "nothing is attached"

    @property
    def documents(self) -> set[tuple[str, str]]:
        """Name and digest of each document that a signature of the image names."""
        names = set()
        for statement in self.statements:
            if statement["predicateType"] == SIGNATURE:
                names.update(statement["predicate"]["documents"].items())
        return names

    def names(self, kind: str = "") -> set[str]:
        """Return the names that the statements, or those of one type, give to the image."""
        names = set()
        for statement in self.statements:
            if kind in ("", statement["predicateType"]):
                names.add(str(statement["subject"][0].get("name")))
        return names

    def predicates(self, kind: str) -> list[Any]:
        """Return the predicates of the signed statements of a type."""
        return [s["predicate"] for s in self.statements if s["predicateType"] == kind]


def _digest_in(digests: Mapping[str, str]) -> str:
    """Return the digest of a subject, by all algorithms that it names."""
    return ", ".join(f"{name}:{value}" for name, value in sorted(digests.items()))


def _judged(bundle: Document, trust: Trust) -> tuple[dict[str, Any] | None, str, str]:
    """Return the statement in a bundle and its type, or None and why its signature is rejected."""
    try:
        statement = payload(bundle.data)
        kind = statement["predicateType"]
        if kind in _OURS and statement["_type"] != STATEMENT:
            return None, kind, f"it is of type {str(statement['_type'])[:60]}"
        for subject in statement["subject"]:
            subject["digest"]["sha256"].encode()
        if kind == SIGNATURE:
            set(statement["predicate"]["documents"].items())
    except DAMAGED:
        return None, "", "an envelope has no in-toto statement in it"
    problem = trust.rejects(bundle.data, kind)
    return (None if problem else statement), kind, problem


def _signature_faults(
    documents: Sequence[Document], signatures: _Signatures, result: Verified
) -> Iterator[str]:
    """Yield what is wrong with the signatures. Each document of ours must have one.

    The signed validations are kept in the result.
    """
    if not signatures.statements:
        yield f"signature: no statement about this image counts: {signatures.why}"
        return
    yield from _unnamed(documents, signatures)
    for kind, reason in signatures.broken:
        yield f"signature: a statement of type {kind} names the key and does not count: {reason}"
    said: dict[str, list[Any]] = {}
    for document in documents:
        try:
            needed = statements([document], "", result.digest)[1:]
        except DAMAGED:
            continue
        for statement in needed:
            kind = statement["predicateType"]
            said.setdefault(kind, []).append(statement["predicate"])
            signed = signatures.predicates(kind)
            if statement["predicate"] in signed:
                if kind == TEST_RESULT:
                    result.validations.append(statement["predicate"])
                continue
            reason = ""
            if kind in signatures.rejected:
                reason = f": {signatures.rejected[kind]}"
            elif signed:
                reason = ", a signed one differs"
            yield f"{document.name}: no signed statement says the same{reason}"
    yield from _undocumented(signatures, said)


def _undocumented(signatures: _Signatures, said: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield the signed statements that no document says: words that nothing else is compared with.

    Statements of other types than ours are not judged.
    """
    for kind in (PROVENANCE, TEST_RESULT, *BILLS.values()):
        for predicate in signatures.predicates(kind):
            if predicate in said.get(kind, ()):
                continue
            what = f"a statement of type {kind}"
            if kind == TEST_RESULT:
                with suppress(*DAMAGED):
                    name = predicate["primus"]["recipe"]["name"]
                    what = f"a validation of {name} that says {predicate['result']}"
            yield f"signature: {what} is signed, and no document says the same"


def _failed_validations(result: Verified, image: _Image) -> Iterator[str]:
    """Yield the signed validations that failed.

    In that of a preview, gates may have failed that its findings say to fail.
    """
    failing = set()
    if result.tag.endswith("-preview"):
        for gates in image.of(GATES, "gates"):
            for gate in gates:
                with suppress(*DAMAGED):
                    if not gate["passed"]:
                        failing.add(f"gate {gate['gate']}")
    for validation in result.validations:
        failed = set(validation["failedTests"])
        if validation["result"] == "PASSED" or (failed and failed <= failing):
            continue
        recipe = validation["primus"]["recipe"]
        names = some(sorted(failed), 3) or "it has no check"
        yield (
            f"the validation of {recipe['name']} ({recipe['precision']}) says "
            f"{validation['result']}: {names}"
        )


def _unnamed(documents: Sequence[Document], signatures: _Signatures) -> Iterator[str]:
    """Yield how the documents differ from those that the image's signature names."""
    named = signatures.documents
    if not named:
        reason = signatures.rejected.get(SIGNATURE, signatures.why)
        yield f"signature: the image itself is not signed: {reason}"
        return
    ours = {(d.name, digest_of(d.data)) for d in documents if d.media_type in _CHECKS}
    for name, _ in sorted(named - ours):
        yield f"{name}: it is missing, but signed"
    for name, _ in sorted(ours - named):
        if name in dict(named):
            yield f"{name}: it was changed, other bytes are signed"
        else:
            yield f"{name}: the signature does not name it"


def _provenance(content: Any, document: Document, image: _Image) -> Iterator[str]:
    definition = content["predicate"]["buildDefinition"]
    details = content["predicate"]["runDetails"]
    parameters = definition["externalParameters"]
    _require_text(parameters["target"], parameters["release"])
    until = parameters.get("supported_until")
    if until is not None:
        date.fromisoformat(until)
    if content["subject"][0]["digest"]["sha256"] != image.digest.removeprefix("sha256:"):
        yield f"{document.name}: it is about another image"
    yield from _other_actions(definition["internalParameters"]["layers"], document, image)
    hashes = {(d.name, digest_of(d.data)) for d in image.documents}
    for product in details["byproducts"]:
        if (product["name"], f"sha256:{product['digest']['sha256']}") not in hashes:
            yield f"{product['name']}: it is missing or differs from what {document.name} names"
    needed = set()
    for dependency in definition["resolvedDependencies"]:
        if "sha256" in dependency["digest"]:
            needed.add(dependency["digest"]["sha256"])
    for files in image.of(LOCK, "files"):
        if needed != {file["sha256"] for file in files}:
            yield f"{document.name}: its dependencies are not the files of lock.json"


def _require_text(*values: Any) -> None:
    """Raise TypeError for what is no text."""
    for value in values:
        if not isinstance(value, str):
            raise TypeError


def _other_actions(keys: Mapping[str, str], document: Document, image: _Image) -> Iterator[str]:
    """Yield the layers that other actions built than the provenance says."""
    built = {}
    for number, entry in enumerate(image.config.get("history", ())):
        _, name = _created_by(image.config, number)
        built[name] = entry["comment"]
    if not built:
        return
    for name in sorted(keys.keys() | built.keys()):
        if keys.get(name) != built.get(name):
            other = f"action {keys.get(name)} built it, in the image {built.get(name)}"
            yield f"{document.name}: layer {name}: {other}"


def _bill(content: Any, document: Document, image: _Image) -> Iterator[str]:
    whole, *packages = content["packages"]
    if whole["checksums"][0]["checksumValue"] != image.digest.removeprefix("sha256:"):
        yield f"{document.name}: it is about another image"
    yield from _other_files(packages, document, image)
    wheels, debs = _packages_inside(content["relationships"], packages, image)
    if image.stated:
        report = versions_inside(image.stated.items(), wheels=wheels, debs=debs)
        for error in report.errors:
            yield f"{document.name}: {error.message.replace('the lock', document.name)}"
    yield from _other_licences(packages, document, image)


def _other_licences(packages: Sequence[Any], document: Document, image: _Image) -> Iterator[str]:
    """Yield the wheels whose own metadata clearly declare another licence than the bill."""
    declared = {}
    for package in packages:
        if _purl(package).startswith("pkg:pypi/"):
            declared[normalised(package["name"])] = package["licenseDeclared"]
    for items in image.stated.values():
        for item in items:
            if item.kind != "wheel":
                continue
            licence = Licences().of_wheel(item.licence)
            name = normalised(item.name)
            if not unlisted(licence) and declared.get(name, licence) != licence:
                other = f"{licence} in the image, {declared[name]} in {document.name}"
                yield f"{document.name}: the licence of {name} is {other}"


def _other_files(packages: Sequence[Any], document: Document, image: _Image) -> Iterator[str]:
    """Yield the files that only the bill or only the lock names."""
    files = set()
    for package in packages:
        if "checksums" in package:
            sha256 = package["checksums"][0]["checksumValue"]
            files.add((package["name"], package["versionInfo"], sha256))
    for rows in image.of(LOCK, "files"):
        locked = {(file["name"], file["version"], file["sha256"]) for file in rows}
        for file in sorted(files ^ locked):
            name, version, sha256 = file
            only = "lock.json" if file in locked else document.name
            yield f"{document.name}: only {only} has {name} {version} with sha256 {sha256[:12]}"


def _packages_inside(
    relations: Sequence[Any], packages: Sequence[Any], image: _Image
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the versions of the wheels and Debian packages that a bill says are in the image."""
    inside = set()
    for relation in relations:
        kind = relation["relationshipType"]
        if kind in ("CONTAINS", "GENERATED_FROM") and relation["spdxElementId"] == IMAGE:
            inside.add(relation["relatedSpdxElement"])
    wheels: dict[str, str] = {}
    debs: dict[str, str] = {}
    for package in packages:
        kind = _purl(package).partition("/")[0]
        if package["SPDXID"] in inside and kind == "pkg:deb":
            debs[package["name"]] = package["versionInfo"]
        elif package["SPDXID"] in inside and kind in ("pkg:pypi", "pkg:generic"):
            wheels[package["name"]] = package["versionInfo"]
        elif package["SPDXID"] == "SPDXRef-local-primus":
            # The provenance has the version of primus itself.
            for versions in image.of(IN_TOTO, "predicate", "runDetails", "builder", "version"):
                wheels |= versions
    return wheels, debs


def _purl(package: Mapping[str, Any]) -> str:
    """Return the package URL of a package of a bill; empty for what has none."""
    if "externalRefs" not in package:
        return ""
    return str(package["externalRefs"][0]["referenceLocator"])


def _components(content: Any, document: Document, image: _Image) -> Iterator[str]:
    purls = set()
    for packages in image.of(SPDX, "packages"):
        purls |= {_purl(package) for package in packages}
    purls.discard("")
    components = {entry["purl"] for entry in content["components"] if "purl" in entry}
    if purls and purls != components:
        other = min(purls ^ components)
        yield f"{document.name}: it differs from sbom.spdx.json in {unquote(other)}"
    for entry in content["components"]:
        if "purl" in entry and PackageURL.from_string(entry["purl"]).version != entry["version"]:
            version = entry["version"]
            yield f"{document.name}: {unquote(entry['purl'])} has the version {version} there"
    whole = content["metadata"]["component"]["hashes"][0]["content"]
    if whole != image.digest.removeprefix("sha256:"):
        yield f"{document.name}: it is about another image"


def _gates(content: Any, document: Document, image: _Image) -> Iterator[str]:
    if content["digest"] != image.digest:
        yield f"{document.name}: it is about another image"
    verdicts = {gate["gate"]: gate["passed"] for gate in content["gates"]}
    for gates in image.of(VALIDATION, "gates", "gates"):
        for gate in gates:
            if verdicts.get(gate["gate"]) != gate["passed"]:
                yield f"{document.name}: a validation has another verdict of gate {gate['gate']}"
    if not verdicts:
        yield f"{document.name}: it has no gate"
    for gate in content["gates"]:
        has_errors = any(finding["severity"] == "error" for finding in gate["findings"])
        if gate["passed"] == has_errors:
            verdict = "passed" if gate["passed"] else "failed"
            yield f"{document.name}: gate {gate['gate']} is said to have {verdict}"


def _record(content: Any, document: Document, image: _Image) -> Iterator[str]:
    record = Record.of(content)
    if image.config and record.image.content != digest_of(canonical_json(image.config)):
        yield f"{document.name}: it is about another image"
    all_ran = all(job.ran for job in record.jobs)
    if record.passed != (bool(record.verdicts) and not record.failed and all_ran):
        yield f"{document.name}: its verdict is not that of its checks"
    fault = misstated(content["recipe"])
    if fault:
        yield f"{document.name}: {fault}"
    trained_for = NO_GPU if record.recipe.gpu == CPU else record.recipe.gpu
    if record.gpu != trained_for:
        yield f"{document.name}: it ran on {record.gpu}, and its recipe is for {record.recipe.gpu}"
    limits = section(record.recipe.settings, "validation")
    names = [job.name for job in record.jobs]
    if record.suite.sha256 != digest_of_suite(record.suite.format, names, limits):
        sha256 = record.suite.sha256[:12]
        yield f"{document.name}: its runs and limits are not those of suite {sha256}"


def _unmet(image: _Image, policy: Policy, *, preview: bool) -> list[str]:
    """Return what the image lacks of what a policy needs, and what it has of what that refuses."""
    evidence = evidence_in(image.documents)
    lacking = objections(evidence, policy, preview=preview)
    return [*lacking, *forbidden_in(image.documents, policy)]


def _lock(content: Any, document: Document, image: _Image) -> Iterator[str]:
    """The signature, the provenance and the bill of materials name its files."""
    for file in content["files"]:
        _require_text(file["name"], file["version"], file["sha256"])
    for parameters in image.of(IN_TOTO, "predicate", "buildDefinition", "externalParameters"):
        for key in ("target", "channel"):
            if content[key] != parameters[key]:
                yield f"{document.name}: its {key} is {content[key]}, not {parameters[key]}"


_CHECKS: Mapping[str, Callable[[Any, Document, _Image], Iterator[str]]] = {
    IN_TOTO: _provenance,
    SPDX: _bill,
    CYCLONEDX: _components,
    GATES: _gates,
    VALIDATION: _record,
    LOCK: _lock,
}


def _void(validations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why signed test results do not hold for this suite or for this machine's GPUs."""
    machine = detect()
    here = {"driver": machine.driver, "firmware": machine.firmware}
    for result in validations:
        about = result["primus"]
        hardware = about["hardware"]
        name = f"the validation of {about['recipe']['name']} ({about['recipe']['precision']})"
        number = about["suite"]["format"]
        if number != FORMAT:
            yield f"{name} is void: it is of suite {number}, and this primus has suite {FORMAT}"
        for part, version in here.items():
            if hardware["gpu"] == machine.generation and hardware.get(part) != version:
                before = hardware.get(part) or "unknown"
                yield f"{name} is void here: it had {part} {before}, this machine has {version}"


def verified_text(reference: str, result: Verified) -> str:
    """Return the result as lines: each fault, and what the signed validations say."""
    lines = [f"{reference} {result.digest}"]
    if result.withdrawn:
        lines.insert(0, f"✗ {result.withdrawn}")
    if result.release:
        # A tag such as latest-cpu does not tell, and can be moved back to an older release.
        lines.append(f"  release {result.release}, target {result.target}")
    support = support_text(result.supported_until, date.today())
    if support:
        lines.append(f"  {support}")
    lines.append(f"  signed: {counted(result.signed, 'statement')}")
    lines += [f"  {_validation_line(validation)}" for validation in result.validations]
    for fault in (*result.faults, *result.void, *result.lacking):
        lines.append(f"  ✗ {fault}")
    lines.append("verified" if result.passed else "FAILED")
    return "\n".join(lines)


def _validation_line(validation: Mapping[str, Any]) -> str:
    about = validation["primus"]
    recipe = about["recipe"]
    hardware = about["hardware"]
    words = " ".join((recipe["name"], recipe["backend"], recipe["mode"], recipe["precision"]))
    machine = [hardware["gpu"], hardware.get("driver"), hardware.get("firmware")]
    where = " ".join(filter(None, machine)).replace(NO_GPU, "the CPU")
    passed = len(validation["passedTests"])
    failed = len(validation["failedTests"])
    line = f"{validation['result'].lower()}: {words} on {where}: "
    line += f"{passed} checks passed, {failed} failed"
    rates = about["suite"].get("rates")
    if rates:
        line += f"; its suite names {rates['named']} of {rates['faults']} faults"
    return line
