"""`primus withdraw`: a published release that must not be used any more."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from primus_images.cli.host.common import SignerOptions
from primus_images.cli.host.publish import check_repository
from primus_images.cli.host.sign import signer_of
from primus_images.cli.verb import Options, answer, note
from primus_images.errors import InputError
from primus_images.plan.project import Project
from primus_images.release.registry import Repository
from primus_images.release.statement import names_another_release
from primus_images.release.tags import require_good_successor, withdraw as attach, withdrawable
from primus_images.release.withdrawal import Withdrawal, remember, withdrawals


@dataclass(frozen=True, kw_only=True)
class WithdrawOptions(SignerOptions, Options):
    """The options of ``withdraw``."""

    release: str
    to: str
    reason: str
    successor: str | None
    project: Path | None


def withdraw(options: WithdrawOptions) -> int:
    """Withdraw a published release: sign why, attach it to the image, and note it in the project.

    The image and its tag stay. `verify`, `tag`, `diff` and `run` say first that it is withdrawn.
    """
    example = (
        "primus withdraw v26.11-cpu --to docker.io/OWNER/NAME --key cosign.key "
        "--reason 'wrong gradients' --successor v26.11.1-cpu"
    )
    check_repository(options.to, example)
    reason = " ".join(options.reason.split())
    if not reason:
        raise InputError("--reason is empty: users must know why", hint=example)
    if not reason.isprintable():
        raise InputError("--reason has characters that cannot be printed", hint=example)
    signer = signer_of(options)
    if signer is None:
        raise InputError("--key or --keyless is missing: who signs?", hint="--key cosign.key")
    root = None
    if options.project or Project.here():
        root = Project.find(options.project).root
        withdrawals(root)  # a damaged file is refused before anything is signed
    there = Repository(options.to)
    image = withdrawable(there, options.release, options.successor)
    if options.successor:
        require_good_successor(there, options.successor, signer)
    withdrawal = Withdrawal(
        reason=reason,
        date=datetime.now(tz=UTC).date().isoformat(),
        successor=options.successor,
        digest=image.digest,
    )
    attach(there, image, withdrawal, signer)
    lines = [
        f"{options.to}:{options.release}: {withdrawal.sentence}",
        f"{options.to}@{image.digest}",
    ]
    file = None
    if root:
        noted = withdrawals(root).get(options.release)
        if noted and noted.digest not in (None, image.digest):
            note(
                options,
                f"! withdrawn.yaml no longer names {noted.digest}, another image {options.release}",
            )
        file = str(remember(root, options.release, withdrawal))
        lines.append(f"  → commit {file}, so that `primus run` and `primus diff` know it")
    for tag in image.moving_tags:
        note(options, f"! {tag} still names it: {_remedy(tag, options)}")
    document = {
        "ref": f"{options.to}:{options.release}",
        "digest": image.digest,
        **withdrawal.predicate,
        "tags": list(image.moving_tags),
        "file": file,
    }
    return answer(options, document, lines)


def _remedy(tag: str, options: WithdrawOptions) -> str:
    """Return what to do with a moving tag that names a withdrawn image."""
    successor = options.successor or "RELEASE"
    release, _, _ = successor.partition("-")
    if options.successor and names_another_release(tag, release):
        return f"{successor} is of another release, so publish a patch for it, or remove the tag"
    return f"primus tag {tag} {successor} --to {options.to} --key KEY"
