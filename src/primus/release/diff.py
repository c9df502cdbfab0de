"""The differences between two releases, and contradictions between the published tables of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from primus.errors import InputError
from primus.release.history import Release

# The rows of the published tables, in their order. Components that only some releases list follow, sorted by name.
ROWS = (
    "rocm", "python", "pytorch", "transformer_engine", "flash_attention", "hipblaslt", "triton", "rccl", "primus",
    "primus_turbo", "aiter",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Change:
    """One fact that differs. ``old`` or ``new`` is None if that side does not state it.

    ``step`` is the direction of the version number, if it can be compared.
    """

    what: str
    kind: Literal["added", "removed", "changed"]
    old: str | None
    new: str | None
    step: Literal["forward", "back"] | None


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """A value of the best known ``table`` for which another published table of the same tag differs."""

    tag: str
    source: str
    what: str
    table: str | None
    other: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """The differences of one kind, such as packages or files, and the number of entries that are the same."""

    name: str
    changes: tuple[Change, ...]
    same: int


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The comparison of two releases, called ``image:tag``. The origin is empty for a release that AMD published.

    ``facts`` are date, size, GPUs and identity. ``unknown`` are components without a version on either side.
    ``sections`` are what else both sides state, and ``not_compared`` what only one of them does. ``curves`` are
    differences between the golden curves of both sides, and ``issues`` the known issues of the new one.
    """

    old: str
    new: str
    old_origin: str
    new_origin: str
    facts: tuple[Change, ...]
    gpus_added: tuple[str, ...]
    gpus_removed: tuple[str, ...]
    size_gb_change: float | None
    components: tuple[Change, ...]
    same_facts: Mapping[str, str]
    same_components: Mapping[str, str]
    unknown: tuple[str, ...]
    contradictions: tuple[Contradiction, ...]
    notes: Mapping[str, tuple[str, ...]]
    sections: tuple[Section, ...] = ()
    not_compared: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()
    issues: tuple[str, ...] = ()


def one_of(releases: Sequence[Release], word: str) -> Release:
    """Return the only release in ``releases``. Tags with the same published table count as one.

    Raises InputError, with the choices, if several remain.
    """
    references = {release.reference for release in releases}
    distinct = [release for release in releases if release.same_as not in references]
    if len(distinct) == 1:
        return distinct[0]
    names = ", ".join(release.reference for release in distinct)
    hint = f"name one, for example {distinct[-1].reference}"
    raise InputError(f"{word} stands for {len(distinct)} images: {names}", hint=hint)


def diff(old: Release, new: Release) -> Diff:
    """Compare ``old`` with ``new``."""
    differing, same_facts, _ = _compare(release_facts(old), release_facts(new), list(release_facts(old)), steps=False)
    names = component_order([*old.components, *new.components])
    components, same, unknown = _compare(_with_locked(old, names), _with_locked(new, names), names, steps=True)
    sides = {side.reference: side for side in (old, new)}.values()
    size = None if old.size_gb is None or new.size_gb is None else round(new.size_gb - old.size_gb, 6)
    return Diff(
        old=old.reference,
        new=new.reference,
        old_origin=old.origin,
        new_origin=new.origin,
        facts=differing,
        gpus_added=_beyond(new.gpus, old.gpus),
        gpus_removed=_beyond(old.gpus, new.gpus),
        size_gb_change=size,
        components=components,
        same_facts=same_facts,
        same_components=same,
        unknown=unknown,
        contradictions=tuple(contradiction for side in sides for contradiction in contradictions(side)),
        notes={side.reference: side.notes for side in sides if side.notes and not side.origin},
    )


def sections(
    old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]
) -> tuple[tuple[Section, ...], tuple[str, ...]]:
    """Compare what both sides state, section by section. Also returns the names of what only one side states."""
    result = []
    for name in (name for name in new if name in old):
        entries = sorted({*old[name], *new[name]}, key=_natural)
        changes, same, _ = _compare(old[name], new[name], entries, steps=name == "packages")
        result.append(Section(name=name, changes=changes, same=len(same)))
    return tuple(result), tuple(sorted(old.keys() ^ new.keys()))


def _with_locked(release: Release, names: Sequence[str]) -> dict[str, str | None]:
    """Return the release's components and, for components that only the other side names, the locked versions."""
    return {**{name: release.locked[name] for name in names if name in release.locked}, **release.components}


def contradictions(release: Release) -> tuple[Contradiction, ...]:
    """Return every value for which another table of the same tag differs."""
    prefix = release.digest[7:15] if release.digest else None
    size = _exact(release.content_size_bytes)
    return tuple(
        Contradiction(tag=release.reference, source=other.source, what=what, table=best, other=value)
        for other in release.alternates
        for what, best, value in (
            ("digest", prefix, other.digest_prefix),
            ("image id", release.image_id, other.image_id),
            ("compressed size", size, _exact(other.content_size_bytes)),
            *((name, release.components.get(name), version) for name, version in other.components.items()),
            *((name, None, version) for name, version in other.other_packages.items()),
        )
        if value is not None and value != best
    )


def component_order(names: Sequence[str]) -> list[str]:
    """Return each name once: first the rows of the published tables, then the rest in natural order."""
    return sorted(set(names), key=lambda name: (ROWS.index(name) if name in ROWS else len(ROWS), _natural(name), name))


def step(old: str, new: str) -> Literal["forward", "back"] | None:
    """Return the direction of a version change, or None if it is unclear (commits, equal numbers)."""
    # Only dotted numbers count, because a commit such as 2631e68d also begins with digits.
    matches = [re.match(r"v?([0-9]+(?:\.[0-9]+)+)", version) for version in (old, new)]
    numbers = [tuple(map(int, match[1].split("."))) for match in matches if match]
    if len(numbers) < 2:
        return None
    before, after = (number[: min(map(len, numbers))] for number in numbers)
    return None if before == after else "forward" if before < after else "back"


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def release_facts(release: Release) -> dict[str, str | None]:
    """Return what is known of a release apart from its components. None is not published."""
    return {
        "date": f"{release.date} ({release.date_kind})" if release.date_kind else release.date,
        "supported until": release.supported_until,
        "drivers": release.drivers,
        "size": None if release.size_gb is None else f"{release.size_gb:g} GB",
        "compressed size": _exact(release.content_size_bytes),
        "GPUs": _listed(release.gpus),
        "architectures": _listed(release.gfx),
        "digest": release.digest,
        "image id": release.image_id,
        "confidence": None if release.origin else release.confidence,
    }


def _exact(size: int | None) -> str | None:
    return None if size is None else f"{size:,} bytes"


def _listed(names: tuple[str, ...] | None) -> str | None:
    return None if names is None else ", ".join(sorted(names, key=_natural)) or "none"


def _beyond(names: tuple[str, ...] | None, others: tuple[str, ...] | None) -> tuple[str, ...]:
    # If one side is unknown, nothing counts as added or removed.
    return () if names is None or others is None else tuple(sorted(set(names) - set(others), key=_natural))


def _compare(
    old: Mapping[str, str | None], new: Mapping[str, str | None], names: Sequence[str], *, steps: bool
) -> tuple[tuple[Change, ...], dict[str, str], tuple[str, ...]]:
    pairs = {name: (old.get(name), new.get(name)) for name in names}
    changes = tuple(
        Change(
            what=name,
            kind="added" if before is None else "removed" if after is None else "changed",
            old=before,
            new=after,
            step=step(before, after) if steps and before is not None and after is not None else None,
        )
        for name, (before, after) in pairs.items()
        if before != after
    )
    same = {name: before for name, (before, after) in pairs.items() if before == after and before is not None}
    return changes, same, tuple(name for name, pair in pairs.items() if pair == (None, None))
