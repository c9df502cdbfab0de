"""Statements about an image that anybody can check: in-toto statements in signed envelopes,
attached to the image.

Every document about an image becomes a statement whose subject is the image. cosign signs each one
as a Sigstore bundle, so that ``cosign verify-attestation`` and ``primus verify --image`` accept it.
A statement depends on its document alone, so a verifier makes it again from the document and
compares. docs/statements.md has the format.
"""

import json
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
from primus_images.release.artifact import Document
from primus_images.release.documents import CYCLONEDX, IN_TOTO, SPDX, VALIDATION, form
from primus_images.release.registry import Repository, reference
from primus_images.schema import read_json

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
SIGNATURE = "https://sigstore.dev/cosign/sign/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
BILLS = {SPDX: "https://spdx.dev/Document", CYCLONEDX: "https://cyclonedx.org/bom"}
# All other tags, such as latest-cpu, may move.
RELEASE_TAG = r"v[0-9]+[.][0-9.]+-.*"
_REQUEST = "request.json"
_KEYLESS = "without --key, cosign needs the servers of Sigstore"
# How cosign's errors begin that are about the key or the trusted root, not about the signature.
_UNJUDGED = ("loading verifier from key opts", "setting trusted material")
_COSIGN = "install cosign 3 or newer (Debian: package cosign of forky or sid)"


def statements(documents: Sequence[Document], tag: str, digest: str) -> list[dict[str, Any]]:
    """Return the statements about the image ``digest``, whose name is ``tag``: its signature, which
    names all ``documents`` by their hashes, then one for each bill of materials, provenance and
    validation.
    """
    hashes = {document.name: digest_of(document.data) for document in documents}
    about: list[tuple[str, dict[str, Any]]] = [(SIGNATURE, {"documents": hashes})]
    for document in documents:
        content = json.loads(document.data)
        if document.media_type in BILLS:
            about.append((BILLS[document.media_type], content))
        elif document.media_type == IN_TOTO:
            about.append((PROVENANCE, content["predicate"]))
        elif document.media_type == VALIDATION:
            about.append((TEST_RESULT, test_result(content, document.data)))
    return [statement_about(tag, digest, kind, predicate) for kind, predicate in about]


def statement_about(
    name: str, digest: str, kind: str, predicate: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the in-toto statement of the type ``kind`` about the artifact ``digest``."""
    return form(
        "statement",
        name=name,
        sha256=digest.removeprefix("sha256:"),
        kind=kind,
        predicate=predicate,
    )


def test_result(record: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """Return in-toto's test-result for a validation record, whose file is ``data``, with the
    extension ``primus``.

    Raises KeyError, TypeError or AttributeError if it is not a record.
    """
    recipe = record["recipe"]
    facts = record["facts"]
    verdicts = record["verdicts"]
    return form(
        "test_result",
        result="PASSED" if record["passed"] else "FAILED",
        recipe_name=f"recipe {recipe['name']}",
        recipe_sha256=recipe["sha256"],
        suite_sha256=record["suite"]["sha256"],
        record_sha256=digest_of(data).removeprefix("sha256:"),
        passed=[v["name"] for v in verdicts if v["passed"] and not v.get("skipped")],
        failed=[v["name"] for v in verdicts if not v["passed"] and not v.get("skipped")],
        recipe={
            key: value for key, value in recipe.items() if key not in ("settings", "description")
        },
        hardware={"gpu": record["gpu"], **record["machine"]},
        precision={key: facts.get(key) for key in ("matmul_dtypes", "matmul_flops", "gpu_kernels")},
        seeds=[facts.get("seed")],
        runs=[job["name"] for job in record["jobs"] if job["ran"]],
        wrap=record.get("wrap"),
        **{key: record[key] for key in ("image", "made", "suite", "not_run")},
    )


class Signer(NamedTuple):
    """Who signs: the owner of ``key`` (a file or the address of a key service), or without one, an
    identity that cosign asks its provider for (keyless; the signature is entered in the public
    transparency log).
    """

    key: str | None

    def bundle(self, statement: Mapping[str, Any]) -> bytes:
        """Return the signed envelope. The password of the key comes from COSIGN_PASSWORD; a key's
        signature is entered in no log. Raises HostError.
        """
        with tempfile.TemporaryDirectory(prefix="primus-sign-") as name:
            content = Path(name) / "statement.json"
            bundle = Path(name) / "bundle.json"
            content.write_bytes(canonical_json(statement))
            words = ["attest-blob", "--yes", "--statement", str(content), "--bundle", str(bundle)]
            if self.key:
                key = ["--key", self.key, "--use-signing-config=false", "--tlog-upload=false"]
            else:
                key = []
            self._accept(cosign(*words, *key))
            return bundle.read_bytes()

    def check(self, option: str) -> None:
        """Raise InputError if the key is a file that does not exist, HostError if cosign cannot
        sign with it.
        """
        check_key(self.key, option, "cosign.key")
        if self.key:
            self._accept(cosign("public-key", "--key", self.key))

    def _accept(self, problem: str) -> None:
        if problem:
            hint = f"{_KEYLESS}; --sign-later signs elsewhere"
            if self.key:
                hint = "check the key, and COSIGN_PASSWORD, its password"
            raise HostError(
                f"cosign failed: {problem}", hint=_COSIGN if "unknown flag" in problem else hint
            )


class Trust(NamedTuple):
    """Whose signatures count: the owner of ``key``'s, or an ``identity``'s that ``issuer`` vouches
    for.
    """

    key: str | None = None
    identity: str | None = None
    issuer: str | None = None

    def rejects(self, bundle: bytes, kind: str) -> str:
        """Return why cosign rejects the signature; empty if it accepts it.

        Raises HostError if cosign can judge no signature: it is missing, it cannot read the key, or
        without a key, it does not reach Sigstore.
        """
        with tempfile.NamedTemporaryFile(prefix="primus-bundle-") as file:
            file.write(bundle)
            file.flush()
            if self.key:
                by = ["--key", self.key, "--insecure-ignore-tlog"]
            else:
                by = []
            by += ["--certificate-identity", self.identity] if self.identity else []
            by += ["--certificate-oidc-issuer", self.issuer] if self.issuer else []
            words = (
                "verify-blob-attestation",
                "--bundle",
                file.name,
                "--check-claims=false",
                "--type",
                kind,
                *by,
            )
            problem = cosign(*words)
            if problem.startswith(_UNJUDGED):
                if self.key:
                    hint = "name the public key, such as cosign.pub"
                else:
                    hint = _KEYLESS
                raise HostError(f"cosign cannot verify signatures: {problem}", hint=hint)
            if problem:
                return f"its signature is not by {self.key or self.identity} (cosign: {problem})"
            return ""


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
    there: Repository, digest: str, about: Sequence[Mapping[str, Any]], by: Signer
) -> list[Document]:
    """Sign the statements ``about`` the image ``digest``. Returns them without those to which a
    signature of this key is attached already.
    """
    before = {_signed_by(bundle.data) for bundle in there.documents(digest, BUNDLE)}
    signed = [
        Document(media_type=BUNDLE, name="", data=by.bundle(statement)) for statement in about
    ]
    return [bundle for bundle in signed if _signed_by(bundle.data) not in before]


def payload(bundle: bytes) -> dict[str, Any]:
    """Return the statement in a bundle, whose signature is not verified. Raises what damaged JSON
    raises.
    """
    # cosign also accepts the other alphabet of base64, whose characters b64decode would skip.
    statement: dict[str, Any] = json.loads(
        b64decode(json.loads(bundle)["dsseEnvelope"]["payload"], validate=True)
    )
    return statement


def _signed_by(bundle: bytes) -> tuple[str, str]:
    """Return the payload of a bundle and the mark of its key. Every keyless signature has a
    certificate of its own.
    """
    try:
        content = json.loads(bundle)
        material = content["verificationMaterial"]
        return content["dsseEnvelope"]["payload"], str(material.get("publicKey", "keyless"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", ""


def write_request(
    folder: Path, ref: str, subject: Mapping[str, Any], about: Sequence[Mapping[str, Any]]
) -> Path:
    """Write what is to be signed elsewhere: the statements ``about`` the image ``subject`` that
    ``ref`` will name.
    """
    path = folder / ref.rpartition(":")[2] / _REQUEST
    write_file(path, canonical_json({"ref": ref, "subject": subject, "statements": about}))
    return path


def requests(folder: Path) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Return what :func:`write_request` wrote: reference, descriptor and statements of each image.

    Raises InputError if there is none, or if a statement is about another image or tag than its
    request.
    """
    result = []
    for path in sorted(folder.glob(f"*/{_REQUEST}")):
        content: Any = read_json(path).data
        try:
            ref = content["ref"]
            subject = content["subject"]
            about = content["statements"]
            names = {
                (s["name"], f"sha256:{s['digest']['sha256']}")
                for each in about
                for s in each["subject"]
            }
            _, tag, _ = reference(ref, f"{path}:")
            if subject["mediaType"] != MANIFEST_TYPE or names != {(tag, subject["digest"])}:
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise InputError(
                "not a request of `primus publish --sign-later`", where=str(path)
            ) from None
        result.append((ref, subject, about))
    if not result:
        raise InputError(
            f"nothing to sign in {folder}", hint=f"primus publish TARGET --sign-later {folder}"
        )
    return result
