"""``kernels``: GPU code for one architecture, from Debian packages that contain code for many.

A base is the same for every GPU. What its packages have for one architecture goes into a layer of its own, so images
for two GPUs share every byte that is not specific to one of them.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

from primus.engine.workshop import Workshop
from primus.errors import CheckFailed, HostError
from primus.gpucode.bundles import keep_only
from primus.oci.contents import members
from primus.oci.store import Layer
from primus.oci.tar import Entry
from primus.plan.action import Action
from primus.programs import need

_NARROW = "narrow the base's pattern under `kernels`"
_LIST = re.compile(r"var/lib/dpkg/info/([^/:]+)(?::[^/]+)?\.list")


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Raise HostError if dpkg-deb, which unpacks the packages, is missing and cannot be installed."""
    need("dpkg-deb", "dpkg", say=shop.progress.say)


def make(action: Action, shop: Workshop, scratch: Path) -> Layer:
    """Write the files of the action's packages that are for its architecture."""
    arch, patterns = str(action.spec["arch"]), cast("Mapping[str, Sequence[str]]", action.spec["kernels"])
    entries: list[Entry] = []
    for deb in action.files:
        entries += kernel_files(arch, shop.file(deb), patterns[deb.name], scratch / deb.name)
    return shop.write(action, entries)


def kernel_files(arch: str | None, deb: Path, patterns: Sequence[str], folder: Path) -> list[Entry]:
    """Return the package's files and symbolic links whose absolute path matches one of ``patterns``; ``folder`` keeps
    their bytes.

    A path that contains names of architectures shows which GPUs the file is for. From any other file, code for
    architectures other than ``arch`` is removed; with None, nothing is. Raises HostError if ``deb`` is not a package,
    CheckFailed for a path that is neither a file nor a symbolic link, and for a file without readable GPU code.
    """
    folder.mkdir(parents=True)
    entries: list[Entry] = []
    for member, stream in _members(deb):
        path = member.name.removeprefix("./").strip("/")
        if member.isdir() or not any(fnmatch.fnmatchcase("/" + path, pattern) for pattern in patterns):
            continue
        if arch and "gfx" in path and not re.search(rf"{arch}(?![0-9a-f])", path):
            continue
        if member.issym():
            entries.append(Entry(path=path, kind="symlink", mode=0o777, link=member.linkname))
        elif stream is None:
            raise CheckFailed(f"/{path} is neither a file nor a symbolic link", hint=_NARROW)
        else:
            copy = folder / str(len(entries))
            with copy.open("wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
            entries.append(Entry(path=path, mode=member.mode, size=member.size, source=copy))
    # Only now has dpkg-deb ended and freed its memory.
    for number, entry in enumerate(entries):
        if arch and "gfx" not in entry.path and isinstance(entry.source, Path):
            entries[number] = replace(entry, source=_pruned(arch, entry.path, entry.source))
    return entries


def _pruned(arch: str, path: str, whole: Path) -> Path:
    copy, size = whole.with_suffix(".pruned"), whole.stat().st_size
    try:
        with whole.open("rb") as source, copy.open("wb") as out:
            has_code = keep_only(arch, source, size, out)
    except ValueError as error:
        raise CheckFailed(f"/{path}: {error}", hint=f"{_NARROW}, so that it stays whole in the base") from None
    if not has_code:
        raise CheckFailed(f"/{path} holds no GPU code and names no architecture", hint=_NARROW)
    whole.unlink()
    return copy


def _members(deb: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    # Each thread of dpkg-deb allocates its own dictionary.
    env = {**os.environ, "DPKG_DEB_THREADS_MAX": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as process:
        try:
            with tarfile.open(fileobj=cast("IO[bytes]", process.stdout), mode="r|", bufsize=1 << 20) as archive:
                for member in members(archive):
                    yield member, archive.extractfile(member) if member.isreg() else None
        except tarfile.TarError as error:
            raise HostError(f"{deb.name} cannot be unpacked: {error}", hint="fetch it again") from None
        finally:
            process.kill()


def unlisted(entries: Iterable[Entry], kernels: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the packages in a base's dpkg database whose files match a pattern of ``kernels``, but that ``kernels``
    does not list. No layer would contain these files.
    """
    patterns = re.compile("|".join(fnmatch.translate(p) for of in kernels.values() for p in of))
    packages = []
    for entry in entries:
        name = _LIST.fullmatch(entry.path)
        if name and name[1] not in kernels:
            text = b"".join(entry.chunks()).decode("utf-8", "replace")
            if any(patterns.match(line) for line in text.splitlines()):
                packages.append(name[1])
    return sorted(packages)
