"""The shortest way to "nothing to do": since the last build nothing it read and nothing it made was touched.

A no-op build is mostly start-up, and most of that is imports. So a build that ends leaves a note: the size, times,
inode and mode of every file and folder it read (pins, target, lock, local trees, the engine's own code) and of every
blob it made, and the image's name and digest. While all of them are as noted, planning anew would give the same
plan; any difference only leads to the plan. The note trusts what git's index trusts, and like it refuses files
touched after the build began. Imports stay at the bare minimum on purpose.
"""

from __future__ import annotations

import json
import os
import sys
import time
from zlib import crc32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


# As in the module stat, which costs an import.
_TYPE, _REGULAR = 0o170000, 0o100000


def nothing_to_do(words: Sequence[str]) -> bool:
    """Answer ``primus build WORDS`` from the notes of its targets, if they all still hold; False leaves it undone.

    Options that cannot change the answer are understood, any other word that is not a target takes the long way.
    """
    begin = time.monotonic()
    targets, places = _parse(words)
    root = _absolute(places["--project"]) if "--project" in places else _above(os.getcwd())
    if not targets or not root:
        return False
    store = _absolute(places["--store"]) if "--store" in places else f"{root}/.primus/store"
    notes = []
    seen: set[tuple[str, str]] = set()
    for target in targets:
        try:
            note = _note(note_path(root, target))
            # Targets share most of what they read: each group is looked at once.
            groups = {(paths, marks) for paths, marks in note["groups"]} - seen
            if note["store"] != store or any(marks != marks_of(paths) for paths, marks in groups):
                return False
            seen |= groups
        except (OSError, ValueError, KeyError, TypeError):
            return False
        notes.append(note)
    say_unchanged([(note["name"], note["digest"]) for note in notes], time.monotonic() - begin)
    return True


def say_unchanged(images: Sequence[tuple[str, str]], seconds: float) -> None:
    """Say of each image (its name, its digest) that there is nothing to do: one line, which ends in the digest.

    The digest alone goes to standard output. Where that leads elsewhere than standard error, each gets a line.
    """
    end = "  " if _one_stream() else "\n"
    for name, digest in images:
        sys.stderr.write(f"{name}: nothing to do, {seconds:.2f} s{end}")
        sys.stderr.flush()
        sys.stdout.write(f"{digest}\n")
        sys.stdout.flush()


def _one_stream() -> bool:
    """Whether standard output and standard error are one terminal, file or pipe."""
    try:
        out, err = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


def _parse(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Targets and the places given; no targets when there is a word this module does not know."""
    targets: dict[str, None] = {}
    places: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word in ("--project", "--store"):
            places[word] = next(rest, "")
        elif word.startswith("-") and word not in ("--offline", "--locked"):
            return [], {}
        elif not word.startswith("-"):
            targets[word] = None
    return ([] if any("/" in target for target in targets) else list(targets)), places


def _above(folder: str) -> str:
    while not os.path.exists(f"{folder}/versions.yaml"):
        folder, name = os.path.split(folder)
        if not name:
            return ""
    return folder


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{os.getcwd()}/{path}".rstrip("/")


def _note(path: str) -> Any:
    """What :func:`primus.files.read_sealed` reads, without its imports; ValueError for a damaged note."""
    # A pipe in its place must not be waited for, and a device may have no end.
    if os.stat(path).st_mode & _TYPE != _REGULAR:
        raise ValueError("the note is not a regular file")
    with open(path, "rb") as stream:
        mark, _, data = stream.read().partition(b"\n")
    if mark != b"%08x" % crc32(data):
        raise ValueError("the note is damaged")
    return json.loads(data)


def note_path(root: str, target: str) -> str:
    """Where the note of a target lies."""
    return f"{root}/.primus/cache/unchanged-{target}.json"


def marks_of(paths: str) -> str:
    """One text for size, times, inode and mode of all the paths (one per line)."""
    lstat = os.lstat
    return " ".join(
        f"{s.st_size}.{s.st_mtime_ns}.{s.st_ctime_ns}.{s.st_ino}.{s.st_mode}" for s in map(lstat, paths.split("\n"))
    )
