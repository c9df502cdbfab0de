"""`primus tag`: a moving tag of a registry."""

import argparse

from primus_images.cli.host.publish import check_repository
from primus_images.cli.host.sign import trust_of
from primus_images.cli.verb import answer
from primus_images.release.registry import Repository
from primus_images.release.tags import move_tag, require_moving


def tag(args: argparse.Namespace) -> int:
    """Move a tag to a published release, forwards after a publish or back to an earlier one."""
    example = "primus tag latest-cpu v26.11-cpu --to docker.io/OWNER/NAME --key cosign.pub"
    check_repository(args.to, example)
    require_moving(args.tag, args.release)
    trust = trust_of(args)
    before, digest = move_tag(Repository(args.to), args.tag, args.release, trust)
    line = f"{args.to}:{args.tag}: {before or 'new'} → {digest} ({args.release})"
    return answer(args, {"tag": f"{args.to}:{args.tag}", "old": before, "new": digest}, [line])
