"""What the gates know of a layer, gathered in one pass over its blob, and kept by digest.

Facts depend on the layer's bytes and on the rules alone, not on the target: they are kept under the digest and the
hash of this package's code, so that a second check reads no blob and a changed rule reads each again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import IO, Any, cast

from primus.gates.codeobjects import Code, code_in, is_kernel_file, is_triton_metadata
from primus.gates.contents import Member, walk
from primus.gates.litter import Scanner, Trace, path_traces, reads_text, text_traces
from primus.gates.rules import rules
from primus.gates.sonames import Library, soname_of
from primus.gates.versions_inside import Stated, stated_in, states_versions
from primus.images.archs import in_path
from primus.sandbox.model import LayerRef

__all__ = ["LayerFacts", "facts_of", "observe"]

_CHUNK = 1 << 20
# Files whose whole text a gate wants are short; dpkg's status of a large image stays well below this.
_TEXT_SIZE = 32 << 20


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What lies in a layer. ``folders`` give bytes and number of the files directly in each, ``unreadable`` reasons."""

    folders: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    code: tuple[Code, ...] = ()
    libraries: tuple[Library, ...] = ()
    stated: tuple[Stated, ...] = ()
    traces: tuple[Trace, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)


def observe(members: Iterable[Member], needles: Sequence[bytes] = ()) -> LayerFacts:
    """Look at every member once. ``needles`` are paths of the machine that built, which may stand in no file."""
    folders: dict[str, tuple[int, int]] = {}
    code: list[Code] = []
    libraries: list[Library] = []
    stated: list[Stated] = []
    traces: list[Trace] = []
    unreadable: dict[str, str] = {}
    for member in members:
        traces += path_traces(member.path, member.kind)
        if member.kind != "file":
            continue
        folder = member.path.rpartition("/")[0]
        size, count = folders.get(folder, (0, 0))
        folders[folder] = (size + member.size, count + 1)
        scanner = Scanner(member.path, needles)
        with member.open() as stream, tempfile.SpooledTemporaryFile(max_size=16 << 20) as copy:
            kept = _copy(member, stream, scanner, cast("IO[bytes]", copy))
            traces += scanner.traces()
            if not kept:
                continue
            file = cast("IO[bytes]", copy)
            try:
                if (found := code_in(member.path, file, member.size)) is not None:
                    code.append(found)
                if scanner.elf and (library := soname_of(member.path, file)) is not None:
                    libraries.append(library)
            except ValueError as error:
                unreadable[member.path] = str(error)
            if not scanner.elf and member.size <= _TEXT_SIZE:
                file.seek(0)
                text = file.read().decode("utf-8", "replace") if _wants_text(member.path) else ""
                stated += stated_in(member.path, text)
                traces += text_traces(member.path, text)
    return LayerFacts(
        folders=folders,
        code=tuple(code),
        libraries=tuple(libraries),
        stated=tuple(stated),
        traces=tuple(traces),
        unreadable=unreadable,
    )


def _wants_text(path: str) -> bool:
    return states_versions(path) or reads_text(path)


def _copy(member: Member, stream: IO[bytes], scanner: Scanner, copy: IO[bytes]) -> bool:
    """Scan the file; keep a copy when a gate needs to read it again out of order."""
    head = stream.read(_CHUNK)
    keep = (
        head.startswith((b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB", b"KPAK"))
        or is_triton_metadata(member.path, head)
        or (_wants_text(member.path) and member.size <= _TEXT_SIZE)
    )
    named = is_kernel_file(member.path) and bool(in_path(member.path))
    if named and not keep:
        # Its name says it all, and these files may be large.
        copy.write(head[:64])
    chunk = head
    while chunk:
        scanner.feed(chunk)
        if keep:
            copy.write(chunk)
        chunk = stream.read(_CHUNK)
    return keep or named


def facts_of(
    layer: LayerRef, blob: Path, folder: Path, needles: Sequence[bytes] = (), stop: Event | None = None
) -> LayerFacts:
    """The layer's facts, from ``folder`` when they are kept there, else by reading the blob, whose digest it proves.

    Raises HostError when the blob cannot be read or is damaged, InterruptedError once ``stop`` is set.
    """
    mark = hashlib.sha256(rules().encode() + b"\0".join(sorted(needles))).hexdigest()[:16]
    kept = folder / f"{layer.digest.removeprefix('sha256:')}-{mark}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return _loads(kept.read_bytes())
    facts = observe(_until(stop, walk(layer, blob)), needles)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(kept.name.partition("-")[0] + "-*"):
            old.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as stream:
            json.dump(asdict(facts), stream)
        Path(stream.name).replace(kept)
    return facts


def _until(stop: Event | None, members: Iterable[Member]) -> Iterator[Member]:
    for member in members:
        if stop is not None and stop.is_set():
            raise InterruptedError
        yield member


def _loads(data: bytes) -> LayerFacts:
    known: dict[str, Any] = json.loads(data)
    return LayerFacts(
        folders={path: (size, count) for path, (size, count) in known["folders"].items()},
        code=tuple(
            Code(
                **{
                    **row,
                    "targets": tuple(row["targets"]),
                    "packs": tuple(row["packs"]),
                    "kernels": {name: tuple(targets) for name, targets in row["kernels"].items()},
                }
            )
            for row in known["code"]
        ),
        libraries=tuple(Library(**row) for row in known["libraries"]),
        stated=tuple(Stated(**row) for row in known["stated"]),
        traces=tuple(Trace(**row) for row in known["traces"]),
        unreadable=known["unreadable"],
    )
