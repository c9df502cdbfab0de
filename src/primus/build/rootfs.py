"""Locked Debian packages → the entries of a base layer, through mmdebstrap, without any network.

mmdebstrap sees one repository: a folder with exactly the locked packages. What depends on the moment or the machine
(logs, caches, machine id, device nodes, apt's sources) is left out of the layer, what remains is what dpkg installed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from primus.build.kinds.kernels import unlisted
from primus.build.part import open_part
from primus.build.space import disk_is_full
from primus.errors import CheckFailed, HostError
from primus.oci.store import storage_error
from primus.oci.tar import MTIME, Entry
from primus.plan.trim import LEFT_OUT, NOT_UNPACKED, UNPACKED_STILL, VARIANT
from primus.sandbox import userns
from primus.sandbox.isolated import log_tail
from primus.sandbox.running import tracked
from primus.versions.lock import LockedFile


def root_entries(
    debs: Sequence[LockedFile],
    suite: str,
    scratch: Path,
    *,
    find: Callable[[LockedFile], Path],
    mmdebstrap: str,
    log: Path,
    kernels: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[Entry]:
    """Build the root file system in ``scratch`` and return its entries; their bytes stay in a tar there.

    ``find`` gives a locked file's path on disk; ``kernels`` are package and patterns of files that stay packed. Raises
    HostError when this user may not build one, CheckFailed with the log's tail when a package fails to install, and for
    kernel files of a package that ``kernels`` does not name.
    """
    tar = scratch / "root.tar"
    mode = "root" if os.geteuid() == 0 else "unshare"
    with _workplace(scratch) as place, log.open("wb") as out:
        archive = place / "archive"
        archive.mkdir()
        paragraphs = [_publish(deb, find(deb), archive) for deb in sorted(debs, key=lambda d: d.name)]
        (archive / "Packages").write_bytes(b"\n".join(paragraphs))
        # By this name mmdebstrap finds the essential packages.
        (archive / "Release").write_text(f"Codename: {suite}\n", encoding="ascii")
        apart = _own_processes()
        command = [
            *apart,
            mmdebstrap,
            f"--mode={mode}",
            f"--variant={VARIANT}",
            "--format=tar",
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
            *(f"--dpkgopt=path-exclude={path}" for path in NOT_UNPACKED),
            *(f"--dpkgopt=path-include={path}" for path in UNPACKED_STILL),
            *(f"--dpkgopt=path-exclude={path}" for patterns in kernels.values() for path in patterns),
            "--include=" + ",".join(sorted(d.name for d in debs)),
            suite,
            str(tar),
            f"deb [trusted=yes] copy:{archive} ./",
        ]
        env = {**os.environ, "SOURCE_DATE_EPOCH": str(MTIME), "LC_ALL": "C.UTF-8", "TMPDIR": str(place)}
        # An interrupted base is thrown away: dpkg need not wait for the disk after every file.
        env["DPKG_FORCE"] = "unsafe-io"
        # What packages compile on purpose comes out the same each time, what an import leaves behind does not.
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env,
            start_new_session=bool(apart),
        )  # fmt: skip
        # Without namespaces some of its processes may have ids that this user cannot signal, but the terminal can.
        with tracked(process) if apart else process:
            code = process.wait()
        # While the half-made root still takes the space.
        full = disk_is_full(log, place, scratch) if code != 0 else None
    if full is not None:
        raise full
    if code != 0:
        raise CheckFailed(f"the base could not be installed (mmdebstrap ended with {code}):\n{log_tail(log)}")
    entries = list(tar_entries(tar, LEFT_OUT))
    if kernels and (packages := unlisted(entries, kernels)):
        raise CheckFailed(
            f"{' and '.join(packages)} has files where a pattern of `kernels` leaves them out",
            hint="name it under `kernels` of the base, too",
        )
    return entries


def _own_processes() -> list[str]:
    """What root starts mmdebstrap with: in namespaces of its own, none of its processes and mounts outlives this one.

    Nothing for an ordinary user, whose mmdebstrap makes its own, and where root may make none.
    """
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return []
    return words if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0 else []


@contextlib.contextmanager
def _workplace(scratch: Path) -> Iterator[Path]:
    """Where the root file system grows: for an ordinary user a folder that the user's mapped ids may enter too, which
    a home usually is not.
    """
    if os.geteuid() == 0:
        yield scratch
        return
    if (lack := userns.missing()) is not None:
        what, fix = lack
        raise HostError(f"this user cannot build a root file system: {what}", hint=fix)
    with tempfile.TemporaryDirectory(prefix="primus-base-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def _publish(deb: LockedFile, path: Path, archive: Path) -> bytes:
    """Put one package into the repository folder and return its paragraph of the Packages file."""
    name = f"{deb.sha256[:16]}.deb"
    try:
        (archive / name).hardlink_to(path)
    except OSError:
        try:
            shutil.copyfile(path, archive / name)
        except OSError as error:
            raise storage_error(error, archive) from None
    control = subprocess.run(["dpkg-deb", "-f", str(path)], capture_output=True, check=False)
    if control.returncode != 0:
        raise HostError(f"{deb.file} is not a Debian package", hint="remove it from the file cache and fetch it again")
    fields = f"Filename: ./{name}\nSize: {deb.size}\nSHA256: {deb.sha256}\n"
    return control.stdout.rstrip(b"\n") + b"\n" + fields.encode()


def tar_entries(tar: Path, left_out: Sequence[str] = ()) -> Iterator[Entry]:
    """The files, folders and links of a tar of a root file system, but for patterns ``left_out``; CheckFailed for
    anything else.
    """
    kinds = {
        tarfile.REGTYPE: "file",
        tarfile.LNKTYPE: "hardlink",
        tarfile.SYMTYPE: "symlink",
        tarfile.DIRTYPE: "dir",
    }
    with tarfile.open(tar, "r:") as archive:
        while (member := archive.next()) is not None:
            # tarfile keeps every member it has seen; for a large base that is more than the entries themselves.
            archive.members.clear()  # type: ignore[attr-defined]
            path = member.name.removeprefix("./").strip("/")
            if not path or path == "." or any(fnmatch.fnmatchcase(path, pattern) for pattern in left_out):
                continue
            if member.type not in kinds:
                raise CheckFailed(f"the base holds /{path}, which is not a file, folder or link")
            yield Entry(
                path=path,
                kind=kinds[member.type],  # type: ignore[arg-type]
                mode=member.mode,
                uid=member.uid,
                gid=member.gid,
                size=member.size if member.type == tarfile.REGTYPE else 0,
                link=member.linkname.removeprefix("./") if member.type == tarfile.LNKTYPE else member.linkname,
                xattrs=_xattrs(member),
                source=functools.partial(open_part, tar, member.offset_data, member.size) if member.isreg() else None,
            )


def _xattrs(member: tarfile.TarInfo) -> dict[str, bytes]:
    prefix = "SCHILY.xattr."
    return {
        key.removeprefix(prefix): value.encode("utf-8", "surrogateescape")
        for key, value in member.pax_headers.items()
        if key.startswith(prefix)
    }
