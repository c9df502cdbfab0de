"""Releases and their differences as aligned text for a terminal, and as Markdown."""

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
    bytes_words,
    component_order,
    contradictions,
    date_words,
)
from primus.release.history import History, Release, UnconfirmedTag, errors_about, newest_first
from primus.release.markdown import section, table
from primus.terminal import PLAIN, Screen, Styled

_NONE = "–"
_HEAD = ("tag", "date", "ROCm", "PyTorch", "GPUs", "size")
_CONFIDENCE = {
    "published": "published: docs page, docs data or release note",
    "draft": "draft: README or unpublished data",
    "image": "image: read by AMD from inside the image",
    None: "not published",
}
_MARK = {"added": Styled("+", "green"), "removed": Styled("-", "red"), "changed": Styled("~", "yellow")}
# Longer lines of prose are hard to read, even on a wide screen.
_PROSE = 116


class _Text:
    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def title(self, text: str) -> list[str]:
        return self.screen.wrap(Styled(text, "bold"))

    def heading(self, text: str) -> list[str]:
        return ["", *self.title(text)]

    def facts(self, rows: Iterable[tuple[str, str]]) -> list[str]:
        return self.screen.table(list(rows), indent="  ")

    def changes(self, difference: Diff, *, facts: bool) -> list[str]:
        changes, same = _compared(difference, facts=facts)
        rows: list[tuple[str, str, str]] = []
        for change in changes:
            old, new = _sides(change, difference, facts=facts)
            remark = _remark(change, difference)
            rows.append((_MARK[change.kind], change.what, f"{old} → {new}" + (f"  ({remark})" if remark else "")))
        rows += [("=", what, value) for what, value in same.items()]
        return self.screen.table(rows, indent="  ")

    def items(self, lines: Iterable[str]) -> list[str]:
        narrow = replace(self.screen, width=min(self.screen.width or _PROSE, _PROSE))
        return [part for line in lines for part in narrow.wrap(line, "  - ", "    ")]

    def releases(self, releases: Sequence[Release]) -> list[str]:
        rows = [_row(release) for release in newest_first(releases)]
        return [*self.screen.table(rows, head=_HEAD), *(p for line in _legend(rows) for p in self.screen.wrap(line))]


class _Markdown:
    def title(self, text: str) -> list[str]:
        return [f"## {_cell(text)}", ""]

    def heading(self, text: str) -> list[str]:
        return ["", f"### {text[0].upper()}{_cell(text[1:])}", ""]

    def facts(self, rows: Iterable[tuple[str, str]]) -> list[str]:
        return _table([("", ""), *rows])

    def changes(self, difference: Diff, *, facts: bool) -> list[str]:
        changes, same = _compared(difference, facts=facts)
        rows = [(c.what, *_sides(c, difference, facts=facts), _remark(c, difference)) for c in changes]
        rows += [(what, value, value, "the same") for what, value in same.items()]
        return _table([("", difference.old, difference.new, ""), *rows])

    def items(self, lines: Iterable[str]) -> list[str]:
        return [f"- {_cell(line)}" for line in lines]

    def releases(self, releases: Sequence[Release]) -> list[str]:
        rows = [_row(release) for release in newest_first(releases)]
        legend = " ".join(_cell(line) for line in _legend(rows))
        return [*_table([_HEAD, *rows]), *(["", legend] if legend else [])]


Layout = _Text | _Markdown


def layout_of(*, markdown: bool, screen: Screen = PLAIN) -> Layout:
    """Return the layout for the functions below: Markdown, or text for ``screen``."""
    return _Markdown() if markdown else _Text(screen)


def plain(release: Release) -> dict[str, Any]:
    """Return the release for JSON output."""
    return {name: value for name, value in asdict(release).items() if name != "locked"}


def release_list(releases: Sequence[Release], layout: Layout) -> str:
    """Return a table with one row per release, newest first."""
    return "\n".join(layout.releases(releases))


def release_page(history: History, release: Release, stack: Mapping[str, Any] | None, layout: Layout) -> str:
    """Return everything that is known about one release. ``stack`` is what it was made from."""
    names = component_order(list(release.components))
    lines = [*layout.title(release.reference), *layout.facts(_facts(release)), *layout.heading("components")]
    lines += layout.facts((name, release.components[name] or release.missing) for name in names)
    errors = errors_about(history, release)
    sections = {
        "other sources on this tag": [line for _, line in _by_source(contradictions(release))],
        "known errors of published pages": [f"{e.where}: printed {e.printed}; right: {e.right}" for e in errors],
        "notes": release.notes,
        "made from": _stack(stack) if stack else [],
    }
    return "\n".join(lines + _sections(sections, layout))


def diff_page(difference: Diff, layout: Layout) -> str:
    """Return the differences."""
    sides = ((difference.old, difference.old_pinned), (difference.new, difference.new_pinned))
    title = " → ".join(name + (" (pins of versions.yaml)" if pinned else "") for name, pinned in sides)
    lines = layout.title(title) + ([""] if isinstance(layout, _Text) else [])
    lines += layout.changes(difference, facts=True)
    lines += layout.heading(f"components: {_counts(difference)}")
    lines += layout.changes(difference, facts=False)
    sections: dict[str, Sequence[str]] = {
        "on neither side": [", ".join(difference.unknown)] if difference.unknown else [],
        "training": difference.curves,
        "other sources on these tags": [f"{tag}, {line}" for tag, line in _by_source(difference.contradictions)],
        **{f"notes on {reference}": notes for reference, notes in difference.notes.items()},
    }
    return "\n".join(lines + _sections(sections, layout))


def doubts(tags: Sequence[UnconfirmedTag], layout: Layout) -> str:
    """Return the unconfirmed tags, one item each."""
    items = layout.items(f"{tag.reference}: named by {tag.named_by}; {tag.status}" for tag in tags)
    return "\n".join([*layout.heading("unconfirmed tags")[1:], *items])


def page(history: History) -> str:
    """Return docs/releases.md."""
    every = newest_first(history.releases)
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
        release_list(history.releases, _Markdown()),
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
        *_section(
            "Known errors of published pages",
            ("where", "printed", "right"),
            [(error.where, error.printed, error.right) for error in history.documentation_errors],
        ),
        *_section(
            "Unconfirmed tags",
            ("tag", "named by", "status"),
            [(tag.reference, tag.named_by, tag.status) for tag in history.unconfirmed_tags],
            "These tags are named in some file, but no table, page or history lists them.",
        ),
        *_section(
            "Related images",
            ("tag", "date", "components", "size", "notes"),
            [
                (r.reference, r.date or _NONE, _versions(r), _size(r), " ".join(r.notes))
                for r in newest_first(history.related_images)
            ],
        ),
    ]
    return "\n".join(lines)


def _section(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], intro: str = "") -> list[str]:
    return section(title, [_escaped(name) for name in head], [map(_escaped, row) for row in rows], intro)


def _versions(release: Release) -> str:
    return ", ".join(f"{name} {version}" for name, version in release.components.items() if version)


def _sections(sections: Mapping[str, Sequence[str]], layout: Layout) -> list[str]:
    return [
        line for title, items in sections.items() if items for line in (*layout.heading(title), *layout.items(items))
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
    unknown = _unknown_fact(release.pinned)
    facts = [
        ("date", date_words(release) or unknown),
        ("size", unknown if release.size_gb is None else f"{release.size_gb:g} GB unpacked"),
        ("compressed size", bytes_words(release.content_size_bytes) or unknown),
        ("GPUs", unknown if release.gpus is None else ", ".join(release.gpus) or "none"),
        ("architectures", unknown if release.gfx is None else ", ".join(release.gfx) or "none"),
        ("digest", release.digest or unknown),
        ("image id", release.image_id or unknown),
    ]
    if not release.pinned:
        facts.append(("confidence", _CONFIDENCE[release.confidence]))
    if release.image_verified:
        facts.append(("read from the image", ", ".join(release.image_verified)))
    if release.same_as:
        facts.append(("same table as", release.same_as))
    return facts


def _unknown_fact(pinned: bool) -> str:
    return "not known before it is built" if pinned else "not published"


def _by_source(contradicting: Iterable[Contradiction]) -> list[tuple[str, str]]:
    """Return (tag, line) for each source that differs."""
    cells: dict[tuple[str, str], list[str]] = {}
    for c in contradicting:
        best = f" (best known: {c.table})" if c.table else ""
        cells.setdefault((c.tag, c.source), []).append(f"{c.what} {c.other}{best}")
    return [(tag, f"{source}: {', '.join(values)}") for (tag, source), values in cells.items()]


def _stack(stack: Mapping[str, Any]) -> list[str]:
    pinned = "by digest" if stack["base_pinned_by_digest"] else "not pinned by digest"
    lines = [f"{stack['dockerfile']} on {stack['base_image']} ({pinned})", f"installed by {stack['installer']}"]
    for name, source in stack["git"].items():
        if source is not None:
            commit = source.get("commit") or source.get("ref") or "at no recorded commit"
            lines.append(f"{name}: {source['repo']} {commit}")
    for wheel in stack["wheels"]:
        origin = f" from {wheel['index']}" if wheel.get("index") else ""
        lines.append(f"{wheel['name']} {wheel['version']}{origin}" + ("" if wheel["pinned"] else ", not pinned"))
    return lines + [f"in no public repository: {path}" for path in stack["private_inputs"]]


def _counts(difference: Diff) -> str:
    kinds = Counter(change.kind for change in difference.components)
    parts = [
        (kinds["changed"], "changed"),
        (kinds["added"], "only on the new side"),
        (kinds["removed"], "only on the old side"),
        (len(difference.same_components), "the same"),
    ]
    return ", ".join(f"{count} {words}" for count, words in parts if count) or "none is named"


def _compared(difference: Diff, *, facts: bool) -> tuple[Sequence[Change], Mapping[str, str]]:
    if facts:
        return difference.facts, difference.same_facts
    return difference.components, difference.same_components


def _sides(change: Change, difference: Diff, *, facts: bool) -> tuple[str, str]:
    def missing(pinned: bool) -> str:
        return _unknown_fact(pinned) if facts else "not pinned" if pinned else "not published"

    return change.old or missing(difference.old_pinned), change.new or missing(difference.new_pinned)


def _remark(change: Change, difference: Diff) -> str:
    if change.what == "size" and difference.size_gb_change is not None:
        return f"{difference.size_gb_change:+g} GB"
    if change.what == "GPUs":
        return ", ".join([*(f"+{gpu}" for gpu in difference.gpus_added), *(f"-{g}" for g in difference.gpus_removed)])
    return "goes back" if change.step == "back" else ""


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ([_escaped(cell) for cell in row] for row in rows)
    return table(head, body)


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
