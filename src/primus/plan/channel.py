"""Which of a target's channels builds it, and why. An image never mixes files of two channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from primus.errors import InputError

if TYPE_CHECKING:
    from primus.plan.target import Target

# Pure Python packages come from PyPI in every channel, and every channel uses local folders.
SOURCES: dict[str, tuple[str, ...]] = {
    "amd": ("amd", "pypi", "local"),
    "debian": ("debian", "pypi", "local"),
    "pypi": ("pypi", "local"),
    "local": ("local",),
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The channel that builds a target. ``base`` is its root file system, ``preview`` the reason why its image is
    not a release, ``reason`` why the channel was chosen.
    """

    channel: str
    base: str | None
    preview: str | None
    reason: str
    # Whether the user named the channel.
    named: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """The channels whose pins it may use, best first."""
        return SOURCES[self.channel]

    @property
    def suffix(self) -> str:
        """The suffix of the image's name."""
        return "-preview" if self.preview else ""


def choose(name: str, target: Target, asked: str | None, locked: Callable[[str], bool]) -> Choice:
    """Return the requested channel, else the best one with a committed lock, else the best one.

    The choice depends on locks, not on the network, so the same checkout chooses the same channel on every machine.
    ``locked`` returns whether a channel has a lock. Raises InputError for a channel that the target does not have.
    """
    if asked is not None:
        if asked not in target.channels:
            raise InputError(f"{name} has no channel {asked!r}", hint="its channels: " + ", ".join(target.channels))
        return replace(_choice(target, asked, "selected by --channel"), named=True)
    for channel in target.channels:
        if locked(channel):
            better = target.channels[: target.channels.index(channel)]
            reason = "the only channel" if len(target.channels) == 1 else "the best channel with a lock"
            if better:
                reason += f"; {', '.join(better)} has none here (primus lock {name} --channel {better[0]})"
            return _choice(target, channel, reason)
    return _choice(target, target.channels[0], "the best channel; none has a lock yet")


def _choice(target: Target, channel: str, reason: str) -> Choice:
    base = target.bases.get(channel, target.base)
    return Choice(channel=channel, base=base, preview=target.previews.get(channel), reason=reason)
