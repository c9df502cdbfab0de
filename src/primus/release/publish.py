"""Publishing an image with its evidence: check it, push it by digest, attach the documents, sign it, set the tag."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.errors import CheckFailed, HostError, InputError
from primus.gates.check import judge
from primus.gates.examined import examine
from primus.oci import canonical
from primus.oci.store import MANIFEST_TYPE, Store
from primus.release.documents import checkout, documents
from primus.release.registry import Document, Repository, digest_tag, plain_http
from primus.schema import read_json
from primus.versions.registry import skopeo

if TYPE_CHECKING:
    from primus.engine.image import Composed
    from primus.plan.action import ImagePlan
    from primus.plan.workspace import Workspace
    from primus.progress import Progress

VALIDATION = "application/vnd.primus.validation.v1+json"
# The runs that at least one record must contain. A quick suite proves neither that runs repeat nor that they resume.
_RUNS = {"base", "repeat", "resume", "accumulation"}
# What follows a tag in the tag by which a publisher announces that it will set it, and the seconds that others wait.
_ANNOUNCED = ".by-"
_PATIENCE = 2.0
# The only gate that a preview may fail: Debian's ROCm has no code for some GPUs.
_FORGIVEN = "coverage"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence about a built image.

    ``content`` is the digest of its config. ``preview`` is the reason why it is a preview; empty for a release. ``gpu``
    is the GPU generation that it is for. ``recipes`` are those that its ``target`` names. ``records`` are all
    validation records, also of other images. ``commit`` is that of the repository, and ``edited`` are files that differ
    from it.
    """

    content: str
    target: str
    preview: str
    gpu: str | None
    recipes: Sequence[str]
    failed_gates: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    commit: str | None
    edited: Sequence[str]

    @property
    def of_this_image(self) -> list[Mapping[str, Any]]:
        """The records of this image."""
        return [record for record in self.records if record["image"]["content"] == self.content]


def objections(evidence: Evidence, *, preview: bool) -> tuple[str, ...]:
    """Return the reasons why the image may not be published, one sentence each; empty if it may.

    A release for a GPU must have passed its validations on that GPU. With ``preview``, a CPU is sufficient, the
    coverage gate may fail, and files of the repository may be edited.
    """
    reasons = []
    if evidence.preview and not preview:
        reasons.append(f"it is a preview: {evidence.preview}")
    reasons += [f"gate {gate} fails" for gate in evidence.failed_gates if not (preview and gate == _FORGIVEN)]
    reasons += _of_validation(evidence, preview)
    if evidence.commit is None and not preview:
        reasons.append("the commit it was built from is unknown: this is not a git repository")
    elif evidence.commit and evidence.edited and not preview:
        reasons.append(f"files differ from commit {evidence.commit[:12]}: {_some(evidence.edited)}")
    return tuple(reasons)


def _of_validation(evidence: Evidence, preview: bool) -> list[str]:
    if not evidence.recipes:
        return ["its target names no recipe to validate it with"]
    records, where = [record for record in evidence.of_this_image if _passed(record, preview)], ""
    if evidence.gpu and not preview:
        records, where = [record for record in records if record["gpu"] == evidence.gpu], f" on {evidence.gpu}"
        if not records:
            return [
                f"nothing was trained in this image on {evidence.gpu}, and a run on a CPU does not count for the GPU "
                f"(run primus validate {evidence.target} on a machine with that GPU)"
            ]
    trained = {record["recipe"]["name"] for record in records}
    reasons = []
    if lacking := [name for name in evidence.recipes if name not in trained]:
        reasons.append(
            f"{_some(lacking)} did not pass a validation in this image{where} "
            f"(primus validate {evidence.target} --suite quick)"
        )
    if not any({job["name"] for job in record["jobs"] if job["ran"]} >= _RUNS for record in records):
        reasons.append(
            f"no validation in this image{where} repeated a run, resumed it and split its batch "
            f"(primus validate {evidence.target})"
        )
    return reasons


def _passed(record: Mapping[str, Any], preview: bool) -> bool:
    if not preview:
        return record["passed"] is True
    failed = {verdict["name"] for verdict in record["verdicts"] if not verdict["passed"]}
    ran = all(job["ran"] for job in record["jobs"])
    return bool(record["verdicts"]) and ran and failed <= {f"gate {_FORGIVEN}"}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


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
        return {"mediaType": MANIFEST_TYPE, "digest": self.image.digest, "size": len(self.image.manifest)}


def prepare(plan: ImagePlan, workspace: Workspace, *, records: Path, preview: bool, progress: Progress) -> Ready:
    """Check the built image again, and create its documents. Nothing is sent.

    ``records`` is the folder of validations. Raises InputError if the store does not contain exactly this image.
    """
    resolved = plan.resolved
    examined = examine(plan, workspace, progress)
    image, outcome = examined.image, judge(examined)
    validations = _records(records / resolved.name)
    commit, edited = checkout(resolved.root)
    content = canonical.digest_of(image.config)
    evidence = Evidence(
        content=content,
        target=resolved.name,
        preview=resolved.choice.preview or "",
        gpu=resolved.gpu.name if resolved.gpu else None,
        recipes=resolved.target.recipes,
        failed_gates=[report.gate for report in outcome.reports if not report.passed],
        records=validations,
        commit=commit,
        edited=edited,
    )
    return Ready(
        image=image,
        tag=resolved.ref if resolved.choice.suffix or not preview else f"{resolved.ref}-preview",
        documents=(*documents(image, outcome, commit, edited), *map(_validation, evidence.of_this_image)),
        objections=objections(evidence, preview=preview),
    )


def publish(
    ready: Ready, store: Store, repository: str, progress: Progress, *, key: str | None = None
) -> dict[str, Any]:
    """Push the image and its documents, sign it with ``key``, and set its tag last, so that no tag lacks evidence.

    The tag of a preview is moved; that of a release never is. Blobs are hashed before they are sent. Raises CheckFailed
    if the tag of a release already names another image, or if there are objections.
    """
    if ready.objections:
        raise CheckFailed(f"{ready.tag} may not be published: {'; '.join(ready.objections)}")
    digest = ready.image.digest
    there = Repository(repository, progress.say)
    before = there.digest(ready.tag)
    if before not in (None, digest) and not ready.tag.endswith("-preview"):
        raise CheckFailed(
            f"{repository}:{ready.tag} is already published as {before}; a release is never replaced",
            hint="raise `release` in versions.yaml",
        )
    blobs = [canonical.digest_of(ready.image.config), *(layer.blob.digest for layer in ready.image.layers)]
    missing = [blob for blob in blobs if not there.has_blob(blob)]
    if missing or there.digest(digest) is None:
        _push(ready, store, repository, missing, progress)
    artifacts = there.attach(ready.documents, ready.subject)
    attached = [
        {"type": document.media_type, "name": document.name, "digest": artifact}
        for document, artifact in zip(ready.documents, artifacts, strict=True)
    ]
    # cosign stores signatures under this tag. Signing again with the same key would only make the list longer.
    if key and there.digest(f"{digest_tag(digest)}.sig") is None:
        sign(f"{repository}@{digest}", key)
    if before is None and not ready.tag.endswith("-preview"):
        _announce(there, ready)
    if before != digest:
        there.tag(ready.tag, ready.image.manifest)
        if (now := there.digest(ready.tag)) is None:
            raise HostError(
                f"{repository}:{ready.tag} names nothing after it was set to {digest}", hint="run the command again"
            )
        if now != digest:
            raise _lost(there, ready.tag, now)
    sizes = {layer.blob.digest: layer.blob.size for layer in ready.image.layers}
    return {
        "ref": f"{repository}:{ready.tag}",
        "digest": digest,
        "new": before != digest,
        "bytes_sent": sum(sizes.get(blob, 0) for blob in missing),
        "bytes": ready.image.size,
        "attached": attached,
        "signed": key is not None,
    }


def _announce(there: Repository, ready: Ready) -> None:
    """Let publishers of one new tag see each other: no registry sets a tag only if it is absent.

    Each first sets a tag of its own for its image, and then looks for those of others. So at least one of two sees the
    other, and waits for it; if both do, the smaller digest goes first. Raises CheckFailed if another image has the tag.
    """
    mine, digest = f"{ready.tag}{_ANNOUNCED}{ready.image.digest[7:19]}", ready.image.digest
    there.tag(mine, ready.image.manifest)
    others = [tag for tag in there.tags(f"{ready.tag}{_ANNOUNCED}") if tag != mine]
    for _ in range(1 + (min(others) < mine) if others else 0):
        time.sleep(_PATIENCE)
        if there.digest(ready.tag) is not None:
            break
    if (now := there.digest(ready.tag)) not in (None, digest):
        raise _lost(there, ready.tag, str(now))


def _lost(there: Repository, tag: str, winner: str) -> CheckFailed:
    return CheckFailed(
        f"another publish was first: {there.name}:{tag} is {winner}", hint="raise `release` in versions.yaml"
    )


def move_tag(there: Repository, tag: str, release: str) -> tuple[str | None, str]:
    """Let a moving tag (``latest-cpu``) name a published release. Returns the old digest and the new one.

    Raises InputError for a tag of a release, which never moves, and for a release that was not published.
    """
    if re.fullmatch(r"v[0-9]+[.][0-9.]+-.*", tag):
        raise InputError(f"{tag} is the tag of a release, which never moves", hint="move a tag such as latest-cpu")
    before, digest = there.digest(tag), there.digest(release)
    if digest is None:
        have = ", ".join(t for t in there.tags("v") if _ANNOUNCED not in t) or "none"
        raise InputError(f"{there.name} has no {release}; its releases: {have}", hint="primus publish publishes one")
    there.tag(tag, there.manifest(release))
    if (now := there.digest(tag)) != digest:
        raise HostError(
            f"{there.name}:{tag} names {now or 'nothing'} after it was set to {digest}", hint="run it again"
        )
    return before, digest


def sign(image: str, key: str) -> None:
    """Sign ``host/path@digest`` with cosign. ``key`` is a file or the address of a key service.

    Nothing is sent to a transparency log. The password of the key comes from COSIGN_PASSWORD. Raises HostError if
    cosign is missing or fails.
    """
    if shutil.which("cosign") is None:
        raise HostError("signing needs cosign, which is missing", hint="install cosign, or publish without --key")
    words = ["cosign", "sign", "--yes", "--tlog-upload=false", "--key", key, image]
    cosign = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if cosign.returncode != 0:
        errors = [line for line in cosign.stderr.splitlines() if line.startswith("Error")]
        reason = errors[-1].partition(": ")[2] or errors[-1] if errors else f"code {cosign.returncode}"
        raise HostError(f"cosign failed: {reason}", hint="check the key")


def _push(ready: Ready, store: Store, repository: str, missing: list[str], progress: Progress) -> None:
    digest = ready.image.digest
    sizes = {layer.blob.digest: layer.blob.size for layer in ready.image.layers}
    total = sum(sizes.get(blob, 0) for blob in missing)
    progress.start("hash", "read and hash", total)
    for blob in (*missing, digest):
        if wrong := store.check(blob):
            raise HostError(wrong, hint="primus build --rehash rebuilds it")
        progress.advance("hash", sizes.get(blob, 0))
    progress.finish("hash")
    progress.start("push", f"push {len(missing)} of {len(sizes) + 1} blobs, {total / 1e6:.1f} MB", None)
    Repository(repository, progress.say).check_uploads()
    trust = "--dest-tls-verify=false" if plain_http(repository) else "--dest-tls-verify=true"
    source = f"oci:{store.root.absolute()}:{ready.image.plan.ref}"
    skopeo("copy", "--quiet", "--preserve-digests", trust, source, f"docker://{repository}@{digest}")
    progress.finish("push")


def _records(folder: Path) -> list[dict[str, Any]]:
    """Read all validation records below ``folder``, sorted by path. Raises InputError for a file in another format."""
    records = []
    for path in sorted(folder.glob("*/record.json")):
        try:
            record: Any = read_json(path).data
            needed = (record["image"]["content"], record["recipe"]["name"], record["passed"], record["gpu"])
            if not all(isinstance(value, str | bool) for value in needed):
                raise TypeError
            _ = {v["name"]: v["passed"] for v in record["verdicts"]}, {j["name"]: j["ran"] for j in record["jobs"]}
        except (OSError, KeyError, TypeError):
            raise InputError("not a validation record", where=str(path), hint="remove it") from None
        records.append(record)
    return records


def _validation(record: Mapping[str, Any]) -> Document:
    recipe = record["recipe"]
    words = [*map(recipe.get, ("name", "backend", "mode", "precision")), f"{len(record['jobs'])}-runs"]
    name = "-".join(filter(None, words))
    data = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True).encode()
    return Document(media_type=VALIDATION, name=f"validation-{name}.json", data=data)
