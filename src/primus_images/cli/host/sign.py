"""`primus sign`: signatures of published images, made on another machine than the publish."""

import argparse

from primus_images.cli.verb import answer
from primus_images.errors import InputError
from primus_images.release.publish import finish
from primus_images.release.registry import Repository
from primus_images.release.statement import Signer, Trust, check_key, requests, require_unedited


def sign(args: argparse.Namespace) -> int:
    """Sign the evidence of published images, attach it to them, and set their tags."""
    signer = signer_of(args)
    if signer is None:
        raise InputError("--key or --keyless is missing: who signs?", hint="--key cosign.key")
    done = []
    lines = []
    for request in requests(args.folder):
        name, _, _ = request.ref.rpartition(":")
        digest = request.subject["digest"]
        there = Repository(name)
        require_unedited(there, request)
        number = finish(there, request, signer)
        done.append({"ref": request.ref, "digest": digest, "signed": number})
        lines += [f"{request.ref}: {number} statements signed", f"{name}@{digest}"]
    return answer(args, {"signed": done}, lines)


def signer_of(args: argparse.Namespace) -> Signer | None:
    """Return who signs by the options --key and --keyless; None without them."""
    if args.key and args.keyless:
        raise InputError("--key and --keyless exclude each other")
    if not (args.key or args.keyless):
        return None
    signer = Signer(key=args.key)
    signer.check("--key")
    return signer


def trust_of(args: argparse.Namespace) -> Trust:
    """Return whose signatures count by --key, or by --identity and --issuer."""
    if args.key and (args.identity or args.issuer):
        raise InputError(
            "--key and --identity with --issuer exclude each other: who must have signed it?",
            hint="--key cosign.pub",
        )
    if not args.key and not (args.identity and args.issuer):
        raise InputError(
            "who must have signed it? Name either --key, or --identity and --issuer",
            hint="--key cosign.pub",
        )
    check_key(args.key, "--key")
    return Trust(key=args.key, identity=args.identity, issuer=args.issuer)
