"""The differences between two releases."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from primus.release import golden
from primus.release.history import Release
from primus.release.sides import Side

# The rows of the published tables, in their order. Components that only some releases list follow, sorted by name.
ROWS = (
    "rocm", "python", "pytorch", "transformer_engine", "flash_attention", "hipblaslt", "triton", "rccl", "primus",
    "primus_turbo", "aiter",
)  # fmt: skip
Values = Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value that differs. ``old`` or ``new`` is None if that side does not state it."""

    what: str
    kind: Literal["added", "removed", "changed"]
    old: str | None
    new: str | None


@dataclass(frozen=True, kw_only=True)
class Section:
    """The differences of one kind, such as components, packages or files, and the values that are the same."""

    name: str
    changes: tuple[Change, ...]
    same: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The comparison of two releases, called ``image:tag``. The origin is empty for a release that AMD published.

    ``sections`` are facts (date, size, GPUs and identity), components, and what else both sides state;
    ``not_compared`` is what only one of them states. ``notes`` are sentences by release.
    ``curves`` are differences between the golden curves of both sides, and ``issues`` the known issues of the new one.
    """

    old: str
    new: str
    old_origin: str
    new_origin: str
    sections: tuple[Section, ...]
    not_compared: tuple[str, ...]
    notes: Mapping[str, tuple[str, ...]]
    curves: tuple[str, ...]
    issues: tuple[str, ...]


def diff(old: Side, new: Side, issues: Iterable[object] = ()) -> Diff:
    """Compare ``old`` with ``new``, of which ``issues`` are known."""
    before, after, sides = old.release, new.release, (old.release, new.release)
    names = component_order([*before.components, *after.components])
    sections = [
        _compare("facts", release_facts(before), release_facts(after), release_facts(before)),
        # The locked version counts for a component that only the other side names.
        _compare("components", {**before.locked, **before.components}, {**after.locked, **after.components}, names),
        *(
            _compare(name, old.parts[name], part, sorted({*old.parts[name], *part}, key=_natural))
            for name, part in new.parts.items()
            if name in old.parts
        ),
    ]
    return Diff(
        old=before.reference,
        new=after.reference,
        old_origin=before.origin,
        new_origin=after.origin,
        sections=tuple(sections),
        not_compared=tuple(sorted(old.parts.keys() ^ new.parts.keys())),
        notes={side.reference: side.notes for side in sides if side.notes and not side.origin},
        curves=golden.changes(old.curves, new.curves, before.reference, after.reference),
        issues=tuple(map(str, issues)),
    )


def component_order(names: Sequence[str]) -> list[str]:
    """Return each name once: first the rows of the published tables, then the rest in natural order."""
    return sorted(set(names), key=lambda name: (ROWS.index(name) if name in ROWS else len(ROWS), _natural(name), name))


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def release_facts(release: Release) -> dict[str, str | None]:
    """Return what is known of a release apart from its components. None is not published."""
    size = release.content_size_bytes
    return {
        "date": release.date,
        "supported until": release.supported_until,
        "drivers": release.drivers,
        "size": None if release.size_gb is None else f"{release.size_gb:g} GB",
        "compressed size": None if size is None else f"{size:,} bytes",
        "GPUs": _listed(release.gpus),
        "architectures": _listed(release.gfx),
        "digest": release.digest,
        "image id": release.image_id,
        "confidence": release.confidence,
    }


def _listed(names: tuple[str, ...] | None) -> str | None:
    return None if names is None else ", ".join(sorted(names, key=_natural)) or "none"


def _compare(name: str, old: Values, new: Values, entries: Iterable[str]) -> Section:
    pairs = {entry: (old.get(entry), new.get(entry)) for entry in entries}
    return Section(
        name=name,
        changes=tuple(
            Change(
                what=entry,
                kind="added" if before is None else "removed" if after is None else "changed",
                old=before,
                new=after,
            )
            for entry, (before, after) in pairs.items()
            if before != after
        ),
        same={entry: before for entry, (before, after) in pairs.items() if before == after and before is not None},
    )
