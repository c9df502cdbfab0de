"""A deterministic tar writer: the same entries give the same bytes on any machine, at any time, in any directory order.

Entries are ordered by path. Owner and mode are the entry's, every time stamp is :data:`MTIME`, and parents are written
once. Headers are ustar; a PAX header precedes an entry only if ustar cannot represent it (long path or link, 8 GiB or
more, extended attributes, non-ASCII text). Headers are formatted here, because Python's tarfile reaches only about 100
MB/s on many small files.
"""

from __future__ import annotations

import errno
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, Literal, Protocol

from primus.errors import CheckFailed, InputError
from primus.files import link_fault, open_regular, path_fault

# The oldest time that a zip file can represent (1980-01-01 UTC), so that files of an image can be zipped again.
MTIME = 315532800
BLOCK = 512
_CHUNK = 1 << 20
_TYPES = {"file": b"0", "hardlink": b"1", "symlink": b"2", "dir": b"5"}

Kind = Literal["file", "hardlink", "symlink", "dir"]
Source = bytes | Path | Callable[[], IO[bytes]] | None


class Sink(Protocol):
    """A destination of tar bytes."""

    def write(self, data: bytes, /) -> object:
        """Take the next bytes."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One clean path (:func:`primus.files.path_fault`) of a layer. ``link`` is the target of a hard or symbolic link
    (a hard link's target is a path of the same layer). ``source`` yields exactly ``size`` bytes, with the hash
    ``sha256`` if the layer's key states one.

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
    source: Source = field(default=None, compare=False, repr=False)
    sha256: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if fault := path_fault(self.path):
            raise InputError(f"the path {self.path[:200]!r} cannot be in an image: {fault}")
        if self.kind in ("symlink", "hardlink"):
            fault = link_fault(self.link) if self.kind == "symlink" else path_fault(self.link)
            if fault:
                raise InputError(f"the target {self.link[:200]!r} of the link {self.path} cannot be used: {fault}")

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes. Raises CheckFailed if they are not ``size`` bytes with the hash ``sha256``,
        or if the source is no longer a regular file.
        """
        digest, done = hashlib.sha256() if self.sha256 else None, 0
        for chunk in self._pieces():
            done += len(chunk)
            # A source that keeps growing must not fill the disk.
            if done > self.size:
                break
            if digest:
                digest.update(chunk)
            yield chunk
        if done != self.size or (digest and digest.hexdigest() != self.sha256):
            raise self._changed()

    def _pieces(self) -> Iterator[bytes]:
        if isinstance(self.source, bytes):
            yield self.source
        elif self.source is not None:
            try:
                stream = open_regular(self.source, follow=False) if isinstance(self.source, Path) else self.source()
            except (FileNotFoundError, NotADirectoryError, InputError):
                raise self._changed() from None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise self._changed() from None
                raise
            with closing(stream):
                while chunk := stream.read(_CHUNK):
                    yield chunk

    def _changed(self) -> CheckFailed:
        what = self.source if isinstance(self.source, Path) else self.path
        return CheckFailed(
            f"{what} changed while the build read it", hint="build again, and do not change the files meanwhile"
        )


class _Part(io.RawIOBase):
    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._file = path.open("rb")
        self._file.seek(offset)
        self._left = size

    def read(self, amount: int = -1) -> bytes:
        data = self._file.read(self._left if amount < 0 else min(amount, self._left))
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def open_part(path: Path, offset: int, size: int) -> BinaryIO:
    """Open the ``size`` bytes of the file that begin at ``offset``, as an entry's source."""
    return _Part(path, offset, size)  # type: ignore[return-value]


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries sorted by path parts, with missing parents (0755, root) added. Raises InputError for a
    duplicate path or a path below something that is not a folder.
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
            raise InputError(f"the path {path} lies below {parent}, which is a {by_path[parent].kind}")
    # A hard link must follow its target. Links are written last, which every tar reader supports.
    return sorted(by_path.values(), key=lambda e: (e.kind == "hardlink", e.path.split("/")))


def write_tar(entries: Iterable[Entry], sink: Sink) -> int:
    """Write the entries in the given order and the end mark, and return the number of bytes."""
    total = 0
    for entry in entries:
        head = _header(entry)
        sink.write(head)
        total += len(head)
        # An empty file may have changed, too.
        if entry.kind == "file" and (entry.size or entry.sha256):
            for chunk in entry.chunks():
                sink.write(chunk)
            padding = -entry.size % BLOCK
            if padding:
                sink.write(b"\0" * padding)
            total += entry.size + padding
    sink.write(b"\0" * (2 * BLOCK))
    return total + 2 * BLOCK


def _header(entry: Entry) -> bytes:
    name = entry.path + "/" if entry.kind == "dir" else entry.path
    pax: dict[str, bytes] = {f"SCHILY.xattr.{k}": v for k, v in entry.xattrs.items()}
    name_field, prefix = _split(name)
    if name_field is None:
        pax["path"] = name.encode()
        name_field, prefix = name.encode("ascii", "replace")[:100], b""
    link = entry.link.encode("ascii", "replace")
    if len(link) > 100 or not entry.link.isascii():
        pax["linkpath"] = entry.link.encode()
        link = link[:100]
    size = entry.size if entry.kind == "file" else 0
    if size >= 8 << 30:
        pax["size"] = str(size).encode()
        size = 0
    for field_name, number in (("uid", entry.uid), ("gid", entry.gid)):
        if number > 0o7777777:
            pax[field_name] = str(number).encode()
    block = _block(name_field, prefix, entry, size, link, _TYPES[entry.kind])
    if not pax:
        return block
    body = b"".join(_record(k, pax[k]) for k in sorted(pax))
    plain = Entry(path="pax", size=len(body))
    head = _block(b"././@PaxHeader", b"", plain, len(body), b"", b"x")
    return head + body + b"\0" * (-len(body) % BLOCK) + block


def _split(name: str) -> tuple[bytes | None, bytes]:
    if not name.isascii():
        return None, b""
    raw = name.encode()
    if len(raw) <= 100:
        return raw, b""
    cut = raw.rfind(b"/", 0, 156)
    while cut > 0:
        head, tail = raw[:cut], raw[cut + 1 :]
        if len(head) <= 155 and 0 < len(tail) <= 100:
            return tail, head
        cut = raw.rfind(b"/", 0, cut)
    return None, b""


def _block(name: bytes, prefix: bytes, entry: Entry, size: int, link: bytes, kind: bytes) -> bytes:
    uid, gid = entry.uid & 0o7777777, entry.gid & 0o7777777
    block = bytearray(BLOCK)
    block[0 : len(name)] = name
    block[100:108] = b"%07o\0" % (entry.mode & 0o7777)
    block[108:116] = b"%07o\0" % uid
    block[116:124] = b"%07o\0" % gid
    block[124:136] = b"%011o\0" % size
    block[136:148] = b"%011o\0" % MTIME
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[157 : 157 + len(link)] = link
    block[257:265] = b"ustar\x0000"
    block[329:345] = b"0000000\0" * 2
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _record(key: str, value: bytes) -> bytes:
    body = b" " + key.encode() + b"=" + value + b"\n"
    length = len(body) + 1
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return str(length).encode() + body
