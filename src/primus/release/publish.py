"""Publishing an image with its evidence: check it, push it by digest, attach the documents, sign it, set the tag."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.errors import CheckFailed, HostError, InputError
from primus.gates.check import judge
from primus.gates.examined import examine
from primus.jsonfile import read_json
from primus.oci import canonical
from primus.oci.store import MANIFEST_TYPE, Store
from primus.release import fitness, provenance, sbom
from primus.release.attach import Document, Repository, digest_tag
from primus.release.distribution import plain_http
from primus.versions.registry import skopeo
from primus.versions.traffic import listening

if TYPE_CHECKING:
    from collections.abc import Sequence

    from primus.engine.image import Composed
    from primus.gates.check import Outcome
    from primus.plan.action import ImagePlan
    from primus.plan.workspace import Workspace
    from primus.progress import Progress

VALIDATION = "application/vnd.primus.validation.v1+json"
GATES = "application/vnd.primus.gates.v1+json"
LOCK = "application/vnd.primus.lock.v1+json"
SPDX = "application/spdx+json"
IN_TOTO = "application/vnd.in-toto+json"


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
    found = _records(records / resolved.name)
    commit, edited = checkout(resolved.root)
    content = canonical.digest_of(image.config)
    evidence = fitness.Evidence(
        content=content,
        preview=resolved.choice.preview or "",
        gpu=resolved.gpu.name if resolved.gpu else None,
        recipes=resolved.target.recipes,
        failed_gates=[report.gate for report in outcome.reports if not report.passed],
        records=found,
        commit=commit,
        edited=edited,
    )
    mine = [record for record in found if record["image"]["content"] == content]
    return Ready(
        image=image,
        tag=resolved.ref if resolved.choice.suffix or not preview else f"{resolved.ref}-preview",
        documents=(*documents(image, outcome, commit, edited), *map(_validation, mine)),
        objections=fitness.objections(evidence, preview=preview),
    )


def documents(image: Composed, outcome: Outcome, commit: str | None, edited: Sequence[str]) -> tuple[Document, ...]:
    """Return the image's bill of materials, provenance, lock and gate findings.

    ``edited`` are the files that differ from ``commit``.
    """
    resolved = image.plan.resolved
    made = [
        Document(media_type=GATES, name="gates.json", data=canonical.dumps(outcome.as_json())),
        Document(
            media_type=IN_TOTO,
            name="provenance.json",
            data=canonical.dumps(
                provenance.statement(
                    resolved.lock,
                    ref=resolved.ref,
                    digest=image.digest,
                    release=resolved.versions.release,
                    target=resolved.name,
                    channel=resolved.choice.channel,
                    commit=None if edited else commit,
                    layers={action.name: action.key for action in image.plan.layers},
                )
            ),
        ),
    ]
    if resolved.lock:
        made += [
            Document(media_type=LOCK, name="lock.json", data=resolved.lock_path.read_bytes()),
            Document(media_type=SPDX, name="sbom.spdx.json", data=canonical.dumps(bill(image, commit, edited))),
        ]
    return tuple(made)


def bill(image: Composed, commit: str | None, edited: Sequence[str]) -> dict[str, Any]:
    """Return the image's SPDX document. Raises InputError if its target has no lock."""
    resolved = image.plan.resolved
    taken = (commit or "unknown") + ("+edited" if edited else "")
    local = {component: taken for component, pin in resolved.pins.items() if pin.path}
    lock, name = resolved.lock, resolved.name
    if lock is None:
        raise InputError(f"{name} has no lock, so its contents are unknown", hint=resolved.lock_command)
    created = str(image.plan.config["created"])
    return sbom.spdx(lock, ref=resolved.ref, digest=image.digest, roots=resolved.roots, local=local, created=created)


def publish(
    ready: Ready, store: Store, repository: str, progress: Progress, *, key: str | None = None
) -> dict[str, Any]:
    """Push the image and its documents, sign it with ``key``, and set its tag last, so that no tag lacks evidence.

    The tag of a preview is moved; that of a release never is. Blobs are hashed before they are sent. Raises CheckFailed
    if the tag of a release already names another image, or if there are objections.
    """
    if ready.objections:
        raise CheckFailed(f"{ready.tag} may not be published: {'; '.join(ready.objections)}")
    with listening(progress.say):
        return _publish(ready, store, repository, progress, key)


def _publish(ready: Ready, store: Store, repository: str, progress: Progress, key: str | None) -> dict[str, Any]:
    digest = ready.image.digest
    there = Repository(repository)
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
    laid = zip(ready.documents, there.attach(ready.documents, ready.subject), strict=True)
    attached = [{"type": one.media_type, "name": one.name, "digest": where} for one, where in laid]
    # cosign stores signatures under this tag. Signing again with the same key would only make the list longer.
    if key and there.digest(f"{digest_tag(digest)}.sig") is None:
        sign(f"{repository}@{digest}", key)
    if before != digest:
        there.tag(ready.tag, ready.image.manifest)
        if (now := there.digest(ready.tag)) != digest:
            raise HostError(
                f"{repository}:{ready.tag} names {now or 'nothing'} after it was set to {digest}",
                hint="run the command again; if another publish set the tag, the release already exists",
            )
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


def sign(image: str, key: str) -> None:
    """Sign ``host/path@digest`` with cosign. ``key`` is a file or the address of a key service.

    Nothing is sent to a transparency log. The password of the key comes from COSIGN_PASSWORD. Raises HostError if
    cosign is missing or fails.
    """
    if shutil.which("cosign") is None:
        raise HostError("signing needs cosign, which is missing", hint="install cosign, or publish without --key")
    words = ["cosign", "sign", "--yes", "--tlog-upload=false", "--key", key, image]
    done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("Error")] or [f"code {done.returncode}"]
        raise HostError(f"cosign failed: {said[-1].partition(': ')[2] or said[-1]}", hint="check the key")


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
    trust = "--dest-tls-verify=false" if plain_http(repository) else "--dest-tls-verify=true"
    source = f"oci:{store.root.absolute()}:{ready.image.plan.ref}"
    skopeo("copy", "--quiet", "--preserve-digests", trust, source, f"docker://{repository}@{digest}")
    progress.finish("push")


def _records(folder: Path) -> list[dict[str, Any]]:
    """Read all validation records below ``folder``, sorted by path. Raises InputError for a file in another format."""
    found = []
    for path in sorted(folder.glob("*/record.json")):
        try:
            record: Any = read_json(path).data
            needed = (record["image"]["content"], record["recipe"]["name"], record["passed"], record["gpu"])
            if not all(isinstance(value, str | bool) for value in needed):
                raise TypeError
            _ = {v["name"]: v["passed"] for v in record["verdicts"]}, {j["name"]: j["ran"] for j in record["jobs"]}
        except (OSError, KeyError, TypeError):
            raise InputError("not a validation record", where=str(path), hint="remove it") from None
        found.append(record)
    return found


def _validation(record: dict[str, Any]) -> Document:
    recipe = record["recipe"]
    words = [*map(recipe.get, ("name", "backend", "mode", "precision")), f"{len(record['jobs'])}-runs"]
    name = "-".join(filter(None, words))
    data = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True).encode()
    return Document(media_type=VALIDATION, name=f"validation-{name}.json", data=data)


def checkout(root: Path) -> tuple[str | None, list[str]]:
    """Return the commit checked out at ``root`` (None outside git) and the files that differ from it."""
    try:
        commit = _git(root, "rev-parse", "--verify", "HEAD").strip()
        return commit, [line[3:] for line in _git(root, "status", "--porcelain").splitlines()]
    except (OSError, subprocess.CalledProcessError):
        return None, []


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout
