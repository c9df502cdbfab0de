"""The differences between two releases, and contradictions between the published tables of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from primus.errors import InputError
from primus.release.history import Release
from primus.schema import described

# The rows of the published tables, in their order. Components that only some releases list follow, sorted by name.
ROWS = (
    "rocm",
    "python",
    "pytorch",
    "transformer_engine",
    "flash_attention",
    "hipblaslt",
    "triton",
    "rccl",
    "primus",
    "primus_turbo",
    "aiter",
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One fact that differs. ``old`` or ``new`` is None if that side does not state it."""

    what: str = described("Component or fact.")
    kind: Literal["added", "removed", "changed"] = described("Which side states the fact.")
    old: str | None = described("Value on the old side.")
    new: str | None = described("Value on the new side.")
    step: Literal["forward", "back"] | None = described("Direction of the version number, if it can be compared.")


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """A value for which another published table of the same tag differs."""

    tag: str = described("Image and tag.")
    source: str = described("The other table.")
    what: str = described("Component or fact.")
    table: str | None = described("Value of the best known table.")
    other: str = described("Value of the other one.")


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The comparison of two releases."""

    old: str = described("Image and tag of the old side.")
    new: str = described("Image and tag of the new side.")
    old_pinned: bool = described("Whether the old side is the current pins.")
    new_pinned: bool = described("Whether the new side is the current pins.")
    facts: tuple[Change, ...] = described("Date, size, GPUs and identity.")
    gpus_added: tuple[str, ...] = described("GPUs of the new side only.")
    gpus_removed: tuple[str, ...] = described("GPUs of the old side only.")
    size_gb_change: float | None = described("New size minus old size, if both are known.")
    components: tuple[Change, ...] = described("Components that differ.")
    same_facts: Mapping[str, str] = described("Facts that are equal on both sides.")
    same_components: Mapping[str, str] = described("Components that are equal on both sides.")
    unknown: tuple[str, ...] = described("Components without a version on either side.")
    contradictions: tuple[Contradiction, ...] = described("Values in other published tables of either side.")
    notes: Mapping[str, tuple[str, ...]] = described("Image and tag → further notes.")
    curves: tuple[str, ...] = described("Differences between the golden curves of both sides.", default=())


def one_of(found: Sequence[Release], word: str) -> Release:
    """Return the only release in ``found``. Tags with the same published table count as one.

    Raises InputError, with the choices, if several remain.
    """
    references = {r.reference for r in found}
    chosen = [r for r in found if r.same_as not in references]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(r.reference for r in chosen)
    hint = f"name one, for example {chosen[-1].reference}"
    raise InputError(f"{word} stands for {len(chosen)} images: {names}", hint=hint)


def diff(old: Release, new: Release) -> Diff:
    """Compare ``old`` with ``new``."""
    facts, same_facts, _ = _compare(_facts(old), _facts(new), list(_facts(old)), steps=False)
    names = component_order([*old.components, *new.components])
    mine, theirs = _with_locked(old, names), _with_locked(new, names)
    components, same, unknown = _compare(mine, theirs, names, steps=True)
    both_sizes = old.size_gb is not None and new.size_gb is not None
    sides = {side.reference: side for side in (old, new)}.values()
    return Diff(
        old=old.reference,
        new=new.reference,
        old_pinned=old.pinned,
        new_pinned=new.pinned,
        facts=facts,
        gpus_added=_beyond(new.gpus, old.gpus),
        gpus_removed=_beyond(old.gpus, new.gpus),
        size_gb_change=round((new.size_gb or 0) - (old.size_gb or 0), 6) if both_sizes else None,
        components=components,
        same_facts=same_facts,
        same_components=same,
        unknown=unknown,
        contradictions=tuple(c for side in sides for c in contradictions(side)),
        notes={side.reference: side.notes for side in sides if side.notes},
    )


def _with_locked(release: Release, names: Sequence[str]) -> dict[str, str | None]:
    """Return the release's components and, for components that only the other side names, the locked versions."""
    return {**{name: release.locked[name] for name in names if name in release.locked}, **release.components}


def contradictions(release: Release) -> tuple[Contradiction, ...]:
    """Return every value for which another table of the same tag differs."""
    found: list[Contradiction] = []
    for other in release.alternates:
        prefix = release.digest[7:15] if release.digest else None
        size = _bytes(release.content_size_bytes)
        cells: list[tuple[str, str | None, str | None]] = [
            ("digest", prefix, other.digest_prefix),
            ("image id", release.image_id, other.image_id),
            ("compressed size", size, _bytes(other.content_size_bytes)),
            *((name, release.components.get(name), value) for name, value in other.components.items()),
            *((name, None, value) for name, value in other.other_packages.items()),
        ]
        found += [
            Contradiction(tag=release.reference, source=other.source, what=what, table=mine, other=theirs)
            for what, mine, theirs in cells
            if theirs is not None and theirs != mine
        ]
    return tuple(found)


def component_order(names: Sequence[str]) -> list[str]:
    """Return each name once: first the rows of the published tables, then the rest in natural order."""
    return sorted(set(names), key=lambda n: (ROWS.index(n) if n in ROWS else len(ROWS), _natural(n), n))


def step(old: str, new: str) -> Literal["forward", "back"] | None:
    """Return the direction of a version change, or None if it is unclear (commits, equal numbers)."""
    before, after = _release_number(old), _release_number(new)
    if before is None or after is None:
        return None
    for one, other in zip(before, after, strict=False):
        if one != other:
            return "forward" if one < other else "back"
    return None


def _release_number(version: str) -> tuple[int, ...] | None:
    # Only dotted numbers count, because a commit such as 2631e68d also begins with digits.
    found = re.match(r"v?([0-9]+(?:\.[0-9]+)+)", version)
    return tuple(map(int, found[1].split("."))) if found else None


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def _facts(release: Release) -> dict[str, str | None]:
    date = f"{release.date} ({release.date_kind})" if release.date_kind else release.date
    return {
        "date": date,
        "size": None if release.size_gb is None else f"{release.size_gb:g} GB",
        "compressed size": _bytes(release.content_size_bytes),
        "GPUs": _listed(release.gpus),
        "architectures": _listed(release.gfx),
        "digest": release.digest,
        "image id": release.image_id,
        "confidence": "pins" if release.pinned else release.confidence,
    }


def _listed(names: tuple[str, ...] | None) -> str | None:
    return None if names is None else ", ".join(sorted(names, key=_natural)) or "none"


def _bytes(size: int | None) -> str | None:
    return None if size is None else f"{size:,} bytes"


def _beyond(mine: tuple[str, ...] | None, others: tuple[str, ...] | None) -> tuple[str, ...]:
    # If one side is unknown, nothing counts as added or removed.
    if mine is None or others is None:
        return ()
    return tuple(sorted(set(mine) - set(others), key=_natural))


def _compare(
    old: Mapping[str, str | None], new: Mapping[str, str | None], names: Sequence[str], *, steps: bool
) -> tuple[tuple[Change, ...], dict[str, str], tuple[str, ...]]:
    changes: list[Change] = []
    same: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        before, after = old.get(name), new.get(name)
        if before is None and after is None:
            unknown.append(name)
        elif before is not None and before == after:
            same[name] = before
        else:
            way = step(before, after) if steps and before is not None and after is not None else None
            kind: Literal["added", "removed", "changed"] = "changed"
            if before is None or after is None:
                kind = "added" if before is None else "removed"
            changes.append(Change(what=name, kind=kind, old=before, new=after, step=way))
    return tuple(changes), same, tuple(unknown)
