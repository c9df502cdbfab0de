"""What the gates know about a layer, collected in one pass over its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, cast

from primus.gates.codeobjects import Code, code_in, is_kernel_file, is_triton_metadata
from primus.gates.libraries import Library, library_of
from primus.gates.stated import Stated, stated_in, stated_in_library, states_versions
from primus.gates.traces import Scanner, Trace, path_traces, reads_text, text_traces
from primus.gpucode.archs import in_path

# Files that a gate reads as a whole are short; even the dpkg status of a large image is well below this limit.
_TEXT_SIZE = 32 << 20


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


class Examiner:
    """Examines the entries of a layer one after the other, as their bytes are streamed.

    ``needles`` are paths of the build machine, which no file may contain.
    """

    def __init__(self, needles: Sequence[bytes] = ()) -> None:
        self._needles = needles
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
            known, count = self._folders.get(folder, (0, 0))
            self._folders[folder] = (known + size, count + 1)
            self._file = _File(path, size, Scanner(path, self._needles))

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
            if self._file.first:
                self._file.feed(b"")
            self._traces += self._file.scanner.traces()
            if self._file.copy is not None:
                self._examine(self._file, self._file.copy)
        self.close()

    def _examine(self, seen: _File, file: IO[bytes]) -> None:
        try:
            if (found := code_in(seen.path, file, seen.size)) is not None:
                self._code.append(found)
            if seen.scanner.elf and (library := library_of(seen.path, file, seen.size)) is not None:
                self._libraries.append(library)
            if seen.scanner.elf:
                self._stated += stated_in_library(seen.path, file)
        except ValueError as error:
            self._unreadable[seen.path] = str(error)
        if not seen.scanner.elf and seen.size <= _TEXT_SIZE:
            file.seek(0)
            text = file.read().decode("utf-8", "replace") if _wants_text(seen.path) else ""
            self._stated += stated_in(seen.path, text)
            self._traces += text_traces(seen.path, text)


class _File:
    """The file that is being streamed. ``copy`` keeps its bytes if a gate needs random access."""

    copy: IO[bytes] | None = None

    def __init__(self, path: str, size: int, scanner: Scanner) -> None:
        self.path, self.size, self.scanner = path, size, scanner
        self.first, self._whole = True, False

    def feed(self, chunk: bytes) -> None:
        """Take the file's next bytes."""
        if self.first:
            self._first(chunk)
        self.scanner.feed(chunk)
        if self.copy is not None and self._whole:
            self.copy.write(chunk)

    def _first(self, head: bytes) -> None:
        self.first = False
        self._whole = (
            head.startswith((b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB", b"KPAK"))
            or is_triton_metadata(self.path, head)
            or (_wants_text(self.path) and self.size <= _TEXT_SIZE)
        )
        named = is_kernel_file(self.path) and bool(in_path(self.path))
        if self._whole or named:
            self.copy = _spool()
        if self.copy is not None and not self._whole:
            # The name is enough, and these files may be large.
            self.copy.write(head[:64])


def _spool() -> IO[bytes]:
    # Seam "random access": most files are only streamed, and importing tempfile takes 3 ms.
    import tempfile

    return cast("IO[bytes]", tempfile.SpooledTemporaryFile(max_size=16 << 20))


def _wants_text(path: str) -> bool:
    return states_versions(path) or reads_text(path)
