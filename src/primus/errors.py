"""Errors a person can act on: what is wrong, where, and what to do.

Every error that reaches the command line is a :class:`PrimusError`; its class decides the exit code
(0 ok, 1 failed check or job, 2 bad input, 3 environment). ``main`` prints one and never a traceback.
"""

from __future__ import annotations

__all__ = ["CheckFailed", "HostError", "InputError", "PrimusError"]


class PrimusError(Exception):
    """Base of all errors shown to the user.

    ``message`` says what is wrong in one sentence, ``where`` is ``file:line:col`` when a file is to blame,
    ``hint`` says what to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
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
