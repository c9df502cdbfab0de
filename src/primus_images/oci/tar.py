"""A deterministic tar writer: the same entries give the same bytes on any machine, at any time, in
any directory order.

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
_TYPES = {"file": b"0", "hardlink": b"1", "symlink": b"2", "dir": b"5"}

Kind = Literal["file", "hardlink", "symlink", "dir"]
Source = bytes | Path | Callable[[], Iterable[bytes]]


class Member(NamedTuple):
    """One path of a layer, without a leading slash. ``chunks`` are a file's bytes, which can be
    read once, while it is the current member. ``link`` is where a symlink leads.
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
    """One clean path (:func:`primus_images.files.path_fault`) of a layer. ``link`` is the target of
    a hard or symbolic link (a hard link's target is a path of the same layer). ``source`` yields
    exactly ``size`` bytes, with the hash ``sha256`` if the layer's key states one.

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
        if self.kind in ("symlink", "hardlink"):
            if self.kind == "symlink":
                fault = link_fault(self.link)
            else:
                fault = path_fault(self.link)
            if fault:
                raise InputError(
                    f"the target {self.link[:200]!r} of the link {self.path} cannot be used: "
                    f"{fault}"
                )

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes. Raises CheckFailed if they are not ``size`` bytes with the hash
        ``sha256``, or if the source is no longer a regular file.
        """
        digest = None
        if self.sha256:
            digest = hashlib.sha256()
        done = 0
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
        if isinstance(self.source, Path):
            what = self.source
        else:
            what = self.path
        return CheckFailed(
            f"{what} changed while the build read it",
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
    """Return the entries sorted by path parts, with missing parents (0755, root) added. Raises
    InputError for a duplicate path or a path below something that is not a folder.
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
            raise InputError(
                f"the path {path} lies below {parent}, which is a {by_path[parent].kind}"
            )
    # A hard link must follow its target. Links are written last, which every tar reader supports.
    return sorted(by_path.values(), key=lambda e: (e.kind == "hardlink", e.path.split("/")))


def write_tar(entries: Iterable[Entry], write: Callable[[bytes], object]) -> Iterator[Member]:
    """Write the entries in the given order and the end mark. Yields each entry while it is written,
    so that its bytes, which exist only now, can be examined.
    """
    for entry in entries:
        write(_header(entry))
        if entry.kind == "file":
            chunks = _written(entry, write)
        else:
            chunks = iter(())
        yield Member(
            path=entry.path, kind=entry.kind, size=entry.size, link=entry.link, chunks=chunks
        )
        # What the caller has not read.
        for _ in chunks:
            pass
    write(bytes(2 * BLOCK))


def _written(entry: Entry, write: Callable[[bytes], object]) -> Iterator[bytes]:
    for chunk in entry.chunks():
        write(chunk)
        yield chunk
    write(bytes(-entry.size % BLOCK))


def _header(entry: Entry) -> bytes:
    if entry.kind == "dir":
        path = entry.path + "/"
    else:
        path = entry.path
    pax: dict[str, bytes] = {f"SCHILY.xattr.{k}": v for k, v in entry.xattrs.items()}
    prefix, name = _split(path)
    if len(name) > 100 or not path.isascii():
        pax["path"] = path.encode()
        prefix = b""
        name = path.encode("ascii", "replace")
    link = entry.link.encode("ascii", "replace")
    if len(link) > 100 or not entry.link.isascii():
        pax["linkpath"] = entry.link.encode()
    size = 0
    if entry.kind == "file":
        size = entry.size
    if size >= 8 << 30:
        pax["size"] = str(size).encode()
        size = 0
    for field_name, number in (("uid", entry.uid), ("gid", entry.gid)):
        if number > 0o7777777:
            pax[field_name] = str(number).encode()
    block = _block(name, entry, size, _TYPES[entry.kind], link, prefix)
    if not pax:
        return block
    body = b"".join(_record(k, pax[k]) for k in sorted(pax))
    head = _block(b"././@PaxHeader", Entry(path="pax"), len(body), b"x")
    return head + body + bytes(-len(body) % BLOCK) + block


def _split(path: str) -> tuple[bytes, bytes]:
    raw = path.encode()
    if len(raw) <= 100:
        return b"", raw
    # The name after the slash must not be empty.
    cut = raw.rfind(b"/", 0, min(156, len(raw) - 1))
    if cut > 0:
        return (raw[:cut], raw[cut + 1 :])
    return (b"", raw)


def _block(
    name: bytes, entry: Entry, size: int, kind: bytes, link: bytes = b"", prefix: bytes = b""
) -> bytes:
    numbers = (entry.mode & 0o7777, entry.uid & 0o7777777, entry.gid & 0o7777777, size, MTIME)
    head = name[:100].ljust(100, b"\0") + b"%07o\0%07o\0%07o\0%011o\0%011o\0" % numbers
    device = b"0000000\0" * 2
    tail = (
        kind
        + link[:100].ljust(100, b"\0")
        + b"ustar\x0000"
        + bytes(64)
        + device
        + prefix.ljust(167, b"\0")
    )
    return head + b"%06o\0 " % (sum(head) + 8 * ord(" ") + sum(tail)) + tail


def _record(key: str, value: bytes) -> bytes:
    body = b" " + key.encode() + b"=" + value + b"\n"
    length = len(body) + 1
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return str(length).encode() + body
