"""The rule for every path in an image, from any source: a component, a wheel, a package or a base image."""

from __future__ import annotations

import re

_CONTROL = "[\0-\x1f\x7f-\x9f]"
_MOST_NAME, _MOST_PATH = 255, 4095


def path_fault(path: str) -> str | None:
    """Return what is wrong with ``path`` as the path of a file in a layer; None if nothing is.

    A valid path is relative, stays inside the root, is UTF-8 without control characters, respects Linux's limits,
    and contains no name that begins with ``.wh.``, which would remove files of other layers.
    """
    # The fast path for nearly all paths: layers have a hundred thousand of them.
    if (
        path.isascii()
        and path.isprintable()
        and 0 < len(path) <= _MOST_NAME
        and path[0] not in "./"
        and path[-1] != "/"
        and "/." not in path
        and "//" not in path
    ):
        return None
    if fault := _text_fault(path):
        return fault
    if path.startswith("/"):
        return "it is absolute"
    parts = path.split("/")
    if ".." in parts:
        return "it leaves its folder"
    if "" in parts or "." in parts:
        return "it has an empty part or a dot as a part"
    if any(part.startswith(".wh.") for part in parts):
        return "a name that begins with .wh. removes files of other layers"
    if any(len(part.encode()) > _MOST_NAME for part in parts):
        return f"a name in it is longer than {_MOST_NAME} bytes"
    return None


def link_fault(target: str) -> str | None:
    """Return what is wrong with ``target`` as the target of a symbolic link; None if nothing is. It may be absolute."""
    if target.isascii() and target.isprintable() and 0 < len(target) <= _MOST_PATH:
        return None
    return _text_fault(target)


def _text_fault(text: str) -> str | None:
    if not text:
        return "it is empty"
    if re.search(_CONTROL, text):
        return "it has a control character"
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "it is not UTF-8"
    return f"it is longer than {_MOST_PATH} bytes" if size > _MOST_PATH else None
