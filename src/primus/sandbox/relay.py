"""Between the person's terminal and a pseudo-terminal in the container."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import tty
from typing import Any

from primus.sandbox.model import Command, Stream

__all__ = ["Terminal", "raw_mode", "restore", "saved", "wanted", "window_size"]

_CHUNK = 65536
_END_OF_FILE = b"\x04"


def window_size(number: int) -> tuple[int, int]:
    """Rows and columns of the terminal at descriptor ``number``; (24, 80) when it is none."""
    try:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(number, termios.TIOCGWINSZ, b"\0" * 8))
    except OSError:
        return 24, 80
    return (rows, columns) if rows and columns else (24, 80)


def raw_mode(number: int) -> list[Any] | None:
    """Put a terminal into raw mode and return what :func:`restore` needs; None when it is no terminal."""
    before = saved(number)
    if before is not None:
        tty.setraw(number, termios.TCSADRAIN)
    return before


def saved(number: int) -> list[Any] | None:
    """The settings of the terminal at ``number``, for :func:`restore`; None when it is no terminal."""
    try:
        return termios.tcgetattr(number)
    except termios.error:
        return None


def restore(number: int, before: list[Any] | None) -> None:
    """Undo :func:`raw_mode`; None does nothing."""
    if before is not None:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(number, termios.TCSADRAIN, before)


def wanted(command: Command, stdin: Stream, stdout: Stream) -> bool:
    """Whether the command gets a pseudo-terminal."""
    if command.tty is not None:
        return command.tty
    return stdin is None and stdout is None and os.isatty(0) and os.isatty(1)


class Terminal:
    """Moves bytes between stdin/stdout and a pseudo-terminal's master until the other side is gone."""

    def __init__(self, master: int) -> None:
        self._master = master
        os.set_blocking(master, False)
        self._open = True
        self._stdin_open = True
        self._to_container = b""
        self._saved = raw_mode(0)
        self.resize()

    def resize(self) -> None:
        """Give the container's terminal the size of ours."""
        rows, columns = window_size(0)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def interests(self) -> tuple[list[int], list[int]]:
        """Descriptors to wait for: readable, writable."""
        reads = [self._master] if self._open else []
        # One buffer at a time: a command that does not read must not fill our memory.
        if self._stdin_open and self._open and not self._to_container:
            reads.append(0)
        return reads, [self._master] if self._to_container and self._open else []

    def move(self, ready: list[int], writable: list[int]) -> None:
        """Move what is ready."""
        if 0 in ready and self._stdin_open:
            try:
                data = os.read(0, _CHUNK)
            except OSError:
                data = b""
            self._stdin_open = bool(data)
            self._to_container = data or _END_OF_FILE
        if self._master in writable or (self._to_container and self._open):
            with contextlib.suppress(BlockingIOError, OSError):
                self._to_container = self._to_container[os.write(self._master, self._to_container) :]
        if self._master in ready:
            self._out()

    def _out(self) -> None:
        try:
            data = os.read(self._master, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._open = False
            return
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(1, view) :]
            except OSError:
                self._open = False
                return

    def drain(self) -> None:
        """Pass on what the container wrote before it ended; nobody is left to write more."""
        os.set_blocking(self._master, True)
        while self._open:
            self._out()

    def close(self) -> None:
        """Give the person's terminal back."""
        restore(0, self._saved)
        with contextlib.suppress(OSError):
            os.close(self._master)
