"""Verifying a published image with nothing but its registry: each tampering is named in one
sentence.

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
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from primus_images.errors import CheckFailed, HostError
from primus_images.gates.contents import Stated, stated_in, states_versions
from primus_images.gates.rules.versions import versions_inside
from primus_images.gpus.detect import detect
from primus_images.oci.layer import walk
from primus_images.oci.store import canonical_json, digest_of
from primus_images.recipes.recipe import misstated
from primus_images.release.artifact import Document
from primus_images.release.documents import CYCLONEDX, GATES, IN_TOTO, LOCK, SPDX, VALIDATION
from primus_images.release.policy import Policy, evidence_in, forbidden_in, objections
from primus_images.release.registry import Repository, reference
from primus_images.release.statement import (
    BUNDLE,
    RELEASE_TAG,
    SIGNATURE,
    TEST_RESULT,
    Trust,
    payload,
    statements,
)
from primus_images.sandbox.container import LayerRef
from primus_images.terminal import counted
from primus_images.training.judge.suite import FORMAT, digest_of_suite

# What is in a damaged document can be anything.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


@dataclass(kw_only=True)
class Verified:
    """What was found: ``faults`` name tampering, ``void`` statements that hold elsewhere,
    ``lacking`` what the policy needs. ``validations`` are the signed test results.
    """

    digest: str = ""
    tag: str = ""
    faults: list[str] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    signed: int = 0

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.faults or self.void or self.lacking)


def verify_image(
    name: str,
    trust: Trust,
    *,
    policy: Policy | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Verified:
    """Verify the image that ``name`` names, and with a ``policy``, whether it has what that needs.

    Raises InputError for a name of nothing, HostError if the registry or cosign cannot be used.
    """
    repository, tag, digest = reference(name, "--image")
    there = Repository(repository)
    result = Verified()
    manifest = there.manifest(digest or tag)
    if manifest is None:
        raise there.lacks(digest or tag)
    result.digest = digest or digest_of(manifest)
    if digest_of(manifest) != result.digest:
        result.faults.append(f"manifest: the registry returns other bytes for {result.digest}")
        return result
    documents = list(_documents(there, result))
    signed = _signed(documents, trust, result)
    if signed:
        names = {str(s["subject"][0].get("name")) for s in signed}
        result.tag = min(names)
        if tag and tag not in names and re.fullmatch(RELEASE_TAG, tag):
            result.faults.append(
                f"tag: {tag} names the image that was signed as {', '.join(sorted(names))}"
            )
    try:
        content = json.loads(manifest)
        if signed is None:
            layers = ()
        else:
            layers = content["layers"]
        config, stated = _contents(there, content["config"], layers, result.faults, say)
    except _DAMAGED:
        result.faults.append("manifest: it is not that of an image")
        return result
    ours = [document for document in documents if document.media_type in _CHECKS]
    image = _Seen(result.digest, config, stated, ours)
    for document in ours:
        try:
            result.faults += _CHECKS[document.media_type](
                json.loads(document.data), document, image
            )
        except _DAMAGED as error:
            result.faults.append(
                f"{document.name}: it is damaged ({type(error).__name__}: {error})"
            )
    result.void = list(_void(result.validations))
    if policy and not result.faults:
        preview = result.tag.endswith("-preview")
        result.lacking = [
            *objections(evidence_in(ours), policy, preview=preview),
            *forbidden_in(ours, policy),
        ]
    return result


def _contents(
    there: Repository,
    about: Mapping[str, Any],
    layers: Sequence[Any],
    faults: list[str],
    say: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, list[Stated]]]:
    """Read config and layers. Returns the config, and layer → what its files state of packages."""
    config: dict[str, Any] = {}
    stated: dict[str, list[Stated]] = {}
    with tempfile.TemporaryDirectory(prefix="primus-verify-") as folder:
        path = Path(folder) / "blob"
        digest = about["digest"]
        if not there.blob(digest, path, about["size"]):
            faults.append("config: it is missing")
        elif digest_of(path.read_bytes()) != digest:
            faults.append(f"config: its bytes are not those of {digest}")
        else:
            config = json.loads(path.read_bytes())
        history = config.get("history", [])
        diff_ids = config.get("rootfs", {}).get("diff_ids", [])
        for number, layer in enumerate(layers):
            if number < len(history):
                words = history[number]["created_by"].split(maxsplit=2)
            else:
                words = ["", "", str(number)]
            name = words[2]
            kind = words[1]
            if not there.blob(layer["digest"], path, layer["size"]):
                faults.append(f"layer {name}: it is missing")
                continue
            ref = LayerRef(
                digest=layer["digest"],
                diff_id=diff_ids[number] if number < len(diff_ids) else "",
                size=layer["size"],
                media_type=layer["mediaType"],
            )
            say(f"layer {name}: {layer['size'] / 1e6:.1f} MB")
            try:
                files = (m for m in walk(ref, path) if m.kind == "file" and states_versions(m.path))
                items = [i for m in files for i in stated_in(m.path, m.text())]
                # The packages of a registry's image are locked as layers, not individually.
                stated[name] = [item for item in items if kind != "image" or item.kind != "deb"]
            except HostError as error:
                if config:
                    faults.append(
                        f"layer {name}: {error.message.partition(': ')[2].partition(' (/')[0]}"
                    )
    return config, stated


def _documents(there: Repository, result: Verified) -> Iterator[Document]:
    for descriptor in there.referrers(result.digest):
        try:
            yield there.document(descriptor)
        except CheckFailed as error:
            result.faults.append(f"document: {error.message}")
        except _DAMAGED:
            result.faults.append(f"document: {descriptor['digest']} is not a document's manifest")


def _signed(
    documents: Sequence[Document], trust: Trust, result: Verified
) -> list[dict[str, Any]] | None:
    """Return the statements about this image whose signature counts, or None if no signature does.
    Each document of ours must have one.
    """
    rejected = dict[str, str]()
    trusted = list[str]()

    def accepted(bundle: Document) -> dict[str, Any] | None:
        try:
            statement = payload(bundle.data)
            kind = statement["predicateType"]
            about = [subject["digest"]["sha256"] for subject in statement["subject"]]
            _ = ()
            if kind == SIGNATURE:
                _ = {*statement["predicate"]["documents"].items()}
        except _DAMAGED:
            rejected[""] = "an envelope has no in-toto statement in it"
            return None
        problem = trust.rejects(bundle.data, kind)
        if problem:
            rejected[kind] = problem
            return None
        trusted.append(kind)
        if about == [result.digest.removeprefix("sha256:")]:
            return statement
        names = ", ".join(f"sha256:{digest}" for digest in about) or "nothing"
        rejected[kind] = f"it is about {names}, so it is void for this image"
        return None

    with ThreadPoolExecutor(8) as pool:
        checked = pool.map(
            accepted, [document for document in documents if document.media_type == BUNDLE]
        )
        signed = [statement for statement in checked if statement is not None]
    result.signed = len(signed)
    why = "; ".join(dict.fromkeys(rejected.values())) or "nothing is attached"
    if not signed:
        result.faults.append(f"signature: no statement about this image counts: {why}")
        if trusted:
            return []
        return None
    there = [(statement["predicateType"], statement["predicate"]) for statement in signed]
    named = {
        pair
        for kind, content in there
        if kind == SIGNATURE
        for pair in content["documents"].items()
    }
    if not named:
        result.faults.append(
            f"signature: the image itself is not signed: {rejected.get(SIGNATURE, why)}"
        )
    ours = {(d.name, digest_of(d.data)) for d in documents if d.media_type in _CHECKS}
    result.faults += [f"{name}: it is missing, but signed" for name, _ in sorted(named - ours)]
    for name, _ in sorted(ours - named) if named else ():
        other = "the signature does not name it"
        if name in dict(named):
            other = "it was changed, other bytes are signed"
        result.faults.append(f"{name}: {other}")
    for document in documents:
        try:
            needed = statements([document], "", result.digest)[1:]
        except _DAMAGED:
            continue
        for kind, predicate in ((n["predicateType"], n["predicate"]) for n in needed):
            if (kind, predicate) not in there:
                differs = [other for of, other in there if of == kind]
                reason = ""
                if kind in rejected:
                    reason = f": {rejected[kind]}"
                reason = reason or (", a signed one differs" if differs else "")
                result.faults.append(f"{document.name}: no signed statement says the same{reason}")
            elif kind == TEST_RESULT:
                result.validations.append(predicate)
    return signed


class _Seen(NamedTuple):
    digest: str
    config: Mapping[str, Any]
    stated: Mapping[str, Sequence[Stated]]
    documents: Sequence[Document]

    def of(self, media_type: str) -> list[Any]:
        """Return the contents of the documents of a type that can be read."""
        contents = []
        for document in self.documents:
            with suppress(*_DAMAGED):
                contents += [json.loads(document.data)] if document.media_type == media_type else []
        return contents


def _provenance(content: Any, document: Document, image: _Seen) -> Iterator[str]:
    definition = content["predicate"]["buildDefinition"]
    details = content["predicate"]["runDetails"]
    if content["subject"][0]["digest"]["sha256"] != image.digest.removeprefix("sha256:"):
        yield f"{document.name}: it is about another image"
    keys = definition["internalParameters"]["layers"]
    built = {
        entry["created_by"].split(maxsplit=2)[2]: entry["comment"]
        for entry in image.config.get("history", ())
    }
    for name in sorted(keys.keys() | built.keys()) if built else ():
        if keys.get(name) != built.get(name):
            other = f"action {keys.get(name)} built it, in the image {built.get(name)}"
            yield f"{document.name}: layer {name}: {other}"
    hashes = {(d.name, digest_of(d.data)) for d in image.documents}
    for product in details["byproducts"]:
        if (product["name"], f"sha256:{product['digest']['sha256']}") not in hashes:
            yield f"{product['name']}: it is missing or differs from what {document.name} names"
    needed = {
        d["digest"]["sha256"] for d in definition["resolvedDependencies"] if "sha256" in d["digest"]
    }
    for lock in image.of(LOCK):
        if needed != {file["sha256"] for file in lock["files"]}:
            yield f"{document.name}: its dependencies are not the files of lock.json"


def _bill(content: Any, document: Document, image: _Seen) -> Iterator[str]:
    whole, *packages = content["packages"]
    if whole["checksums"][0]["checksumValue"] != image.digest.removeprefix("sha256:"):
        yield f"{document.name}: it is about another image"
    files = {
        (p["name"], p["versionInfo"], p["checksums"][0]["checksumValue"])
        for p in packages
        if "checksums" in p
    }
    for lock in image.of(LOCK):
        locked = {(file["name"], file["version"], file["sha256"]) for file in lock["files"]}
        for name, version, sha256 in sorted(files ^ locked):
            if (name, version, sha256) in locked:
                only = "lock.json"
            else:
                only = document.name
            yield f"{document.name}: only {only} has {name} {version} with sha256 {sha256[:12]}"
    inside = {
        r["relatedSpdxElement"]
        for r in content["relationships"]
        if r["relationshipType"] != "BUILD_TOOL_OF"
    }
    wheels = dict[str, str]()
    debs = dict[str, str]()
    for package in packages:
        kind = ""
        if "externalRefs" in package:
            kind = package["externalRefs"][0]["referenceLocator"].partition("/")[0]
        if package["SPDXID"] in inside and kind in ("pkg:deb", "pkg:pypi", "pkg:generic"):
            (debs if kind == "pkg:deb" else wheels)[package["name"]] = package["versionInfo"]
        elif package["SPDXID"] == "SPDXRef-local-primus":
            builders = [
                p["predicate"]["runDetails"]["builder"]["version"] for p in image.of(IN_TOTO)
            ]
            wheels |= {name: version for builder in builders for name, version in builder.items()}
    if image.stated:
        report = versions_inside(image.stated.items(), wheels=wheels, debs=debs)
        yield from (
            f"{document.name}: {e.message.replace('the lock', document.name)}"
            for e in report.errors
        )


def _components(content: Any, document: Document, image: _Seen) -> Iterator[str]:
    packages = [
        package
        for spdx in image.of(SPDX)
        for package in spdx["packages"]
        if "externalRefs" in package
    ]
    purls = {package["externalRefs"][0]["referenceLocator"] for package in packages}
    if purls and (
        other := sorted(purls ^ {c["purl"] for c in content["components"] if "purl" in c})
    ):
        yield f"{document.name}: it differs from sbom.spdx.json in {unquote(other[0])}"


def _gates(content: Any, document: Document, image: _Seen) -> Iterator[str]:
    if content["digest"] != image.digest:
        yield f"{document.name}: it is about another image"
    for gate in content["gates"]:
        if gate["passed"] == any(finding["severity"] == "error" for finding in gate["findings"]):
            yield (
                f"{document.name}: gate {gate['gate']} is said to have "
                f"{'passed' if gate['passed'] else 'failed'}"
            )


def _record(content: Any, document: Document, image: _Seen) -> Iterator[str]:
    recipe = content["recipe"]
    verdicts = content["verdicts"]
    jobs = content["jobs"]
    if image.config and content["image"]["content"] != digest_of(canonical_json(image.config)):
        yield f"{document.name}: it is about another image"
    if content["passed"] != (
        bool(verdicts) and all(v["passed"] for v in verdicts) and all(j["ran"] for j in jobs)
    ):
        yield f"{document.name}: its verdict is not that of its checks"
    fault = misstated(recipe)
    if fault:
        yield f"{document.name}: {fault}"
    names = [job["name"] for job in jobs]
    settings = recipe["settings"]
    checks = {
        key.partition(".")[2]: settings[key] for key in settings if key.startswith("validation.")
    }
    if content["suite"]["sha256"] != digest_of_suite(content["suite"]["format"], names, checks):
        yield (
            f"{document.name}: its runs and limits are not those of suite "
            f"{content['suite']['sha256'][:12]}"
        )


_CHECKS: Mapping[str, Callable[[Any, Document, _Seen], Iterator[str]]] = {
    IN_TOTO: _provenance,
    SPDX: _bill,
    CYCLONEDX: _components,
    GATES: _gates,
    VALIDATION: _record,
    LOCK: lambda *_: iter(
        ()
    ),  # the signature, the provenance and the bill of materials name its files
}


def _void(validations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why signed test results do not hold for this installation's suite or for this machine's
    GPUs.
    """
    machine = detect()
    here = {"driver": machine.driver, "firmware": machine.firmware}
    for result in validations:
        about = result["primus"]
        hardware = result["primus"]["hardware"]
        of = f"the validation of {about['recipe']['name']} ({about['recipe']['precision']})"
        if about["suite"]["format"] != FORMAT:
            yield (
                f"{of} is void: it is of suite {about['suite']['format']}, and this primus "
                f"has suite {FORMAT}"
            )
        for part, there in here.items():
            if hardware["gpu"] == machine.generation and hardware.get(part) != there:
                yield (
                    f"{of} is void here: it had {part} {hardware.get(part) or 'unknown'}, "
                    f"this machine has {there}"
                )


def verified_text(reference: str, result: Verified) -> str:
    """Return the result as lines: each fault, and what the signed validations say."""
    lines = [f"{reference} {result.digest}", f"  signed: {counted(result.signed, 'statement')}"]
    for validation in result.validations:
        about = validation["primus"]
        recipe = about["recipe"]
        hardware = about["hardware"]
        rates = about["suite"].get("rates")
        where = " ".join(
            filter(None, (hardware["gpu"], hardware.get("driver"), hardware.get("firmware")))
        )
        words = " ".join((recipe["name"], recipe["backend"], recipe["mode"], recipe["precision"]))
        tests = (
            f"{len(validation['passedTests'])} checks passed, "
            f"{len(validation['failedTests'])} failed"
        )
        measured = ""
        if rates:
            measured = f"; its suite names {rates['named']} of {rates['faults']} faults"
        lines.append(
            f"  {validation['result'].lower()}: {words} on {where.replace('none', 'the CPU')}: "
            f"{tests}{measured}"
        )
    lines += [f"  ✗ {fault}" for fault in (*result.faults, *result.void, *result.lacking)]
    return "\n".join([*lines, "verified" if result.passed else "FAILED"])
