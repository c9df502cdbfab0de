"""Moving tags, such as ``latest-cpu``: they follow evidence, and stay with one target."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from primus_images.errors import CheckFailed, InputError
from primus_images.oci.store import MANIFEST_TYPE, digest_of
from primus_images.release.artifact import ANNOUNCED, DAMAGED, WITHDRAWAL
from primus_images.release.documents import IN_TOTO, statement
from primus_images.release.publish import require_set
from primus_images.release.reference import require_tag
from primus_images.release.registry import Repository
from primus_images.release.statement import (
    RELEASE_TAG,
    Signer,
    Trust,
    bundles,
    names_another_release,
    target_of,
    target_of_latest,
)
from primus_images.release.verification import (
    Verified,
    problem_of_successor,
    verify_statements,
)
from primus_images.release.withdrawal import Withdrawal


def move_tag(there: Repository, tag: str, release: str, trust: Trust) -> tuple[str | None, str]:
    """Let a moving tag (``latest-cpu``) name a published release whose statements verify.

    Returns the old digest and the new one. Raises InputError for a release that was not published:
    that a publisher announced it is not enough. Raises CheckFailed for an image that does not
    verify, was withdrawn, or is of another target or release than the tag.
    """
    before = there.digest(tag)
    manifest = None
    if ANNOUNCED not in release:
        manifest = there.manifest(release)
    if manifest is None:
        others = []
        for other in there.tags("v"):
            if re.fullmatch(RELEASE_TAG, other) and ANNOUNCED not in other:
                others.append(other)
        raise InputError(
            f"{there.name} has no {release}; its releases: {', '.join(others) or 'none'}",
            hint="primus publish publishes one",
        )
    verified = verify_statements(there, release, trust)
    _require_verified(verified, tag, release, there)
    _require_same_target(there, tag, before, verified)
    if before != verified.digest:  # a registry that forbids moving tags also refuses this one
        there.tag(tag, there.manifest(verified.digest) or b"")
    require_set(there, tag, there.digest(tag), verified.digest)
    return before, verified.digest


class PublishedImage(NamedTuple):
    """An image of a release that was published, and the moving tags that name it."""

    tag: str
    digest: str
    manifest: bytes
    moving_tags: tuple[str, ...]


def withdrawable(there: Repository, release: str, successor: str | None) -> PublishedImage:
    """Return the published image that is called ``release``.

    Raises InputError if there is none, or if the successor is not another release of its target.
    """
    if not re.fullmatch(RELEASE_TAG, release):
        raise InputError(
            f"{release} is not the name of a release", hint="name one, such as v26.11-cpu"
        )
    manifest = there.manifest(release)
    if manifest is None:
        raise there.lacks(release)
    digest = digest_of(manifest)
    if successor:
        _require_successor(there, successor, release, digest)
    moving = []
    for tag in there.tags_with(release):
        fixed = re.fullmatch(f"{RELEASE_TAG}|sha256-.*", tag) or ANNOUNCED in tag
        if not fixed and there.digest(tag) == digest:
            moving.append(tag)
    return PublishedImage(release, digest, manifest, tuple(moving))


def _require_successor(there: Repository, successor: str, release: str, digest: str) -> None:
    same_target = _target_of(successor) == _target_of(release)
    if not re.fullmatch(RELEASE_TAG, successor) or not same_target or successor == release:
        raise InputError(
            f"--successor {successor} is not another release of the target of {release}",
            hint="name one, such as v26.11.1-cpu for v26.11-cpu",
        )
    after = there.digest(successor)
    if after is None:
        raise there.lacks(successor)
    if after == digest:
        raise InputError(
            f"--successor {successor} is the same image as {release}",
            hint="publish the mended release first",
        )


def require_good_successor(there: Repository, successor: str, signer: Signer) -> None:
    """Raise CheckFailed unless the successor's statements verify with the key that withdraws."""
    with TemporaryDirectory(prefix="primus-key-") as folder:
        trust = signer.own_trust(Path(folder))
        problem = problem_of_successor(there, successor, trust) if trust else ""
    if problem:
        raise CheckFailed(
            f"--successor {successor} does not verify: {problem}",
            hint="publish it with this key, which signs it, or leave out --successor",
        )


def withdraw(
    there: Repository, image: PublishedImage, withdrawal: Withdrawal, signer: Signer
) -> None:
    """Attach the signed statement that an image is withdrawn."""
    content = statement(image.tag, image.digest, WITHDRAWAL, withdrawal.predicate)
    subject = {
        "mediaType": MANIFEST_TYPE,
        "digest": image.digest,
        "size": len(image.manifest),
    }
    there.attach(bundles(there, image.digest, [content], signer), subject)


def require_moving(tag: str, release: str) -> None:
    """Raise InputError unless ``tag`` may move to ``release``, by their names."""
    if re.fullmatch(f"{RELEASE_TAG}|sha256-.*", tag) or ANNOUNCED in tag:
        raise InputError(
            f"{tag} is a tag that publishing sets, which never moves by hand",
            hint="move one such as latest-cpu",
        )
    require_tag(tag, "TAG")
    if re.fullmatch("sha256:[0-9a-f]{64}", release) is None:
        require_tag(release, "RELEASE")
    target = target_of_latest(tag)
    is_release = re.fullmatch(RELEASE_TAG, release) and target == _target_of(release)
    if target and not is_release:
        raise InputError(
            f"{release} is not the name of a release of the target of {tag}",
            hint="name one, like v26.11-cpu for latest-cpu; a tag that does not begin with "
            "latest- can stand for any image",
        )


def _target_of(tag: str) -> str:
    return target_of(tag.partition(ANNOUNCED)[0])


def _require_verified(verified: Verified, tag: str, release: str, there: Repository) -> None:
    problem = verified.withdrawn
    if verified.faults:
        problem = verified.faults[0]
    if problem:
        raise CheckFailed(
            f"{tag} does not move to {release}: {problem}",
            hint=f"primus verify --image {there.name}@{verified.digest} --key KEY tells all",
        )


def _require_same_target(
    there: Repository, tag: str, before: str | None, verified: Verified
) -> None:
    """Raise CheckFailed if the tag stands for another target or release than the image."""
    target = target_of_latest(tag)
    if before and not target:
        target = _target_in(there, before)
    if target and target != verified.target:
        raise CheckFailed(
            f"{tag} stands for target {target}, and the image is of {verified.target}",
            hint="choose another tag, or a release of this target",
        )
    release = verified.release
    if names_another_release(tag, release):
        raise CheckFailed(
            f"{tag} is the name of another release than that of the image, {release}",
            hint=f"a tag for it can be {release} or one that is not the name of a release",
        )


def _target_in(there: Repository, digest: str) -> str:
    """Return the target that the provenance of an image names; empty without one.

    Raises CheckFailed if the provenance is listed, and lost.
    """
    for document in there.documents(digest, IN_TOTO):
        try:
            content = json.loads(document.data)
            definition = content["predicate"]["buildDefinition"]
            return str(definition["externalParameters"]["target"])
        except DAMAGED:
            continue
    return ""
