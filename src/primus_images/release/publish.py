"""Publishing an image with its evidence: check it, push it by digest, attach the documents, sign
it, set the tag.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from primus_images.errors import CheckFailed, HostError
from primus_images.gates.check import judge
from primus_images.gates.examined import examine
from primus_images.oci.store import MANIFEST_TYPE, Store, digest_of
from primus_images.plan.action import Composed, ImagePlan
from primus_images.plan.project import Workspace
from primus_images.progress import Progress
from primus_images.release.artifact import ANNOUNCED, Document
from primus_images.release.documents import VALIDATION, documents
from primus_images.release.git import checkout
from primus_images.release.policy import Policy, evidence_in, forbidden_in, objections
from primus_images.release.records import records_of
from primus_images.release.registry import Repository
from primus_images.release.statement import Request, Signer, bundles, statements
from primus_images.training.judge.record import NO_GPU, Record
from primus_images.versions.remotes import skopeo
from primus_images.versions.traffic import seconds_for

# Seconds that others wait for a publisher who announced that it will set a tag.
_PATIENCE = 2.0


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A checked image, its future tag and documents, and why it may not be published."""

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


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an image needs to be published, and the folder of its validations."""

    records: Path
    policy: Policy
    preview: bool


def prepare(
    plan: ImagePlan,
    workspace: Workspace,
    needs: Needs,
    progress: Progress,
) -> Ready:
    """Check the built image again, and create its documents. Nothing is sent.

    Raises InputError if the store does not contain exactly this image.
    """
    resolved = plan.resolved
    examined = examine(plan, workspace, progress)
    image = examined.image
    source = checkout(resolved.root)
    papers = documents(image, judge(examined), examined.facts, source)
    validations = _validations(needs.records / resolved.name, digest_of(image.config))
    every = (*papers, *validations)
    evidence = replace(evidence_in(every), commit=source.commit, edited=source.edited)
    tag = resolved.ref
    if needs.preview and not resolved.choice.suffix:
        tag = f"{resolved.ref}-preview"
    return Ready(
        image=image,
        tag=tag,
        documents=every,
        objections=(
            *objections(evidence, needs.policy, preview=needs.preview),
            *forbidden_in(papers, needs.policy),
        ),
    )


def publish(
    ready: Ready,
    store: Store,
    repository: str,
    progress: Progress,
    signing: Signer | Path | None = None,
) -> dict[str, Any]:
    """Push the image and its documents, sign it, and set its tag last: no tag lacks evidence.

    ``signing`` is who signs, or a folder. What must be signed is then written to that folder, and
    no tag is set before it is. The tag of a preview is moved; that of a release never is. Raises
    CheckFailed if the tag of a release already names another image, or if there are objections.
    """
    if ready.objections:
        raise CheckFailed(f"{ready.tag} may not be published: {'; '.join(ready.objections)}")
    digest = ready.image.digest
    there = Repository(repository)
    before = _free(there, ready.tag, digest)
    blobs = [digest_of(ready.image.config), *(layer.blob.digest for layer in ready.image.layers)]
    missing = there.missing("blobs", blobs)
    # A tag that names the image was answered with its manifest.
    if missing or (before != digest and there.digest(digest) is None):
        _push(ready, store, there, missing, progress)
    request = Request(
        ref=f"{repository}:{ready.tag}",
        subject=ready.subject,
        statements=statements(ready.documents, ready.tag, digest),
    )
    to_sign = None
    if isinstance(signing, Path):
        there.attach(ready.documents, ready.subject)
        to_sign = request.write(signing)
    elif signing or before != digest:
        finish(there, request, signing, ready.documents)
    else:
        there.attach(ready.documents, ready.subject)
    return {
        "ref": request.ref,
        "digest": digest,
        "new": before != digest,
        "bytes_sent": _bytes(ready, missing),
        "bytes": ready.image.size,
        "attached": [document.name for document in ready.documents],
        "signed": isinstance(signing, Signer),
        "to_sign": str(to_sign) if to_sign else None,
    }


def _bytes(ready: Ready, blobs: Sequence[str]) -> int:
    """Return the bytes of those of the image's layers that are among ``blobs``."""
    return sum(layer.blob.size for layer in ready.image.layers if layer.blob.digest in blobs)


def _announce(there: Repository, tag: str, manifest: bytes) -> None:
    """Let publishers of one new tag see each other: no registry sets a tag only if it is absent.

    Each first sets a tag of its own for its image, and then looks for those of others. So at least
    one of two sees the other, and waits for it; if both do, the smaller digest goes first. Raises
    CheckFailed if another image has the tag.
    """
    digest = digest_of(manifest)
    mine = f"{tag}{ANNOUNCED}{digest[7:19]}"
    there.tag(mine, manifest)
    announced = there.tags_with(mine, f"{tag}{ANNOUNCED}")
    others = [other for other in announced if other != mine]
    rounds = 0
    if others:
        rounds = 2 if min(others) < mine else 1
    for _ in range(rounds):
        time.sleep(_PATIENCE)
        if there.digest(tag) is not None:
            break
    _require_first(there, tag, there.digest(tag), digest)


def _require_first(there: Repository, tag: str, now: str | None, digest: str) -> None:
    if now not in (None, digest):
        raise CheckFailed(
            f"another publish was first: {there.name}:{tag} is {now}",
            hint="raise `release` in versions.yaml",
        )


def require_set(there: Repository, tag: str, now: str | None, digest: str) -> None:
    """Raise HostError if a tag names something else after it was set to ``digest``."""
    if now != digest:
        raise HostError(
            f"{there.name}:{tag} names {now or 'nothing'} after it was set to {digest}",
            hint="run it again",
        )


def finish(
    there: Repository,
    request: Request,
    signer: Signer | None,
    documents: Sequence[Document] = (),
) -> int:
    """Sign the statements of a pushed image, attach them and ``documents``, and set its tag.

    They are attached at once, because the list of referrers may be a tag that cannot be moved.
    Returns the number of statements. Raises CheckFailed if the image is missing, or if the tag of a
    release already names another one.
    """
    digest = str(request.subject["digest"])
    _, _, tag = request.ref.rpartition(":")
    before = _free(there, tag, digest)
    manifest = there.manifest(digest)
    if manifest is None or digest_of(manifest) != digest:
        raise CheckFailed(f"{there.name} does not have the image {digest}", hint="publish it again")
    signed = bundles(there, digest, request.statements, signer) if signer else []
    there.attach([*documents, *signed], request.subject)
    if before is None and not tag.endswith("-preview"):
        _announce(there, tag, manifest)
    if before != digest:
        there.tag(tag, manifest)
        now = there.digest(tag)
        _require_first(there, tag, now, digest)
        require_set(there, tag, now, digest)
    return len(request.statements) if signer else 0


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
    ready: Ready, store: Store, there: Repository, missing: Sequence[str], progress: Progress
) -> None:
    number = len(ready.image.layers) + 1
    size = f"{_bytes(ready, missing) / 1e6:.1f} MB"
    progress.start("push", f"push {len(missing)} of {number} blobs, {size}", None)
    there.check_uploads()
    destination = f"docker://{there.name}@{ready.image.digest}"
    seconds = seconds_for(_bytes(ready, missing))
    options = [f"--command-timeout={seconds:.0f}s", "--quiet", "--preserve-digests"]
    if there.plain:  # skopeo reads registries.conf only without this option
        options.append("--dest-tls-verify=false")
    try:
        with TemporaryDirectory(prefix="primus-push-") as folder:
            # skopeo takes a colon in a path for its end.
            link = Path(folder) / "store"
            link.symlink_to(store.root.absolute())
            source = f"oci:{link}:{ready.image.plan.ref}"
            skopeo("copy", *options, source, destination)
    except HostError:
        # skopeo also refuses damaged blobs, but says that the registry failed.
        for digest in (*missing, ready.image.digest):
            damage = store.check(digest)
            if damage:
                raise HostError(damage, hint="primus build --rehash rebuilds it") from None
        raise
    progress.finish("push")


def _validations(folder: Path, content: str) -> list[Document]:
    """Return the validations of the image with this config as documents."""
    return [_validation(record) for record in records_of(folder, content)]


def _validation(record: Record) -> Document:
    recipe = record.recipe
    name = f"{recipe.name}-{recipe.backend}-{recipe.mode}-{recipe.precision}"
    if record.gpu != NO_GPU:
        name += f"-{record.gpu}"
    data = json.dumps(record.as_json(), indent=1, ensure_ascii=False, sort_keys=True).encode()
    return Document(
        media_type=VALIDATION,
        name=f"validation-{name}-{len(record.jobs)}-runs.json",
        data=data,
    )
