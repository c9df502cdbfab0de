"""Errors for users: what is wrong, where, and what to do about it.

Every error that reaches the command line is a :class:`PrimusError`. Its class determines the exit
code (0 success, 1 failed check or job, 2 invalid input, 3 missing requirement). ``main`` prints it
without a traceback.
"""

import re
from collections.abc import Collection, Iterable

# Longer than names, digests and most paths are: a broken file may have a key of a megabyte.
_LONG_WORD = re.compile(r"(\S{200})\S{100,}")
# Two words that are less alike than this are two words.
_MISSPELLED = 0.84


def did_you_mean(word: str, choices: Iterable[str], *, most: int = 1) -> str:
    """Return ``did you mean 'x'?`` with up to ``most`` similar words of ``choices``; empty if none
    is similar.
    """
    from difflib import get_close_matches  # not for a command without a mistake

    names = list(choices)
    same = [name for name in names if name.lower() == word.lower()]
    near = same[:most] or get_close_matches(word, names, most)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return ""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the same as the end of a sentence that refuses ``word``: ``; did you mean 'x'?``, or
    an empty text.
    """
    if near := did_you_mean(word, choices):
        return f"; {near}"
    return ""


def alike(word: str, names: Collection[str]) -> str:
    """Return which name was meant, as the end of a sentence; "" if none.

    Names with other digits are other things: ``qwen3_8B`` is no misspelled ``qwen2.5_7B``.
    """
    from difflib import SequenceMatcher  # not for a command without a mistake

    digits = re.findall(r"\d+", word)
    close = []
    for name in names:
        likeness = SequenceMatcher(None, word.lower(), name.lower()).ratio()
        if re.findall(r"\d+", name) == digits and likeness > _MISSPELLED:
            close.append(name)
    return nearest(word, close)


class PrimusError(Exception):
    """Base of all errors shown to the user.

    ``message`` states the problem in one sentence, ``where`` is ``file:line:col`` if a file is
    wrong, and ``hint`` tells what to do. ``about`` is the package, image or repository concerned,
    for a caller that knows where it is pinned.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        where: object = None,
        hint: str | None = None,
        about: str | None = None,
    ) -> None:
        self.message = _LONG_WORD.sub(r"\1…", message)
        super().__init__(self.message)
        self.about = about
        if where is None:
            self.where = None
        else:
            self.where = str(where)
        self.hint = hint

    def __str__(self) -> str:
        if self.where:
            text = f"{self.where}: {self.message}"
        else:
            text = self.message
        if self.hint:
            return f"{text}\n  → {self.hint}"
        return text


class CheckFailed(PrimusError):
    """A check or a job failed although the input was valid (exit code 1)."""


class InputError(PrimusError):
    """A file, option or value given by the user is invalid (exit code 2)."""

    exit_code = 2


class HostError(PrimusError):
    """The machine lacks something: a tool, a source that answers, disk space, permission (exit code
    3).
    """

    exit_code = 3
