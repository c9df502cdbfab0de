"""`primus sign`: signatures of published images, made on another machine than the publish."""

from dataclasses import dataclass
from pathlib import Path

from primus_images.cli.host.common import SignerOptions, TrustedOptions
from primus_images.cli.verb import Options, answer
from primus_images.errors import InputError
from primus_images.release.publish import finish
from primus_images.release.registry import Repository
from primus_images.release.statement import Signer, Trust, check_key, requests, require_unedited
from primus_images.terminal import counted


@dataclass(frozen=True, kw_only=True)
class SignOptions(SignerOptions, Options):
    """The options of ``sign``."""

    folder: Path


def sign(options: SignOptions) -> int:
    """Sign the evidence of published images, attach it to them, and set their tags."""
    signer = signer_of(options)
    if signer is None:
        raise InputError("--key or --keyless is missing: who signs?", hint="--key cosign.key")
    done = []
    lines = []
    for request in requests(options.folder):
        name, _, _ = request.ref.rpartition(":")
        digest = request.subject["digest"]
        there = Repository(name)
        require_unedited(there, request)
        number = finish(there, request, signer)
        done.append({"ref": request.ref, "digest": digest, "signed": number})
        lines += [f"{request.ref}: {counted(number, 'statement')} signed", f"{name}@{digest}"]
    return answer(options, {"signed": done}, lines)


def signer_of(options: SignerOptions) -> Signer | None:
    """Return who signs by the options --key and --keyless; None without them."""
    if options.key and options.keyless:
        raise InputError("--key and --keyless exclude each other")
    if not (options.key or options.keyless):
        return None
    signer = Signer(key=options.key)
    signer.check("--key")
    return signer


def trust_of(options: TrustedOptions) -> Trust:
    """Return whose signatures count by --key, or by --identity and --issuer."""
    if options.key and (options.identity or options.issuer):
        raise InputError(
            "--key and --identity with --issuer exclude each other: who must have signed it?",
            hint="--key cosign.pub",
        )
    if not options.key and not (options.identity and options.issuer):
        raise InputError(
            "who must have signed it? Name either --key, or --identity and --issuer",
            hint="--key cosign.pub",
        )
    check_key(options.key, "--key")
    return Trust(key=options.key, identity=options.identity, issuer=options.issuer)
