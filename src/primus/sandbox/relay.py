"""The user's terminal: its size, its settings, and whether a command gets its own terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import tty
from typing import Any

from primus.sandbox.container import Command, Stream


def window_size(number: int) -> tuple[int, int]:
    """Return rows and columns of the terminal at descriptor ``number``; (24, 80) if it is not a terminal."""
    try:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(number, termios.TIOCGWINSZ, b"\0" * 8))
    except OSError:
        return 24, 80
    return (rows, columns) if rows and columns else (24, 80)


def raw_mode(number: int) -> list[Any] | None:
    """Put a terminal into raw mode and return the argument for :func:`restore`; None if it is not a terminal."""
    before = saved(number)
    if before is not None:
        tty.setraw(number, termios.TCSADRAIN)
    return before


def saved(number: int) -> list[Any] | None:
    """Return the settings of the terminal at ``number``, for :func:`restore`; None if it is not a terminal."""
    try:
        return termios.tcgetattr(number)
    except termios.error:
        return None


def restore(number: int, before: list[Any] | None) -> None:
    """Restore the settings. Does nothing for None."""
    if before is not None:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(number, termios.TCSADRAIN, before)


def wants_terminal(command: Command, stdin: Stream, stdout: Stream) -> bool:
    """Return whether the command gets a pseudo-terminal."""
    if command.tty is not None:
        return command.tty
    return stdin is None and stdout is None and os.isatty(0) and os.isatty(1)
