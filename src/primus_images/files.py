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
    """Raise InputError for what Git leaves in place of a large file without Git LFS.

    Raises OSError as any read.
    """
    with open_regular(path) as stream:
        if stream.read(30).startswith(b"version https://git-lfs"):
            message = "this is a pointer of Git LFS, not the file"
            raise InputError(message, where=path, hint="git lfs pull")


def open_regular(path: Path | str, shown: str | None = None, *, follow: bool = True) -> IO[bytes]:
    """Open a regular file for reading. ``shown`` is its name in messages.

    Raises InputError for a pipe, device, socket or folder and, without ``follow``, for a symbolic
    link. Raises OSError as any open.
    """
    where = shown or str(path)
    # Opening some devices has side effects, so check first. If a pipe replaces the file meanwhile,
    # the open does not block.
    status = Path(path).stat(follow_symlinks=follow)
    if stat.S_ISDIR(status.st_mode):
        raise InputError("this is a directory, not a file", where=where)
    if not stat.S_ISREG(status.st_mode):
        raise InputError("this is not a regular file", where=where)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    return os.fdopen(handle, "rb", buffering=0)


def sha256_of(path: Path | str) -> str:
    """Return the SHA-256 of a regular file, as hex.

    Raises InputError for anything else, and OSError as any read.
    """
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def mark_of(status: os.stat_result) -> list[int]:
    """Return size, times and inode, of which one changes when the file is written to."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def plain(path: Path) -> Path:
    """Return an absolute path without ``..``, unless a link makes this another place."""
    absolute = path.absolute()
    shorter = Path(os.path.normpath(absolute))
    if os.path.realpath(shorter) == os.path.realpath(absolute):
        return shorter
    return absolute


def below(folder: Path, *, hidden: bool = True) -> Iterator[Path]:
    """Yield all files below ``folder``, also those in linked folders.

    Each folder is entered once, if possible by name. What is not a folder is yielded: also pipes,
    devices, and links that lead nowhere.
    """
    entered: set[Path] = set()

    def walk(folder: Path) -> Iterator[Path]:
        real = folder.resolve()
        if real in entered:
            return
        entered.add(real)
        for entry in sorted(folder.iterdir(), key=lambda entry: (entry.is_symlink(), entry.name)):
            if entry.name.startswith(".") and not hidden:
                continue
            if entry.is_dir():
                yield from walk(entry)
            else:
                yield entry

    yield from walk(folder)


def text_if_readable(path: Path, last: int | None = None) -> str:
    """Return the text of the file, or of its ``last`` bytes; "" if it cannot be read.

    Bytes that are not UTF-8 are replaced.
    """
    try:
        with open_regular(path) as file:
            if last is not None:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - last))
            return file.read().decode(errors="replace")
    except (OSError, InputError):
        return ""


def user_name(uid: int) -> str:
    """Return the name of the user, or the number if this machine has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def ownership(path: Path) -> str:
    """Return a sentence with the owner of ``path`` and the user of this process.

    If a folder hides the path, the owner is the folder's.
    """
    seen = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    owner = user_name(seen.lstat().st_uid)
    return f"{seen} belongs to {owner}, and you are {user_name(os.geteuid())}"


def reason_of(error: OSError) -> str:
    """Return why the system refused a file; for a lack of rights, with its owner."""
    reason = error.strerror or str(error)
    if error.filename and error.errno in (errno.EACCES, errno.EPERM):
        return f"{reason}: {ownership(Path(os.fsdecode(error.filename)))}"
    return reason


def require_readable(path: Path) -> None:
    """Raise PermissionError for a file that is there, and that this user may not read."""
    if path.exists() and not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def stems(folder: Path) -> list[str]:
    """Return the sorted names of the folder's YAML files, without hidden ones of editors.

    Empty if there is no such folder. Raises OSError for one that cannot be read.
    """
    if not folder.is_dir():
        return []
    # Not by glob, which finds nothing where the folder cannot be read.
    names = [path.name for path in folder.iterdir()]
    visible = [name for name in names if name.endswith(".yaml") and not name.startswith(".")]
    return sorted(name.removesuffix(".yaml") for name in visible)


def json_if_readable(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it is missing, damaged, or something else."""
    try:
        value = json.loads(text_if_readable(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    if isinstance(value, dict):
        return value
    return {}


def read_bytes(path: Path | str, shown: str | None = None) -> bytes:
    """Return the whole file.

    Raises InputError if it is not a regular file or too large, and OSError as any read.
    """
    with open_regular(path, shown) as stream:
        if os.fstat(stream.fileno()).st_size > _MOST_BYTES:
            where = shown or str(path)
            raise InputError(f"the file is larger than {_MOST_BYTES >> 20} MiB", where=where)
        return stream.read()


def write_file(path: Path, data: str | bytes) -> None:
    """Write ``data`` to ``path`` atomically, and create its folder.

    Raises OSError as any write, which names ``path``, and InputError for a pipe, a device and all
    else in ``/dev``, which a file would replace.
    """
    refuse_special(path, str(path))
    if path.parent == Path("/dev"):
        raise InputError("this is not a regular file", where=str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the process id, because containers on several nodes that share the folder may have the
    # same one.
    waiting = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    if isinstance(data, str):
        data = data.encode()
    try:
        waiting.write_bytes(data)
        waiting.replace(path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)
        waiting.unlink(missing_ok=True)
        raise


def remove_path(path: Path) -> None:
    """Remove the path, even if it is a folder where a file belongs.

    Raises OSError if that fails.
    """
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
        if mark != b"%08x" % crc32(text):
            return None
        return json.loads(text)
    except (OSError, ValueError, RecursionError, InputError):
        return None


def path_fault(path: str) -> str | None:
    """Return what is wrong with ``path`` as the path of a file in a layer; None if nothing is.

    A valid path is relative, stays inside the root, is UTF-8 without control characters, respects
    Linux's limits, and contains no name that begins with ``.wh.``, which would remove files of
    other layers.
    """
    if path.startswith("/"):
        return "it is absolute"
    return link_fault(path) or _parts_fault(path)


def _parts_fault(path: str) -> str | None:
    parts = path.split("/")
    if ".." in parts:
        return "it leaves its folder"
    if "" in parts or "." in parts:
        return "it has an empty part or a dot as a part"
    if "/.wh." in f"/{path}":
        return "a name that begins with .wh. removes files of other layers"
    if any(len(part.encode()) > _MOST_NAME for part in parts):
        return f"a name in it is longer than {_MOST_NAME} bytes"
    return None


def link_fault(target: str) -> str | None:
    """Return what is wrong with ``target`` as the target of a symbolic link; None if nothing is.

    It may be absolute.
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
