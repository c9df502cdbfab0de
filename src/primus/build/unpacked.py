"""Debian packages laid over a finished image: straight from their archives, no maintainer script runs.

dpkg's own database belongs to the image below and stays as it is; each package leaves its record in
``var/lib/dpkg/status.d``, where scanners look for packages of images that have no dpkg.
"""

from __future__ import annotations

import fnmatch
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from primus.build.rootfs import tar_entries
from primus.errors import HostError
from primus.oci.tar import Entry
from primus.plan.trim import NOT_UNPACKED, UNPACKED_STILL
from primus.versions.lock import LockedFile

# On a merged /usr these are links, below which nothing may be laid.
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def over_entries(debs: Sequence[LockedFile], scratch: Path, *, find: Callable[[LockedFile], Path]) -> list[Entry]:
    """The files of the packages; their bytes stay in tars in ``scratch``. ``find`` gives a package's path on disk.

    Raises HostError for a file that is no package.
    """
    found: dict[str, Entry] = {}
    for deb in sorted(debs, key=lambda d: d.name):
        for entry in _entries(deb, find(deb), scratch):
            # Packages share folders; what else two of them have, dpkg would refuse, and the layer does too.
            if entry.kind != "dir" or entry.path not in found:
                if entry.path in found:
                    raise HostError(
                        f"/{entry.path} is in two packages, one of which is {deb.name}", hint="leave one out"
                    )
                found[entry.path] = entry
    return list(found.values())


def _entries(deb: LockedFile, path: Path, scratch: Path) -> Iterator[Entry]:
    tar = scratch / f"{deb.sha256}.tar"
    with tar.open("wb") as out:
        files = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=out, check=False)
    control = subprocess.run(["dpkg-deb", "-f", str(path)], capture_output=True, check=False)
    if files.returncode or control.returncode:
        raise HostError(f"{deb.file} is not a Debian package", hint="remove it from the file cache and fetch it again")
    for entry in tar_entries(tar):
        if entry.path not in _MERGED and _unpacked("/" + entry.path):
            link = _merged(entry.link) if entry.kind == "hardlink" else entry.link
            yield replace(entry, path=_merged(entry.path), link=link)
    record = control.stdout.rstrip(b"\n") + b"\nStatus: install ok installed\n"
    yield Entry(path=f"var/lib/dpkg/status.d/{deb.name}", size=len(record), source=record)


def _merged(path: str) -> str:
    return f"usr/{path}" if path.partition("/")[0] in _MERGED else path


def _unpacked(path: str) -> bool:
    """dpkg's rule for the options that a base is made with."""
    left_out = any(fnmatch.fnmatchcase(path, pattern) for pattern in NOT_UNPACKED)
    return not left_out or any(fnmatch.fnmatchcase(path, pattern) for pattern in UNPACKED_STILL)
