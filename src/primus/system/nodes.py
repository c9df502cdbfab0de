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
from primus.report.html import document as html_document
from primus.schema import read_json
from primus.system.host import Finding, Level, failed, slow
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
    def problems(self) -> list[Finding]:
        """The findings that would fail a job or slow it down."""
        return [finding for finding in self.findings if finding.problem]

    def document(self) -> dict[str, Any]:
        """Return the node as JSON, which :func:`read` reads."""
        return {
            "passed": not self.problems,
            "node": self.name,
            "gpus": list(self.gpus),
            "driver": self.driver,
            "findings": [finding.as_json() for finding in self.findings],
            "measurements": [asdict(measurement) for measurement in self.measurements],
        }


def read(path: Path) -> Node:
    """Read a document that ``preflight --json`` wrote. Raises InputError for any other file."""
    try:
        document: Any = read_json(path).data
        return Node(
            name=str(document["node"]), gpus=tuple(map(str, document["gpus"])), driver=str(document["driver"]),
            findings=tuple(_finding(row) for row in document["findings"]),
            measurements=tuple(
                Measurement(**{**row, "figures": tuple(map(float, row["figures"]))})
                for row in document.get("measurements", ())
            ),
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"{path} cannot be read: {(error.strerror or '').lower()}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "run `primus preflight --json` again on that node"
        raise InputError(f"{path} is not a document of `primus preflight --json`", hint=hint) from error


def _finding(row: Mapping[str, Any]) -> Finding:
    if row["level"] not in MARKS or row.keys() - {"check", "level", "said", "remedy"}:
        raise ValueError(row["level"])
    check, level, message = (str(row[key]) for key in ("check", "level", "said"))
    return Finding(check=check, level=level, message=message, remedy=str(row["remedy"]))  # type: ignore[arg-type]


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
            message = f"{of(node) or 'unknown'}; most nodes have {usual or 'an unknown one'}"
            yield node.name, failed(check, message, "leave the node out, or make it equal to the others")


def _slowest(nodes: Sequence[Node]) -> Iterator[tuple[str, Finding]]:
    for what, of_nodes in _by_benchmark(nodes).items():
        figures = {name: min(measurement.figures) for name, measurement in of_nodes.items()}
        typical = statistics.median(figures.values())
        for name, figure in figures.items():
            if figure < typical * (1 - APART):
                message = f"{figure:,.4g}, {1 - figure / typical:.0%} less than the median of the nodes, {typical:,.4g}"
                remedy = "it holds all other nodes up: leave it out, or find the cause"
                yield name, slow(f"{what[0]} ({what[1]})", message, remedy)


def _by_benchmark(nodes: Sequence[Node]) -> dict[tuple[str, str], dict[str, Measurement]]:
    """Return (benchmark, unit) → node → measurement."""
    benchmarks: dict[tuple[str, str], dict[str, Measurement]] = {}
    for node in nodes:
        for measurement in node.measurements:
            benchmarks.setdefault((measurement.what, measurement.unit), {})[node.name] = measurement
    return benchmarks


def _worst(findings: Sequence[Finding], default: Level) -> Level:
    return min((finding.level for finding in findings), key=_WORST.index, default=default)


def rows(nodes: Sequence[Node], between: Sequence[tuple[str, Finding]]) -> list[tuple[str, ...]]:
    """Return table rows, one per node: name, GPUs, verdict, problems."""
    table: list[tuple[str, ...]] = []
    for node in nodes:
        problems = [*node.problems, *(finding for name, finding in between if name == node.name)]
        text = "; ".join(f"{finding.check}: {finding.message}" for finding in problems) or "ready"
        table.append((MARKS[_worst(problems, "ok")], node.name, _gpus(node), text))
    return table


def page(nodes: Sequence[Node], between: Sequence[tuple[str, Finding]]) -> str:
    """Return one self-contained HTML page: checks by nodes, figures by nodes, and each problem with its remedy."""
    problems = [*((node.name, finding) for node in nodes for finding in node.problems), *between]
    ready = "all nodes are ready" if len(nodes) > 1 else "the node is ready"
    verdict = f"✗ {len(problems)} problems" if problems else f"✓ {ready}"
    names = "".join(f"<th>{escape(node.name)}</th>" for node in nodes)
    checks = [
        f'<tr><td class="name">{escape(check)}</td>{"".join(_of_check(node, check) for node in nodes)}</tr>'
        for check in dict.fromkeys(finding.check for node in nodes for finding in node.findings)
    ]
    listed = [
        f"<tr><td>{escape(name)}</td>{_cell(finding.level, '')}<td>{escape(finding.check)}</td>"
        f"<td>{escape(finding.message)}</td><td>{escape(finding.remedy)}</td></tr>"
        for name, finding in problems
    ]
    figures = [_figures(nodes, *benchmark) for benchmark in _by_benchmark(nodes).items()]
    limits = "<th>At least</th><th>At most</th><th>Source</th>"
    parts = [
        f"<h1>Preflight of {len(nodes)} node{'s' * (len(nodes) != 1)}</h1>",
        f'<div class="outcome {"fail" if problems else "pass"}"><strong>{verdict}.</strong></div>',
        _table("Problems", "<th>Node</th><th></th><th>Check</th><th>Found</th><th>Remedy</th>", listed),
        _table("Checks", f"<th></th>{names}", checks),
        _table("Benchmark, each GPU", f"<th></th>{names}{limits}", figures),
    ]
    return html_document("Preflight", "".join(parts))


def _table(title: str, head: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f'<h2>{title}</h2><div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _of_check(node: Node, check: str) -> str:
    findings = [finding for finding in node.findings if finding.check == check]
    return _cell(_worst(findings, "skipped"), "; ".join(finding.message for finding in findings))


def _cell(level: Level, message: str) -> str:
    style = {"ok": "pass-mark", "failed": "fail-mark", "slow": "fail-mark", "skipped": "sub"}[level]
    return f'<td title="{escape(message)}"><span class="{style}">{MARKS[level]}</span></td>'


def _figures(nodes: Sequence[Node], benchmark: tuple[str, str], of_nodes: Mapping[str, Measurement]) -> str:
    measurement = next(iter(of_nodes.values()))
    figures = [of_nodes[node.name].figures if node.name in of_nodes else () for node in nodes]
    cells = [" ".join(f"{figure:,.4g}" for figure in row) or "–" for row in figures]
    cells += ["–" if limit is None else f"{limit:,.4g}" for limit in (measurement.least, measurement.most)]
    shown = "".join(f'<td class="num">{cell}</td>' for cell in cells)
    return f'<tr><td class="name">{escape(", ".join(benchmark))}</td>{shown}<td>{escape(measurement.source)}</td></tr>'
