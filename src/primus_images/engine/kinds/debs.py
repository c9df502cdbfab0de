"""``debs`` and ``kernels``: locked Debian packages as a base, and their code for one GPU.

A base is installed by mmdebstrap, without any network. It sees one repository: a folder with
exactly the locked packages. What depends on the moment or the machine is left out of the layer.

Over an image that a registry gave, packages are laid straight from their archives, and no
maintainer script runs. dpkg's own database belongs to the image below and stays as it is; each
package leaves its record in ``var/lib/dpkg/status.d``, where scanners look for packages of images
that have no dpkg.

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
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
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
_PLAIN = re.compile(r"[\w/.+-]+", re.ASCII)
_LIST = re.compile(r"var/lib/dpkg/info/([^/:]+)(?::[^/]+)?\.list")


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Check for mmdebstrap and, for an ordinary user, for user namespaces.

    Packages on top of an image need neither.
    """
    if all("over" in action.spec for action in actions):
        return
    problem = lacks_ids()
    if problem:
        raise HostError(f"this user cannot build a root file system: {problem[0]}", hint=problem[1])
    need("mmdebstrap", "mmdebstrap")


def make(action: Action, shop: Workshop, scratch: Path) -> Layer:
    """Install the packages with mmdebstrap, or unpack them if they go on top of an image."""
    if "over" in action.spec:
        entries = _over_entries(action, shop, scratch)
    else:
        entries = root_entries(action, shop, scratch)
    return shop.write(action, entries)


def root_entries(action: Action, shop: Workshop, scratch: Path) -> list[Entry]:
    """Build the root file system and return its entries, whose bytes are in a tar in ``scratch``.

    Raises HostError if the disk is full, CheckFailed if a package cannot be installed or has kernel
    files that it should not.
    """
    kernels = cast("Mapping[str, Sequence[str]]", action.spec.get("kernels", {}))
    suite = str(action.spec["suite"])
    debs = sorted(action.files, key=lambda deb: deb.name)
    log = shop.log(action)
    tar = scratch / "root.tar"
    with _workplace(scratch) as place:
        archive = _archive(debs, suite, shop, Path(place))
        apart = _own_processes()
        command = [
            *apart,
            str(need("mmdebstrap", "mmdebstrap")),
            f"--mode={'unshare' if os.geteuid() else 'root'}",
            f"--variant={VARIANT}",
            "--format=tar",
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
            *(f"--dpkgopt=path-exclude={path}" for path in TRIM["not_unpacked"]),
            *(f"--dpkgopt=path-include={path}" for path in TRIM["unpacked_still"]),
            *(f"--dpkgopt=path-exclude={path}" for path in chain(*kernels.values())),
            "--include=" + ",".join(deb.name for deb in debs),
            suite,
            str(tar),
            f"deb [trusted=yes] copy:{archive} ./",
        ]
        code = _mmdebstrap(command, place, log, apart=bool(apart))
        # The unfinished root still takes the space now.
        full = disk_is_full(log, Path(place), scratch) if code else None
    if full:
        raise full
    if code:
        raise CheckFailed(
            f"the base could not be installed (mmdebstrap ended with {code}):\n{log_tail(log)}"
        )
    entries = without_empty_merged(list(tar_entries(tar, TRIM["left_out"])))
    packages = unlisted(entries, kernels) if kernels else []
    if packages:
        raise CheckFailed(
            f"{' and '.join(packages)} has files where a pattern of `kernels` leaves them out",
            hint="name it under `kernels` of the base, too",
        )
    return entries


def _archive(debs: Sequence[LockedFile], suite: str, shop: Workshop, place: Path) -> Path:
    """Return the folder of a repository with exactly these packages."""
    archive = place / "archive"
    archive.mkdir()
    packages = [_publish(deb, shop.file(deb), archive) for deb in debs]
    (archive / "Packages").write_bytes(b"\n".join(packages))
    # mmdebstrap finds the essential packages by this name.
    (archive / "Release").write_text(f"Codename: {suite}\n", encoding="ascii")
    # apt reads them as another user, whatever the umask.
    for path in (place, archive, archive / "Packages", archive / "Release"):
        path.chmod(0o755)
    return archive


def _mmdebstrap(command: Sequence[str], place: str, log: Path, *, apart: bool) -> int:
    env = {
        **os.environ,
        "SOURCE_DATE_EPOCH": str(MTIME),
        "LC_ALL": "C.UTF-8",
        "TMPDIR": place,
        # An interrupted base is discarded, so dpkg need not flush every file to the disk.
        "DPKG_FORCE": "unsafe-io",
        # Bytecode that packages compile on purpose is reproducible; bytecode that imports leave
        # behind is not.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=apart,
        )
        # Without namespaces, some of its processes may have ids that this user cannot signal, but
        # the terminal can.
        with tracked(process) if apart else process:
            return process.wait()


def without_empty_merged(entries: Sequence[Entry]) -> list[Entry]:
    """Leave out empty folders of a merged /usr, with their links: not every mmdebstrap has them."""
    empty = {
        name
        for name in TRIM["merged"]
        if not any(entry.path.startswith(f"usr/{name}/") for entry in entries)
    }
    return [entry for entry in entries if entry.path.removeprefix("usr/") not in empty]


def _own_processes() -> list[str]:
    """Return how root starts mmdebstrap: in namespaces, so that no process or mount outlives it.

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


@contextmanager
def _workplace(scratch: Path) -> Iterator[str]:
    """Yield a folder for mmdebstrap, whose path apt can read in a line of its sources."""
    if os.geteuid() == 0 and _PLAIN.fullmatch(str(scratch)):
        yield str(scratch)
        return
    with tempfile.TemporaryDirectory(prefix="primus-base-", ignore_cleanup_errors=True) as folder:
        if os.geteuid() != 0:
            # An ordinary user's mapped ids must be able to enter it, which a home folder usually
            # prevents.
            yield folder
            return
        link = Path(folder) / "scratch"
        link.symlink_to(scratch)
        yield str(link)


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
    """Return dpkg-deb's output for the package at ``path``, called ``name`` in a HostError."""
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
    """Yield the archive's members without those that match a pattern of ``left_out``.

    Their bytes stay in the archive.
    """
    with tarfile.open(tar, "r:") as archive:
        for path, member in members(archive):
            if not path or _matches(path, left_out):
                continue
            if member.type not in MEMBER_KINDS:
                raise CheckFailed(f"the base contains /{path}, which is not a file, folder or link")
            xattrs = {}
            for key, value in member.pax_headers.items():
                _, marker, name = key.partition("SCHILY.xattr.")
                if marker:
                    xattrs[name] = value.encode("utf-8", "surrogateescape")
            size = member.size if MEMBER_KINDS[member.type] == "file" else 0
            source = functools.partial(part, tar, member.offset_data, size)
            yield entry_of(path, member, size=size, xattrs=xattrs, source=source)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


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
    for entry in tar_entries(tar):
        place = f"/{entry.path}"
        trimmed = _matches(place, TRIM["not_unpacked"])
        if entry.path in TRIM["merged"] or (
            trimmed and not _matches(place, TRIM["unpacked_still"])
        ):
            continue
        link = _merged(entry.link) if entry.kind == "hardlink" else entry.link
        yield replace(entry, path=_merged(entry.path), link=link)
    record = dpkg_deb("-f", path, deb.file).rstrip(b"\n") + b"\nStatus: install ok installed\n"
    yield Entry(path=f"var/lib/dpkg/status.d/{deb.name}", size=len(record), source=record)


def _merged(path: str) -> str:
    if path.partition("/")[0] in TRIM["merged"]:
        return f"usr/{path}"
    return path


def unlisted(entries: Iterable[Entry], kernels: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the packages whose files match a pattern of ``kernels``, which does not list them.

    The base's dpkg database names the files. No layer would contain them.
    """
    patterns = list(chain(*kernels.values()))
    packages = []
    for entry in entries:
        name = _LIST.fullmatch(entry.path)
        if name and name[1] not in kernels:
            files = b"".join(entry.chunks()).decode("utf-8", "replace").splitlines()
            if any(_matches(file, patterns) for file in files):
                packages.append(name[1])
    return sorted(packages)


def prepare_kernels(actions: Sequence[Action], shop: Workshop) -> None:
    """Check for dpkg-deb, which unpacks the packages."""
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
    """Return the package's files and symbolic links that match ``patterns``, bytes in ``folder``.

    A path that contains names of architectures shows which GPUs the file is for. From any other
    file, code for architectures other than ``arch`` is removed; with None, nothing is. Raises
    HostError if ``deb`` is not a package, CheckFailed for a path that is neither a file nor a
    symbolic link, and for a file without readable GPU code.
    """
    folder.mkdir(parents=True)
    tar = folder / "files.tar"
    with tar.open("wb") as out:
        dpkg_deb("--fsys-tarfile", deb, deb.name, out)
    entries = list[Entry]()
    for entry in tar_entries(tar):
        if entry.kind == "dir" or not _matches(f"/{entry.path}", patterns):
            continue
        names_archs = "gfx" in entry.path
        if arch and names_archs and not re.search(rf"{arch}(?![0-9a-f])", entry.path):
            continue
        if entry.kind == "hardlink":
            raise CheckFailed(f"/{entry.path} is neither a file nor a symbolic link", hint=_NARROW)
        if arch and not names_archs and entry.kind == "file":
            entries.append(_pruned(arch, entry, folder / str(len(entries))))
        else:
            entries.append(entry)
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
