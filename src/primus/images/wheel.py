"""A wheel → entries of a layer, straight from the archive (PEP 427), as pip would have laid them out.

Scripts get the interpreter of the image's environment, ``entry_points.txt`` becomes console scripts, ``INSTALLER``
and ``RECORD`` are written so that pip inside the image lists and removes the package.
"""

from __future__ import annotations

import base64
import configparser
import csv
import functools
import hashlib
import io
import re
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

from primus.errors import CheckFailed, HostError
from primus.images.prefix import Prefix
from primus.images.tar import Entry
from primus.images.zipped import open_member
from primus.versions.model import normalised

__all__ = ["wheel_entries"]

_SCRIPT = """#!{python}
import sys
from {module} import {top}
if __name__ == "__main__":
    sys.argv[0] = sys.argv[0].removesuffix(".exe")
    sys.exit({call}())
"""


def wheel_entries(path: Path, file_name: str, prefix: Prefix, without: Collection[str] = ()) -> Iterator[Entry]:
    """The wheel's files as entries, sources still in the archive; ``file_name`` is the wheel's real name.

    Its folders that ``without`` names are left out, of its ``RECORD`` too.
    Raises HostError when the archive is no wheel, CheckFailed when it has no such folder.
    """
    try:
        archive = zipfile.ZipFile(path)
        every = [i for i in archive.infolist() if not i.is_dir()]
        infos = [i for i in every if not i.filename.startswith(tuple(f"{folder}/" for folder in without))]
        dist = next(i.filename.split("/")[0] for i in infos if re.fullmatch(r"[^/]+\.dist-info/WHEEL", i.filename))
    except (zipfile.BadZipFile, StopIteration, OSError):
        raise HostError(
            f"{file_name} is not a wheel", hint="remove it from the file cache and fetch it again"
        ) from None
    for folder in without:
        if not any(i.filename.startswith(f"{folder}/") for i in every):
            raise CheckFailed(f"{file_name} has no folder {folder} to leave out", hint="correct `without` of its pin")
    if any(".." in i.filename.split("/") or i.filename.startswith("/") for i in infos):
        raise HostError(f"{file_name} holds a path that leaves its folder", hint="do not use this wheel")
    placed = {_place(i.filename, dist, prefix): i for i in infos}
    made = dict(_scripts(archive, dist, prefix))
    made[f"{prefix.site}/{dist}/INSTALLER"] = b"primus\n"
    record = f"{prefix.site}/{dist}/RECORD"
    for name, info in placed.items():
        if name == record or name in made:
            continue
        script = name.startswith(f"{prefix.root}/bin/") and ".data/scripts/" in info.filename
        if script and (text := archive.read(info)).startswith(b"#!python"):
            made[name] = f"#!{prefix.interpreter}\n".encode() + text.partition(b"\n")[2]
            continue
        runs = script or (info.external_attr >> 16) & 0o111
        yield Entry(
            path=name,
            mode=0o755 if runs else 0o644,
            size=info.file_size,
            source=functools.partial(open_member, archive, info),
        )
    for name, data in made.items():
        mode = 0o755 if name.startswith(f"{prefix.root}/bin/") else 0o644
        yield Entry(path=name, mode=mode, size=len(data), source=data)
    rows = _record(archive, dist, placed, made, prefix)
    yield Entry(path=record, size=len(rows), source=rows)


def _place(name: str, dist: str, prefix: Prefix) -> str:
    data = dist.removesuffix(".dist-info") + ".data/"
    if not name.startswith(data):
        return f"{prefix.site}/{name}"
    scheme, _, rest = name[len(data) :].partition("/")
    project = normalised(dist.partition("-")[0])
    return {
        "purelib": f"{prefix.site}/{rest}",
        "platlib": f"{prefix.site}/{rest}",
        "scripts": f"{prefix.root}/bin/{rest}",
        "headers": f"{prefix.root}/include/site/python{prefix.python}/{project}/{rest}",
        "data": f"{prefix.root}/{rest}",
    }[scheme]


def _scripts(archive: zipfile.ZipFile, dist: str, prefix: Prefix) -> Iterator[tuple[str, bytes]]:
    try:
        text = archive.read(f"{dist}/entry_points.txt").decode()
    except KeyError:
        return
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # names of commands keep their case
    parser.read_string(text)
    for section in ("console_scripts", "gui_scripts"):
        for command, target in parser.items(section) if parser.has_section(section) else ():
            module, _, call = target.partition("[")[0].strip().partition(":")
            script = _SCRIPT.format(python=prefix.interpreter, module=module, top=call.split(".")[0], call=call)
            yield f"{prefix.root}/bin/{command}", script.encode()


def _record(
    archive: zipfile.ZipFile, dist: str, placed: dict[str, zipfile.ZipInfo], made: dict[str, bytes], prefix: Prefix
) -> bytes:
    known = {row[0]: row for row in csv.reader(io.StringIO(archive.read(f"{dist}/RECORD").decode())) if row}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    up = "../" * (prefix.site.count("/") - prefix.root.count("/"))
    rows: dict[str, list[str]] = {}
    for path, info in placed.items():
        rows[path] = known.get(info.filename, ["", "", ""])[1:3]
    for path, data in made.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows[path] = [f"sha256={digest}", str(len(data))]
    rows[f"{prefix.site}/{dist}/RECORD"] = ["", ""]
    for path in sorted(rows):
        site = path.startswith(prefix.site + "/")
        shown = path[len(prefix.site) + 1 :] if site else up + path[len(prefix.root) + 1 :]
        writer.writerow([shown, *rows[path]])
    return out.getvalue().encode()
