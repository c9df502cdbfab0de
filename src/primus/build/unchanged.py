"""The fast path of a no-op build: no file that the last build read or wrote has been modified.

The same comparison finds out that only local folders were modified. :mod:`primus.gates.swap` can then replace their
layers in the last image, without planning.

A no-op build is mostly start-up time, most of which is imports. Therefore, each build writes a note: size, times, inode
and mode of every file and folder that it read (pins, target, lock, local trees, the engine's own code) and of every
blob that it wrote, and the image's name and digest. If nothing differs from the note, planning would give the same
plan. Any difference only leads to planning. The note relies on what git's index relies on and, like git, distrusts
files modified after the build began. Imports are kept to a minimum on purpose.
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

    Builds = Sequence[tuple[Any, dict[str, str]]]


# As in the module stat, which would cost an import.
_TYPE, _REGULAR = 0o170000, 0o100000


def nothing_to_do(builds: Builds, began_ns: int) -> bool:
    """Report that there is nothing to do, if nothing differs from the notes that :func:`last_builds` returned; else
    return False. ``began_ns`` is the time at which the command began.
    """
    if not builds or any(changed for _, changed in builds):
        return False
    say_unchanged([(note["name"], note["digest"]) for note, _ in builds], (time.time_ns() - began_ns) / 1e9)
    return True


def last_builds(words: Sequence[str]) -> Builds:
    """Return, for each target of ``primus build WORDS``, its note, and the layers whose local folders differ from it
    with the present marks of their files.

    Empty if anything else differs. Accepts options that cannot change the answer; any other word that is not a target
    gives an empty answer.
    """
    targets, places = _parse(words)
    root = _absolute(places["--project"]) if "--project" in places else _above(os.getcwd())
    if not targets or not root:
        return []
    store = _absolute(places["--store"]) if "--store" in places else f"{root}/.primus/store"
    builds = []
    # Targets share most of the files they read, so each group is checked once.
    now: dict[str, str] = {}
    for target in targets:
        try:
            note = _note(note_path(root, target))
            if note["store"] != store:
                return []
            changed = {}
            for layer, paths, marks in note["groups"]:
                if paths not in now:
                    now[paths] = marks_of(paths)
                if now[paths] != marks:
                    changed[layer] = now[paths]
            if not all(layer in note["local"] for layer in changed):
                return []
        except (OSError, ValueError, KeyError, TypeError):
            return []
        builds.append((note, changed))
    return builds


def say_unchanged(images: Sequence[tuple[str, str]], seconds: float) -> None:
    """Report for each image (name, digest) that there is nothing to do, in one line that ends with the digest.

    Only the digest goes to standard output. If standard output and standard error differ, each gets a line.
    """
    end = "  " if _one_stream() else "\n"
    for name, digest in images:
        sys.stderr.write(f"{name}: nothing to do, {seconds:.2f} s{end}")
        sys.stderr.flush()
        sys.stdout.write(f"{digest}\n")
        sys.stdout.flush()


def _one_stream() -> bool:
    """Whether standard output and standard error are the same terminal, file or pipe."""
    try:
        out, err = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


def _parse(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return targets and path options; no targets if there is a word that this module does not know."""
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
    """Read what :func:`primus.files.read_sealed` would read, without its imports. Raises ValueError for a damaged
    note.
    """
    # A pipe would block, and a device may be endless.
    if os.stat(path).st_mode & _TYPE != _REGULAR:
        raise ValueError("the note is not a regular file")
    with open(path, "rb") as stream:
        mark, _, data = stream.read().partition(b"\n")
    if mark != b"%08x" % crc32(data):
        raise ValueError("the note is damaged")
    return json.loads(data)


def note_path(root: str, target: str) -> str:
    """Return the path of a target's note."""
    return f"{root}/.primus/cache/unchanged-{target}.json"


def marks_of(paths: str, since: int | None = None) -> str:
    """Return size, times, inode and mode of all paths (one per line) as one text. A file that was modified at or after
    the time ``since`` gets the mark ``-``, which it will never have: it may have been modified after it was read.
    """
    lstat = os.lstat
    return " ".join(
        "-"
        if since is not None and max(s.st_mtime_ns, s.st_ctime_ns) >= since
        else f"{s.st_size}.{s.st_mtime_ns}.{s.st_ctime_ns}.{s.st_ino}.{s.st_mode}"
        for s in map(lstat, paths.split("\n"))
    )
