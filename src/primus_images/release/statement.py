"""Statements about an image that anybody can check: in-toto statements in signed envelopes,
attached to the image.

Every document about an image becomes a statement whose subject is the image. cosign signs each one
as a Sigstore bundle, so that ``cosign verify-attestation`` and ``primus verify --image`` accept it.
A statement depends on its document alone, so a verifier makes it again from the document and
compares. docs/statements.md has the format.
"""

import json
import re
import shutil
import tempfile
from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from primus_images.errors import HostError, InputError
from primus_images.files import write_file
from primus_images.oci.store import MANIFEST_TYPE, canonical_json, digest_of
from primus_images.programs import captured
from primus_images.release.artifact import DAMAGED, Document, damage
from primus_images.release.documents import CYCLONEDX, IN_TOTO, SPDX, VALIDATION, statement
from primus_images.release.reference import reference
from primus_images.release.registry import Repository
from primus_images.schema import read_json
from primus_images.training.judge.record import Record

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
SIGNATURE = "https://sigstore.dev/cosign/sign/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
BILLS = {SPDX: "https://spdx.dev/Document", CYCLONEDX: "https://cyclonedx.org/bom"}
# The release in the name of a tag, such as stable-v26.12.
_RELEASE_IN_TAG = re.compile(r"(?:^|[-_.])v([0-9]+(?:[.][0-9]+)+)", re.I)
# All other tags, such as latest-cpu, may move.
RELEASE_TAG = r"v[0-9]+[.][0-9.]+-.*"
_REQUEST = "request.json"
# The facts of a run that prove its precision.
_PRECISION = ("matmul_dtypes", "matmul_flops", "gpu_kernels")
_KEYLESS = "without --key, cosign needs the servers of Sigstore"
# How cosign's errors begin that are about the key or the trusted root, not about the signature.
_UNJUDGED = ("loading verifier from key opts", "setting trusted material")
_COSIGN = "install cosign 3 or newer (Debian: package cosign of forky or sid)"


def target_of(name: str) -> str:
    """Return the target in the name of a release or of a tag; empty without one.

    A preview is of the target that it is a preview for.
    """
    return name.removesuffix("-preview").partition("-")[2]


def target_of_latest(tag: str) -> str:
    """Return the target for which a tag such as latest-cpu stands; empty for other tags."""
    return target_of(tag) if tag.lower().startswith("latest-") else ""


def names_another_release(tag: str, release: str) -> bool:
    """Whether a tag has the name of a release, and neither of ``release`` nor the short one."""
    if re.fullmatch("v?[0-9.]+", tag, re.I):
        named = tag.strip("vV.")
    else:
        part = _RELEASE_IN_TAG.search(tag)
        named = part[1] if part else ""
    ours = release.removeprefix("v")
    return named not in ("", ours) and not ours.startswith(f"{named}.")


def statements(documents: Sequence[Document], tag: str, digest: str) -> list[dict[str, Any]]:
    """Return the statements about the image ``digest``, whose name is ``tag``.

    They are its signature, which names all ``documents`` by their hashes, then one for each bill of
    materials, provenance and validation.
    """
    hashes = {document.name: digest_of(document.data) for document in documents}
    result = [statement(tag, digest, SIGNATURE, {"documents": hashes})]
    for document in documents:
        content = json.loads(document.data)
        if document.media_type in BILLS:
            result.append(statement(tag, digest, BILLS[document.media_type], content))
        elif document.media_type == IN_TOTO:
            result.append(statement(tag, digest, PROVENANCE, content["predicate"]))
        elif document.media_type == VALIDATION:
            predicate = test_result(Record.of(content), document.data)
            result.append(statement(tag, digest, TEST_RESULT, predicate))
    return result


def test_result(record: Record, data: bytes) -> dict[str, Any]:
    """Return in-toto's test-result for a validation record, with the extension ``primus``.

    ``data`` is its file. See https://in-toto.io/attestation/test-result/v0.1.
    """
    verdicts = [verdict for verdict in record.verdicts if not verdict.skipped]
    content = record.as_json()
    recipe = content["recipe"]
    recipe.pop("settings")
    recipe.pop("description")
    extension = {
        "image": content["image"],
        "made": record.made,
        "recipe": recipe,
        "suite": content["suite"],
        "hardware": {"gpu": record.gpu, **content["machine"]},
        "precision": {key: record.facts.get(key) for key in _PRECISION},
        "seeds": [record.facts.get("seed")],
        "runs": list(record.ran),
        "not_run": list(record.not_run),
    }
    if record.wrap:
        extension["wrap"] = record.wrap
    sha256 = digest_of(data).removeprefix("sha256:")
    return {
        "result": "PASSED" if record.passed else "FAILED",
        "configuration": [
            {"name": f"recipe {record.recipe.name}", "digest": {"sha256": record.recipe.sha256}},
            {"name": "suite", "digest": {"sha256": record.suite.sha256}},
            {"name": "record", "digest": {"sha256": sha256}},
        ],
        "passedTests": [verdict.name for verdict in verdicts if verdict.passed],
        "failedTests": [verdict.name for verdict in verdicts if not verdict.passed],
        "primus": extension,
    }


class Signer(NamedTuple):
    """Who signs: the owner of ``key`` (a file or the address of a key service).

    Without a key, it is an identity that cosign asks its provider for (keyless); the signature is
    entered in the public transparency log.
    """

    key: str | None

    def bundle(self, content: Mapping[str, Any]) -> bytes:
        """Return the signed envelope of a statement. Raises HostError.

        The password of the key comes from COSIGN_PASSWORD. A key's signature is entered in no log.
        """
        with tempfile.TemporaryDirectory(prefix="primus-sign-") as name:
            file = Path(name) / "statement.json"
            bundle = Path(name) / "bundle.json"
            file.write_bytes(canonical_json(content))
            words = ["--yes", "--statement", str(file), "--bundle", str(bundle)]
            if self.key:
                words += ["--key", self.key, "--use-signing-config=false", "--tlog-upload=false"]
            self._accept(cosign("attest-blob", *words))
            return bundle.read_bytes()

    def check(self, option: str) -> None:
        """Raise InputError if the key is a file that does not exist.

        Raises HostError if cosign cannot sign with it.
        """
        check_key(self.key, option, "cosign.key")
        if self.key:
            self._accept(cosign("public-key", "--key", self.key))

    def own_trust(self, folder: Path) -> "Trust | None":
        """Return the trust in this key alone, whose public part is written to ``folder``.

        None without a key: who the signing identity is, only its provider knows.
        """
        if not self.key:
            return None
        path = folder / "cosign.pub"
        self._accept(cosign("public-key", "--key", self.key, "--outfile", str(path)))
        return Trust(key=str(path))

    def _accept(self, problem: str) -> None:
        if not problem:
            return
        hint = f"{_KEYLESS}; --sign-later signs elsewhere"
        if "unknown flag" in problem:
            hint = _COSIGN
        elif self.key:
            hint = "check the key, and COSIGN_PASSWORD, its password"
        raise HostError(f"cosign failed: {problem}", hint=hint)


class Trust(NamedTuple):
    """Whose signatures count: a ``key``'s, or an ``identity``'s that ``issuer`` confirms."""

    key: str | None = None
    identity: str | None = None
    issuer: str | None = None

    def rejects(self, bundle: bytes, kind: str) -> str:
        """Return why cosign rejects the signature; empty if it accepts it.

        Raises HostError if cosign can judge no signature: it is missing, it cannot read the key, or
        without a key, it does not reach Sigstore.
        """
        words = ["--check-claims=false", "--type", kind]
        if self.key:
            words += ["--key", self.key, "--insecure-ignore-tlog"]
        if self.identity:
            words += ["--certificate-identity", self.identity]
        if self.issuer:
            words += ["--certificate-oidc-issuer", self.issuer]
        with tempfile.NamedTemporaryFile(prefix="primus-bundle-") as file:
            file.write(bundle)
            file.flush()
            problem = cosign("verify-blob-attestation", "--bundle", file.name, *words)
        if not problem:
            return ""
        if problem.startswith(_UNJUDGED):
            hint = "name the public key, such as cosign.pub" if self.key else _KEYLESS
            raise HostError(f"cosign cannot verify signatures: {problem}", hint=hint)
        return f"its signature is not by {self.key or self.identity} (cosign: {problem})"


def check_key(key: str | None, option: str, example: str = "cosign.pub") -> None:
    """Raise InputError if the key is a file that does not exist, HostError if cosign is missing."""
    need_cosign()
    if key and "://" not in key and not Path(key).is_file():
        raise InputError(
            f"{option}: there is no file {key}", hint=f"name the key, such as {example}"
        )


def need_cosign() -> None:
    """Raise HostError if cosign is missing."""
    if shutil.which("cosign") is None:
        raise HostError("cosign, which signs and verifies, is missing", hint=_COSIGN)


def cosign(*words: str) -> str:
    """Run cosign. Returns why it failed; empty if it did not. Raises HostError if it is missing."""
    need_cosign()
    done = captured(["cosign", *words], f"cosign {words[0]}")
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error")]
    if errors:
        return errors[0].partition(": ")[2] or errors[0]
    return f"code {done.returncode}"


def bundles(
    there: Repository, digest: str, unsigned: Sequence[Mapping[str, Any]], signer: Signer
) -> list[Document]:
    """Sign the statements ``unsigned`` about the image ``digest``.

    Returns them without those to which a signature of this key is attached already.
    """
    before = {_signed_by(bundle.data) for bundle in there.whole_documents(digest, BUNDLE)}
    new = []
    for content in unsigned:
        data = signer.bundle(content)
        if _signed_by(data) not in before:
            kind = str(content["predicateType"])
            new.append(Document(media_type=BUNDLE, name="", data=data, predicate=kind))
    return new


def require_unedited(there: Repository, request: "Request") -> None:
    """Raise InputError unless a request's statements are those of the image's documents.

    The documents were attached when the request was written. Who edits it afterwards would have
    words signed that nobody measured.
    """
    digest = str(request.subject["digest"])
    _, _, tag = request.ref.rpartition(":")
    named: set[tuple[str, str]] = set()
    for unsigned in request.statements:
        if unsigned["predicateType"] == SIGNATURE:
            named.update(unsigned["predicate"]["documents"].items())
    attached = there.documents(digest)
    documents = [
        document for document in attached if (document.name, digest_of(document.data)) in named
    ]
    try:
        contents = statements(documents, tag, digest)
    except DAMAGED as error:
        raise InputError(
            f"a document of {request.ref} is damaged: {damage(error)}",
            hint="publish the image again with --sign-later",
        ) from None
    expected = {canonical_json(content): content for content in contents}
    asked = {canonical_json(content): content for content in request.statements}
    for content in asked.keys() ^ expected.keys():
        kind = (asked.get(content) or expected[content])["predicateType"]
        raise InputError(
            f"the request to sign {request.ref} was edited: its statement of type {kind} is not "
            "that of the documents that were published",
            hint="publish the image again with --sign-later",
        )


def payload(bundle: bytes) -> dict[str, Any]:
    """Return the statement in a bundle, whose signature is not verified.

    Raises what damaged JSON raises.
    """
    envelope = json.loads(bundle)["dsseEnvelope"]
    # cosign also accepts the other alphabet of base64, whose characters b64decode would skip.
    content: dict[str, Any] = json.loads(b64decode(envelope["payload"], validate=True))
    return content


def _signed_by(bundle: bytes) -> tuple[str, str]:
    """Return the payload of a bundle and the mark of its key.

    Every keyless signature has a certificate of its own.
    """
    try:
        return json.loads(bundle)["dsseEnvelope"]["payload"], key_of(bundle) or "keyless"
    except DAMAGED:
        return "", ""


def key_of(bundle: bytes) -> str:
    """Return the mark of the key that a bundle names; empty without one."""
    try:
        return str(json.loads(bundle)["verificationMaterial"]["publicKey"]["hint"])
    except DAMAGED:
        return ""


class Request(NamedTuple):
    """What is to be signed elsewhere: statements about the image ``subject``.

    ``ref`` is the name that the image gets, and ``subject`` its descriptor.
    """

    ref: str
    subject: Mapping[str, Any]
    statements: Sequence[Mapping[str, Any]]

    def write(self, folder: Path) -> Path:
        """Write the request to a folder of the tag below ``folder``."""
        path = folder / self.ref.rpartition(":")[2] / _REQUEST
        write_file(path, canonical_json(self._asdict()))
        return path


def requests(folder: Path) -> list[Request]:
    """Return the requests of all images below ``folder``.

    Raises InputError if there is none, or if a statement is about another image or tag than its
    request.
    """
    result = [_read_request(path) for path in sorted(folder.glob(f"*/{_REQUEST}"))]
    if not result:
        raise InputError(
            f"nothing to sign in {folder}", hint=f"primus publish TARGET --sign-later {folder}"
        )
    return result


def _read_request(path: Path) -> Request:
    content: Any = read_json(path).data
    try:
        request = Request(content["ref"], content["subject"], content["statements"])
        _, tag, _ = reference(request.ref, f"{path}:")
        names = set()
        for unsigned in request.statements:
            for subject in unsigned["subject"]:
                names.add((subject["name"], f"sha256:{subject['digest']['sha256']}"))
        about = {(tag, request.subject["digest"])}
        if request.subject["mediaType"] != MANIFEST_TYPE or names != about:
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            "not a request of `primus publish --sign-later`", where=str(path)
        ) from None
    return request
