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
from typing import IO, cast

from primus.errors import InputError
from primus.files import read_sealed, write_sealed
from primus.gates.codeobjects import PACK, Code, Library, code_in, is_kernel_file, is_triton_metadata, library_of
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
from primus.gpucode.bundles import COMPRESSED, PLAIN
from primus.oci.contents import Member, walk
from primus.oci.tar import Entry
from primus.sandbox.container import LayerRef
from primus.schema import build
from primus.yamlfile import Document

_CHUNK = 1 << 20
# Files that a gate reads as a whole are short; even the dpkg status of a large image is well below this limit.
_TEXT_SIZE = 32 << 20
_SPOOLED_IN_MEMORY = 16 << 20
# How files that a gate reads as a whole begin: libraries, bundles and kernel packs.
_COPIED = (b"\x7fELF", PLAIN, COMPRESSED, PACK)
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
        # About the current file. The copy holds its bytes if a gate needs random access.
        self._path, self._size, self._is_first, self._is_copied = "", 0, False, False
        self._scanner: Scanner | None = None
        self._copy: IO[bytes] | None = None

    def begin(self, path: str, kind: str, size: int) -> None:
        """Begin the next entry and finish the previous one."""
        self._end()
        self._traces += path_traces(path, kind)
        if kind == "file":
            folder = path.rpartition("/")[0]
            total, count = self._folders.get(folder, (0, 0))
            self._folders[folder] = (total + size, count + 1)
            self._path, self._size, self._is_first = path, size, True
            self._scanner = Scanner(path, self._machine_paths)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the file. The first chunk should have a megabyte, if the file is that large."""
        if self._scanner is None:
            return
        if self._is_first:
            self._is_first = False
            self._is_copied = chunk.startswith(_COPIED) or is_triton_metadata(self._path, chunk) or self._reads_text
            # The name of a kernel file is enough, and these files may be large.
            if self._is_copied or (is_kernel_file(self._path) and in_path(self._path)):
                copy = tempfile.SpooledTemporaryFile(max_size=_SPOOLED_IN_MEMORY)  # noqa: SIM115 - close() closes it
                self._copy = cast("IO[bytes]", copy)
        self._scanner.feed(chunk)
        if self._copy is not None and self._is_copied:
            self._copy.write(chunk)

    def close(self) -> None:
        """Discard the current file; no more bytes of it will follow."""
        if self._copy is not None:
            self._copy.close()
        self._scanner = self._copy = None

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

    @property
    def _reads_text(self) -> bool:
        return self._size <= _TEXT_SIZE and (states_versions(self._path) or reads_text(self._path))

    def _end(self) -> None:
        if self._scanner is not None:
            if self._is_first:
                self.feed(b"")
            self._traces += self._scanner.traces()
            if self._copy is not None:
                self._examine(self._copy, self._scanner.elf)
        self.close()

    def _examine(self, copy: IO[bytes], is_elf: bool) -> None:
        path, size = self._path, self._size
        try:
            if (code := code_in(path, copy, size)) is not None:
                self._code.append(code)
            if is_elf and (library := library_of(path, copy, size)) is not None:
                self._libraries.append(library)
            if is_elf:
                self._stated += stated_in_library(path, copy)
        except ValueError as error:
            self._unreadable[path] = str(error)
        if not is_elf and self._reads_text:
            copy.seek(0)
            text = copy.read().decode("utf-8", "replace")
            self._stated += stated_in(path, text)
            self._traces += text_traces(path, text)


def _examined(items: Iterable[Member | Entry | bytes], machine_paths: Sequence[bytes]) -> LayerFacts:
    with contextlib.closing(Examiner(machine_paths)) as examiner:
        for item in items:
            if isinstance(item, bytes):
                examiner.feed(item)
            else:
                examiner.begin(item.path, item.kind, item.size)
        return examiner.facts()


def observe(members: Iterable[Member], machine_paths: Sequence[bytes] = (), stop: Event | None = None) -> LayerFacts:
    """Examine every member once; see :class:`Examiner`. Raises InterruptedError once ``stop`` is set."""

    def items() -> Iterator[Member | bytes]:
        for member in members:
            if stop is not None and stop.is_set():
                raise InterruptedError
            yield member
            if member.kind == "file":
                with member.open() as stream:
                    while chunk := stream.read(_CHUNK):
                        yield chunk

    return _examined(items(), machine_paths)


def facts_of(
    layer: LayerRef, blob: Path, folder: Path, machine_paths: Sequence[bytes] = (), stop: Event | None = None
) -> LayerFacts:
    """Return the layer's facts: from the cache in ``folder``, or by reading the blob, whose digest is verified.

    Raises HostError if the blob cannot be read or is damaged, InterruptedError once ``stop`` is set.
    """
    cached = read_sealed(_cache_path(layer.digest, folder, machine_paths))
    with contextlib.suppress(InputError):
        return build(LayerFacts, Document(name=layer.digest, data=cached, places={}, typed=True))
    facts = observe(walk(layer, blob), machine_paths, stop)
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
        self._size, self._has_ended = 0, False

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
        try:
            return _examined(self._items(), machine_paths)
        except BaseException:
            # The builder must not wait for a reader that has ended.
            for _ in self._items():
                pass
            raise

    def _items(self) -> Iterator[Entry | bytes]:
        while not self._has_ended:
            batch = self._queue.get()
            self._has_ended = batch is None
            yield from batch or ()
