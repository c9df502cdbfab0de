"""Publishing an image with its evidence: check it, push it by digest, attach the documents, sign
it, set the tag.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.gates.check import judge
from primus_images.gates.examined import examine
from primus_images.oci.store import MANIFEST_TYPE, Store, digest_of
from primus_images.plan.action import Composed, ImagePlan
from primus_images.plan.project import Workspace
from primus_images.progress import Progress
from primus_images.recipes.recipe import misstated
from primus_images.release.artifact import Document
from primus_images.release.documents import VALIDATION, checkout, documents
from primus_images.release.policy import Policy, evidence_in, forbidden_in, objections
from primus_images.release.registry import Repository, plain_http, require_tag
from primus_images.release.statement import RELEASE_TAG, Signer, bundles, statements, write_request
from primus_images.schema import read_json
from primus_images.versions.remotes import skopeo

# What follows a tag in the tag by which a publisher announces that it will set it, and the seconds
# that others wait.
_ANNOUNCED = ".by-"
_PATIENCE = 2.0


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A checked image, its future tag, its documents, and the reasons why it may not be published."""

    image: Composed
    tag: str
    documents: tuple[Document, ...]
    objections: tuple[str, ...]

    @property
    def subject(self) -> dict[str, Any]:
        """The image's descriptor."""
        return {
            "mediaType": MANIFEST_TYPE,
            "digest": self.image.digest,
            "size": len(self.image.manifest),
        }


def prepare(
    plan: ImagePlan,
    workspace: Workspace,
    *,
    records: Path,
    policy: Policy,
    preview: bool,
    progress: Progress,
) -> Ready:
    """Check the built image again, and create its documents. Nothing is sent.

    ``records`` is the folder of validations. ``policy`` says what the image needs. Raises
    InputError if the store does not contain exactly this image.
    """
    resolved = plan.resolved
    examined = examine(plan, workspace, progress)
    image = examined.image
    commit, edited = checkout(resolved.root)
    papers = documents(image, judge(examined), examined.facts, commit, edited)
    content = digest_of(image.config)
    validations = [
        record
        for record in _records(records / resolved.name)
        if record["image"]["content"] == content
    ]
    every = (*papers, *map(_validation, validations))
    evidence = replace(evidence_in(every), commit=commit, edited=edited)
    return Ready(
        image=image,
        tag=resolved.ref if resolved.choice.suffix or not preview else f"{resolved.ref}-preview",
        documents=every,
        objections=(*objections(evidence, policy, preview=preview), *forbidden_in(papers, policy)),
    )


def publish(
    ready: Ready,
    store: Store,
    repository: str,
    progress: Progress,
    *,
    signer: Signer | None = None,
    later: Path | None = None,
) -> dict[str, Any]:
    """Push the image and its documents, sign it as ``signer``, and set its tag last, so that no tag
    lacks evidence.

    With ``later``, what must be signed is written to that folder, and no tag is set before it is.
    The tag of a preview is moved; that of a release never is. Raises CheckFailed if the tag of a
    release already names another image, or if there are objections.
    """
    if ready.objections:
        raise CheckFailed(f"{ready.tag} may not be published: {'; '.join(ready.objections)}")
    digest = ready.image.digest
    there = Repository(repository)
    before = _free(there, ready.tag, digest)
    blobs = [digest_of(ready.image.config), *(layer.blob.digest for layer in ready.image.layers)]
    missing = there.missing("blobs", blobs)
    sizes = {layer.blob.digest: layer.blob.size for layer in ready.image.layers}
    sent = sum(sizes.get(blob, 0) for blob in missing)
    # A tag that names the image was answered with its manifest.
    if missing or (before != digest and there.digest(digest) is None):
        _push(ready, store, there, missing, sent, progress)
    ref = f"{repository}:{ready.tag}"
    about = statements(ready.documents, ready.tag, digest)
    if not later and (signer or before != digest):
        finish(there, ready.tag, ready.subject, about, signer, ready.documents)
    else:
        there.attach(ready.documents, ready.subject)
    request = None
    if later:
        request = write_request(later, ref, ready.subject, about)
    return {
        "ref": ref,
        "digest": digest,
        "new": before != digest,
        "bytes_sent": sent,
        "bytes": ready.image.size,
        "attached": [document.name for document in ready.documents],
        "signed": signer is not None,
        "to_sign": str(request) if request else None,
    }


def _announce(there: Repository, tag: str, manifest: bytes) -> None:
    """Let publishers of one new tag see each other: no registry sets a tag only if it is absent.

    Each first sets a tag of its own for its image, and then looks for those of others. So at least
    one of two sees the other, and waits for it; if both do, the smaller digest goes first. Raises
    CheckFailed if another image has the tag.
    """
    digest = digest_of(manifest)
    mine = f"{tag}{_ANNOUNCED}{digest[7:19]}"
    there.tag(mine, manifest)
    others = [other for other in there.tags(f"{tag}{_ANNOUNCED}") if other != mine]
    for _ in range(1 + (min(others) < mine) if others else 0):
        time.sleep(_PATIENCE)
        if there.digest(tag) is not None:
            break
    now = there.digest(tag)
    if now not in (None, digest):
        raise CheckFailed(
            f"another publish was first: {there.name}:{tag} is {now}",
            hint="raise `release` in versions.yaml",
        )


def move_tag(there: Repository, tag: str, release: str) -> tuple[str | None, str]:
    """Let a moving tag (``latest-cpu``) name a published release. Returns the old digest and the
    new one.

    Raises InputError for a tag of a release or its documents, which never moves, for a release of
    another target, and for one that was not published: that a publisher announced it is not enough.
    """
    if re.fullmatch(f"{RELEASE_TAG}|sha256-.*", tag):
        raise InputError(
            f"{tag} is a tag of a release, which never moves by hand",
            hint="move one such as latest-cpu",
        )
    for option, word in (("TAG", tag), ("RELEASE", release.removeprefix("sha256:"))):
        require_tag(word, option)
    targets = [
        word.partition(_ANNOUNCED)[0].removesuffix("-preview").partition("-")[2]
        for word in (tag, release)
    ]
    if tag.startswith("latest-") and (
        targets[0] != targets[1] or not re.fullmatch(RELEASE_TAG, release)
    ):
        raise InputError(
            f"{release} is not the name of a release of the target of {tag}",
            hint="name one, like v26.11-cpu for latest-cpu; a tag that does not begin with "
            "latest- can stand for any image",
        )
    before = there.digest(tag)
    if _ANNOUNCED in release:
        digest = None
    else:
        digest = there.digest(release)
    if digest is None:
        others = ", ".join(t for t in there.tags("v") if _ANNOUNCED not in t) or "none"
        raise InputError(
            f"{there.name} has no {release}; its releases: {others}",
            hint="primus publish publishes one",
        )
    if before != digest:  # a registry that forbids moving tags also refuses this one
        there.tag(tag, there.manifest(release) or b"")
    _check_tag(there, tag, there.digest(tag), digest)
    return before, digest


def _check_tag(there: Repository, tag: str, now: str | None, digest: str) -> None:
    if now != digest:
        now_text = now or "nothing"
        raise HostError(
            f"{there.name}:{tag} names {now_text} after it was set to {digest}", hint="run it again"
        )


def finish(
    there: Repository,
    tag: str,
    subject: Mapping[str, Any],
    about: list[dict[str, Any]],
    signer: Signer | None,
    documents: Sequence[Document] = (),
) -> int:
    """Sign the statements ``about`` the pushed image ``subject``, attach them and ``documents`` at
    once (the list of referrers may be a tag that cannot be moved), and set its tag. Returns the
    number of statements.

    Raises CheckFailed if the image is missing, or if the tag of a release already names another
    one.
    """
    digest = str(subject["digest"])
    before = _free(there, tag, digest)
    manifest = there.manifest(digest)
    if manifest is None or digest_of(manifest) != digest:
        raise CheckFailed(f"{there.name} does not have the image {digest}", hint="publish it again")
    there.attach([*documents, *(bundles(there, digest, about, signer) if signer else ())], subject)
    if before is None and not tag.endswith("-preview"):
        _announce(there, tag, manifest)
    if before != digest:
        there.tag(tag, manifest)
        now = there.digest(tag)
        if now not in (None, digest):
            raise CheckFailed(
                f"another publish was first: {there.name}:{tag} is {now}",
                hint="raise `release` in versions.yaml",
            )
        _check_tag(there, tag, now, digest)
    if signer:
        return len(about)
    return 0


def _free(there: Repository, tag: str, digest: str) -> str | None:
    """Return what the tag names; nothing but ``digest``, unless it is the tag of a preview."""
    before = there.digest(tag)
    if before not in (None, digest) and not tag.endswith("-preview"):
        raise CheckFailed(
            f"{there.name}:{tag} is already published as {before}; a release is never replaced",
            hint="raise `release` in versions.yaml",
        )
    return before


def _push(
    ready: Ready, store: Store, there: Repository, missing: list[str], size: int, progress: Progress
) -> None:
    progress.start(
        "push",
        f"push {len(missing)} of {len(ready.image.layers) + 1} blobs, {size / 1e6:.1f} MB",
        None,
    )
    there.check_uploads()
    trust = "--dest-tls-verify=true"
    if plain_http(there.name):
        trust = "--dest-tls-verify=false"
    source = f"oci:{store.root.absolute()}:{ready.image.plan.ref}"
    try:
        skopeo(
            "copy",
            "--quiet",
            "--preserve-digests",
            trust,
            source,
            f"docker://{there.name}@{ready.image.digest}",
        )
    except HostError:
        # skopeo also refuses damaged blobs, but says that the registry failed.
        wrong = next(filter(None, map(store.check, (*missing, ready.image.digest))), "")
        if wrong:
            raise HostError(wrong, hint="primus build --rehash rebuilds it") from None
        raise
    progress.finish("push")


def _records(folder: Path) -> list[dict[str, Any]]:
    records = []
    for path in sorted(folder.glob("*/record.json")):
        try:
            record: Any = read_json(path).data
            needed = (
                record["image"]["content"],
                record["recipe"]["name"],
                record["passed"],
                record["gpu"],
            )
            if not all(isinstance(value, str | bool) for value in needed):
                raise TypeError
            _ = (
                {v["name"]: v["passed"] for v in record["verdicts"]},
                {j["name"]: j["ran"] for j in record["jobs"]},
            )
            fault = misstated(record["recipe"])
        except (OSError, KeyError, TypeError):
            raise InputError("not a validation record", where=str(path), hint="remove it") from None
        if fault:
            raise InputError(
                f"not a validation record: {fault}",
                where=str(path),
                hint="remove it, and validate again",
            )
        records.append(record)
    return records


def _validation(record: Mapping[str, Any]) -> Document:
    recipe = record["recipe"]
    words = [
        *map(recipe.get, ("name", "backend", "mode", "precision")),
        f"{len(record['jobs'])}-runs",
    ]
    name = "-".join(filter(None, words))
    data = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True).encode()
    return Document(media_type=VALIDATION, name=f"validation-{name}.json", data=data)
