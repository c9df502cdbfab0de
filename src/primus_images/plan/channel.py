"""The channel that builds a target: where its files come from.

An image never mixes files of two channels.
"""

from collections.abc import Callable
from typing import NamedTuple

from primus_images.errors import InputError
from primus_images.plan.target import Target


class Choice(NamedTuple):
    """The channel that builds a target, and the ``reason`` why it was chosen.

    ``base`` is its root file system, ``preview`` the reason why its image is not a release.
    """

    channel: str
    base: str | None
    preview: str | None
    reason: str

    @property
    def sources(self) -> tuple[str, ...]:
        """The channels whose pins it may use, best first."""
        if self.channel == "local":
            return ("local",)
        # Pure Python packages come from PyPI in every channel.
        return tuple(dict.fromkeys((self.channel, "pypi", "local")))

    @property
    def suffix(self) -> str:
        """The suffix of the image's name."""
        if self.preview:
            return "-preview"
        return ""


def choose(
    name: str, target: Target, requested: str | None, has_lock: Callable[[str], bool]
) -> Choice:
    """Return the ``requested`` channel, else the best one with a committed lock, else the best one.

    The choice depends on locks, not on the network, so the same checkout chooses the same channel
    on every machine. Raises InputError for a channel that the target does not have.
    """
    if requested and requested not in target.channels:
        channels = ", ".join(target.channels)
        raise InputError(f"{name} has no channel {requested!r}", hint=f"its channels: {channels}")
    locked = next(filter(has_lock, target.channels), None)
    channel = requested or locked or target.channels[0]
    if requested:
        reason = "selected by --channel"
    elif locked is None:
        reason = "the best channel; none has a lock yet"
    elif len(target.channels) == 1:
        reason = "the only channel"
    else:
        reason = "the best channel with a lock"
        better = target.channels[: target.channels.index(channel)]
        if better:
            command = f"primus lock {name} --channel {better[0]}"
            reason += f"; {', '.join(better)} has none here ({command})"
    base = target.bases.get(channel, target.base)
    return Choice(channel=channel, base=base, preview=target.previews.get(channel), reason=reason)
