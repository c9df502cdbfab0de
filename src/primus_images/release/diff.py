"""The differences between two releases, and both as aligned text or tables in Markdown."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from primus_images.release import golden
from primus_images.release.history import Release, newest_first
from primus_images.release.sides import Side
from primus_images.terminal import PLAIN, Screen, Styled

# The rows of the published tables, in their order. Components that only some releases list follow,
# sorted by name.
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
Values = Mapping[str, str | None]
Kind = Literal["added", "removed", "changed"]
NONE = "–"
# What is said of a missing value: of a release that AMD published, and of pins or an image.
_ABSENT = ("not published", "not there")
HEAD = ("tag", "date", "ROCm", "PyTorch", "GPUs", "size")
# The most rows of one section as text, such as files.
_MOST = 60
_MARK = {
    "added": Styled("+", "green"),
    "removed": Styled("-", "red"),
    "changed": Styled("~", "yellow"),
}
# Longer lines of prose are hard to read, even on a wide screen.
_PROSE = 116


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value that differs. ``old`` or ``new`` is None if that side does not state it."""

    what: str
    kind: Kind
    old: str | None
    new: str | None


@dataclass(frozen=True, kw_only=True)
class Section:
    """The differences of one kind, such as components, packages or files, and the values that are
    the same.
    """

    name: str
    changes: tuple[Change, ...]
    same: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The comparison of two releases, called ``image:tag``. The origin is empty for a release that
    AMD published.

    ``sections`` are facts (date, size, GPUs and identity), components, and what else both sides
    state; ``not_compared`` is what only one of them states. ``notes`` are sentences by release.
    ``curves`` are differences between the golden curves of both sides, and ``issues`` the known
    issues of the new one.
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
    before = old.release
    after = new.release
    sides = (old.release, new.release)
    names = component_order([*before.components, *after.components])
    sections = [
        _compare("facts", release_facts(before), release_facts(after), release_facts(before)),
        # The locked version counts for a component that only the other side names.
        _compare(
            "components",
            {**before.locked, **before.components},
            {**after.locked, **after.components},
            names,
        ),
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
    """Return each name once: first the rows of the published tables, then the rest in natural
    order.
    """
    return sorted(
        set(names),
        key=lambda name: (ROWS.index(name) if name in ROWS else len(ROWS), _natural(name), name),
    )


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
    if names is None:
        return None
    return ", ".join(sorted(names, key=_natural)) or "none"


def _compare(name: str, old: Values, new: Values, entries: Iterable[str]) -> Section:
    changes = []
    same = {}
    for entry in entries:
        before = old.get(entry)
        after = new.get(entry)
        kind: Kind = "added" if before is None else "removed" if after is None else "changed"
        if before != after:
            changes.append(Change(what=entry, kind=kind, old=before, new=after))
        elif before is not None:
            same[entry] = before
    return Section(name=name, changes=tuple(changes), same=same)


def _heading(text: str, screen: Screen) -> list[str]:
    return ["", *screen.wrap(Styled(text, "bold"))]


def release_list(releases: Sequence[Release], screen: Screen = PLAIN) -> str:
    """Return a table with one row per release, newest first; with what only ours state if there are
    any.
    """
    more = ()
    if any(release.origin for release in releases):
        more = ("supported until", "drivers")
    every = ((release, release_facts(release)) for release in newest_first(releases))
    rows = [(*row(release), *(facts[name] or NONE for name in more)) for release, facts in every]
    return "\n".join(filter(None, [*screen.table(rows, head=(*HEAD, *more)), legend(rows)]))


def release_page(release: Release, screen: Screen = PLAIN) -> str:
    """Return everything that is known about one release."""
    absent = _ABSENT[bool(release.origin)]
    facts = {
        **release_facts(release),
        **({"same table as": release.same_as} if release.same_as else {}),
    }
    names = component_order([*release.components])
    lines = [
        *_heading(release.reference, screen)[1:],
        *screen.table([(name, value or absent) for name, value in facts.items()], indent="  "),
        *_heading("components", screen),
        *screen.table([(name, release.components[name] or absent) for name in names], indent="  "),
        *_items({"notes": release.notes}, screen),
    ]
    return "\n".join(lines)


def diff_page(difference: Diff, screen: Screen = PLAIN) -> str:
    """Return the differences."""
    lines = _heading(_title(difference), screen)[1:]
    absent = [_ABSENT[bool(origin)] for origin in (difference.old_origin, difference.new_origin)]
    for part in difference.sections:
        lines += _heading(f"{part.name}: {_counts(part.changes, len(part.same))}", screen)
        rows: list[tuple[str, str, str]] = [
            (
                _MARK[change.kind],
                change.what,
                f"{change.old or absent[0]} → {change.new or absent[1]}",
            )
            for change in part.changes[:_MOST]
        ]
        if part.name == "facts" or (part.name == "components" and len(difference.sections) == 2):
            rows += [("=", what, value) for what, value in part.same.items()]
        lines += screen.table(rows, indent="  ")
        if len(part.changes) > _MOST:
            lines.append(f"  and {len(part.changes) - _MOST} more, which --json lists")
    return "\n".join([*lines, *_items(_remarks(difference), screen)])


def notes(difference: Diff) -> str:
    """Return the differences as release notes in Markdown."""
    lines = [f"# {_escaped(_title(difference))}", ""]
    for part in difference.sections:
        rows = [
            (c.what, *((side or NONE).replace("\n", " ") for side in (c.old, c.new)))
            for c in part.changes
        ]
        lines += (
            section(part.name.capitalize(), ("name", "old", "new"), escaped_rows(rows))
            if rows
            else []
        )
    for title, items in _remarks(difference).items():
        bullets = [f"- {_escaped(item)}" for item in items]
        lines += [f"## {_escaped(title.capitalize())}", "", *bullets, ""] if items else []
    return "\n".join(lines).rstrip("\n")


def _title(difference: Diff) -> str:
    sides = ((difference.old, difference.old_origin), (difference.new, difference.new_origin))
    return " → ".join(name + (f" ({origin})" if origin else "") for name, origin in sides)


def _remarks(difference: Diff) -> dict[str, Sequence[str]]:
    return {
        "training": difference.curves,
        f"known issues of {difference.new}": difference.issues,
        "stated by one side only": [", ".join(difference.not_compared)]
        if difference.not_compared
        else [],
        **{f"notes on {reference}": notes for reference, notes in difference.notes.items()},
    }


def _items(sections: Mapping[str, Sequence[str]], screen: Screen) -> list[str]:
    narrow = screen._replace(width=min(screen.width or _PROSE, _PROSE))
    lines = []
    for title, items in sections.items():
        lines += _heading(title, screen) if items else []
        lines += [line for item in items for line in narrow.wrap(item, "  - ", "    ")]
    return lines


def row(release: Release) -> tuple[str, ...]:
    """Return the row of a release below :data:`HEAD`."""
    pins = ""
    if release.origin:
        pins = f" ({release.origin.removeprefix('pins of ')})"
    versions = (release.components.get(name) or NONE for name in ("rocm", "pytorch"))
    gpus, size = (release_facts(release)[name] or NONE for name in ("GPUs", "size"))
    return (release.reference + pins, release.date or NONE, *versions, gpus, size)


def legend(rows: Sequence[tuple[str, ...]]) -> str:
    """Return what is said below a table with ``rows``; empty if nothing needs it."""
    if any(NONE in row for row in rows):
        return f"{NONE} not published."
    return ""


def _counts(changes: Sequence[Change], same: int) -> str:
    kinds = Counter[str](change.kind for change in changes)
    words = {
        "changed": "changed",
        "added": "only on the new side",
        "removed": "only on the old side",
    }
    parts = [*((kinds[kind], text) for kind, text in words.items()), (same, "the same")]
    return ", ".join(f"{count} {text}" for count, text in parts if count) or "none is named"


def escaped_rows(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return ``rows`` with what Markdown would not print as it is escaped."""
    return [[_escaped(cell) for cell in row] for row in rows]


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


def table(head: Sequence[str], body: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table. Pipes in cells are escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + [
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in body
    ]


def section(
    title: str, head: Sequence[str], body: Iterable[Iterable[object]], intro: str = ""
) -> list[str]:
    """Return the lines of a section with a table, and a sentence before it."""
    return [f"## {title}", "", *([intro, ""] if intro else []), *table(head, body), ""]
