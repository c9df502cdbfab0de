"""Releases and their differences as aligned text, the page about published releases, and tables in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from primus.release.diff import (
    ROWS,
    Change,
    Contradiction,
    Diff,
    component_order,
    contradictions,
    release_facts,
)
from primus.release.history import History, Release, UnconfirmedTag, errors_about, newest_first
from primus.terminal import PLAIN, Screen, Styled

_NONE = "–"
_HEAD = ("tag", "date", "ROCm", "PyTorch", "GPUs", "size")
_CONFIDENCE = {
    "published": "published: docs page, docs data or release note",
    "draft": "draft: README or unpublished data",
    "image": "image: read by AMD from inside the image",
    None: "not published",
}
# What is said of an entry that a published release lacks, and pins or an image do.
_NOT_THERE = ("not published", "not there")
# The most rows of one section as text, such as files.
_MOST = 40
_MARK = {"added": Styled("+", "green"), "removed": Styled("-", "red"), "changed": Styled("~", "yellow")}
# Longer lines of prose are hard to read, even on a wide screen.
_PROSE = 116


def _heading(text: str, screen: Screen) -> list[str]:
    return ["", *screen.wrap(Styled(text, "bold"))]


def _items(lines: Iterable[str], screen: Screen) -> list[str]:
    narrow = replace(screen, width=min(screen.width or _PROSE, _PROSE))
    return [part for line in lines for part in narrow.wrap(line, "  - ", "    ")]


def _changes(difference: Diff, screen: Screen, *, facts: bool) -> list[str]:
    changes = difference.facts if facts else difference.components
    same = difference.same_facts if facts else difference.same_components
    rows: list[tuple[str, str, str]] = [
        (_MARK[change.kind], change.what, _text(change, difference, facts=facts)) for change in changes
    ]
    if facts or not difference.sections:
        rows += [("=", what, value) for what, value in same.items()]
    return screen.table(rows, indent="  ")


def _text(change: Change, difference: Diff, *, facts: bool) -> str:
    def missing(origin: str) -> str:
        return _unknown_fact(origin) if facts else _NOT_THERE[bool(origin)]

    old, new = change.old or missing(difference.old_origin), change.new or missing(difference.new_origin)
    remark = _remark(change, difference)
    return f"{old} → {new}" + (f"  ({remark})" if remark else "")


def plain(release: Release) -> dict[str, Any]:
    """Return the release for JSON output."""
    shown = {name: value for name, value in asdict(release).items() if name not in ("locked", "origin")}
    return {**shown, "pinned": release.pinned}


def release_list(releases: Sequence[Release], screen: Screen = PLAIN) -> str:
    """Return a table with one row per release, newest first."""
    rows = [_row(release) for release in newest_first(releases)]
    legend = [part for line in _legend(rows) for part in screen.wrap(line)]
    return "\n".join([*screen.table(rows, head=_HEAD), *legend])


def release_page(history: History, release: Release, screen: Screen = PLAIN) -> str:
    """Return everything that is known about one release."""
    components = [
        (name, release.components[name] or release.missing) for name in component_order([*release.components])
    ]
    sections = {
        "other sources on this tag": [line for _, line in _by_source(contradictions(release))],
        "known errors of published pages": [
            f"{error.where}: printed {error.printed}; right: {error.right}" for error in errors_about(history, release)
        ],
        "notes": release.notes,
    }
    return "\n".join(
        [
            *_heading(release.reference, screen)[1:],
            *screen.table(_facts(release), indent="  "),
            *_heading("components", screen),
            *screen.table(components, indent="  "),
            *_sections(sections, screen),
        ]
    )


def diff_page(difference: Diff, screen: Screen = PLAIN) -> str:
    """Return the differences."""
    lines = [
        *_heading(_title(difference), screen)[1:],
        "",
        *_changes(difference, screen, facts=True),
        *_heading(f"components: {_counts(difference.components, len(difference.same_components))}", screen),
        *_changes(difference, screen, facts=False),
    ]
    for part in difference.sections:
        lines += _heading(f"{part.name}: {_counts(part.changes, part.same)}", screen)
        rows = [
            (_MARK[change.kind], change.what, _text(change, difference, facts=False)) for change in part.changes[:_MOST]
        ]
        lines += screen.table(rows, indent="  ")
        if len(part.changes) > _MOST:
            lines.append(f"  and {len(part.changes) - _MOST} more, which --json lists")
    return "\n".join([*lines, *_sections(_remarks(difference), screen)])


def notes(difference: Diff) -> str:
    """Return the differences as release notes in Markdown."""
    lines = [f"# {_escaped(_title(difference))}", ""]
    parts = {"facts": difference.facts, "components": difference.components}
    for name, changes in {**parts, **{part.name: part.changes for part in difference.sections}}.items():
        sides = [(c.what, *((side or "–").replace("\n", " ") for side in (c.old, c.new))) for c in changes]
        if sides:
            lines += _section(name.capitalize(), ("name", "old", "new"), sides)
    for title, items in _remarks(difference).items():
        lines += (
            [f"## {_escaped(title.capitalize())}", "", *(f"- {_escaped(item)}" for item in items), ""] if items else []
        )
    return "\n".join(lines).rstrip("\n")


def _title(difference: Diff) -> str:
    sides = ((difference.old, difference.old_origin), (difference.new, difference.new_origin))
    return " → ".join(name + (f" ({origin})" if origin else "") for name, origin in sides)


def _remarks(difference: Diff) -> dict[str, Sequence[str]]:
    return {
        "on neither side": [", ".join(difference.unknown)] if difference.unknown else [],
        "training": difference.curves,
        f"known issues of {difference.new}": difference.issues,
        "stated by one side only": [", ".join(difference.not_compared)] if difference.not_compared else [],
        "other sources on these tags": [f"{tag}, {line}" for tag, line in _by_source(difference.contradictions)],
        **{f"notes on {reference}": notes for reference, notes in difference.notes.items()},
    }


def doubts(tags: Sequence[UnconfirmedTag], screen: Screen = PLAIN) -> str:
    """Return the unconfirmed tags, one item each."""
    items = (f"{tag.reference}: named by {tag.named_by}; {tag.status}" for tag in tags)
    return "\n".join([*_heading("unconfirmed tags", screen)[1:], *_items(items, screen)])


def page(history: History) -> str:
    """Return docs/releases.md."""
    every = newest_first(history.every)
    rows = [_row(release) for release in every]
    columns = [name for name in ROWS if name not in ("rocm", "pytorch")]
    lines = [
        "<!-- Generated from src/primus/release/history.yaml by `nox -s docs`; do not edit. -->",
        "# Published releases",
        "",
        "Every training image tag that is known to be published, newest first. `primus releases NAME` shows "
        "everything known about a release. `primus diff v25.10 v26.8` compares two releases, and "
        "`primus diff v26.8 versions.yaml` compares a release with the current pins. Values that were not "
        "published are never filled in from elsewhere.",
        "",
        *history.deprecations,
        "",
        *table(_HEAD, [map(_escaped, row) for row in rows]),
        "",
        " ".join(map(_escaped, _legend(rows))),
        "",
        *_section(
            "Components",
            ("tag", *columns),
            [(r.reference, *(r.components.get(name) or _NONE for name in columns)) for r in every],
            "Versions as published. Newer releases list more components; see `primus releases NAME`.",
        ),
        *_section(
            "Contradicting tables",
            ("tag", "what", "best known", "other table", "source"),
            [(c.tag, c.what, c.table or "not published", c.other, c.source) for r in every for c in contradictions(r)],
            "Some tags have several published tables that differ. The tables above show the best known value.",
        ),
    ]
    return "\n".join(lines)


def _section(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], intro: str = "") -> list[str]:
    return section(title, [_escaped(name) for name in head], [map(_escaped, row) for row in rows], intro)


def _sections(sections: Mapping[str, Sequence[str]], screen: Screen) -> list[str]:
    return [
        line
        for title, items in sections.items()
        if items
        for line in (*_heading(title, screen), *_items(items, screen))
    ]


def _row(release: Release) -> tuple[str, ...]:
    star = " *" if contradictions(release) else ""
    pins = " (versions.yaml)" if release.pinned else ""
    versions = (release.components.get(name) or _NONE for name in ("rocm", "pytorch"))
    gpus = _NONE if release.gpus is None else ", ".join(release.gpus) or "none"
    return (release.reference + pins + star, release.date or _NONE, *versions, gpus, _size(release))


def _size(release: Release) -> str:
    return _NONE if release.size_gb is None else f"{release.size_gb:g} GB"


def _legend(rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [f"{_NONE} not published."] if any(_NONE in row for row in rows) else []
    if any(row[0].endswith("*") for row in rows):
        lines.append("* another published table differs: see primus releases NAME.")
    return lines


def _facts(release: Release) -> list[tuple[str, str]]:
    values = release_facts(release)
    size, confidence = values["size"], _CONFIDENCE[release.confidence]
    values |= {"size": size and f"{size} unpacked", "confidence": confidence}
    if release.pinned:
        del values["confidence"]
    rows = [(name, value or _unknown_fact(release.origin)) for name, value in values.items()]
    if release.image_verified:
        rows.append(("read from the image", ", ".join(release.image_verified)))
    if release.same_as:
        rows.append(("same table as", release.same_as))
    return rows


def _unknown_fact(origin: str) -> str:
    return "not known before it is built" if "image" not in origin and origin else _NOT_THERE[bool(origin)]


def _by_source(contradicting: Iterable[Contradiction]) -> list[tuple[str, str]]:
    """Return (tag, line) for each source that differs."""
    cells: dict[tuple[str, str], list[str]] = {}
    for c in contradicting:
        best = f" (best known: {c.table})" if c.table else ""
        cells.setdefault((c.tag, c.source), []).append(f"{c.what} {c.other}{best}")
    return [(tag, f"{source}: {', '.join(values)}") for (tag, source), values in cells.items()]


def _counts(changes: Sequence[Change], same: int) -> str:
    kinds = Counter(change.kind for change in changes)
    parts = [
        (kinds["changed"], "changed"),
        (kinds["added"], "only on the new side"),
        (kinds["removed"], "only on the old side"),
        (same, "the same"),
    ]
    return ", ".join(f"{count} {words}" for count, words in parts if count) or "none is named"


def _remark(change: Change, difference: Diff) -> str:
    if change.what == "size" and difference.size_gb_change is not None:
        return f"{difference.size_gb_change:+g} GB"
    if change.what == "GPUs":
        return ", ".join([*(f"+{gpu}" for gpu in difference.gpus_added), *(f"-{g}" for g in difference.gpus_removed)])
    return "goes back" if change.step == "back" else ""


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


# Markdown, which all generated pages share


def table(head: Sequence[str], body: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table. Pipes in cells are escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in body]


def section(title: str, head: Sequence[str], body: Iterable[Iterable[object]], intro: str = "") -> list[str]:
    """Return the lines of a section with a table, and a sentence before it."""
    return [f"## {title}", "", *([intro, ""] if intro else []), *table(head, body), ""]
