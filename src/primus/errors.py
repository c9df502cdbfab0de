"""Errors a person can act on: what is wrong, where, and what to do.

Every error that reaches the command line is a :class:`PrimusError`; its class decides the exit code
(0 ok, 1 failed check or job, 2 bad input, 3 environment). ``main`` prints one and never a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """``did you mean 'x'?`` with the nearest of ``known`` (``most`` of them at most); empty when none is near."""
    # Seam "suggestion": only a wrong name costs these 5 ms.
    from difflib import get_close_matches

    names = list(known)
    same = [name for name in names if name.lower() == word.lower()]
    near = same[:most] or get_close_matches(word, names, most)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """The same as the end of a sentence that refuses ``word``: ``; did you mean 'x'?`` or nothing."""
    return f"; {near}" if (near := did_you_mean(word, known)) else ""


class PrimusError(Exception):
    """Base of all errors shown to the user.

    ``message`` says what is wrong in one sentence, ``where`` is ``file:line:col`` when a file is to blame,
    ``hint`` says what to do about it. ``about`` is the package, image or repository concerned, for a caller that knows
    where that is pinned.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, where: str | None = None, hint: str | None = None, about: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.about = about
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  → {self.hint}" if self.hint else text


class CheckFailed(PrimusError):
    """A check or a job failed: the input was fine, the outcome was not (exit code 1)."""

    exit_code = 1


class InputError(PrimusError):
    """A file, option or value given by the user is wrong (exit code 2)."""

    exit_code = 2


class HostError(PrimusError):
    """The machine lacks something: a tool, a source that answers, disk, permission (exit code 3)."""

    exit_code = 3


class Interrupted(PrimusError):
    """Ctrl-C or a signal ended a command that can say what is left of it (exit code 130)."""

    exit_code = 130


class LacksPackages(HostError):
    """The archive is out of reach until ``packages`` of this host's own distribution are installed."""

    def __init__(self, message: str, packages: tuple[str, ...], hint: str) -> None:
        super().__init__(message, hint=f"apt-get install {' '.join(packages)}, or {hint}")
        self.packages = packages
