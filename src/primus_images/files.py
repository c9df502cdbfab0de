"""Reading and writing files safely: no pipe or device is opened, and no file is partly written.

:func:`path_fault` is the rule for every path in an image, from any source: a component, a wheel, a
package or a base image.

A *sealed* file is one of our own caches or records: JSON with a CRC-32. A damaged one counts as
absent, because it can be created again.
"""

import errno
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from zlib import crc32

from primus_images.errors import InputError

# The largest text file that is read. Locks, recipes and records are far smaller.
_MOST_BYTES = 64 << 20
_MOST_NAME = 255
_MOST_PATH = 4095
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f]")


def refuse_special(path: Path, shown: str) -> None:
    """Raise InputError for a pipe or a device, which would block the reader or never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError("this is not a regular file", where=shown)


def refuse_pointer(path: Path) -> None:
    """Raise InputError for what Git leaves in place of a large file without Git LFS. OSError as any
    read.
    """
    with open_regular(path) as stream:
        if stream.read(30).startswith(b"version https://git-lfs"):
            raise InputError(
                "this is a pointer of Git LFS, not the file", where=str(path), hint="git lfs pull"
            )


def open_regular(path: Path | str, shown: str | None = None, *, follow: bool = True) -> IO[bytes]:
    """Open a regular file for reading. InputError for a pipe, device, socket or folder, OSError as
    any open.

    Without ``follow``, a symbolic link is an OSError as well. ``shown`` is the file's name in
    messages.
    """
    shown = shown or str(path)
    # Opening some devices has side effects, so check first. If a pipe replaces the file meanwhile,
    # the open does not block.
    _regular(os.stat(path) if follow else os.lstat(path), shown)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    stream = os.fdopen(os.open(path, flags), "rb", buffering=0)
    try:
        _regular(os.fstat(stream.fileno()), shown)
    except InputError:
        stream.close()
        raise
    return stream


def sha256_of(path: Path | str) -> str:
    """Return the SHA-256 of a regular file, as hex. InputError for anything else, OSError as any
    read.
    """
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def below(folder: Path, *, hidden: bool = True) -> Iterator[Path]:
    """Yield all files below ``folder``, also those in linked folders. Each folder is entered once,
    if possible by name.

    What is not a folder is yielded: also pipes, devices, and links that lead nowhere.
    """
    entered: set[Path] = set()

    def walk(folder: Path) -> Iterator[Path]:
        real = folder.resolve()
        if real in entered:
            return
        entered.add(real)
        for entry in sorted(folder.iterdir(), key=lambda entry: (entry.is_symlink(), entry.name)):
            if hidden or not entry.name.startswith("."):
                yield from walk(entry) if entry.is_dir() else (entry,)

    yield from walk(folder)


def _regular(status: os.stat_result, shown: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise InputError("this is a directory, not a file", where=shown)
    if not stat.S_ISREG(status.st_mode):
        raise InputError("this is not a regular file", where=shown)


def text_if_readable(path: Path, last: int | None = None) -> str:
    """Return the text of the file, or of its ``last`` bytes; "" if it cannot be read. Bytes that
    are not UTF-8 are replaced.
    """
    try:
        # A pipe that nobody writes to is not waited for.
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            file.seek(0 if last is None else max(0, path.stat().st_size - last))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def user_name(uid: int) -> str:
    """Return the name of the user, or the number if this machine has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def ownership(path: Path) -> str:
    """Return a sentence with the owner of ``path``, or of the folder that hides it, and the user of
    this process.
    """
    seen = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    return (
        f"{seen} belongs to {user_name(seen.lstat().st_uid)}, and you are {user_name(os.geteuid())}"
    )


def reason_of(error: OSError) -> str:
    """Return why the system refused a file; for a lack of rights, with its owner."""
    denied = error.filename and error.errno in (errno.EACCES, errno.EPERM)
    return f"{error.strerror or error}" + (
        f": {ownership(Path(os.fsdecode(error.filename)))}" if denied else ""
    )


def require_readable(path: Path) -> None:
    """Raise PermissionError for a file that is there, and that this user may not read."""
    if path.exists() and not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def stems(folder: Path) -> list[str]:
    """Return the sorted names of the folder's YAML files, without hidden ones, which editors
    create.

    Empty if there is no such folder. Raises OSError for one that cannot be read.
    """
    paths = ()
    if folder.is_dir():
        paths = folder.iterdir()
    return sorted(path.stem for path in paths if path.suffix == ".yaml" and path.name[0] != ".")


def json_if_readable(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it is missing, damaged, or holds something else."""
    try:
        value = json.loads(text_if_readable(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    if isinstance(value, dict):
        return value
    return {}


def read_bytes(path: Path | str, shown: str | None = None) -> bytes:
    """Return the whole file. InputError if it is not a regular file or too large, OSError as any
    read.
    """
    with open_regular(path, shown) as stream:
        # Its size instead of the limit, because Python allocates as many bytes as requested.
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(min(size, _MOST_BYTES) + 1) or b""
        while len(data) <= _MOST_BYTES and (more := stream.read(1 << 16)):
            data += more
    if len(data) > _MOST_BYTES:
        raise InputError(
            f"the file is larger than {_MOST_BYTES >> 20} MiB", where=shown or str(path)
        )
    return data


def write_file(path: Path, data: str | bytes) -> None:
    """Write ``data`` to ``path`` atomically, and create its folder. Raises OSError as any write,
    which names ``path``.

    InputError for a pipe, a device and all else in ``/dev``, which a file would replace.
    """
    refuse_special(path, str(path))
    if path.parent == Path("/dev"):
        raise InputError("this is not a regular file", where=str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the process id, because containers on several nodes that share the folder may have the
    # same one.
    waiting = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        waiting.write_bytes(data.encode() if isinstance(data, str) else data)
        waiting.replace(path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)
        waiting.unlink(missing_ok=True)
        raise


def remove_path(path: Path) -> None:
    """Remove the path, even if it is a folder where a file belongs. Raises OSError if that fails."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def seal(data: bytes) -> bytes:
    """Return ``data`` (JSON) with its CRC-32 in front, for :func:`read_sealed`."""
    return b"%08x\n" % crc32(data) + data


def write_sealed(path: Path, value: object) -> None:
    """Write ``value`` as sealed JSON, atomically. Raises OSError as any write."""
    write_file(path, seal(json.dumps(value).encode()))


def read_sealed(path: Path | str) -> Any:
    """Return the value of a sealed file; None if it is absent, damaged or not a regular file."""
    try:
        mark, _, text = read_bytes(path).partition(b"\n")
        if mark == b"%08x" % crc32(text):
            return json.loads(text)
        return None
    except (OSError, ValueError, RecursionError, InputError):
        return None


def path_fault(path: str) -> str | None:
    """Return what is wrong with ``path`` as the path of a file in a layer; None if nothing is.

    A valid path is relative, stays inside the root, is UTF-8 without control characters, respects
    Linux's limits, and contains no name that begins with ``.wh.``, which would remove files of
    other layers.
    """
    fault = link_fault(path)
    if fault:
        return fault
    if path.startswith("/"):
        return "it is absolute"
    parts = path.split("/")
    if ".." in parts:
        return "it leaves its folder"
    if "" in parts or "." in parts:
        return "it has an empty part or a dot as a part"
    if "/.wh." in f"/{path}":
        return "a name that begins with .wh. removes files of other layers"
    if max(map(len, map(str.encode, parts))) > _MOST_NAME:
        return f"a name in it is longer than {_MOST_NAME} bytes"
    return None


def link_fault(target: str) -> str | None:
    """Return what is wrong with ``target`` as the target of a symbolic link; None if nothing is. It
    may be absolute.
    """
    if not target:
        return "it is empty"
    if _CONTROL.search(target):
        return "it has a control character"
    try:
        size = len(target.encode())
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if size > _MOST_PATH:
        return f"it is longer than {_MOST_PATH} bytes"
    return None
