"""The differences between two releases, and both as aligned text or tables in Markdown."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from primus_images.release import golden
from primus_images.release.history import Release, newest_first
from primus_images.release.sides import Side
from primus_images.terminal import PLAIN, Screen, Styled, counted
from primus_images.training.judge.record import NO_GPU, Record

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
# What is said of a value that a side lacks: a release that AMD published, or a side that does not
# say all of this kind, or one that does.
_NOT_PUBLISHED = "not published"
_NOT_STATED = "not stated"
_NOT_THERE = "not there"
HEAD = ("tag", "date", "ROCm", "PyTorch", "GPUs", "size")
# The most rows of one section as text, such as files.
_MOST = 60
_MARK = {
    "added": Styled("+", "green"),
    "removed": Styled("-", "red"),
    "changed": Styled("~", "yellow"),
}
# What release notes show without unfolding: sections, rows of a table, and items of a list.
_SHOWN = ("facts", "components", "licences")
_SCREEN = 12
_BULLETS = 4
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
    the same. ``absent`` says of the old and of the new side what it means that a value is missing.
    """

    name: str
    changes: tuple[Change, ...]
    same: Mapping[str, str]
    absent: tuple[str, str]

    @property
    def compared(self) -> tuple[Change, ...]:
        """The changes of which both sides know."""
        known = []
        for change in self.changes:
            old_known = change.old is not None or self.absent[0] == _NOT_THERE
            new_known = change.new is not None or self.absent[1] == _NOT_THERE
            if old_known and new_known:
                known.append(change)
        return tuple(known)


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The comparison of two releases, called ``image:tag``. The origin is empty for a release that
    AMD published.

    ``sections`` are facts (date, size, GPUs and identity), components, and what else both sides
    state; ``not_compared`` is what only one of them states. ``notes`` are sentences by release.
    ``curves`` are differences between the golden curves of both sides, and ``issues`` the known
    issues of the new one. ``withdrawn`` are sentences about sides that were withdrawn.
    ``validations`` are rows about those of the new one: recipe, backend, precision, where it ran,
    checks and loss.
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
    withdrawn: tuple[str, ...]
    validations: tuple[tuple[str, ...], ...]


def diff(old: Side, new: Side, issues: Iterable[object] = ()) -> Diff:
    """Compare ``old`` with ``new``, of which ``issues`` are known."""
    before = old.release
    after = new.release
    origins = (before.origin, after.origin)
    sections = [
        _compare("facts", release_facts(before), release_facts(after), origins),
        # The locked version counts for a component that only the other side names.
        _compare(
            "components",
            {**before.locked, **before.components},
            {**after.locked, **after.components},
            origins,
            component_order([*before.components, *after.components]),
        ),
    ]
    for name, part in new.parts.items():
        if name in old.parts:
            names = sorted({*old.parts[name], *part}, key=_natural)
            sections.append(_compare(name, old.parts[name], part, origins, names))
    notes = {}
    for release in (before, after):
        if release.notes and not release.origin:
            notes[release.reference] = release.notes
    return Diff(
        old=before.reference,
        new=after.reference,
        old_origin=before.origin,
        new_origin=after.origin,
        sections=tuple(sections),
        not_compared=tuple(sorted(old.parts.keys() ^ new.parts.keys())),
        notes=notes,
        curves=golden.changes(old.curves, new.curves, before.reference, after.reference),
        issues=tuple(map(str, issues)),
        withdrawn=tuple(
            f"{one.release.reference} was {one.withdrawn}" for one in (old, new) if one.withdrawn
        ),
        validations=tuple(_validation_row(record) for record in new.records),
    )


def _validation_row(record: Record) -> tuple[str, ...]:
    recipe = record.recipe
    where = "CPU" if record.gpu == NO_GPU else record.gpu
    passed = len(record.verdicts) - len(record.failed)
    losses = [step.get("loss") for step in record.jobs[0].steps] if record.jobs else []
    curve = NONE
    if losses and losses[0] is not None and losses[-1] is not None:
        curve = f"{losses[0]:.3f} → {losses[-1]:.3f}"
    verdict = "passed" if record.passed else "FAILED"
    checks = f"{verdict}: {passed} of {len(record.verdicts)}"
    return (recipe.name, recipe.backend, recipe.precision, where, checks, curve)


def component_order(names: Iterable[str]) -> list[str]:
    """Return each name once: first the rows of the published tables, then in natural order."""
    others = sorted(set(names) - set(ROWS), key=lambda name: (_natural(name), name))
    return [name for name in ROWS if name in names] + others


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    """Return a key by which v10 is after v9."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def release_facts(release: Release) -> dict[str, str | None]:
    """Return what is known of a release apart from its components. None is not published."""
    size = None
    if release.size_gb is not None:
        size = f"{release.size_gb:g} GB"
    compressed = None
    if release.content_size_bytes is not None:
        compressed = f"{release.content_size_bytes:,} bytes"
    return {
        "date": release.date,
        "supported until": release.supported_until,
        "drivers": release.drivers,
        "validated": release.validated,
        "size": size,
        "compressed size": compressed,
        "GPUs": _joined(release.gpus),
        "architectures": _joined(release.gfx),
        "digest": release.digest,
        "image id": release.image_id,
        "confidence": release.confidence,
    }


def _joined(names: tuple[str, ...] | None) -> str | None:
    if names is None:
        return None
    return ", ".join(sorted(names, key=_natural)) or "none"


def _compare(
    name: str,
    old: Values,
    new: Values,
    origins: tuple[str, str],
    entries: Iterable[str] | None = None,
) -> Section:
    """Compare ``entries``, by default those of ``old``."""
    changes = []
    same = {}
    for entry in old if entries is None else entries:
        before = old.get(entry)
        after = new.get(entry)
        if before != after:
            changes.append(_change(entry, before, after))
        elif before is not None:
            same[entry] = before
    absent = (_absent(name, origins[0]), _absent(name, origins[1]))
    return Section(name=name, changes=tuple(changes), same=same, absent=absent)


def _absent(section: str, origin: str) -> str:
    """Return what it means that a side of this origin lacks a value of a section."""
    if not origin:
        return _NOT_PUBLISHED
    pinned = origin.startswith("pins of")
    # An image names its pins, and not what is pinned of its base. Pins do not name variables that
    # every image has, such as PATH.
    unstated = section == "environment" if pinned else section == "components"
    if section == "facts" or unstated:
        return _NOT_STATED
    return _NOT_THERE


def _change(entry: str, old: str | None, new: str | None) -> Change:
    kind: Kind = "changed"
    if old is None:
        kind = "added"
    elif new is None:
        kind = "removed"
    return Change(what=entry, kind=kind, old=old, new=new)


def _heading(text: str, screen: Screen) -> list[str]:
    return ["", *screen.wrap(Styled(text, "bold"))]


def release_list(releases: Sequence[Release], screen: Screen = PLAIN) -> str:
    """Return a table with one row per release, newest first.

    It has what only ours state if there are any.
    """
    more: tuple[str, ...] = ()
    if any(release.origin for release in releases):
        more = ("supported until", "drivers", "validated")
    rows = []
    for release in newest_first(releases):
        facts = release_facts(release)
        rows.append((*row(release), *(facts[name] or NONE for name in more)))
    lines = screen.table(rows, head=(*HEAD, *more))
    return "\n".join(filter(None, [*lines, legend(rows)]))


def release_page(release: Release, screen: Screen = PLAIN) -> str:
    """Return everything that is known about one release."""
    facts = release_facts(release)
    if release.same_as:
        facts["same table as"] = release.same_as
    unknown = _absent("facts", release.origin)
    fact_rows = [(name, value or unknown) for name, value in facts.items()]
    names = component_order(release.components)
    absent = _absent("components", release.origin)
    component_rows = [(name, release.components[name] or absent) for name in names]
    lines = [
        *screen.wrap(Styled(release.reference, "bold")),
        *screen.table(fact_rows, indent="  "),
        *_heading("components", screen),
        *screen.table(component_rows, indent="  "),
        *_items({"notes": release.notes}, screen),
    ]
    return "\n".join(lines)


def diff_page(difference: Diff, screen: Screen = PLAIN) -> str:
    """Return the differences."""
    lines = []
    for sentence in difference.withdrawn:
        lines += screen.wrap(f"! {sentence}", hanging="  ")
    lines += screen.wrap(Styled(_title(difference), "bold"))
    for part in difference.sections:
        lines += _heading(f"{part.name}: {_counts(part.changes, len(part.same))}", screen)
        lines += screen.table(_rows(part, difference), indent="  ")
        if len(part.changes) > _MOST:
            lines.append(f"  and {len(part.changes) - _MOST} more, which --json lists")
    return "\n".join([*lines, *_items(_remarks(difference), screen)])


def _rows(part: Section, difference: Diff) -> list[tuple[str, str, str]]:
    """Return the first changes of a section, and what is the same where that is of interest."""
    old_absent, new_absent = part.absent
    rows: list[tuple[str, str, str]] = []
    for change in part.changes[:_MOST]:
        values = f"{change.old or old_absent} → {change.new or new_absent}"
        rows.append((_MARK[change.kind], change.what, values))
    only_published = len(difference.sections) == 2
    if part.name == "facts" or (part.name == "components" and only_published):
        rows += [("=", what, value) for what, value in part.same.items()]
    return rows


def notes(difference: Diff) -> str:
    """Return the differences as release notes in Markdown.

    One screen has what a reader decides by: pins, sizes, validations, issues and licences. The rest
    is folded below it. Only what both sides state is compared.
    """
    lines = [f"# {_escaped(_title(difference))}", ""]
    for sentence in difference.withdrawn:
        lines += [f"**{_escaped(sentence)}**", ""]
    folded = []
    for part in difference.sections:
        rows = [(change.what, _cell(change.old), _cell(change.new)) for change in part.compared]
        title = f"{part.name.capitalize()}: {counted(len(rows), 'difference')}"
        cells = escaped_rows(rows)
        head: tuple[str, ...] = ("name", "old", "new")
        is_shown = part.name in _SHOWN and bool(rows)
        if is_shown:
            lines += [f"## {part.name.capitalize()}", "", *table(head, cells[:_SCREEN]), ""]
        if rows and not (is_shown and len(rows) <= _SCREEN):
            folded += _folded(title, table(head, cells))
    if difference.validations:
        head = ("recipe", "backend", "precision", "on", "checks", "loss")
        rows_of_records = escaped_rows(difference.validations)
        shown = table(head, rows_of_records[:_SCREEN])
        lines += ["## Validations", "", *shown, ""]
        if len(rows_of_records) > _SCREEN:
            title = f"All {len(rows_of_records)} validations"
            folded += _folded(title, table(head, rows_of_records))
    for title, items in _remarks(difference).items():
        bullets = [f"- {_escaped(item)}" for item in items]
        if bullets:
            lines += [f"## {_escaped(title.capitalize())}", "", *bullets[:_BULLETS], ""]
        if len(bullets) > _BULLETS:
            folded += _folded(f"{_escaped(title.capitalize())}: all {len(bullets)}", bullets)
    return "\n".join([*lines, *folded]).rstrip("\n")


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


def _cell(value: str | None) -> str:
    return (value or NONE).replace("\n", " ")


def _title(difference: Diff) -> str:
    old = _with_origin(difference.old, difference.old_origin)
    new = _with_origin(difference.new, difference.new_origin)
    return f"{old} → {new}"


def _with_origin(name: str, origin: str) -> str:
    return f"{name} ({origin})" if origin else name


def _remarks(difference: Diff) -> dict[str, Sequence[str]]:
    remarks: dict[str, Sequence[str]] = {
        "training": difference.curves,
        f"known issues of {difference.new}": difference.issues,
    }
    if difference.not_compared:
        remarks["stated by one side only"] = [", ".join(difference.not_compared)]
    for reference, notes in difference.notes.items():
        remarks[f"notes on {reference}"] = notes
    return remarks


def _items(sections: Mapping[str, Sequence[str]], screen: Screen) -> list[str]:
    narrow = screen._replace(width=min(screen.width or _PROSE, _PROSE))
    lines = []
    for title, items in sections.items():
        if items:
            lines += _heading(title, screen)
        for item in items:
            lines += narrow.wrap(item, "  - ", "    ")
    return lines


def row(release: Release) -> tuple[str, ...]:
    """Return the row of a release below :data:`HEAD`."""
    name = release.reference
    if release.origin:
        name += f" ({release.origin.removeprefix('pins of ')})"
    facts = release_facts(release)
    return (
        name,
        release.date or NONE,
        release.components.get("rocm") or NONE,
        release.components.get("pytorch") or NONE,
        facts["GPUs"] or NONE,
        facts["size"] or NONE,
    )


def legend(rows: Sequence[tuple[str, ...]]) -> str:
    """Return what is said below a table with ``rows``; empty if nothing needs it."""
    if any(NONE in row for row in rows):
        return f"{NONE} not published."
    return ""


def _counts(changes: Sequence[Change], same: int) -> str:
    kinds = Counter(change.kind for change in changes)
    counts = {
        "changed": kinds["changed"],
        "only on the new side": kinds["added"],
        "only on the old side": kinds["removed"],
        "the same": same,
    }
    parts = [f"{count} {words}" for words, count in counts.items() if count]
    return ", ".join(parts) or "none is named"


def escaped_rows(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return ``rows`` with what Markdown would not print as it is escaped."""
    return [[_escaped(cell) for cell in row] for row in rows]


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


def table(head: Sequence[str], body: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table. Pipes in cells are escaped."""
    lines = [_line(head), "|" + "---|" * len(head)]
    for cells in body:
        lines.append(_line(str(cell).replace("|", "\\|") for cell in cells))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def section(
    title: str, head: Sequence[str], body: Iterable[Iterable[object]], intro: str = ""
) -> list[str]:
    """Return the lines of a section with a table, and a sentence before it."""
    lines = [f"## {title}", ""]
    if intro:
        lines += [intro, ""]
    return [*lines, *table(head, body), ""]
