"""Unpacking a layer blob to a folder that overlayfs can use as a lower layer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from primus.errors import HostError, InputError, PrimusError
from primus.sandbox.blobs import NO_TAR, BlobReader, damaged
from primus.sandbox.container import LayerRef

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_CHUNK = 1 << 20


def layer_dir(cache: Path, layer: LayerRef) -> Path:
    """Return the folder of the unpacked ``layer`` below ``cache``."""
    return cache / layer.diff_id.partition(":")[2][:32]


def is_unpacked(cache: Path, layer: LayerRef) -> bool:
    """Return whether ``layer`` is unpacked. The folder appears only after both digests have been checked."""
    return layer_dir(cache, layer).is_dir()


def unpack_layer(layer: LayerRef, blob: Path, cache: Path, *, user_namespace: bool = False) -> Path:
    """Unpack ``blob`` below ``cache`` unless that is done already, and return the folder.

    Safe against other processes that unpack the same layer (they wait) and against SIGKILL (the next one starts
    over). ``user_namespace`` selects the overlay attribute that a user namespace may set. Raises HostError for a
    damaged blob or a file system that cannot hold the files, InputError for a layer with paths outside its root.
    """
    target = layer_dir(cache, layer)
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_dir():
                return target
            scratch = cache / f"{target.name}.tmp"
            if scratch.exists():
                shutil.rmtree(scratch)
            scratch.mkdir()
            try:
                _extract(layer, blob, scratch, user_namespace)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
            scratch.rename(target)
    except OSError as error:
        raise HostError(
            f"layer {layer.digest} cannot be unpacked below {cache}: {error.strerror or error}"
            + (f" ({error.filename})" if error.filename else ""),
            hint="free disk space, or put the cache on a local file system with extended attributes",
        ) from error
    return target


def _extract(layer: LayerRef, blob: Path, root: Path, user_namespace: bool) -> None:
    reader = BlobReader(layer, blob)
    try:
        writer = _Writer(root, layer, user_namespace)
        with tarfile.TarFile(fileobj=cast("Any", _Forward(reader)), mode="r") as archive:
            while (member := archive.next()) is not None:
                writer.add(archive, member)
                # tarfile keeps every header, and a layer can have a million.
                archive.members.clear()  # type: ignore[attr-defined]
        writer.finish()
        reader.finish()
    except (*NO_TAR, InputError, EOFError) as error:
        # A wrong digest explains more than the parser's error about the same bytes.
        reader.finish()
        if isinstance(error, PrimusError):
            raise
        raise damaged(layer, blob, f"it is no tar archive ({error})") from error
    finally:
        reader.close()


class _Forward:
    """A reader as a file object that seeks forward only. tarfile's own streaming mode copies far more."""

    def __init__(self, reader: BlobReader) -> None:
        self._reader = reader
        self._at = 0

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        data = self._reader.read(size)
        self._at += len(data)
        return data

    def seek(self, position: int, _whence: int = 0) -> int:
        if position < self._at:
            raise tarfile.StreamError("the archive must be read from front to back")
        while self._at < position and self.read(min(_CHUNK, position - self._at)):
            pass
        return self._at


class _Writer:
    """Writes members below ``root``. It created everything there, so it knows each real folder by name."""

    def __init__(self, root: Path, layer: LayerRef, user_namespace: bool) -> None:
        self._root = str(root)
        self._layer = layer
        self._opaque = "user.overlay.opaque" if user_namespace else "trusted.overlay.opaque"
        self._dirs: dict[str, int | None] = {"": None}
        Path(root).chmod(0o755)

    def _refuse(self, name: str, why: str) -> InputError:
        return InputError(
            f"layer {self._layer.digest} has an unsafe entry {name!r}: {why}", hint="build the image again"
        )

    def _clean(self, name: str) -> str:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise self._refuse(name, "it leaves the root")
        return "/".join(parts)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _parent(self, name: str) -> None:
        parent = name.rpartition("/")[0]
        if parent in self._dirs:
            return
        self._parent(parent)
        try:
            os.mkdir(self._path(parent), 0o755)  # noqa: PTH102
        except FileExistsError:
            raise self._refuse(name, f"{parent!r} is not a directory") from None
        # The caller's umask must not affect the image.
        os.chmod(self._path(parent), 0o755)  # noqa: PTH101
        self._dirs[parent] = None

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write the member. Raises InputError if it is unsafe."""
        try:
            self._add(archive, member)
        except (ValueError, ArithmeticError):
            raise self._refuse(
                member.name, "its header has an impossible time, owner or mode, or a name with a zero byte"
            ) from None

    def _add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = self._clean(member.name)
        base = name.rpartition("/")[2]
        if name:
            self._parent(name)
        if base == _OPAQUE:
            os.setxattr(self._path(name.rpartition("/")[0]), self._opaque, b"y")
        elif base.startswith(_WHITEOUT):
            self._whiteout(name, base)
        elif member.isdir():
            self._directory(name, member)
        elif not name:
            raise self._refuse(member.name, "the root must be a directory")
        else:
            self._other(archive, name, member)

    def _whiteout(self, name: str, base: str) -> None:
        if base.startswith(_WHITEOUT + _WHITEOUT):
            return  # bookkeeping of aufs
        hidden = name[: -len(base)] + base[len(_WHITEOUT) :]
        if base == _WHITEOUT or hidden.rpartition("/")[2] in (".", ".."):
            raise self._refuse(name, "it hides no name")
        if hidden in self._dirs:
            # The layer has its own folder of that name, so only the contents of the lower one are hidden.
            os.setxattr(self._path(hidden), self._opaque, b"y")
            return
        with contextlib.suppress(FileExistsError):
            os.mknod(self._path(hidden), stat.S_IFCHR, os.makedev(0, 0))

    def _directory(self, name: str, member: tarfile.TarInfo) -> None:
        path = self._path(name)
        if name not in self._dirs:
            try:
                os.mkdir(path, 0o700)  # noqa: PTH102
            except FileExistsError:
                if not _is_whiteout(path):
                    raise self._refuse(member.name, "it is a file and a directory") from None
                os.unlink(path)  # noqa: PTH108
                os.mkdir(path, 0o700)  # noqa: PTH102
                os.setxattr(path, self._opaque, b"y")
        self._own(path, member)
        os.chmod(path, stat.S_IMODE(member.mode))  # noqa: PTH101
        self._attributes(path, member)
        # Set at the end, because every file written below changes it.
        self._dirs[name] = _mtime_ns(member)

    def _other(self, archive: tarfile.TarFile, name: str, member: tarfile.TarInfo) -> None:
        path = self._path(name)
        if name in self._dirs:
            raise self._refuse(member.name, "it is a file and a directory")
        try:
            made = self._create(archive, path, member)
        except FileExistsError:
            os.unlink(path)  # noqa: PTH108
            made = self._create(archive, path, member)
        if not made:
            return
        self._own(path, member)
        if not member.issym():
            os.chmod(path, stat.S_IMODE(member.mode))  # noqa: PTH101
        self._attributes(path, member)
        moment = _mtime_ns(member)
        os.utime(path, ns=(moment, moment), follow_symlinks=False)

    def _create(self, archive: tarfile.TarFile, path: str, member: tarfile.TarInfo) -> bool:
        if member.islnk():
            source = self._clean(member.linkname)
            if source.rpartition("/")[0] not in self._dirs or source in self._dirs:
                raise self._refuse(member.name, f"its link target {member.linkname!r} is not a file of this layer")
            try:
                os.link(self._path(source), path, follow_symlinks=False)
            except FileNotFoundError:
                raise self._refuse(
                    member.name, f"its link target {member.linkname!r} is not a file of this layer"
                ) from None
            return False
        if member.issym():
            os.symlink(member.linkname, path)  # noqa: PTH211
            return True
        if member.isfifo():
            os.mkfifo(path, 0o600)
            return True
        if member.ischr() or member.isblk():
            # The sandbox has its own /dev, and mounts everything else without devices.
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as out:
            source_file = archive.extractfile(member)
            if source_file is not None:
                shutil.copyfileobj(source_file, out, _CHUNK)
        return True

    def _own(self, path: str, member: tarfile.TarInfo) -> None:
        try:
            os.chown(path, member.uid, member.gid, follow_symlinks=False)
        except OSError as error:
            if os.geteuid() == 0 and error.errno == 22:
                raise HostError(
                    f"{member.name!r} belongs to {member.uid}:{member.gid}, outside your subordinate ids",
                    hint="widen your ranges in /etc/subuid and /etc/subgid to 65536",
                ) from error
            raise

    def _attributes(self, path: str, member: tarfile.TarInfo) -> None:
        for key, text in member.pax_headers.items():
            if not key.startswith("SCHILY.xattr."):
                continue
            name = key.removeprefix("SCHILY.xattr.")
            # Overlay's own attributes would let a layer refer to any path, and security labels belong to the host.
            if name.startswith("user.overlay.") or not (
                name == "security.capability" or name.startswith(("user.", "system.posix_acl_"))
            ):
                continue
            value = text.encode("utf-8", "surrogateescape")
            os.setxattr(path, name, value, follow_symlinks=False)

    def finish(self) -> None:
        for name, moment in self._dirs.items():
            if moment is not None:
                os.utime(self._path(name), ns=(moment, moment))


def _is_whiteout(path: str) -> bool:
    status = os.lstat(path)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _mtime_ns(member: tarfile.TarInfo) -> int:
    exact = member.pax_headers.get("mtime")
    seconds = Decimal(int(member.mtime) if exact is None else exact)
    if not abs(seconds) < 1 << 63:
        raise OverflowError
    return int(seconds * 1_000_000_000)
