"""``wheels`` and ``build``: a layer from locked and built wheels, with the bytecode of their
modules; and a wheel that the sandbox builds from source, for a ``wheels`` action to use.

A wheel's files are read from the archive (PEP 427) and laid out as pip would install them. Scripts
get the interpreter of the image's environment, and ``entry_points.txt`` becomes console scripts.
``INSTALLER`` and ``RECORD`` let pip in the image list and remove the package.
"""

import base64
import configparser
import csv
import functools
import hashlib
import io
import json
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from primus_images.engine.workshop import ENVIRONMENT, Wheel, Workshop, own_code
from primus_images.errors import CheckFailed, InputError
from primus_images.files import path_fault, sha256_of
from primus_images.oci.layer import require_sane
from primus_images.oci.store import Layer
from primus_images.oci.tar import Entry, chunks_of, part
from primus_images.plan.action import Action
from primus_images.plan.compile_bytecode import is_compiled
from primus_images.plan.skeleton import BYTECODE, ORDER, Prefix
from primus_images.sandbox.engines import choose
from primus_images.schema import read_json
from primus_images.versions.lock import normalised
from primus_images.yamlfile import read_values

_UNIX = 3
_MOST_TEXT = 64 << 20
# Memory that one compiler process may need. A pin whose compilers need more sets MAX_JOBS in its
# `environment`.
_JOB_BYTES = 2_000_000_000
_OBJECT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_DATA: Any = read_values(Path(__file__).with_name("wheels.yaml")).data


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Check that the sandbox can compile the bytecode or build the wheel."""
    choose(shop.engine).prepare_host(shop.workspace.unpacked)


def make(action: Action, shop: Workshop, scratch: Path) -> Layer:
    """Write the files of the wheels and the bytecode, which the image's own interpreter compiles."""
    python = str(action.spec["python"])
    prefix = Prefix(root=str(action.spec["prefix"]), python=python)
    without = cast("Collection[str]", action.spec.get("without", ()))
    entries: list[Entry] = []
    for wheel in shop.read_by(action):
        entries += wheel_entries(shop.file(wheel), wheel.file, prefix, without)
    words = [f"/usr/bin/python{python}", "-I", "/compile.py", f"/{prefix.site}"]
    run = functools.partial(
        shop.run_with_tools, action, words, what=f"compiling bytecode of {action.name}"
    )
    script = own_code(action, "bytecode", BYTECODE, scratch)
    return shop.write(
        action, [*entries, *bytecode_entries(entries, prefix.site, scratch, script, run)]
    )


def bytecode_entries(
    entries: Sequence[Entry], site: str, scratch: Path, script: Path, run: Callable[..., None]
) -> Iterator[Entry]:
    """Compile the modules among ``entries`` that lie below ``site``, and yield the bytecode files
    as entries.

    ``script`` is a copy of :data:`primus_images.plan.skeleton.BYTECODE`, and ``run`` runs it in the
    sandbox with the mounts ``inputs`` and the folder ``outputs`` as /out. Raises CheckFailed if
    what the script wrote was cut short.
    """
    modules = [e for e in entries if e.path.startswith(site + "/") and is_compiled(e.path)]
    if not modules:
        return
    source = scratch / "source"
    out = scratch / "out"
    source.mkdir()
    out.mkdir()
    with (source / "modules").open("wb") as stream:
        for entry in modules:
            stream.writelines(entry.chunks())
    index = [(entry.path.removeprefix(site + "/"), entry.size) for entry in modules]
    (source / "index.json").write_text(json.dumps(index), encoding="utf-8")
    run(inputs={"/in": source, "/compile.py": script}, outputs=out)
    rows: Any = read_json(out / "index.json").data
    (source / "modules").unlink()
    sizes = {pack: (out / str(pack)).stat().st_size for pack in {int(row[1]) for row in rows}}
    for path, pack, offset, size in rows:
        if offset + size > sizes[pack]:
            raise CheckFailed(f"the bytecode of {path} was cut short")
        yield Entry(
            path=f"{site}/{path}",
            size=size,
            source=functools.partial(part, out / str(pack), offset, size),
        )


def build(action: Action, shop: Workshop, scratch: Path) -> Wheel:
    """Run the build script without network on a read-only source. The script must write one wheel
    to /out.
    """
    (source,) = action.files
    inside = f"/in/{source.file}"
    out = scratch / "out"
    order = own_code(action, "sorted folders", ORDER, scratch)
    shop.run_with_tools(
        action,
        ["/bin/sh", "-c", str(action.spec["script"]), "wheel", inside, str(action.spec["python"])],
        inputs={inside: shop.file(source), "/in/order/sitecustomize.py": order},
        outputs=out,
        env={**_environment(), **cast("Mapping[str, str]", action.spec["environment"])},
        what=action.name,
    )
    wheels = [path for path in out.glob("*.whl") if path.is_file() and not path.is_symlink()]
    if len(wheels) != 1:
        names = ", ".join(sorted(w.name for w in wheels)) or "none"
        raise CheckFailed(
            f"{action.name} must build one wheel, but built {names}", where=str(shop.log(action))
        )
    sha256 = sha256_of(wheels[0])
    wheel = Wheel(file=wheels[0].name, sha256=sha256, size=wheels[0].stat().st_size)
    shop.workspace.files.put(wheels[0], sha256)
    return wheel


def _environment() -> dict[str, str]:
    (line,) = [
        m for m in Path("/proc/meminfo").read_text().splitlines() if m.startswith("MemAvailable:")
    ]
    jobs = str(max(1, min(len(os.sched_getaffinity(0)), 1024 * int(line.split()[1]) // _JOB_BYTES)))
    return {"CMAKE_BUILD_PARALLEL_LEVEL": jobs, "MAX_JOBS": jobs, **ENVIRONMENT["wheel"]}


# zipfile, csv and configparser raise all of these for archives and texts that are damaged on
# purpose. KeyError's text is the missing file in quotes; OSError is a place before the archive.
_FAULTS = (
    zipfile.BadZipFile,
    configparser.Error,
    csv.Error,
    zlib.error,
    struct.error,
    KeyError,
    ValueError,
    EOFError,
    OverflowError,
    RuntimeError,
    OSError,
)


def wheel_entries(
    path: Path, file_name: str, prefix: Prefix, without: Collection[str] = ()
) -> Iterator[Entry]:
    """Yield the wheel's files as entries, whose bytes are still in the archive.

    ``file_name`` is the wheel's original name. Folders in ``without`` are left out, also of
    ``RECORD``. Raises InputError if the archive is not a wheel that an image may contain,
    CheckFailed if ``without`` names no folder.
    """
    try:
        yield from _entries(path, file_name, prefix, without)
    except InputError as error:
        raise InputError(
            f"the wheel {file_name} cannot be used: {error.message}", hint="pin another wheel"
        ) from None
    except _FAULTS as error:
        raise InputError(
            f"the wheel {file_name} cannot be used: {error}", hint="pin another wheel"
        ) from None


def _entries(
    path: Path, file_name: str, prefix: Prefix, without: Collection[str]
) -> Iterator[Entry]:
    archive = zipfile.ZipFile(path)
    every = _members(archive, path.stat().st_size)
    infos = [
        i for i in every if not i.filename.startswith(tuple(f"{folder}/" for folder in without))
    ]
    dists = [
        i.filename.split("/")[0]
        for i in infos
        if re.fullmatch(r"[^/]+\.dist-info/WHEEL", i.filename)
    ]
    if len(dists) != 1:
        raise InputError(f"it has {len(dists) or 'no'} dist-info/WHEEL files, but a wheel has one")
    (dist,) = dists
    for folder in without:
        if not any(i.filename.startswith(f"{folder}/") for i in every):
            raise CheckFailed(
                f"{file_name} has no folder {folder} to leave out",
                hint="correct `without` of its pin",
            )
    placed: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        place = _place(info.filename, dist, prefix)
        if place in placed:
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
            source=functools.partial(_unpacked, archive, info, file_name),
        )
    for name, data in written.items():
        mode = 0o644
        if name.startswith(f"{prefix.root}/bin/"):
            mode = 0o755
        yield Entry(path=name, mode=mode, size=len(data), source=data)
    rows = _record(archive, dist, placed, written, prefix)
    yield Entry(path=record, size=len(rows), source=rows)


def _members(archive: zipfile.ZipFile, size: int) -> list[zipfile.ZipInfo]:
    """Return the archive's files. Raises InputError for entries that an image may not contain, and
    for a bomb.
    """
    files = [i for i in archive.infolist() if not i.is_dir()]
    for info in files:
        # zipfile has already converted Windows paths.
        fault = path_fault(info.filename) or path_fault(info.orig_filename)
        if fault:
            raise InputError(
                f"the path {info.orig_filename[:200]!r} in it cannot be in an image: {fault}"
            )
        kind = stat.S_IFMT(info.external_attr >> 16)
        if info.create_system == _UNIX and kind not in (0, stat.S_IFREG):
            raise InputError(f"{info.filename} is not a regular file")
    require_sane(sum(info.file_size for info in files), size)
    return files


def _text(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _MOST_TEXT:
        raise ValueError(f"{name} is larger than {_MOST_TEXT >> 20} MiB")
    return archive.read(name)


def _place(name: str, dist: str, prefix: Prefix) -> str:
    data = dist.removesuffix(".dist-info") + ".data/"
    if not name.startswith(data):
        return f"{prefix.site}/{name}"
    scheme, _, rest = name[len(data) :].partition("/")
    if scheme not in _DATA["places"] or not rest:
        raise InputError(f"{name} is outside the folders that the .data folder of a wheel may have")
    place: str = _DATA["places"][scheme].format(
        prefix, rest=rest, project=normalised(dist.partition("-")[0])
    )
    return place


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
            words = {
                "python": prefix.interpreter,
                "module": module,
                "top": call.split(".")[0],
                "call": call,
            }
            yield f"{prefix.root}/bin/{command}", _DATA["command"].format(**words).encode()


def _record(
    archive: zipfile.ZipFile,
    dist: str,
    placed: dict[str, zipfile.ZipInfo],
    written: dict[str, bytes],
    prefix: Prefix,
) -> bytes:
    original = {
        row[0]: row
        for row in csv.reader(io.StringIO(_text(archive, f"{dist}/RECORD").decode()))
        if row
    }
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
        if site:
            shown = path[len(prefix.site) + 1 :]
        else:
            shown = up + path[len(prefix.root) + 1 :]
        writer.writerow([shown, *rows[path]])
    return out.getvalue().encode()


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, wheel: str) -> Iterator[bytes]:
    try:
        with archive.open(info) as file:
            yield from chunks_of(file)
    except _FAULTS as error:
        raise InputError(
            f"the wheel {wheel} cannot be used: {info.filename} in it is damaged: {error}",
            hint="pin another wheel",
        ) from None
