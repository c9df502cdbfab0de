"""The facts about layers, cached by digest.

Facts depend only on the layer's bytes and on the rules, not on the target. The cache key is the digest and the hash of
this package's code. A second check therefore reads no blob, and after a change of a rule every layer is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

from primus.files import read_sealed, write_sealed
from primus.gates.codeobjects import Code
from primus.gates.examiner import Examiner, LayerFacts
from primus.gates.libraries import Library
from primus.gates.rules import rules
from primus.gates.stated import Stated
from primus.gates.traces import Trace
from primus.oci.contents import Member, walk
from primus.sandbox.container import LayerRef

_CHUNK = 1 << 20


def observe(members: Iterable[Member], needles: Sequence[bytes] = ()) -> LayerFacts:
    """Examine every member once; see :class:`Examiner`."""
    examiner = Examiner(needles)
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
    layer: LayerRef, blob: Path, folder: Path, needles: Sequence[bytes] = (), stop: Event | None = None
) -> LayerFacts:
    """Return the layer's facts: from the cache in ``folder``, or by reading the blob, whose digest is verified.

    Raises HostError if the blob cannot be read or is damaged, InterruptedError once ``stop`` is set.
    """
    kept = _kept(layer.digest, folder, needles)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return _loaded(read_sealed(kept))
    facts = observe(_until(stop, walk(layer, blob)), needles)
    keep(facts, layer.digest, folder, needles)
    return facts


def known(digest: str, folder: Path, needles: Sequence[bytes] = ()) -> bool:
    """Whether the cache of :func:`facts_of` has the layer with this digest."""
    return _kept(digest, folder, needles).is_file()


def keep(facts: LayerFacts, digest: str, folder: Path, needles: Sequence[bytes] = ()) -> None:
    """Store the facts about the layer with this digest in the cache of :func:`facts_of`."""
    kept = _kept(digest, folder, needles)
    with contextlib.suppress(OSError):
        for old in folder.glob(kept.name.partition("-")[0] + "-*"):
            old.unlink(missing_ok=True)
        write_sealed(kept, asdict(facts))


def _kept(digest: str, folder: Path, needles: Sequence[bytes]) -> Path:
    mark = hashlib.sha256(rules().encode() + b"\0".join(sorted(needles))).hexdigest()[:16]
    return folder / f"{digest.removeprefix('sha256:')}-{mark}.json"


def _until(stop: Event | None, members: Iterable[Member]) -> Iterator[Member]:
    for member in members:
        if stop is not None and stop.is_set():
            raise InterruptedError
        yield member


def _loaded(known: dict[str, Any]) -> LayerFacts:
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
        libraries=tuple(Library(**{**row, "needed": tuple(row["needed"])}) for row in known["libraries"]),
        stated=tuple(Stated(**{**row, "requires": tuple(row["requires"])}) for row in known["stated"]),
        traces=tuple(Trace(**row) for row in known["traces"]),
        unreadable=known["unreadable"],
    )
