"""`primus withdraw`: a published release that must not be used any more."""

import argparse
from datetime import UTC, datetime

from primus_images.cli.host.publish import check_repository
from primus_images.cli.host.sign import signer_of
from primus_images.cli.verb import answer, note
from primus_images.errors import InputError
from primus_images.plan.project import Project
from primus_images.release.registry import Repository
from primus_images.release.tags import withdraw as attach, withdrawable
from primus_images.release.withdrawal import Withdrawal, remember, withdrawals


def withdraw(args: argparse.Namespace) -> int:
    """Withdraw a published release: sign why, attach it to the image, and note it in the project.

    The image and its tag stay. `verify`, `tag`, `diff` and `run` say first that it is withdrawn.
    """
    example = (
        "primus withdraw v26.11-cpu --to docker.io/OWNER/NAME --key cosign.key "
        "--reason 'wrong gradients' --successor v26.11.1-cpu"
    )
    check_repository(args.to, example)
    if not args.reason.strip():
        raise InputError("--reason is empty: users must know why", hint=example)
    signer = signer_of(args)
    if signer is None:
        raise InputError("--key or --keyless is missing: who signs?", hint="--key cosign.key")
    root = None
    if args.project or Project.here():
        root = Project.find(args.project).root
        withdrawals(root)  # a damaged file is refused before anything is signed
    there = Repository(args.to)
    image = withdrawable(there, args.release, args.successor)
    withdrawal = Withdrawal(
        reason=" ".join(args.reason.split()),
        date=datetime.now(tz=UTC).date().isoformat(),
        successor=args.successor,
        digest=image.digest,
    )
    attach(there, image, withdrawal, signer)
    lines = [f"{args.to}:{args.release}: {withdrawal.sentence}", f"{args.to}@{image.digest}"]
    file = None
    if root:
        file = str(remember(root, args.release, withdrawal))
        lines.append(f"  → commit {file}, so that `primus run` and `primus diff` know it")
    for tag in image.moving_tags:
        note(
            args,
            f"! {tag} still names it: primus tag {tag} {args.successor or 'RELEASE'} "
            f"--to {args.to} --key KEY",
        )
    document = {
        "ref": f"{args.to}:{args.release}",
        "digest": image.digest,
        **withdrawal.predicate,
        "tags": list(image.moving_tags),
        "file": file,
    }
    return answer(args, document, lines)
