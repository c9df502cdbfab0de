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
from primus.report import html
from primus.schema import build, read_json
from primus.system.host import Finding, Level, failed, slow
from primus.system.speed import APART, Measurement

MARKS: Mapping[Level, str] = {"ok": "✓", "failed": "✗", "slow": "!", "skipped": "–"}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine: its GPUs, its findings, and the figures of the benchmark if it ran."""

    name: str
    gpus: tuple[str, ...]
    driver: str
    findings: tuple[Finding, ...]
    measurements: tuple[Measurement, ...] = ()

    @property
    def problems(self) -> list[Finding]:
        """The findings that would fail a job or slow it down."""
        return [finding for finding in self.findings if finding.problem]

    def document(self) -> dict[str, Any]:
        """Return the node as JSON, which :func:`read` reads."""
        return {"passed": not self.problems, **asdict(self)}


def read(path: Path) -> Node:
    """Read a document that ``preflight --json`` wrote. Raises InputError, with the place, for any other file."""
    try:
        document = read_json(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {(error.strerror or '').lower()}") from error
    if isinstance(document.data, dict):
        document.data.pop("passed", None)
    return build(Node, document)


def compare(nodes: Sequence[Node]) -> list[tuple[str, Finding]]:
    """Return (node, finding) for problems that show only between nodes. InputError if a node has two documents."""
    if twice := [name for name, count in Counter(node.name for node in nodes).items() if count > 1]:
        raise InputError(f"two documents are from node {twice[0]}", hint="give one document for each node")
    drivers = _odd(nodes, "driver", lambda node: node.driver)
    return [*_odd(nodes, "GPUs", _gpus), *drivers, *_odd(nodes, "RDMA", _rdma), *_slowest(nodes)]


def _gpus(node: Node) -> str:
    counts = Counter(node.gpus)
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "no GPU"


def _rdma(node: Node) -> str:
    return next((one.message.partition(";")[0] for one in node.findings if one.check == "RDMA"), "no RDMA device")


def _odd(nodes: Sequence[Node], check: str, of: Callable[[Node], str]) -> Iterator[tuple[str, Finding]]:
    usual = Counter(of(node) for node in nodes).most_common(1)[0][0]
    for node in nodes:
        if of(node) != usual:
            message = f"{of(node) or 'unknown'}; most nodes have {usual or 'an unknown one'}"
            yield node.name, failed(check, message, "leave the node out, or make it equal to the others")


def _slowest(nodes: Sequence[Node]) -> Iterator[tuple[str, Finding]]:
    benchmarks: dict[str, dict[str, float]] = {}
    for node in nodes:
        for row in node.measurements:
            benchmarks.setdefault(f"{row.what} ({row.unit})", {})[node.name] = min(row.figures)
    for what, figures in benchmarks.items():
        typical = statistics.median(figures.values())
        for name, figure in figures.items():
            if figure < typical * (1 - APART):
                message = f"{figure:,.4g}, {1 - figure / typical:.0%} less than the median of the nodes, {typical:,.4g}"
                yield name, slow(what, message, "it holds all other nodes up: leave it out, or find the cause")


def rows(nodes: Sequence[Node], between: Sequence[tuple[str, Finding]]) -> list[tuple[str, ...]]:
    """Return table rows, one per node: name, GPUs, verdict, problems."""
    table: list[tuple[str, ...]] = []
    for node in nodes:
        problems = [*node.problems, *(finding for name, finding in between if name == node.name)]
        text = "; ".join(f"{finding.check}: {finding.message}" for finding in problems) or "ready"
        worst: Level = "failed" if any(f.level == "failed" for f in problems) else "slow" if problems else "ok"
        table.append((MARKS[worst], node.name, _gpus(node), text))
    return table


def page(nodes: Sequence[Node], between: Sequence[tuple[str, Finding]]) -> str:
    """Return one self-contained HTML page: each problem with its remedy, and all checks and figures by nodes."""
    problems = [*((node.name, finding) for node in nodes for finding in node.problems), *between]
    ready = "all nodes are ready" if len(nodes) > 1 else "the node is ready"
    verdict = f"✗ {len(problems)} problems" if problems else f"✓ {ready}"
    items = (
        f"{name}: {finding.check}: {finding.message}" + (f" → {finding.remedy}" if finding.remedy else "")
        for name, finding in problems
    )
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    cells = {
        (node.name, finding.check): {
            "passed": finding.level == "ok", "skipped": finding.level == "skipped", "measured": finding.message,
            "reason": finding.remedy,
        }
        for node in nodes for finding in node.findings
    }  # fmt: skip
    return html.document(
        "Preflight",
        f"<h1>Preflight of {len(nodes)} node{'s' * (len(nodes) != 1)}</h1>"
        f'<div class="outcome {"fail" if problems else "pass"}"><strong>{verdict}.</strong><ul>{listed}</ul></div>'
        f"{html.grid(cells, 'Check')}",
    )
