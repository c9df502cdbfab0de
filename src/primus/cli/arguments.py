"""Types of command-line values that several verbs share, for argparse's ``type=``.

They reject invalid values while the command line is parsed, with a message that names the option.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from primus.errors import InputError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def whole(*, least: int | None = None) -> Callable[[str], int]:
    """Return a parser for whole numbers in plain ASCII digits, at least ``least``."""

    def read(text: str) -> int:
        # int() also accepts "1_0", " 2", digits of other scripts and numbers of any length; YAML does not.
        number = int(text) if re.fullmatch(r"-?[0-9]{1,64}", text) else None
        if number is None or (least is not None and number < least):
            limit = "" if least is None else f" of at least {least}"
            raise argparse.ArgumentTypeError(f"must be a whole number{limit}, not {text[:40]!r}")
        return number

    return read


def path(option: str) -> Callable[[str], Path]:
    """Return a parser for paths. It raises InputError if the path is empty or contains control characters."""

    def read(text: str) -> Path:
        if not text:
            raise InputError(f"{option} is empty")
        if _CONTROL.search(text):
            raise InputError(f"{option} {text[:80]!r} must not contain control characters")
        return Path(text)

    return read


def folder(option: str) -> Callable[[str], Path]:
    """Return a parser for folders that exist or can be created. It raises InputError if a file is in the way."""
    plain = path(option)

    def read(text: str) -> Path:
        target = plain(text)
        for part in (target, *target.parents):
            try:
                usable = part.is_dir() or not os.path.lexists(part)
            except OSError as error:
                raise InputError(f"{option} {text[:80]}: {(error.strerror or '').lower()}") from error
            if not usable:
                raise InputError(f"{part} is not a folder", hint=f"choose another {option}")
        return target

    return read


def new_file(option: str, *suffixes: str) -> Callable[[str], Path]:
    """Return a parser for new files. It raises InputError if the file exists, its folder does not, or its name ends
    with none of ``suffixes``.
    """
    plain = path(option)

    def read(text: str) -> Path:
        target = plain(text)
        if os.path.lexists(target):
            raise InputError(f"{target} already exists", hint=f"choose another {option}, or delete it")
        if not target.parent.is_dir():
            missing = not os.path.lexists(target.parent)
            hint = f"create it: mkdir -p {shlex.quote(str(target.parent))}" if missing else f"choose another {option}"
            raise InputError(f"{target.parent} {'does not exist' if missing else 'is not a folder'}", hint=hint)
        if suffixes and target.suffix not in suffixes:
            raise InputError(
                f"{target.name} does not end with {' or '.join(suffixes)}", hint=f"choose another {option}"
            )
        return target

    return read
