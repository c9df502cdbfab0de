"""What the gates know about a layer, collected in one pass over its files and cached by its digest.

Facts depend only on the layer's bytes and on the rules, not on the target. The key in the cache is the digest and the
hash of this package's code. A second check therefore reads no blob, and after a change of a rule every layer is read
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from queue import Queue
from threading import Event
from typing import IO, Any, cast

from primus.files import read_sealed, write_sealed
from primus.gates.codeobjects import Code, Library, code_in, is_kernel_file, is_triton_metadata, library_of
from primus.gates.contents import (
    Scanner,
    Stated,
    Trace,
    path_traces,
    reads_text,
    stated_in,
    stated_in_library,
    states_versions,
    text_traces,
)
from primus.gpucode.archs import in_path
from primus.oci.contents import Member, walk
from primus.oci.tar import Entry
from primus.sandbox.container import LayerRef

_CHUNK = 1 << 20
# Files that a gate reads as a whole are short; even the dpkg status of a large image is well below this limit.
_TEXT_SIZE = 32 << 20
_SPOOLED_IN_MEMORY = 16 << 20
_BATCH_BYTES, _MOST_BATCHES = 1 << 20, 4


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """Facts about a layer. ``folders`` maps each folder to the bytes and number of its files, ``unreadable`` paths
    to reasons.
    """

    folders: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    code: tuple[Code, ...] = ()
    libraries: tuple[Library, ...] = ()
    stated: tuple[Stated, ...] = ()
    traces: tuple[Trace, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)


@cache
def rules_hash() -> str:
    """Return a hash of the code that reads GPU code and judges it. A verdict is valid only for the same hash."""
    code, package = hashlib.sha256(), Path(__file__).parent
    for path in (*sorted(package.rglob("*.py")), *sorted(package.with_name("gpucode").glob("*.py"))):
        code.update(path.read_bytes())
    return code.hexdigest()


class Examiner:
    """Examines the entries of a layer one after the other, as their bytes are streamed.

    ``machine_paths`` are paths of the build machine, which no file may contain.
    """

    def __init__(self, machine_paths: Sequence[bytes] = ()) -> None:
        self._machine_paths = machine_paths
        self._folders: dict[str, tuple[int, int]] = {}
        self._code: list[Code] = []
        self._libraries: list[Library] = []
        self._stated: list[Stated] = []
        self._traces: list[Trace] = []
        self._unreadable: dict[str, str] = {}
        self._file: _File | None = None

    def begin(self, path: str, kind: str, size: int) -> None:
        """Begin the next entry and finish the previous one."""
        self._end()
        self._traces += path_traces(path, kind)
        if kind == "file":
            folder = path.rpartition("/")[0]
            total, count = self._folders.get(folder, (0, 0))
            self._folders[folder] = (total + size, count + 1)
            self._file = _File(path, size, Scanner(path, self._machine_paths))

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the file. The first chunk should have a megabyte, if the file is that large."""
        if self._file is not None:
            self._file.feed(chunk)

    def close(self) -> None:
        """Discard the current file; no more bytes of it will follow."""
        if self._file is not None:
            if self._file.copy is not None:
                self._file.copy.close()
            self._file = None

    def facts(self) -> LayerFacts:
        """Return the facts collected so far."""
        self._end()
        return LayerFacts(
            folders=self._folders,
            code=tuple(self._code),
            libraries=tuple(self._libraries),
            stated=tuple(self._stated),
            traces=tuple(self._traces),
            unreadable=self._unreadable,
        )

    def _end(self) -> None:
        if self._file is not None:
            if self._file.is_first:
                self._file.feed(b"")
            self._traces += self._file.scanner.traces()
            if self._file.copy is not None:
                self._examine(self._file, self._file.copy)
        self.close()

    def _examine(self, file: _File, copy: IO[bytes]) -> None:
        is_elf = file.scanner.elf
        try:
            if (code := code_in(file.path, copy, file.size)) is not None:
                self._code.append(code)
            if is_elf and (library := library_of(file.path, copy, file.size)) is not None:
                self._libraries.append(library)
            if is_elf:
                self._stated += stated_in_library(file.path, copy)
        except ValueError as error:
            self._unreadable[file.path] = str(error)
        if not is_elf and file.reads_text:
            copy.seek(0)
            text = copy.read().decode("utf-8", "replace")
            self._stated += stated_in(file.path, text)
            self._traces += text_traces(file.path, text)


class _File:
    """The file that is being streamed. ``copy`` holds its bytes if a gate needs random access."""

    copy: IO[bytes] | None = None

    def __init__(self, path: str, size: int, scanner: Scanner) -> None:
        self.path, self.size, self.scanner = path, size, scanner
        self.reads_text = size <= _TEXT_SIZE and (states_versions(path) or reads_text(path))
        self.is_first, self._copies_all = True, False

    def feed(self, chunk: bytes) -> None:
        if self.is_first:
            self._open_copy(chunk)
        self.scanner.feed(chunk)
        if self.copy is not None and self._copies_all:
            self.copy.write(chunk)

    def _open_copy(self, head: bytes) -> None:
        self.is_first = False
        self._copies_all = (
            head.startswith((b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB", b"KPAK"))
            or is_triton_metadata(self.path, head)
            or self.reads_text
        )
        if self._copies_all or (is_kernel_file(self.path) and in_path(self.path)):
            copy = tempfile.SpooledTemporaryFile(max_size=_SPOOLED_IN_MEMORY)  # noqa: SIM115 - close() closes it
            self.copy = cast("IO[bytes]", copy)
        if self.copy is not None and not self._copies_all:
            # The name is enough, and these files may be large.
            self.copy.write(head[:64])


def observe(members: Iterable[Member], machine_paths: Sequence[bytes] = ()) -> LayerFacts:
    """Examine every member once; see :class:`Examiner`."""
    examiner = Examiner(machine_paths)
    try:
        for member in members:
            examiner.begin(member.path, member.kind, member.size)
            if member.kind == "file":
                with member.open() as stream:
                    while chunk := stream.read(_CHUNK):
                        examiner.feed(chunk)
        return examiner.facts()
    finally:
        examiner.close()


def facts_of(
    layer: LayerRef, blob: Path, folder: Path, machine_paths: Sequence[bytes] = (), stop: Event | None = None
) -> LayerFacts:
    """Return the layer's facts: from the cache in ``folder``, or by reading the blob, whose digest is verified.

    Raises HostError if the blob cannot be read or is damaged, InterruptedError once ``stop`` is set.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return _from_json(read_sealed(_cache_path(layer.digest, folder, machine_paths)))
    facts = observe(_until(stop, walk(layer, blob)), machine_paths)
    save_facts(facts, layer.digest, folder, machine_paths)
    return facts


def has_facts(digest: str, folder: Path, machine_paths: Sequence[bytes] = ()) -> bool:
    """Whether the cache of :func:`facts_of` has the layer with this digest."""
    return _cache_path(digest, folder, machine_paths).is_file()


def save_facts(facts: LayerFacts, digest: str, folder: Path, machine_paths: Sequence[bytes] = ()) -> None:
    """Store the facts about the layer with this digest in the cache of :func:`facts_of`."""
    path = _cache_path(digest, folder, machine_paths)
    with contextlib.suppress(OSError):
        for old in folder.glob(path.name.partition("-")[0] + "-*"):
            old.unlink(missing_ok=True)
        write_sealed(path, asdict(facts))


def _cache_path(digest: str, folder: Path, machine_paths: Sequence[bytes]) -> Path:
    key = hashlib.sha256(rules_hash().encode() + b"\0".join(sorted(machine_paths))).hexdigest()[:16]
    return folder / f"{digest.removeprefix('sha256:')}-{key}.json"


def _until(stop: Event | None, members: Iterable[Member]) -> Iterator[Member]:
    for member in members:
        if stop is not None and stop.is_set():
            raise InterruptedError
        yield member


def _from_json(data: dict[str, Any]) -> LayerFacts:
    def kernels(row: dict[str, Any]) -> dict[str, tuple[str, ...]]:
        return {name: tuple(targets) for name, targets in row["kernels"].items()}

    return LayerFacts(
        folders={path: (size, count) for path, (size, count) in data["folders"].items()},
        code=tuple(
            Code(**row | {"targets": tuple(row["targets"]), "packs": tuple(row["packs"]), "kernels": kernels(row)})
            for row in data["code"]
        ),
        libraries=tuple(Library(**row | {"needed": tuple(row["needed"])}) for row in data["libraries"]),
        stated=tuple(Stated(**row | {"requires": tuple(row["requires"])}) for row in data["stated"]),
        traces=tuple(Trace(**row) for row in data["traces"]),
        unreadable=data["unreadable"],
    )


class Watch:
    """Passes a layer's entries from the builder that writes them to the gates, which examine them in another thread.

    Data that was just compressed is therefore not read and decompressed again. The builder waits if the gates are some
    megabytes behind. :meth:`observe`, in the other thread, returns the facts at the end. ``facts`` is the future of
    that thread, if one was started.
    """

    facts: Future[LayerFacts] | None = None

    def __init__(self) -> None:
        self._queue: Queue[list[Entry | bytes] | None] = Queue(_MOST_BATCHES)
        self._batch: list[Entry | bytes] = []
        self._size = 0

    def begin(self, entry: Entry) -> None:
        """Begin the next entry."""
        self._add(entry, 512)

    def feed(self, chunk: bytes) -> None:
        """Take the entry's next bytes."""
        self._add(chunk, len(chunk))

    def close(self) -> None:
        """Mark the end of the layer."""
        self._pass_on()
        self._queue.put(None)

    def _add(self, item: Entry | bytes, size: int) -> None:
        # Many files are too small to justify waking another thread.
        self._batch.append(item)
        self._size += size
        if self._size >= _BATCH_BYTES:
            self._pass_on()

    def _pass_on(self) -> None:
        self._queue.put(self._batch)
        self._batch, self._size = [], 0

    def observe(self, machine_paths: Sequence[bytes]) -> LayerFacts:
        """Examine everything until the builder closes the layer; see :class:`Examiner`."""
        examiner, has_ended = Examiner(machine_paths), False
        try:
            for batch in iter(self._queue.get, None):
                for item in batch:
                    if isinstance(item, bytes):
                        examiner.feed(item)
                    else:
                        examiner.begin(item.path, item.kind, item.size)
            has_ended = True
            return examiner.facts()
        except BaseException:
            # The builder must not wait for a reader that has ended.
            while not has_ended and self._queue.get() is not None:
                pass
            raise
        finally:
            examiner.close()
