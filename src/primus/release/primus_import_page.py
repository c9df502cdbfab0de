"""docs/benchmarks/primus-import.md: comparison of `primus import-exp` with Primus, file by file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus.release.markdown import table

_HEAD = (
    "version", "commit", "files", "merged alike", "trained alike", "difference named", "key refused", "no recipe",
)  # fmt: skip


def primus_import_page(measured: Mapping[str, Any]) -> str:
    """Return the page in Markdown, from ``benchmarks/results/primus-import.json``."""
    lines = [
        "<!-- Generated from benchmarks/results/primus-import.json by `nox -s docs`; do not edit. -->",
        "# Imported experiments compared with Primus",
        "",
        f"Measured on {measured['date']} by `{measured['command']}`. Primus's own parser, from a checkout of each "
        "version and in an environment without this package, merges every example in `examples/megatron` and "
        "`examples/torchtitan`. `import-exp` gets a copy of each file outside of the checkout.",
        "",
        "- Merged alike: both get the same keys with the same values, or both refuse the file.",
        "- Trained alike: `import-exp` wrote a recipe, and Megatron Core or torchtitan gets Primus's value for every "
        "argument that both set. Differences that `import-exp` prints are counted separately. A difference that it "
        "does not print makes the measurement fail.",
        "",
        *table(
            (
                "version",
                "commit",
                "files",
                "merged alike",
                "trained alike",
                "difference named",
                "key refused",
                "no recipe",
            ),
            map(_counts, measured["versions"]),
        ),
    ]
    keys = {name: sum(row["keys"].get(name, 0) for row in measured["versions"]) for name in ("merged", "compared")}
    lines += [
        "",
        f"{keys['compared']:,} arguments of {keys['merged']:,} merged keys were compared. The others are translated by "
        "the tables of [old commands](../old-commands.md), or belong to features that Primus has disabled.",
    ]
    for row in measured["versions"]:
        differ = [
            (f"`{name.removeprefix('examples/')}`", found["outcome"], _what(found))
            for name, found in row["differ"].items()
            if found["outcome"] != "trained alike"
        ]
        lines += ["", f"## {row['version']}", "", *table(("file", "outcome", "what differs"), differ)]
    return "\n".join(lines) + "\n"


def _counts(row: Mapping[str, Any]) -> tuple[object, ...]:
    counts = row["outcomes"]
    return (
        row["version"], f"`{row['commit'][:12]}`", row["files"], f"{row['merged_as_primus']} ({row['share']:.0%})",
        counts.get("trained alike", 0), counts.get("trained alike, differences named", 0),
        counts.get("merged alike, keys refused by name", 0),
        counts.get("merged alike, refused as a whole", 0) + counts.get("refused by both", 0),
    )  # fmt: skip


def _what(found: Mapping[str, Any]) -> str:
    if "why" in found:
        return str(found["why"]).split(": ", 1)[-1].split("; did you mean", maxsplit=1)[0]
    if "absent" in found:
        return "Primus has no key " + ", ".join(f"`{key}`" for key in found["absent"])
    named = [f"`{key}`: {theirs} at Primus, {ours} here" for key, (theirs, ours) in found.get("named", {}).items()]
    return "; ".join([*(f"`{key}` is refused" for key in found.get("unmapped", ())), *named])
