"""`primus tag`: a moving tag of a registry."""

from dataclasses import dataclass

from primus_images.cli.host.common import TrustedOptions
from primus_images.cli.host.publish import check_repository
from primus_images.cli.host.sign import trust_of
from primus_images.cli.verb import Options, answer
from primus_images.release.registry import Repository
from primus_images.release.tags import move_tag, require_moving


@dataclass(frozen=True, kw_only=True)
class TagOptions(TrustedOptions, Options):
    """The options of ``tag``."""

    tag: str
    release: str
    to: str


def tag(options: TagOptions) -> int:
    """Move a tag to a published release, forwards after a publish or back to an earlier one."""
    example = "primus tag latest-cpu v26.11-cpu --to docker.io/OWNER/NAME --key cosign.pub"
    check_repository(options.to, example)
    require_moving(options.tag, options.release)
    trust = trust_of(options)
    before, digest = move_tag(Repository(options.to), options.tag, options.release, trust)
    moved = f"{options.to}:{options.tag}"
    line = f"{moved}: {before or 'new'} → {digest} ({options.release})"
    return answer(options, {"tag": moved, "old": before, "new": digest}, [line])
