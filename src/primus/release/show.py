"""Formatting releases and their differences as aligned text and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from primus.release.compare import ROWS, Change, Contradiction, Diff, component_order, contradictions
from primus.release.history import DocumentationError, History, Release, UnconfirmedTag, errors_about, newest_first
from primus.release.inputs import Stack
from primus.release.markdown import table
from primus.terminal import PLAIN, Screen, Styled

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def plain(release: Release) -> dict[str, Any]:
    """Return the release for JSON output."""
    return {name: value for name, value in asdict(release).items() if name != "locked"}


def list_text(releases: Sequence[Release], screen: Screen = PLAIN) -> str:
    """Return a table with one row per release, newest first."""
    lines = screen.table([_row(r) for r in newest_first(releases)], head=_HEAD)
    lines += [part for line in _legend(releases) for part in screen.wrap(line)]
    return "\n".join(lines)


def list_markdown(releases: Sequence[Release]) -> str:
    """Return the table of :func:`list_text` in Markdown."""
    lines = _table([_HEAD, *(_row(r) for r in newest_first(releases))])
    legend = _legend(releases)
    return "\n".join([*lines, *(["", " ".join(_cell(line) for line in legend)] if legend else [])])


def _row(release: Release) -> tuple[str, ...]:
    size = _NONE if release.size_gb is None else f"{release.size_gb:g} GB"
    star = " *" if contradictions(release) else ""
    pins = " (versions.yaml)" if release.pinned else ""
    versions = (release.components.get(name) or _NONE for name in ("rocm", "pytorch"))
    gpus = _NONE if release.gpus is None else ", ".join(release.gpus) or "none"
    return (release.reference + pins + star, release.date or _NONE, *versions, gpus, size)


def _legend(releases: Sequence[Release]) -> list[str]:
    rows = [_row(r) for r in releases]
    lines = []
    if any(_NONE in row for row in rows):
        lines.append(f"{_NONE} not published.")
    if any(row[0].endswith("*") for row in rows):
        lines.append("* another published table differs: see primus releases NAME.")
    return lines


def one_text(history: History, release: Release, stack: Stack | None, screen: Screen = PLAIN) -> str:
    """Return everything that is known about one release."""
    lines = [screen.paint(release.reference, "bold")]
    lines += screen.table(_facts(release), indent="  ")
    lines += ["", screen.paint("components", "bold")]
    lines += screen.table(_components(release), indent="  ")
    for title, several in _sections(history, release, stack).items():
        if several:
            lines += ["", screen.paint(title, "bold"), *_listed(several, screen)]
    return "\n".join(lines)


def one_markdown(history: History, release: Release, stack: Stack | None, _: Screen = PLAIN) -> str:
    """Return the text of :func:`one_text` in Markdown."""
    lines = [f"## {release.reference}", "", *_table([("", ""), *_facts(release)])]
    lines += ["", *_table([("component", "version"), *_components(release)])]
    for title, several in _sections(history, release, stack).items():
        if several:
            lines += ["", f"### {title[0].upper()}{title[1:]}", "", *(f"- {_cell(line)}" for line in several)]
    return "\n".join(lines)


def _facts(release: Release) -> list[tuple[str, str]]:
    unknown = _unknown_fact(release.pinned)
    size, content = release.size_gb, release.content_size_bytes
    date = f"{release.date} ({release.date_kind})" if release.date_kind else release.date
    facts = [
        ("date", date or unknown),
        ("size", unknown if size is None else f"{size:g} GB unpacked"),
        ("compressed size", unknown if content is None else f"{content:,} bytes"),
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


def _components(release: Release) -> list[tuple[str, str]]:
    names = component_order(list(release.components))
    return [(name, release.components[name] or release.missing) for name in names]


def _sections(history: History, release: Release, stack: Stack | None) -> dict[str, list[str]]:
    return {
        "other sources on this tag": [line for _, line in _by_source(contradictions(release))],
        "known errors of published pages": [_error(e) for e in errors_about(history, release)],
        "notes": list(release.notes),
        "made from": _stack(stack) if stack else [],
    }


def _by_source(found: Iterable[Contradiction]) -> list[tuple[str, str]]:
    """Return (tag, line) for each source that differs."""
    cells: dict[tuple[str, str], list[str]] = {}
    for c in found:
        best = f" (best known: {c.table})" if c.table else ""
        cells.setdefault((c.tag, c.source), []).append(f"{c.what} {c.other}{best}")
    return [(tag, f"{source}: {', '.join(values)}") for (tag, source), values in cells.items()]


def _error(error: DocumentationError) -> str:
    return f"{error.where}: printed {error.printed}; right: {error.right}"


def _doubt(tag: UnconfirmedTag) -> str:
    return f"{tag.reference}: named by {tag.named_by}; {tag.status}"


def _stack(stack: Stack) -> list[str]:
    lines = [
        f"{stack.dockerfile} on {stack.base_image}"
        + (" (by digest)" if stack.base_pinned_by_digest else " (not pinned by digest)"),
        f"installed by {stack.installer}",
    ]
    for name, source in stack.git.items():
        if source is not None:
            lines.append(f"{name}: {source.repo} {source.commit or source.ref or 'at no recorded commit'}")
    for wheel in stack.wheels:
        origin = f" from {wheel.index}" if wheel.index else ""
        lines.append(f"{wheel.name} {wheel.version}{origin}" + ("" if wheel.pinned else ", not pinned"))
    lines += [f"in no public repository: {path}" for path in stack.private_inputs]
    return lines


def diff_text(found: Diff, screen: Screen = PLAIN) -> str:
    """Return the differences as aligned text."""
    lines = [*screen.wrap(_title(found)), ""]
    rows: list[tuple[str, str, str]] = [(_MARK[c.kind], c.what, _arrow(c, found, facts=True)) for c in found.facts]
    rows += [("=", what, value) for what, value in found.same_facts.items()]
    lines += screen.table(rows, indent="  ")
    lines += ["", *screen.wrap("components: " + _counts(found))]
    lines += screen.table([(_MARK[c.kind], c.what, _arrow(c, found)) for c in found.components], indent="  ")
    if found.same_components:
        same = (f"{name} {version}" for name, version in found.same_components.items())
        lines += ["", "the same on both sides", *_listed(same, screen)]
    if found.unknown:
        lines += ["", "on neither side", *_listed([", ".join(found.unknown)], screen)]
    if found.curves:
        lines += ["", "training", *_listed(found.curves, screen)]
    if found.contradictions:
        lines += ["", "other sources on these tags"]
        lines += _listed((f"{tag}, {line}" for tag, line in _by_source(found.contradictions)), screen)
    for reference, notes in found.notes.items():
        lines += ["", f"notes on {reference}", *_listed(notes, screen)]
    return "\n".join(lines)


def diff_markdown(found: Diff, _: Screen = PLAIN) -> str:
    """Return the differences in Markdown."""
    head = ("", found.old, found.new, "")
    lines = [f"## {_cell(_title(found))}", ""]
    lines += _table([head, *(_cells(c, found, facts=True) for c in found.facts), *_same(found.same_facts)])
    lines += ["", f"### Components: {_counts(found)}", ""]
    lines += _table([head, *(_cells(c, found) for c in found.components), *_same(found.same_components)])
    if found.unknown:
        lines += ["", f"On neither side: {', '.join(found.unknown)}."]
    if found.curves:
        lines += ["", "### Training", "", *(f"- {_cell(sentence)}" for sentence in found.curves)]
    if found.contradictions:
        lines += ["", "### Other sources on these tags", ""]
        lines += _table([_CONTRADICTION_HEAD, *map(_contradiction_cells, found.contradictions)])
    for reference, notes in found.notes.items():
        lines += ["", f"### Notes on {reference}", "", *(f"- {_cell(note)}" for note in notes)]
    return "\n".join(lines)


def _title(found: Diff) -> str:
    sides = ((found.old, found.old_pinned), (found.new, found.new_pinned))
    return " → ".join(name + (" (pins of versions.yaml)" if pinned else "") for name, pinned in sides)


def _same(values: Mapping[str, str]) -> list[tuple[str, ...]]:
    return [(name, value, value, "the same") for name, value in values.items()]


def _counts(found: Diff) -> str:
    kinds = Counter(c.kind for c in found.components)
    parts = [
        (kinds["changed"], "changed"),
        (kinds["added"], "only on the new side"),
        (kinds["removed"], "only on the old side"),
        (len(found.same_components), "the same"),
    ]
    return ", ".join(f"{count} {words}" for count, words in parts if count) or "none is named"


def _arrow(change: Change, found: Diff, *, facts: bool = False) -> str:
    old, new = _sides(change, found, facts=facts)
    remark = _remark(change, found)
    return f"{old} → {new}" + (f"  ({remark})" if remark else "")


def _cells(change: Change, found: Diff, *, facts: bool = False) -> tuple[str, ...]:
    return (change.what, *_sides(change, found, facts=facts), _remark(change, found))


def _sides(change: Change, found: Diff, *, facts: bool) -> tuple[str, str]:
    def missing(pinned: bool) -> str:
        return _unknown_fact(pinned) if facts else "not pinned" if pinned else "not published"

    return change.old or missing(found.old_pinned), change.new or missing(found.new_pinned)


def _unknown_fact(pinned: bool) -> str:
    return "not known before it is built" if pinned else "not published"


def _remark(change: Change, found: Diff) -> str:
    if change.what == "size" and found.size_gb_change is not None:
        return f"{found.size_gb_change:+g} GB"
    if change.what == "GPUs":
        gone, come = found.gpus_removed, found.gpus_added
        return ", ".join([*(f"+{g}" for g in come), *(f"-{g}" for g in gone)])
    return "goes back" if change.step == "back" else ""


_CONTRADICTION_HEAD = ("tag", "what", "best known", "other table", "source")


def _contradiction_cells(found: Contradiction) -> tuple[str, ...]:
    return (found.tag, found.what, found.table or "not published", found.other, found.source)


def page(history: History) -> str:
    """Return docs/releases.md."""
    every = newest_first(history.releases)
    columns = [n for n in ROWS if n not in ("rocm", "pytorch")]
    rows = [(r.reference, *(r.components.get(n) or _NONE for n in columns)) for r in every]
    disagreeing = [c for r in every for c in contradictions(r)]
    jax = [("tag", "date", "components", "size", "notes")]
    for r in newest_first(history.related_images):
        versions = ", ".join(f"{name} {version}" for name, version in r.components.items() if version)
        size = _NONE if r.size_gb is None else f"{r.size_gb:g} GB"
        jax.append((r.reference, r.date or _NONE, versions, size, " ".join(r.notes)))
    errors = [(e.where, e.printed, e.right) for e in history.documentation_errors]
    doubts = [(t.reference, t.named_by, t.status) for t in history.unconfirmed_tags]
    return "\n".join(
        [
            "<!-- Generated from src/primus/release/history.yaml by `nox -s docs`; do not edit. -->",
            "# Published releases",
            "",
            "Every training image tag that is known to be published, newest first. `primus releases NAME` shows "
            "everything known about a release. `primus diff v25.10 v26.8` compares two releases, and "
            "`primus diff v26.8 versions.yaml` compares a release with the current pins. Values that were not "
            "published are never filled in from elsewhere.",
            "",
            *(f"{line}" for line in history.deprecations),
            "",
            list_markdown(history.releases),
            "",
            "## Components",
            "",
            "Versions as published. Newer releases list more components; see `primus releases NAME`.",
            "",
            *_table([("tag", *columns), *rows]),
            "",
            "## Contradicting tables",
            "",
            "Some tags have several published tables that differ. The tables above show the best known value.",
            "",
            *_table([_CONTRADICTION_HEAD, *map(_contradiction_cells, disagreeing)]),
            "",
            "## Known errors of published pages",
            "",
            *_table([("where", "printed", "right"), *errors]),
            "",
            "## Unconfirmed tags",
            "",
            "These tags are named in some file, but no table, page or history lists them.",
            "",
            *_table([("tag", "named by", "status"), *doubts]),
            "",
            "## Related images",
            "",
            *_table(jax),
            "",
        ]
    )


def doubts_text(tags: Sequence[UnconfirmedTag], screen: Screen = PLAIN) -> str:
    """Return the unconfirmed tags, one line each."""
    return "\n".join(["unconfirmed tags", *_listed(map(_doubt, tags), screen)])


def doubts_markdown(tags: Sequence[UnconfirmedTag], _: Screen = PLAIN) -> str:
    """Return the unconfirmed tags in Markdown."""
    return "\n".join(["## Unconfirmed tags", "", *(f"- {_cell(_doubt(t))}" for t in tags)])


def _listed(lines: Iterable[str], screen: Screen) -> list[str]:
    narrow = replace(screen, width=min(screen.width or _PROSE, _PROSE))
    return [part for line in lines for part in narrow.wrap(line, "  - ", "    ")]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ([_plain(cell) for cell in row] for row in rows)
    return table(head, body)


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
