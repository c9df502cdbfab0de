"""The results of preflight on one node as a JSON document, and the comparison of several nodes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from primus.errors import InputError
from primus.jsonfile import read_json
from primus.report.html import document as html_document
from primus.system.finding import Finding, Level, failed, slow
from primus.system.speed import APART, Measurement

MARKS: Mapping[Level, str] = {"ok": "✓", "failed": "✗", "slow": "!", "skipped": "–"}
_WORST: tuple[Level, ...] = ("failed", "slow", "ok", "skipped")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine: its GPUs, its findings, and the figures of the benchmark if it ran."""

    name: str
    gpus: tuple[str, ...]
    driver: str
    findings: tuple[Finding, ...]
    measurements: tuple[Measurement, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether nothing would fail a job or slow it down."""
        return not any(one.level in ("failed", "slow") for one in self.findings)

    def document(self) -> dict[str, Any]:
        """Return the node as JSON, which :func:`read` reads."""
        return {
            "passed": self.passed,
            "node": self.name,
            "gpus": list(self.gpus),
            "driver": self.driver,
            "findings": [asdict(one) for one in self.findings],
            "measurements": [asdict(one) for one in self.measurements],
        }

    def worst(self) -> dict[str, Level]:
        """Return check → its worst level on this node."""
        found: dict[str, Level] = {}
        for one in self.findings:
            before = found.get(one.check, "skipped")
            found[one.check] = min(before, one.level, key=_WORST.index)
        return found


def read(path: Path) -> Node:
    """Read a document that ``preflight --json`` wrote. Raises InputError for any other file."""
    try:
        found: Any = read_json(path).data
        return Node(
            name=str(found["node"]), gpus=tuple(map(str, found["gpus"])), driver=str(found["driver"]),
            findings=tuple(_finding(one) for one in found["findings"]),
            measurements=tuple(
                Measurement(**{**one, "figures": tuple(map(float, one["figures"]))})
                for one in found.get("measurements", ())
            ),
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"{path} cannot be read: {(error.strerror or '').lower()}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not a document of `primus preflight --json`",
            hint="run `primus preflight --json` again on that node",
        ) from error


def _finding(row: Mapping[str, Any]) -> Finding:
    if row["level"] not in MARKS:
        raise ValueError(row["level"])
    return Finding(**{name: str(value) for name, value in row.items()})  # type: ignore[arg-type]


def compare(nodes: Sequence[Node]) -> list[tuple[str, Finding]]:
    """Return (node, finding) for problems that show only between nodes. InputError if a node has two documents."""
    if twice := [name for name, count in Counter(node.name for node in nodes).items() if count > 1]:
        raise InputError(f"two documents are from node {twice[0]}", hint="give one document for each node")
    drivers = _odd(nodes, "driver", lambda node: node.driver)
    return [*_odd(nodes, "GPUs", _gpus), *drivers, *_slowest(nodes)]


def _gpus(node: Node) -> str:
    counts = Counter(node.gpus)
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "no GPU"


def _odd(nodes: Sequence[Node], check: str, of: Callable[[Node], str]) -> Iterator[tuple[str, Finding]]:
    usual = Counter(of(node) for node in nodes).most_common(1)[0][0]
    for node in nodes:
        if of(node) != usual:
            said = f"{of(node) or 'unknown'}; most nodes have {usual or 'an unknown one'}"
            yield node.name, failed(check, said, "leave the node out, or make it equal to the others")


def _slowest(nodes: Sequence[Node]) -> Iterator[tuple[str, Finding]]:
    figures: dict[str, dict[str, float]] = {}
    for node in nodes:
        for one in node.measurements:
            figures.setdefault(f"{one.what} ({one.unit})", {})[node.name] = min(one.figures)
    for what, found in figures.items():
        typical = statistics.median(found.values())
        for name, figure in found.items():
            if figure < typical * (1 - APART):
                said = f"{figure:,.4g}, {1 - figure / typical:.0%} less than the median of the nodes, {typical:,.4g}"
                yield name, slow(what, said, "it holds all other nodes up: leave it out, or find the cause")


def rows(nodes: Sequence[Node], between: Sequence[tuple[str, Finding]]) -> list[tuple[str, ...]]:
    """Return table rows, one per node: name, GPUs, verdict, problems."""
    found: list[tuple[str, ...]] = []
    for node in nodes:
        wrong = [one for one in node.findings if one.level in ("failed", "slow")]
        wrong += [finding for name, finding in between if name == node.name]
        level: Level = min((one.level for one in wrong), key=_WORST.index, default="ok")
        found.append(
            (MARKS[level], node.name, _gpus(node), "; ".join(f"{o.check}: {o.said}" for o in wrong) or "ready")
        )
    return found


def page(nodes: Sequence[Node], between: Sequence[tuple[str, Finding]]) -> str:
    """Return one self-contained HTML page: checks by nodes, figures by nodes, and each problem with its remedy."""
    names = list(dict.fromkeys(one.check for node in nodes for one in node.findings))
    worst = {node.name: node.worst() for node in nodes}
    head = "".join(f"<th>{escape(node.name)}</th>" for node in nodes)
    checks = "".join(
        f'<tr><td class="name">{escape(name)}</td>'
        + "".join(_cell(worst[node.name].get(name, "skipped"), _said(node, name)) for node in nodes)
        + "</tr>"
        for name in names
    )
    problems = [(node.name, one) for node in nodes for one in node.findings if one.level in ("failed", "slow")]
    problems += between
    listed = "".join(
        f"<tr><td>{escape(name)}</td>{_cell(one.level, '')}<td>{escape(one.check)}</td><td>{escape(one.said)}</td>"
        f"<td>{escape(one.remedy)}</td></tr>"
        for name, one in problems
    )
    state = "fail" if problems else "pass"
    said = (
        f"✗ {len(problems)} problems" if problems else f"✓ {'all nodes are' if len(nodes) > 1 else 'the node is'} ready"
    )
    parts = [
        f'<h1>Preflight of {len(nodes)} node{"s" * (len(nodes) != 1)}</h1>',
        f'<div class="outcome {state}"><strong>{said}.</strong></div>',
        '<h2>Problems</h2><div class="wide"><table><tr><th>Node</th><th></th><th>Check</th><th>Found</th>'
        f"<th>Remedy</th></tr>{listed}</table></div>" if problems else "",
        f'<h2>Checks</h2><div class="wide"><table><tr><th></th>{head}</tr>{checks}</table></div>',
        _figures(nodes, head),
    ]  # fmt: skip
    return html_document("Preflight", "".join(parts))


def _said(node: Node, check: str) -> str:
    return "; ".join(one.said for one in node.findings if one.check == check)


def _cell(level: Level, said: str) -> str:
    style = {"ok": "pass-mark", "failed": "fail-mark", "slow": "fail-mark", "skipped": "sub"}[level]
    return f'<td title="{escape(said)}"><span class="{style}">{MARKS[level]}</span></td>'


def _figures(nodes: Sequence[Node], head: str) -> str:
    found: dict[tuple[str, str], dict[str, Measurement]] = {}
    for node in nodes:
        for one in node.measurements:
            found.setdefault((one.what, one.unit), {})[node.name] = one
    if not found:
        return ""
    lines = []
    for (what, unit), of in found.items():
        cells = "".join(
            f'<td class="num">{" ".join(f"{figure:,.4g}" for figure in of[node.name].figures)}</td>'
            if node.name in of else "<td>–</td>" for node in nodes
        )  # fmt: skip
        one = next(iter(of.values()))
        least = "–" if one.least is None else f"{one.least:,.4g}"
        most = "–" if one.most is None else f"{one.most:,.4g}"
        lines.append(
            f'<tr><td class="name">{escape(what)}, {unit}</td>{cells}<td class="num">{least}</td>'
            f'<td class="num">{most}</td><td>{escape(one.source)}</td></tr>'
        )
    return (
        f'<h2>Benchmark, each GPU</h2><div class="wide"><table><tr><th></th>{head}<th>At least</th><th>At most</th>'
        f"<th>Source</th></tr>{''.join(lines)}</table></div>"
    )
