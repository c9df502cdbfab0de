"""``wheels`` and ``build``: a layer from wheels, with bytecode; and a wheel built from source.

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
import posixpath
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from primus_images.engine.workshop import ENVIRONMENT, Task, Wheel, Workshop, own_code
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
    """Write the wheels' files and the bytecode, which the image's own interpreter compiles."""
    python = str(action.spec["python"])
    prefix = Prefix(root=str(action.spec["prefix"]), python=python)
    without = cast("Collection[str]", action.spec.get("without", ()))
    entries: list[Entry] = []
    for wheel in shop.read_by(action):
        entries += wheel_entries(shop.file(wheel), wheel.file, prefix, without)
    argv = (f"/usr/bin/python{python}", "-I", "/compile.py", f"/{prefix.site}")

    def run(inputs: Mapping[str, Path], outputs: Path) -> None:
        task = Task(argv=argv, inputs=inputs, outputs=outputs)
        shop.run_with_tools(action, task, f"compiling bytecode of {action.name}")

    script = own_code(action, "bytecode", BYTECODE, scratch)
    bytecode = bytecode_entries(entries, prefix.site, scratch, script, run)
    return shop.write(action, [*entries, *bytecode])


def bytecode_entries(
    entries: Sequence[Entry], site: str, scratch: Path, script: Path, run: Callable[..., None]
) -> Iterator[Entry]:
    """Compile the modules among ``entries`` below ``site``, and yield the bytecode as entries.

    ``script`` is a copy of :data:`primus_images.plan.skeleton.BYTECODE`, and ``run`` runs it in the
    sandbox with the mounts ``inputs`` and the folder ``outputs`` as /out. Raises CheckFailed if
    what the script wrote was cut short.
    """
    modules = [
        entry for entry in entries if entry.path.startswith(f"{site}/") and is_compiled(entry.path)
    ]
    if not modules:
        return
    source = scratch / "source"
    out = scratch / "out"
    source.mkdir()
    out.mkdir()
    with (source / "modules").open("wb") as stream:
        for entry in modules:
            stream.writelines(entry.chunks())
    index = [(entry.path.removeprefix(f"{site}/"), entry.size) for entry in modules]
    (source / "index.json").write_text(json.dumps(index), encoding="utf-8")
    run(inputs={"/in": source, "/compile.py": script}, outputs=out)
    (source / "modules").unlink()
    rows: Any = read_json(out / "index.json").data
    for path, pack, offset, size in rows:
        packed = out / str(pack)
        if offset + size > packed.stat().st_size:
            raise CheckFailed(f"the bytecode of {path} was cut short")
        source_of_entry = functools.partial(part, packed, offset, size)
        yield Entry(path=f"{site}/{path}", size=size, source=source_of_entry)


def build(action: Action, shop: Workshop, scratch: Path) -> Wheel:
    """Run the build script without network. It must write one wheel to /out."""
    (source,) = action.files
    archive = f"/in/{source.file}"
    out = scratch / "out"
    script = str(action.spec["script"])
    order = own_code(action, "sorted folders", ORDER, scratch)
    variables = cast("Mapping[str, str]", action.spec["environment"])
    task = Task(
        argv=("/bin/sh", "-c", script, "wheel", archive, str(action.spec["python"])),
        inputs={archive: shop.file(source), "/in/order/sitecustomize.py": order},
        outputs=out,
        env={**_environment(), **variables},
    )
    shop.run_with_tools(action, task, action.name)
    wheels = [path for path in out.glob("*.whl") if path.is_file() and not path.is_symlink()]
    if len(wheels) != 1:
        names = ", ".join(sorted(path.name for path in wheels)) or "none"
        raise CheckFailed(
            f"{action.name} must build one wheel, but built {names}", where=str(shop.log(action))
        )
    (wheel,) = wheels
    sha256 = sha256_of(wheel)
    shop.workspace.files.put(wheel, sha256)
    return Wheel(file=wheel.name, sha256=sha256, size=wheel.stat().st_size)


def _environment() -> dict[str, str]:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    available = 1024 * int(re.findall(r"MemAvailable: *(\d+)", text)[0])
    jobs = str(max(1, min(len(os.sched_getaffinity(0)), available // _JOB_BYTES)))
    return {"CMAKE_BUILD_PARALLEL_LEVEL": jobs, "MAX_JOBS": jobs, **ENVIRONMENT["wheel"]}


# zipfile and csv raise all of these for archives and texts that are damaged. KeyError's text is the
# missing file in quotes; OSError is a place before the archive.
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
        raise _unusable(file_name, error.message) from None
    except _FAULTS as error:
        raise _unusable(file_name, str(error)) from None


def _unusable(wheel: str, reason: str) -> InputError:
    return InputError(f"the wheel {wheel} cannot be used: {reason}", hint="pin another wheel")


def _entries(
    path: Path, file_name: str, prefix: Prefix, without: Collection[str]
) -> Iterator[Entry]:
    archive = zipfile.ZipFile(path)
    members = _members(archive, path.stat().st_size)
    for folder in without:
        kept = [member for member in members if not member.filename.startswith(f"{folder}/")]
        if len(kept) == len(members):
            raise CheckFailed(
                f"{file_name} has no folder {folder} to leave out",
                hint="correct `without` of its pin",
            )
        members = kept
    dist = _dist_info(members)
    placed = _placed(members, dist, prefix)
    written = _written(archive, dist, placed, prefix)
    record = f"{prefix.site}/{dist}/RECORD"
    for name, info in placed.items():
        if name != record and name not in written:
            runs = _is_script(name, info, prefix) or (info.external_attr >> 16) & 0o111
            source = functools.partial(_unpacked, archive, info, file_name)
            mode = 0o755 if runs else 0o644
            yield Entry(path=name, mode=mode, size=info.file_size, source=source)
    for name, data in written.items():
        mode = 0o755 if name.startswith(f"{prefix.root}/bin/") else 0o644
        yield Entry(path=name, mode=mode, size=len(data), source=data)
    rows = _record(archive, dist, placed, written, prefix)
    yield Entry(path=record, size=len(rows), source=rows)


def _members(archive: zipfile.ZipFile, size: int) -> list[zipfile.ZipInfo]:
    """Return the archive's files.

    Raises InputError for entries that an image may not contain, and for a bomb.
    """
    files = [info for info in archive.infolist() if not info.is_dir()]
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


def _dist_info(members: Sequence[zipfile.ZipInfo]) -> str:
    folders = [
        member.filename.removesuffix("/WHEEL")
        for member in members
        if re.fullmatch(r"[^/]+\.dist-info/WHEEL", member.filename)
    ]
    if len(folders) != 1:
        number = len(folders) or "no"
        raise InputError(f"it has {number} dist-info/WHEEL files, but a wheel has one")
    return folders[0]


def _placed(
    members: Sequence[zipfile.ZipInfo], dist: str, prefix: Prefix
) -> dict[str, zipfile.ZipInfo]:
    """Return path in the image → member."""
    placed: dict[str, zipfile.ZipInfo] = {}
    for info in members:
        place = _place(info.filename, dist, prefix)
        if place in placed:
            raise InputError(f"two of its files would be installed as /{place}")
        placed[place] = info
    return placed


def _place(name: str, dist: str, prefix: Prefix) -> str:
    data = dist.removesuffix(".dist-info") + ".data/"
    if not name.startswith(data):
        return f"{prefix.site}/{name}"
    scheme, _, rest = name.removeprefix(data).partition("/")
    if scheme not in _DATA["places"] or not rest:
        raise InputError(f"{name} is outside the folders that the .data folder of a wheel may have")
    project = normalised(dist.partition("-")[0])
    place: str = _DATA["places"][scheme].format(prefix, rest=rest, project=project)
    return place


def _is_script(place: str, info: zipfile.ZipInfo, prefix: Prefix) -> bool:
    return place.startswith(f"{prefix.root}/bin/") and ".data/scripts/" in info.filename


def _written(
    archive: zipfile.ZipFile, dist: str, placed: Mapping[str, zipfile.ZipInfo], prefix: Prefix
) -> dict[str, bytes]:
    """Return path → bytes of what pip would write: scripts and INSTALLER."""
    written = dict(_commands(archive, dist, prefix))
    written[f"{prefix.site}/{dist}/INSTALLER"] = b"primus\n"
    for name, info in placed.items():
        if name not in written and _is_script(name, info, prefix):
            first, _, rest = _text(archive, info.filename).partition(b"\n")
            if first.startswith(b"#!python"):
                written[name] = f"#!{prefix.interpreter}\n".encode() + rest
    return written


def _commands(archive: zipfile.ZipFile, dist: str, prefix: Prefix) -> Iterator[tuple[str, bytes]]:
    for command, target in _entry_points(archive, dist):
        module, _, call = target.partition("[")[0].strip().partition(":")
        if not _OBJECT.fullmatch(module) or not _OBJECT.fullmatch(call) or "/" in command:
            raise InputError(f"its entry point {command[:100]!r} is not NAME = MODULE:FUNCTION")
        script = _DATA["command"].format(
            python=prefix.interpreter, module=module, top=call.split(".")[0], call=call
        )
        yield f"{prefix.root}/bin/{command}", script.encode()


def _entry_points(archive: zipfile.ZipFile, dist: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the target of each command. A name that stands twice is an error."""
    try:
        text = _text(archive, f"{dist}/entry_points.txt").decode()
    except KeyError:
        return
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    # Names of commands keep their case.
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    for section in ("console_scripts", "gui_scripts"):
        if parser.has_section(section):
            yield from parser.items(section)


def _record(
    archive: zipfile.ZipFile,
    dist: str,
    placed: Mapping[str, zipfile.ZipInfo],
    written: Mapping[str, bytes],
    prefix: Prefix,
) -> bytes:
    """Return RECORD, with hash and size of every file that pip in the image may remove."""
    text = _text(archive, f"{dist}/RECORD").decode()
    original = {row[0]: row[1:3] for row in csv.reader(io.StringIO(text)) if row}
    rows = {path: original.get(info.filename, ["", ""]) for path, info in placed.items()}
    for path, data in written.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows[path] = [f"sha256={digest}", str(len(data))]
    rows[f"{prefix.site}/{dist}/RECORD"] = ["", ""]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for path in sorted(rows):
        writer.writerow([posixpath.relpath(path, prefix.site), *rows[path]])
    return out.getvalue().encode()


def _text(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _MOST_TEXT:
        raise ValueError(f"{name} is larger than {_MOST_TEXT >> 20} MiB")
    return archive.read(name)


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, wheel: str) -> Iterator[bytes]:
    try:
        with archive.open(info) as file:
            yield from chunks_of(file)
    except _FAULTS as error:
        raise _unusable(wheel, f"{info.filename} in it is damaged: {error}") from None
