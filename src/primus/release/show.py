"""Releases and their differences as aligned text, and tables in Markdown."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from primus.release.diff import Change, Diff, component_order, release_facts
from primus.release.history import Release, newest_first
from primus.terminal import PLAIN, Screen, Styled

NONE = "–"
# What is said of a missing value: of a release that AMD published, and of pins or an image.
_ABSENT = ("not published", "not there")
HEAD = ("tag", "date", "ROCm", "PyTorch", "GPUs", "size")
# The most rows of one section as text, such as files.
_MOST = 60
_MARK = {"added": Styled("+", "green"), "removed": Styled("-", "red"), "changed": Styled("~", "yellow")}
# Longer lines of prose are hard to read, even on a wide screen.
_PROSE = 116


def _heading(text: str, screen: Screen) -> list[str]:
    return ["", *screen.wrap(Styled(text, "bold"))]


def release_list(releases: Sequence[Release], screen: Screen = PLAIN) -> str:
    """Return a table with one row per release, newest first."""
    rows = [row(release) for release in newest_first(releases)]
    return "\n".join(filter(None, [*screen.table(rows, head=HEAD), legend(rows)]))


def release_page(release: Release, screen: Screen = PLAIN) -> str:
    """Return everything that is known about one release."""
    absent = _ABSENT[bool(release.origin)]
    facts = {**release_facts(release), **({"same table as": release.same_as} if release.same_as else {})}
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
            (_MARK[change.kind], change.what, f"{change.old or absent[0]} → {change.new or absent[1]}")
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
        rows = [(c.what, *((side or NONE).replace("\n", " ") for side in (c.old, c.new))) for c in part.changes]
        lines += section(part.name.capitalize(), ("name", "old", "new"), escaped_rows(rows)) if rows else []
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
        "stated by one side only": [", ".join(difference.not_compared)] if difference.not_compared else [],
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
    pins = " (versions.yaml)" if release.origin else ""
    versions = (release.components.get(name) or NONE for name in ("rocm", "pytorch"))
    gpus, size = (release_facts(release)[name] or NONE for name in ("GPUs", "size"))
    return (release.reference + pins, release.date or NONE, *versions, gpus, size)


def legend(rows: Sequence[tuple[str, ...]]) -> str:
    """Return what is said below a table with ``rows``; empty if nothing needs it."""
    return f"{NONE} not published." if any(NONE in row for row in rows) else ""


def _counts(changes: Sequence[Change], same: int) -> str:
    kinds = Counter(change.kind for change in changes)
    parts = [
        (kinds["changed"], "changed"),
        (kinds["added"], "only on the new side"),
        (kinds["removed"], "only on the old side"),
        (same, "the same"),
    ]
    return ", ".join(f"{count} {words}" for count, words in parts if count) or "none is named"


def escaped_rows(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return ``rows`` with what Markdown would not print as it is escaped."""
    return [[_escaped(cell) for cell in row] for row in rows]


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


def table(head: Sequence[str], body: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table. Pipes in cells are escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in body]


def section(title: str, head: Sequence[str], body: Iterable[Iterable[object]], intro: str = "") -> list[str]:
    """Return the lines of a section with a table, and a sentence before it."""
    return [f"## {title}", "", *([intro, ""] if intro else []), *table(head, body), ""]
