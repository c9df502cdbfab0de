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
from zlib import ZLIB_RUNTIME_VERSION, crc32

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
            # A copied project has the notes of the other one.
            if (note["root"], note["target"], note["store"]) != (root, target, store):
                return []
            if note["engine"] != engine() or any(os.path.realpath(path) != real for path, real in note["real"]):
                return []
            changed = {}
            for layer, paths, marks in note["groups"]:
                if paths not in now:
                    now[paths] = marks_of(paths, follow=layer is None)
                if now[paths] != marks:
                    changed[layer] = now[paths]
            if not all(layer in note["local"] for layer in changed):
                return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
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
    """Return targets and path options; no targets if there is a word that this module does not know, or if argparse may
    refuse the words.
    """
    targets: dict[str, None] = {}
    places: dict[str, str] = {}
    rest, before = iter(words), ""
    for word in rest:
        if word in ("--project", "--store"):
            places[word] = next(rest, "")
            if not places[word] or places[word].startswith("-"):
                return [], {}
        elif word.startswith("-") and word not in ("--offline", "--locked"):
            return [], {}
        elif not word.startswith("-"):
            # argparse takes all targets from one place.
            if targets and before.startswith("-"):
                return [], {}
            targets[word] = None
        before = word
    return ([] if any("/" in target for target in targets) else list(targets)), places


def _above(folder: str) -> str:
    while not os.path.exists(f"{folder}/versions.yaml"):
        folder, name = os.path.split(folder)
        if not name:
            return ""
    return folder


def _absolute(path: str) -> str:
    """Return the path as pathlib's ``absolute`` does."""
    parts = (path if path.startswith("/") else f"{os.getcwd()}/{path}").split("/")
    return "/" + "/".join(part for part in parts if part not in ("", "."))


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


def engine() -> list[str]:
    """Return what else decides the bytes of an image: where this code and the compressor are, and the version of zlib.
    Another checkout or virtual environment is another engine, whose files a note does not name.
    """
    compressor = next((folder for folder in sys.path if os.path.isdir(f"{folder or '.'}/zstandard")), "")
    return [os.path.dirname(__file__), compressor, ZLIB_RUNTIME_VERSION]


def marks_of(paths: str, since: int | None = None, *, follow: bool = False) -> str:
    """Return size, times, inode and mode of all paths (one per line) as one text. A file that was modified at or after
    the time ``since`` gets the mark ``-``, which it will never have: it may have been modified after it was read.

    ``follow`` is for files that are read through links. In a local folder, a link is what enters the image.
    """
    status = os.stat if follow else os.lstat
    return " ".join(
        "-"
        if since is not None and max(s.st_mtime_ns, s.st_ctime_ns) >= since
        else f"{s.st_size}.{s.st_mtime_ns}.{s.st_ctime_ns}.{s.st_ino}.{s.st_mode}"
        for s in map(status, paths.split("\n"))
    )
