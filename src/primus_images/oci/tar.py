"""A deterministic tar writer: the same entries give the same bytes, anywhere and at any time.

Entries are ordered by path. Owner and mode are the entry's, every time stamp is :data:`MTIME`, and
parents are written once. Headers are ustar; a PAX header precedes an entry only if ustar cannot
represent it (long path or link, 8 GiB or more, extended attributes, non-ASCII text). Headers are
formatted here, because Python's tarfile reaches only about 100 MB/s on many small files.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Literal, NamedTuple

from primus_images.errors import CheckFailed, InputError, PrimusError
from primus_images.files import link_fault, open_regular, path_fault

# The oldest time that a zip file can represent (1980-01-01 UTC), so that files of an image can be
# zipped again.
MTIME = 315532800
BLOCK = 512
_CHUNK = 1 << 20
# What a ustar header can hold: longer names, larger numbers and sizes need a PAX header.
_LONG_NAME = 100
_MOST_ID = 0o7777777
_LARGE = 8 << 30
_TYPES = {"file": b"0", "hardlink": b"1", "symlink": b"2", "dir": b"5"}

Kind = Literal["file", "hardlink", "symlink", "dir"]
Source = bytes | Path | Callable[[], Iterable[bytes]]


class Member(NamedTuple):
    """One path of a layer, without a leading slash.

    ``chunks`` are a file's bytes, which can be read once, while it is the current member. ``link``
    is where a symlink leads.
    """

    path: str
    kind: Kind | Literal["other"] = "file"
    size: int = 0
    link: str = ""
    chunks: Iterable[bytes] = ()

    def text(self) -> str:
        """Read the whole file as UTF-8."""
        return b"".join(self.chunks).decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One clean path (:func:`primus_images.files.path_fault`) of a layer.

    ``link`` is the target of a hard or symbolic link (a hard link's target is a path of the same
    layer). ``source`` yields exactly ``size`` bytes, with the hash ``sha256`` if the layer's key
    states one.

    Raises InputError for a path or a link that an image may not contain.
    """

    path: str
    kind: Kind = "file"
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    size: int = 0
    link: str = ""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    source: Source = field(default=b"", compare=False, repr=False)
    sha256: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        fault = path_fault(self.path)
        if fault:
            raise InputError(f"the path {self.path[:200]!r} cannot be in an image: {fault}")
        if self.kind == "symlink":
            fault = link_fault(self.link)
        elif self.kind == "hardlink":
            fault = path_fault(self.link)
        if fault:
            target = f"{self.link[:200]!r}"
            raise InputError(f"the target {target} of the link {self.path} cannot be used: {fault}")

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes.

        Raises CheckFailed if they are not ``size`` bytes with the hash ``sha256``, or if the source
        is no longer a regular file.
        """
        digest = hashlib.sha256()
        done = 0
        for chunk in self._pieces():
            done += len(chunk)
            # A source that keeps growing must not fill the disk.
            if done > self.size:
                break
            if self.sha256:
                digest.update(chunk)
            yield chunk
        if done != self.size or self.sha256 not in (None, digest.hexdigest()):
            raise self._changed()

    def _pieces(self) -> Iterator[bytes]:
        if isinstance(self.source, bytes):
            yield self.source
        elif isinstance(self.source, Path):
            try:
                stream = open_regular(self.source, follow=False)
            except (FileNotFoundError, NotADirectoryError, InputError):
                raise self._changed() from None
            with stream:
                yield from chunks_of(stream)
        else:
            yield from self.source()

    def _changed(self) -> PrimusError:
        name = self.path
        if isinstance(self.source, Path):
            name = str(self.source)
        return CheckFailed(
            f"{name} changed while the build read it",
            hint="build again, and do not change the files meanwhile",
        )


def chunks_of(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the rest of the stream."""
    return iter(partial(stream.read, _CHUNK), b"")


def part(path: Path, offset: int, size: int) -> Iterator[bytes]:
    """Yield the ``size`` bytes of the file that begin at ``offset``, for an entry's source."""
    with path.open("rb") as file:
        file.seek(offset)
        while size and (chunk := file.read(min(size, _CHUNK))):
            size -= len(chunk)
            yield chunk


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries sorted by path parts, with missing parents (0755, root) added.

    Raises InputError for a duplicate path or a path below something that is not a folder.
    """
    by_path: dict[str, Entry] = {}
    for entry in entries:
        if entry.path in by_path:
            raise InputError(f"the path {entry.path} is given twice")
        by_path[entry.path] = entry
    for path in list(by_path):
        parent = path.rpartition("/")[0]
        while parent and parent not in by_path:
            by_path[parent] = Entry(path=parent, kind="dir", mode=0o755)
            parent = parent.rpartition("/")[0]
        if parent and by_path[parent].kind != "dir":
            kind = by_path[parent].kind
            raise InputError(f"the path {path} lies below {parent}, which is a {kind}")
    # A hard link must follow its target. Links are written last, which every tar reader supports.
    return sorted(by_path.values(), key=lambda e: (e.kind == "hardlink", e.path.split("/")))


def write_tar(entries: Iterable[Entry], write: Callable[[bytes], object]) -> Iterator[Member]:
    """Write the entries in the given order and the end mark.

    Each entry is yielded while it is written, so that its bytes, which exist only now, can be
    examined.
    """
    for entry in entries:
        write(_header(entry))
        chunks: Iterator[bytes] = iter(())
        if entry.kind == "file":
            chunks = _written(entry, write)
        yield Member(entry.path, entry.kind, entry.size, entry.link, chunks)
        # What the caller has not read.
        for _ in chunks:
            pass
    write(bytes(2 * BLOCK))


def _written(entry: Entry, write: Callable[[bytes], object]) -> Iterator[bytes]:
    for chunk in entry.chunks():
        write(chunk)
        yield chunk
    write(bytes(-entry.size % BLOCK))


class _Ustar(NamedTuple):
    """The fields of a ustar header that differ between members."""

    name: bytes
    kind: bytes
    size: int
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    link: bytes = b""
    prefix: bytes = b""

    def block(self) -> bytes:
        numbers = (self.mode & 0o7777, self.uid & _MOST_ID, self.gid & _MOST_ID, self.size, MTIME)
        head = _padded(self.name) + b"%07o\0%07o\0%07o\0%011o\0%011o\0" % numbers
        owner_names = bytes(64)
        device = b"0000000\0" * 2
        prefix = self.prefix.ljust(167, b"\0")
        tail = self.kind + _padded(self.link) + b"ustar\x0000" + owner_names + device + prefix
        # The checksum counts as eight spaces while it is computed.
        checksum = sum(head) + sum(tail) + 8 * ord(" ")
        return head + b"%06o\0 " % checksum + tail


def _padded(name: bytes) -> bytes:
    return name[:_LONG_NAME].ljust(_LONG_NAME, b"\0")


def _header(entry: Entry) -> bytes:
    pax = {f"SCHILY.xattr.{name}": value for name, value in entry.xattrs.items()}
    path = entry.path
    if entry.kind == "dir":
        path += "/"
    prefix, name = _split(path.encode())
    if len(name) > _LONG_NAME or not path.isascii():
        pax["path"] = path.encode()
        prefix = b""
        name = path.encode("ascii", "replace")
    link = entry.link.encode("ascii", "replace")
    if len(link) > _LONG_NAME or not entry.link.isascii():
        pax["linkpath"] = entry.link.encode()
    size = entry.size if entry.kind == "file" else 0
    if size >= _LARGE:
        pax["size"] = b"%d" % size
        size = 0
    if entry.uid > _MOST_ID:
        pax["uid"] = b"%d" % entry.uid
    if entry.gid > _MOST_ID:
        pax["gid"] = b"%d" % entry.gid
    kind = _TYPES[entry.kind]
    block = _Ustar(name, kind, size, entry.mode, entry.uid, entry.gid, link, prefix).block()
    if not pax:
        return block
    body = b"".join(_record(key, pax[key]) for key in sorted(pax))
    head = _Ustar(b"././@PaxHeader", b"x", len(body)).block()
    return head + body + bytes(-len(body) % BLOCK) + block


def _split(path: bytes) -> tuple[bytes, bytes]:
    if len(path) <= _LONG_NAME:
        return b"", path
    # The name after the slash must not be empty.
    cut = path.rfind(b"/", 0, min(156, len(path) - 1))
    if cut > 0:
        return path[:cut], path[cut + 1 :]
    return b"", path


def _record(key: str, value: bytes) -> bytes:
    body = b" %b=%b\n" % (key.encode(), value)
    # A record begins with its own length, whose digits count.
    length = len(body) + 1
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return b"%d" % length + body
