"""A wheel → the entries of a layer, read from the archive (PEP 427) and laid out as pip would install them.

Scripts get the interpreter of the image's environment, and ``entry_points.txt`` becomes console scripts. ``INSTALLER``
and ``RECORD`` let pip in the image list and remove the package.
"""

from __future__ import annotations

import base64
import configparser
import csv
import functools
import hashlib
import io
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, NoReturn, cast

from isal import igzip_lib, isal_zlib

from primus.errors import CheckFailed, InputError
from primus.files import path_fault
from primus.oci.contents import require_sane
from primus.oci.tar import Entry
from primus.plan.skeleton import Prefix
from primus.versions.lock import normalised

_UNIX = 3
_READ = 1 << 19
# Its type stubs declare it as an instance.
_INFLATE_ERROR = cast("type[Exception]", igzip_lib.error)
# The header before a file's bytes; it ends with the lengths of its name and of its extra fields (APPNOTE 4.3.7).
_HEADER = struct.Struct("<4s22xHH")
_MOST_TEXT = 64 << 20
_ENCRYPTED = 1
_OBJECT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_SCRIPT = """#!{python}
import sys
from {module} import {top}
if __name__ == "__main__":
    sys.argv[0] = sys.argv[0].removesuffix(".exe")
    sys.exit({call}())
"""


def wheel_entries(path: Path, file_name: str, prefix: Prefix, without: Collection[str] = ()) -> Iterator[Entry]:
    """Yield the wheel's files as entries, whose bytes are still in the archive. ``file_name`` is the wheel's
    original name.

    Folders in ``without`` are left out, also of ``RECORD``.

    Raises InputError if the archive is not a wheel or contains paths that an image may not contain, CheckFailed if
    a folder in ``without`` does not exist.
    """
    try:
        yield from _entries(path, file_name, prefix, without)
    except InputError as error:
        raise InputError(f"the wheel {file_name} cannot be used: {error.message}", hint="pin another wheel") from None
    # zipfile, csv and configparser raise all of these for archives and texts that are damaged on purpose. KeyError's
    # text is the missing file in quotes.
    except (
        zipfile.BadZipFile, configparser.Error, csv.Error, zlib.error, struct.error, KeyError, ValueError, EOFError,
        OverflowError, RuntimeError,
    ) as error:  # fmt: skip
        raise InputError(f"the wheel {file_name} cannot be used: {error}", hint="pin another wheel") from None


def _entries(path: Path, file_name: str, prefix: Prefix, without: Collection[str]) -> Iterator[Entry]:
    archive = zipfile.ZipFile(path)
    every = _members(archive, path.stat().st_size)
    infos = [i for i in every if not i.filename.startswith(tuple(f"{folder}/" for folder in without))]
    dists = [i.filename.split("/")[0] for i in infos if re.fullmatch(r"[^/]+\.dist-info/WHEEL", i.filename)]
    if len(dists) != 1:
        raise InputError(f"it has {len(dists) or 'no'} dist-info/WHEEL files, but a wheel has one")
    (dist,) = dists
    for folder in without:
        if not any(i.filename.startswith(f"{folder}/") for i in every):
            raise CheckFailed(f"{file_name} has no folder {folder} to leave out", hint="correct `without` of its pin")
    placed: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        if (place := _place(info.filename, dist, prefix)) in placed:
            raise InputError(f"two of its files would be installed as /{place}")
        placed[place] = info
    written = dict(_scripts(archive, dist, prefix))
    written[f"{prefix.site}/{dist}/INSTALLER"] = b"primus\n"
    record = f"{prefix.site}/{dist}/RECORD"
    for name, info in placed.items():
        if name == record or name in written:
            continue
        script = name.startswith(f"{prefix.root}/bin/") and ".data/scripts/" in info.filename
        if script and (text := _text(archive, info.filename)).startswith(b"#!python"):
            written[name] = f"#!{prefix.interpreter}\n".encode() + text.partition(b"\n")[2]
            continue
        runs = script or (info.external_attr >> 16) & 0o111
        yield Entry(
            path=name,
            mode=0o755 if runs else 0o644,
            size=info.file_size,
            source=cast("Callable[[], IO[bytes]]", functools.partial(Member, path, info, file_name)),
        )
    for name, data in written.items():
        mode = 0o755 if name.startswith(f"{prefix.root}/bin/") else 0o644
        yield Entry(path=name, mode=mode, size=len(data), source=data)
    rows = _record(archive, dist, placed, written, prefix)
    yield Entry(path=record, size=len(rows), source=rows)


def _members(archive: zipfile.ZipFile, size: int) -> list[zipfile.ZipInfo]:
    """Return the archive's files. Raises InputError for entries that an image may not contain, ValueError for a
    decompression bomb.
    """
    files = [i for i in archive.infolist() if not i.is_dir()]
    for info in files:
        # zipfile has already converted Windows paths.
        if fault := path_fault(info.filename) or path_fault(info.orig_filename):
            raise InputError(f"the path {info.orig_filename[:200]!r} in it cannot be in an image: {fault}")
        kind = stat.S_IFMT(info.external_attr >> 16)
        if info.create_system == _UNIX and kind not in (0, stat.S_IFREG):
            raise InputError(f"{info.filename} is not a regular file")
        if info.flag_bits & _ENCRYPTED:
            raise InputError(f"{info.filename} in it is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(
                f"{info.filename} in it has compression method {info.compress_type}, but wheels are deflated"
            )
    names = [info.filename for info in files]
    if len(set(names)) < len(names):
        raise InputError(f"{next(name for name in names if names.count(name) > 1)} is contained twice")
    require_sane(sum(info.file_size for info in files), size)
    return files


def _text(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a text file. Raises KeyError if it does not exist, ValueError if it is too large."""
    if archive.getinfo(name).file_size > _MOST_TEXT:
        raise ValueError(f"{name} is larger than {_MOST_TEXT >> 20} MiB")
    return archive.read(name)


def _place(name: str, dist: str, prefix: Prefix) -> str:
    data = dist.removesuffix(".dist-info") + ".data/"
    if not name.startswith(data):
        return f"{prefix.site}/{name}"
    scheme, _, rest = name[len(data) :].partition("/")
    project = normalised(dist.partition("-")[0])
    places = {
        "purelib": f"{prefix.site}/{rest}",
        "platlib": f"{prefix.site}/{rest}",
        "scripts": f"{prefix.root}/bin/{rest}",
        "headers": f"{prefix.root}/include/site/python{prefix.python}/{project}/{rest}",
        "data": f"{prefix.root}/{rest}",
    }
    if scheme not in places or not rest:
        raise InputError(f"{name} is outside the folders that the .data folder of a wheel may have")
    return places[scheme]


def _scripts(archive: zipfile.ZipFile, dist: str, prefix: Prefix) -> Iterator[tuple[str, bytes]]:
    try:
        text = _text(archive, f"{dist}/entry_points.txt").decode()
    except KeyError:
        return
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # names of commands keep their case
    parser.read_string(text)
    for section in ("console_scripts", "gui_scripts"):
        for command, target in parser.items(section) if parser.has_section(section) else ():
            module, _, call = target.partition("[")[0].strip().partition(":")
            if not _OBJECT.fullmatch(module) or not _OBJECT.fullmatch(call) or "/" in command:
                raise InputError(f"its entry point {command[:100]!r} is not NAME = MODULE:FUNCTION")
            script = _SCRIPT.format(python=prefix.interpreter, module=module, top=call.split(".")[0], call=call)
            yield f"{prefix.root}/bin/{command}", script.encode()


def _record(
    archive: zipfile.ZipFile, dist: str, placed: dict[str, zipfile.ZipInfo], written: dict[str, bytes], prefix: Prefix
) -> bytes:
    original = {row[0]: row for row in csv.reader(io.StringIO(_text(archive, f"{dist}/RECORD").decode())) if row}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    up = "../" * (prefix.site.count("/") - prefix.root.count("/"))
    rows: dict[str, list[str]] = {}
    for path, info in placed.items():
        rows[path] = original.get(info.filename, ["", "", ""])[1:3]
    for path, data in written.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows[path] = [f"sha256={digest}", str(len(data))]
    rows[f"{prefix.site}/{dist}/RECORD"] = ["", ""]
    for path in sorted(rows):
        site = path.startswith(prefix.site + "/")
        shown = path[len(prefix.site) + 1 :] if site else up + path[len(prefix.root) + 1 :]
        writer.writerow([shown, *rows[path]])
    return out.getvalue().encode()


class Member:
    """One file of an archive, which several may read at once, in half the time of ``zipfile``.

    Reading raises InputError that names the wheel if the bytes do not match the archive's checksum.
    """

    def __init__(self, archive: Path, info: zipfile.ZipInfo, wheel: str) -> None:
        self._file: IO[bytes] = archive.open("rb", buffering=0)
        self._info, self._wheel = info, wheel
        self._packed, self._left = info.compress_size, info.file_size
        self._sum = 0
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        self._inflater = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_DEFLATE) if deflated else None
        self._begun = False

    def _begin(self) -> None:
        self._begun = True
        self._file.seek(self._info.header_offset)
        head = self._file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(b"PK\3\4"):
            self._fail()
        _, name, more = _HEADER.unpack(head)
        self._file.seek(self._info.header_offset + _HEADER.size + name + more)

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        if not self._left:
            return b""
        if not self._begun:
            self._begin()
        data = self._next(min(size, self._left))
        self._left -= len(data)
        self._sum = isal_zlib.crc32(data, self._sum)
        if not data or (not self._left and self._sum != self._info.CRC):
            self._fail()
        return data

    def _next(self, size: int) -> bytes:
        if self._inflater is None:
            return self._take(size)
        try:
            while True:
                data: bytes = self._inflater.decompress(
                    self._take(_READ) if self._inflater.needs_input else b"", max_length=size
                )
                if data or not self._packed:
                    return data
        except (_INFLATE_ERROR, EOFError):
            self._fail()

    def _take(self, size: int) -> bytes:
        data = self._file.read(min(size, self._packed))
        if not data and self._packed:
            self._fail()
        self._packed -= len(data)
        return data

    def _fail(self) -> NoReturn:
        raise InputError(
            f"the wheel {self._wheel} cannot be used: {self._info.filename} in it is damaged", hint="pin another wheel"
        )

    def close(self) -> None:
        """Close the archive."""
        self._file.close()
