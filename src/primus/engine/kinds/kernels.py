"""``kernels``: GPU code for one architecture, from Debian packages that contain code for many.

A base is the same for every GPU. What its packages have for one architecture goes into a layer of its own, so images
for two GPUs share every byte that is not specific to one of them.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from primus.engine.kinds.debs import dpkg_deb, tar_entries
from primus.engine.workshop import Workshop
from primus.errors import CheckFailed
from primus.gpucode.bundles import keep_only
from primus.oci.store import Layer
from primus.oci.tar import Entry
from primus.plan.action import Action
from primus.programs import need

_NARROW = "narrow the base's pattern under `kernels`"


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
    tar, entries = folder / "files.tar", list[Entry]()
    with tar.open("wb") as out:
        dpkg_deb("--fsys-tarfile", deb, deb.name, out)
    for entry in tar_entries(tar):
        path = entry.path
        if entry.kind == "dir" or not any(fnmatch.fnmatchcase("/" + path, pattern) for pattern in patterns):
            continue
        if arch and "gfx" in path and not re.search(rf"{arch}(?![0-9a-f])", path):
            continue
        if entry.kind == "hardlink":
            raise CheckFailed(f"/{path} is neither a file nor a symbolic link", hint=_NARROW)
        pruned = arch and "gfx" not in path and entry.kind == "file"
        entries.append(_pruned(arch, entry, folder / str(len(entries))) if arch and pruned else entry)
    return entries


def _pruned(arch: str, entry: Entry, whole: Path) -> Entry:
    copy = whole.with_suffix(".pruned")
    with whole.open("wb") as out:
        out.writelines(entry.chunks())
    try:
        with whole.open("rb") as source, copy.open("wb") as out:
            has_code = keep_only(arch, source, entry.size, out)
    except ValueError as error:
        raise CheckFailed(f"/{entry.path}: {error}", hint=f"{_NARROW}, so that it stays whole in the base") from None
    if not has_code:
        raise CheckFailed(f"/{entry.path} holds no GPU code and names no architecture", hint=_NARROW)
    whole.unlink()
    return replace(entry, source=copy)
