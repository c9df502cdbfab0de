"""``debs`` and ``kernels``: locked Debian packages as the base of an image, or over an image that a
registry gave; and their GPU code for one architecture, from packages that contain code for many.

A base is installed by mmdebstrap, without any network. It sees one repository: a folder with
exactly the locked packages. What depends on the moment or the machine is left out of the layer.

Over an image, packages are laid straight from their archives, and no maintainer script runs. dpkg's
own database belongs to the image below and stays as it is; each package leaves its record in
``var/lib/dpkg/status.d``, where scanners look for packages of images that have no dpkg.

A base is the same for every GPU. What its packages have for one architecture goes into a layer of
its own, so images for two GPUs share every byte that is not specific to one of them.
"""

import fnmatch
import functools
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

from primus_images.engine.workshop import Workshop, disk_is_full, log_tail
from primus_images.errors import CheckFailed, HostError
from primus_images.gpucode.bundles import keep_only
from primus_images.oci.layer import MEMBER_KINDS, entry_of, members
from primus_images.oci.store import Layer, storage_error
from primus_images.oci.tar import MTIME, Entry, part
from primus_images.plan.action import Action
from primus_images.plan.skeleton import TRIM, VARIANT
from primus_images.programs import lacks_ids, need, tracked
from primus_images.versions.lock import LockedFile

_NARROW = "narrow the base's pattern under `kernels`"
_LIST = re.compile(r"var/lib/dpkg/info/([^/:]+)(?::[^/]+)?\.list")


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Check for mmdebstrap and, for an ordinary user, for user namespaces. Packages on top of an
    image need neither.
    """
    if all("over" in action.spec for action in actions):
        return
    problem = lacks_ids()
    if problem:
        raise HostError(f"this user cannot build a root file system: {problem[0]}", hint=problem[1])
    need("mmdebstrap", "mmdebstrap")


def make(action: Action, shop: Workshop, scratch: Path) -> Layer:
    """Install the packages with mmdebstrap, or unpack them if they go on top of an image."""
    return shop.write(
        action, (_over_entries if "over" in action.spec else root_entries)(action, shop, scratch)
    )


def root_entries(action: Action, shop: Workshop, scratch: Path) -> list[Entry]:
    """Build the root file system in ``scratch`` and return its entries, whose bytes are in a tar
    file there.

    Raises HostError if the disk is full, CheckFailed if a package cannot be installed or has kernel
    files that it should not.
    """
    kernels = cast("Mapping[str, Sequence[str]]", action.spec.get("kernels", {}))
    debs = sorted(action.files, key=lambda deb: deb.name)
    suite = str(action.spec["suite"])
    mmdebstrap = need("mmdebstrap", "mmdebstrap")
    log = shop.log(action)
    tar = scratch / "root.tar"
    mode = "unshare"
    if os.geteuid() == 0:
        mode = "root"
    with _workplace(scratch) as name, log.open("wb") as out:
        place = Path(name)
        archive = Path(name, "archive")
        archive.mkdir()
        (archive / "Packages").write_bytes(
            b"\n".join([_publish(deb, shop.file(deb), archive) for deb in debs])
        )
        # mmdebstrap finds the essential packages by this name.
        (archive / "Release").write_text(f"Codename: {suite}\n", encoding="ascii")
        # apt reads them as another user, whatever the umask.
        for path in (place, archive, archive / "Packages", archive / "Release"):
            path.chmod(0o755)
        apart = _own_processes()
        command = [
            *apart,
            str(mmdebstrap),
            f"--mode={mode}",
            f"--variant={VARIANT}",
            "--format=tar",
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
            *(f"--dpkgopt=path-exclude={path}" for path in TRIM["not_unpacked"]),
            *(f"--dpkgopt=path-include={path}" for path in TRIM["unpacked_still"]),
            *(
                f"--dpkgopt=path-exclude={path}"
                for patterns in kernels.values()
                for path in patterns
            ),
            "--include=" + ",".join(deb.name for deb in debs),
            suite,
            str(tar),
            f"deb [trusted=yes] copy:{archive} ./",
        ]
        env = {**os.environ, "SOURCE_DATE_EPOCH": str(MTIME), "LC_ALL": "C.UTF-8", "TMPDIR": name}
        # An interrupted base is discarded, so dpkg need not flush every file to the disk.
        env["DPKG_FORCE"] = "unsafe-io"
        # Bytecode that packages compile on purpose is reproducible; bytecode that imports leave
        # behind is not.
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=bool(apart),
        )
        # Without namespaces, some of its processes may have ids that this user cannot signal, but
        # the terminal can.
        with tracked(process) if apart else process:
            code = process.wait()
        # The unfinished root still takes the space now.
        full = None
        if code != 0:
            full = disk_is_full(log, place, scratch)
    if full is not None:
        raise full
    if code != 0:
        raise CheckFailed(
            f"the base could not be installed (mmdebstrap ended with {code}):\n{log_tail(log)}"
        )
    entries = without_empty_merged(list(tar_entries(tar, TRIM["left_out"])))
    if kernels and (packages := unlisted(entries, kernels)):
        packages_text = " and ".join(packages)
        raise CheckFailed(
            f"{packages_text} has files where a pattern of `kernels` leaves them out",
            hint="name it under `kernels` of the base, too",
        )
    return entries


def without_empty_merged(entries: Sequence[Entry]) -> list[Entry]:
    """Leave out folders of a merged /usr that are empty, with their links: not every mmdebstrap
    creates them.
    """
    empty = {
        name
        for name in TRIM["merged"]
        if not any(entry.path.startswith(f"usr/{name}/") for entry in entries)
    }
    return [entry for entry in entries if entry.path.removeprefix("usr/") not in empty]


def _own_processes() -> list[str]:
    """Return how root starts mmdebstrap: in its own namespaces, so that no process or mount
    outlives it.

    An ordinary user's mmdebstrap creates its own; nothing is done if root may not create any.
    """
    words = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return []
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
        return words
    return []


def _workplace(scratch: Path) -> AbstractContextManager[str]:
    if os.geteuid() == 0:
        return nullcontext(str(scratch))
    # An ordinary user's mapped ids must be able to enter it, which a home folder usually prevents.
    return tempfile.TemporaryDirectory(prefix="primus-base-", ignore_cleanup_errors=True)


def _publish(deb: LockedFile, path: Path, archive: Path) -> bytes:
    name = f"{deb.sha256[:16]}.deb"
    try:
        (archive / name).hardlink_to(path)
    except OSError:
        try:
            shutil.copy(path, archive / name)
        except OSError as error:
            raise storage_error(error, archive) from None
    fields = f"Filename: ./{name}\nSize: {deb.size}\nSHA256: {deb.sha256}\n"
    return dpkg_deb("-f", path, deb.file).rstrip(b"\n") + b"\n" + fields.encode()


def dpkg_deb(
    option: str, path: Path, name: str, stdout: int | IO[bytes] = subprocess.PIPE
) -> bytes:
    """Return the output of dpkg-deb for the package at ``path``. HostError for what is no package,
    called ``name``.
    """
    # Each thread of dpkg-deb allocates its own dictionary.
    env = {**os.environ, "DPKG_DEB_THREADS_MAX": "1"}
    done = subprocess.run(
        ["dpkg-deb", option, path], stdout=stdout, stderr=subprocess.DEVNULL, check=False, env=env
    )
    if done.returncode:
        raise HostError(
            f"{name} is not a Debian package",
            hint="remove it from the file cache and fetch it again",
        )
    return done.stdout or b""


def tar_entries(tar: Path, left_out: Sequence[str] = ()) -> Iterator[Entry]:
    """Yield the archive's members, whose bytes stay in it, except for paths that match a pattern of
    ``left_out``.
    """
    with tarfile.open(tar, "r:") as archive:
        for path, member in members(archive):
            if not path or any(fnmatch.fnmatchcase(path, pattern) for pattern in left_out):
                continue
            if member.type not in MEMBER_KINDS:
                raise CheckFailed(f"the base contains /{path}, which is not a file, folder or link")
            headers = (
                (key.partition("SCHILY.xattr.")[2], value)
                for key, value in member.pax_headers.items()
            )
            xattrs = {
                name: value.encode("utf-8", "surrogateescape") for name, value in headers if name
            }
            size = 0
            if MEMBER_KINDS[member.type] == "file":
                size = member.size
            source = functools.partial(part, tar, member.offset_data, size)
            yield entry_of(path, member, size=size, xattrs=xattrs, source=source)


def _over_entries(action: Action, shop: Workshop, scratch: Path) -> list[Entry]:
    entries: dict[str, Entry] = {}
    for deb in sorted(action.files, key=lambda deb: deb.name):
        for entry in _entries(deb, shop.file(deb), scratch):
            # Packages share folders. dpkg refuses any other path that two packages contain.
            if entry.path in entries and entry.kind != "dir":
                raise HostError(
                    f"/{entry.path} is in two packages, one of which is {deb.name}",
                    hint="leave one out",
                )
            entries.setdefault(entry.path, entry)
    return list(entries.values())


def _entries(deb: LockedFile, path: Path, scratch: Path) -> Iterator[Entry]:
    tar = scratch / f"{deb.sha256}.tar"
    with tar.open("wb") as out:
        dpkg_deb("--fsys-tarfile", path, deb.file, out)
    record = dpkg_deb("-f", path, deb.file).rstrip(b"\n") + b"\nStatus: install ok installed\n"
    for entry in tar_entries(tar):
        if entry.path not in TRIM["merged"] and _unpacked("/" + entry.path):
            if entry.kind == "hardlink":
                link = _merged(entry.link)
            else:
                link = entry.link
            yield replace(entry, path=_merged(entry.path), link=link)
    yield Entry(path=f"var/lib/dpkg/status.d/{deb.name}", size=len(record), source=record)


def _merged(path: str) -> str:
    if path.partition("/")[0] in TRIM["merged"]:
        return f"usr/{path}"
    return path


def _unpacked(path: str) -> bool:
    left_out = any(fnmatch.fnmatchcase(path, pattern) for pattern in TRIM["not_unpacked"])
    return not left_out or any(
        fnmatch.fnmatchcase(path, pattern) for pattern in TRIM["unpacked_still"]
    )


def unlisted(entries: Iterable[Entry], kernels: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the packages in a base's dpkg database whose files match a pattern of ``kernels``, but
    that ``kernels`` does not list. No layer would contain these files.
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


def prepare_kernels(actions: Sequence[Action], shop: Workshop) -> None:
    """Raise HostError if dpkg-deb, which unpacks the packages, is missing and cannot be installed."""
    need("dpkg-deb", "dpkg")


def make_kernels(action: Action, shop: Workshop, scratch: Path) -> Layer:
    """Write the files of the action's packages that are for its architecture."""
    arch = str(action.spec["arch"])
    patterns = cast("Mapping[str, Sequence[str]]", action.spec["kernels"])
    entries: list[Entry] = []
    for deb in action.files:
        entries += kernel_files(arch, shop.file(deb), patterns[deb.name], scratch / deb.name)
    return shop.write(action, entries)


def kernel_files(arch: str | None, deb: Path, patterns: Sequence[str], folder: Path) -> list[Entry]:
    """Return the package's files and symbolic links whose absolute path matches one of
    ``patterns``; ``folder`` keeps their bytes.

    A path that contains names of architectures shows which GPUs the file is for. From any other
    file, code for architectures other than ``arch`` is removed; with None, nothing is. Raises
    HostError if ``deb`` is not a package, CheckFailed for a path that is neither a file nor a
    symbolic link, and for a file without readable GPU code.
    """
    folder.mkdir(parents=True)
    tar = folder / "files.tar"
    entries = list[Entry]()
    with tar.open("wb") as out:
        dpkg_deb("--fsys-tarfile", deb, deb.name, out)
    for entry in tar_entries(tar):
        path = entry.path
        if entry.kind == "dir" or not any(
            fnmatch.fnmatchcase("/" + path, pattern) for pattern in patterns
        ):
            continue
        if arch and "gfx" in path and not re.search(rf"{arch}(?![0-9a-f])", path):
            continue
        if entry.kind == "hardlink":
            raise CheckFailed(f"/{path} is neither a file nor a symbolic link", hint=_NARROW)
        pruned = arch and "gfx" not in path and entry.kind == "file"
        entries.append(
            _pruned(arch, entry, folder / str(len(entries))) if arch and pruned else entry
        )
    return entries


def _pruned(arch: str, entry: Entry, whole: Path) -> Entry:
    copy = whole.with_suffix(".pruned")
    with whole.open("wb") as out:
        out.writelines(entry.chunks())
    try:
        with whole.open("rb") as source, copy.open("wb") as out:
            has_code = keep_only(arch, source, entry.size, out)
    except ValueError as error:
        raise CheckFailed(
            f"/{entry.path}: {error}", hint=f"{_NARROW}, so that it stays whole in the base"
        ) from None
    if not has_code:
        raise CheckFailed(
            f"/{entry.path} holds no GPU code and names no architecture", hint=_NARROW
        )
    whole.unlink()
    return replace(entry, source=copy)
