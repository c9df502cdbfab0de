"""docs/gates.md: the findings of the gates in real images, from the committed records only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from primus.gates.rules import gates
from primus.gpucode.archs import runs_on
from primus.oci.left_out import LeftOut
from primus.plan.sharing import Image, LayerOf, pairs, parts, share_text
from primus.release.markdown import measured_on, met, table
from primus.terminal import bytes_text

Record = Mapping[str, Any]


def gates_page(records: Mapping[str, Record], bench: Record) -> str:
    """Return the page in Markdown. ``bench`` are the measurements of builds of the generations."""
    lines = [
        "<!-- Generated from benchmarks/results/gates-*.json and generations.json by `nox -s docs`; do not edit. -->",
        "# Gates",
        "",
        "A build runs every gate before the image gets its name. `primus check` and `primus verify` run them again. A "
        "release that fails a gate gets no name. A preview that fails one gets its name: the summary lists the failed "
        "gates, and `check`, `verify` and `validate` end with exit code 1.",
        "",
        *table(("gate", "what must hold"), [(name, _first_line(gate)) for name, gate in gates().items()]),
        "",
        "## Findings",
        "",
        "These findings are from real images, built from the files in their locks.",
        "",
        *_findings(records),
        "## GPU libraries",
        "",
        "Every file with GPU code and every folder of kernel files in the image.",
        "",
        *(line for record in records.values() if record["arch"] for line in _libraries(record)),
        "## Pruning",
        "",
        "Kernel files whose path names another architecture are left out of the image. Code for other architectures "
        "is removed from the libraries that the base lists. Such a file keeps its length, with zeros in place of the "
        "code, so that only its compressed layer gets smaller.",
        "",
        *_pruning([record for record in records.values() if record["arch"]]),
        "",
        "## Sharing",
        "",
        "A layer is stored and pushed once, no matter how many images contain it. Sizes are compressed. The share of "
        "a pair is relative to the larger image.",
        "",
        *_sharing(records.values()),
        "",
    ]
    return "\n".join([*lines, *_measured(bench)]) + "\n"


def _first_line(gate: object) -> str:
    """What the gate's module says of itself, in a line."""
    return (gate.__doc__ or "").partition("\n")[0].rstrip(".")


def _findings(records: Mapping[str, Record]) -> list[str]:
    rows = []
    for target, record in records.items():
        passed = {gate["gate"]: gate["passed"] for gate in record["gates"]}
        cells = [{True: "✓", False: "**✗**", None: "–"}[passed.get(name)] for name in gates()]
        rows.append((f"`{target}`", record["channel"] + (", preview" if record["preview"] else ""), *cells))
    head = ("target", "channel", *gates())
    lines = [*table(head, rows), ""]
    for target, record in records.items():
        lines += [
            f"`{target}`, `{record['ref']}` {record['digest'][:19]}, {record['date']}, `{record['command']}`:",
            "",
        ]
        lines += [f"- {gate['gate']}: {gate['summary']}" for gate in record["gates"]]
        lines += ["", *(_errors(record))]
    return lines


def _errors(record: Record) -> list[str]:
    found = [f for gate in record["gates"] for f in gate["findings"] if f["severity"] == "error"]
    return [*(f"  - ✗ `{f['path']}`: {f['message']}" for f in found), *([""] if found else [])]


def _libraries(record: Record) -> list[str]:
    arch = record["arch"]
    rows = [
        (
            f"`{library['path']}`",
            library["form"],
            "yes" if runs_on(library["targets"], arch) else "**no**",
            ", ".join(library["targets"]) or library["problem"] or "none",
        )
        for library in record["libraries"]
    ]
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    return [
        f"### {record['target']} ({arch})",
        "",
        *table(("library", "form", f"covers {arch}", "has code for"), rows),
        "",
        *([f"ROCm packages: {packages}.", ""] if packages else []),
    ]


def _pruning(records: Sequence[Record]) -> list[str]:
    rows = []
    for record in records:
        out = LeftOut.sum(LeftOut.of(layer["left_out"]) for layer in record["layers"])
        unpacked = sum(layer["unpacked"] for layer in record["layers"])
        files, code = (f"{out.files:,}", bytes_text(out.size)), (f"{out.objects:,}", bytes_text(out.freed))
        rows.append((f"`{record['target']}`", *files, *code, bytes_text(unpacked)))
    heads = ("kernel files left out", "size", "code objects removed from libraries", "size")
    return table(("target", *heads, "unpacked image"), rows)


def _sharing(records: Iterable[Record]) -> list[str]:
    images = [
        Image(
            target=record["target"],
            layers=tuple(
                LayerOf(name=layer["name"], identity=layer["digest"], size=layer["bytes"]) for layer in record["layers"]
            ),
        )
        for record in records
    ]
    own = [(f"`{p.target}`", _size(p.size), _size(p.shared), _size(p.own)) for p in parts(images)]
    shares = [(" ↔ ".join(f"`{t}`" for t in p.targets), _size(p.shared), share_text(p.share)) for p in pairs(images)]
    return [
        *table(("target", "image", "shared with others", "not shared"), own),
        "",
        *table(("pair", "shared", "share"), shares),
    ]


def _measured(bench: Record) -> list[str]:
    load = bench["load_average"]
    rows = [
        (
            row["name"],
            f"{row['value']:g} {row['unit']}",
            f"{row['bar']['sign']} {row['bar']['limit']:g} {row['unit']}" if "bar" in row else "–",
            met(row),
        )
        for row in bench["rows"]
    ]
    return [
        "## Measured",
        "",
        f"On {bench['date']} by `{bench['command']}`, primus-images {bench['versions']['primus-images']}; all files "
        "were fetched before.",
        "",
        measured_on(bench["machine"]),
        f"- Load average before {load['before'][0]:.2f}, after {load['after'][0]:.2f}",
        *(f"- {note}" for note in bench["notes"]),
        "",
        *table(("what", "measured", "bar", "met"), rows),
    ]


def _size(size: int | None) -> str:
    return "unknown" if size is None else bytes_text(size)
