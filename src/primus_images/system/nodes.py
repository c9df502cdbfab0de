"""Micro-benchmarks and burn-in of a machine's GPUs, its results as a JSON document, and the
comparison of machines.
"""

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from primus_images.errors import HostError, InputError
from primus_images.files import json_if_readable, text_if_readable
from primus_images.gpus.detect import visible
from primus_images.gpus.table import arch_of, generation, load_table, peak
from primus_images.report import html
from primus_images.schema import build, parse_json
from primus_images.system.host import Finding, Host, Level, finding, name_here
from primus_images.terminal import counted
from primus_images.training.run import processes
from primus_images.yamlfile import read_text, read_values

MARKS: Mapping[Level, str] = {"ok": "✓", "failed": "✗", "slow": "!", "skipped": "–"}
UNITS = {
    "gemm bf16": "TFLOP/s",
    "gemm fp8": "TFLOP/s",
    "memory": "TB/s",
    "all-reduce": "GB/s",
    "all-to-all": "GB/s",
}
_COLLECTIVES = ("all-reduce", "all-to-all")
# All GPUs wait for the slowest in every step, so one that is this much below the node's median is
# reported.
_APART = 0.10
# A figure above the peak is a measurement error.
_ABOVE_PEAK = 1.05
_REPORT_SECONDS = 10
_TABLE: Any = read_values(Path(__file__).with_name("expected.yaml")).data
EXPECTED: Mapping[tuple[str, str], Mapping[str, Any]] = {
    (row["gpu"], row["what"]): row for row in _TABLE["figures"]
}
"""(GPU, what) → its row in ``expected.yaml``."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One benchmark: a figure per GPU in ``unit``, the expected range and its source."""

    what: str
    unit: str
    figures: tuple[float, ...]
    least: float | None
    most: float | None
    source: str


def _usable(host: Host) -> tuple[tuple[str, ...], str, str]:
    """Return the visible GPUs of ``host``, their FP8 format, and the reason if PyTorch cannot use
    any.
    """
    gpus = visible(len(host.gpus.names), host.environment)
    name = host.gpus.generation
    reason = ""
    if not host.gpus.names:
        reason = "no GPU on this machine"
    elif not gpus:
        reason = "the environment hides all GPUs: unset HIP_VISIBLE_DEVICES"
    elif importlib.util.find_spec("torch") is None:
        reason = "PyTorch is not installed here; run it in the image"
    return gpus, arch_of(generation(name)).fp8 if name else "", reason


def benchmark(host: Host) -> tuple[list[Finding], list[Measurement]]:
    """Measure the GPUs of ``host`` and judge the figures. A finding states the reason if nothing
    can be measured.
    """
    gpus, fp8, reason = _usable(host)
    if reason:
        return [finding("no_benchmark", reason=reason)], []
    ranks = measure(len(gpus), fp8)
    if isinstance(ranks, str):
        return [finding("broken_benchmark", reason=ranks)], []
    figures = measurements(host.gpus.generation, ranks)
    return [judged for measurement in figures for judged in judge(measurement)], figures


def measure(ranks: int, fp8: str, seconds: float = 300) -> list[dict[str, Any]] | str:
    """Return the figures of each rank, or the reason for a failure. ``fp8`` is the format of the
    matrix units.
    """
    with tempfile.TemporaryDirectory(prefix="primus-preflight-") as name:
        folder = Path(name)
        deadline = time.monotonic() + seconds
        if _run(folder, ranks, fp8, 0, lambda: time.monotonic() > deadline):
            if time.monotonic() > deadline:
                return f"the GPUs did not finish within {seconds:g} s"
            return _failure(folder)
        if all(states := _states(folder, ranks)):
            return states
        return _failure(folder)


def _run(folder: Path, ranks: int, fp8: str, burn_in: float, hopeless: Callable[[], bool]) -> int:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "primus_images.system.measure",
        str(folder),
        fp8,
        str(burn_in),
    ]
    # cuBLAS repeats its results only with a workspace of fixed size.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    # It also ends the ranks, which torchrun starts in sessions of their own.
    return processes.run(
        command,
        log=folder / "log.txt",
        environment=environment,
        watch=processes.Watch(hopeless=hopeless),
    ).exit_code


def _states(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json_if_readable(folder / f"rank-{rank}.json") for rank in range(ranks)]


def _failure(folder: Path) -> str:
    errors = [line for line in text_if_readable(folder / "log.txt").splitlines() if "Error" in line]
    return (
        f"PyTorch fails on the GPUs: {(errors[0] if errors else 'no reason given').strip()[:300]}"
    )


def burn_in(
    host: Host, seconds: float, say: Callable[[str], None], patience: float = 120
) -> list[Finding]:
    """Compute, keep and exchange known values on all GPUs for ``seconds``, and name each GPU that
    gets others.

    ``say`` prints progress. A GPU that does not finish a part of it within ``patience`` seconds
    hangs. Raises HostError if PyTorch cannot use any GPU.
    """
    gpus, fp8, reason = _usable(host)
    if reason:
        raise HostError(f"--burn-in: {reason}", hint="run it in the image, on a machine with GPUs")
    began = changed = reported = time.monotonic()
    states: list[dict[str, Any]] = []
    hangs = False

    def hopeless() -> bool:
        nonlocal states, began, changed, reported, hangs
        now = time.monotonic()
        before = states
        states = _states(folder, len(gpus))
        if states != before:
            changed = now
        if not all(before):
            began = now
        if now - reported > _REPORT_SECONDS and all(states):
            reported = now
            wrong = sum(bool(state["wrong"]) for state in states)
            verdict = "no wrong result"
            if wrong:
                verdict = f"{wrong} of {len(gpus)} GPUs with wrong results"
            say(
                f"burn-in: {now - began:.0f} of {seconds:.0f} s, round {states[0]['round']}, "
                f"{verdict}"
            )
        # Before the first part, PyTorch is loaded.
        hangs = now - changed > patience * (1 if all(states) else 3)
        return hangs

    with tempfile.TemporaryDirectory(prefix="primus-preflight-") as name:
        folder = Path(name)
        code = _run(folder, len(gpus), fp8, seconds, hopeless)
        states = _states(folder, len(gpus))
        if not code and all(states):
            failure = ""
        elif hangs:
            failure = "hangs"
        else:
            failure = _failure(folder)
    rounds = counted(states[0].get("round", 0), "round")
    findings = [finding("wrong_result", what=text) for text in _wrong(states, gpus, failure)]
    return findings or [finding("burn_in", gpus=counted(len(gpus), "GPU"), rounds=rounds)]


def _wrong(states: Sequence[Mapping[str, Any]], gpus: Sequence[str], failure: str) -> Iterator[str]:
    """Yield a sentence for what each rank counted, and for the rank that failed, or that the others
    wait for.

    The first one names the rank that takes part in all that is wrong, if others only receive it
    from there.
    """

    def part(rank: int, row: Mapping[str, Any]) -> str:
        others = ", ".join(gpus[other] for other in row.get("ranks", ()) if other != rank)
        return str(row.get("what", "the start of PyTorch")) + (
            f" with GPU {others}" if others else ""
        )

    names = [
        f"GPU {gpu} of {name_here()}" + (f" ({state['device']})" if state else "")
        for gpu, state in zip(gpus, states, strict=True)
    ]
    groups = {tuple(row["ranks"]) for state in states for row in state.get("wrong", ())}
    common = set(range(len(gpus))).intersection(*groups)
    if len(groups) > 1 and len(common) == 1:
        yield (
            f"{names[common.pop()]}: it takes part in everything that is wrong, and no other "
            "GPU does"
        )
    for rank, state in enumerate(states):
        for row in state.get("wrong", ()):
            when = f"in {counted(row['rounds'], 'round')}, first in round {row['first']}"
            wrong = f"{row['elements']:,} of {row['of']:,} elements are wrong {when}"
            yield f"{names[rank]}: {part(rank, row)}: {wrong}"
    errors = [(state["failed_at"], rank) for rank, state in enumerate(states) if "error" in state]
    if errors:
        # The ranks that lose their peer fail later.
        rank = min(errors)[1]
        yield f"{names[rank]}: {part(rank, states[rank])} fails: {states[rank]['error']}"
    elif failure == "hangs":
        places = [(state.get("round", 0), state.get("place", -1)) for state in states]
        for rank, place in enumerate(places):
            if place == min(places):
                yield f"{names[rank]}: {part(rank, states[rank])} of round {place[0]} does not end"
    elif failure:
        yield failure


def measurements(name: str, ranks: Sequence[Mapping[str, Any]]) -> list[Measurement]:
    """Group the figures of all ranks by benchmark, each with the range expected of the GPU
    ``name``.
    """
    rows = []
    for what, unit in UNITS.items():
        figures = tuple(float(rank[what]) for rank in ranks if what in rank)
        if not figures:
            continue
        row = EXPECTED.get((name, what), {"least": None, "source": "no table knows this GPU"})
        if row.get("gpus") not in (None, len(ranks)):
            row = {"least": None, "source": f"the published figure is of {row['gpus']} GPUs"}
        # A collective has one figure, because all ranks wait for each other.
        if what in _COLLECTIVES:
            figures = (min(figures),)
        most = peak_of(name, what)
        least = row["least"]
        source = row["source"]
        rows.append(
            Measurement(
                what=what, unit=unit, figures=figures, least=least, most=most, source=source
            )
        )
    return rows


def peak_of(name: str, what: str) -> float | None:
    """Return the most that the GPU can reach, from the table of generations; None if unknown."""
    gpu = next((gpu for gpu in load_table().generations if gpu.name == name), None)
    if gpu is None or what in _COLLECTIVES:
        return None
    if what == "memory":
        return gpu.memory.tb_s
    row = peak(gpu, "fp8" if what == "gemm fp8" else "bf16")
    if row:
        return row[0]
    return None


def judge(benchmark: Measurement) -> Iterator[Finding]:
    """Judge the figures of one benchmark: too low, far below the other GPUs, impossible, or as
    expected.
    """
    what = benchmark.what
    unit = benchmark.unit
    figures = benchmark.figures
    least = benchmark.least
    most = benchmark.most
    typical = statistics.median(figures)
    remedies = _TABLE["remedies"]
    remedy = remedies.get(what) or remedies["all-reduce" if what in _COLLECTIVES else "gemm bf16"]
    texts: Any = {
        "what": what,
        "least": least or 0,
        "most": most or 0,
        "source": benchmark.source,
        "remedy": remedy,
    }
    sound = True
    for gpu, figure in enumerate(figures):
        shown = ("" if what in _COLLECTIVES else f"GPU {gpu}: ") + f"{figure:,.4g} {unit}"
        if most is not None and figure > most * _ABOVE_PEAK:
            name = "above_peak"
        elif least is not None and figure < least:
            name = "below_least"
        elif figure < typical * (1 - _APART):
            name = "below_others"
        else:
            continue
        yield finding(name, figure=shown, share=1 - figure / typical, **texts)
        sound = False
    if sound:
        shown = f"{min(figures):,.4g}" + (f"–{max(figures):,.4g}" if len(figures) > 1 else "")
        yield finding(
            "unjudged" if least is None else "as_expected", figure=f"{shown} {unit}", **texts
        )


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
    """Read a document that ``preflight --json`` wrote. Raises InputError, with the place, for any
    other file.
    """
    document = parse_json(read_text(path), str(path))
    if isinstance(document.data, dict):
        document.data.pop("passed", None)
    return build(Node, document)


def compare(nodes: Sequence[Node]) -> list[tuple[str, Finding]]:
    """Return (node, finding) for problems that show only between nodes. InputError if a node has
    two documents.
    """
    twice = [name for name, count in Counter(node.name for node in nodes).items() if count > 1]
    if twice:
        raise InputError(
            f"two documents are from node {twice[0]}", hint="give one document for each node"
        )
    drivers = _odd(nodes, "driver", lambda node: node.driver)
    ports = _odd(
        nodes,
        "RDMA",
        lambda node: next(
            (
                finding.message.partition(";")[0]
                for finding in node.findings
                if finding.check == "RDMA"
            ),
            "no RDMA device",
        ),
    )
    return [*_odd(nodes, "GPUs", _gpus), *drivers, *ports, *_slowest(nodes)]


def _gpus(node: Node) -> str:
    counts = Counter(node.gpus)
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "no GPU"


def _odd(
    nodes: Sequence[Node], check: str, of: Callable[[Node], str]
) -> Iterator[tuple[str, Finding]]:
    usual = Counter(of(node) for node in nodes).most_common(1)[0][0]
    for node in nodes:
        if of(node) != usual:
            what = of(node) or "unknown"
            most = usual or "an unknown one"
            yield node.name, finding("odd_node", check=check, what=what, usual=most)


def _slowest(nodes: Sequence[Node]) -> Iterator[tuple[str, Finding]]:
    benchmarks: dict[str, dict[str, float]] = {}
    for node in nodes:
        for row in node.measurements:
            benchmarks.setdefault(f"{row.what} ({row.unit})", {})[node.name] = min(row.figures)
    for what, figures in benchmarks.items():
        typical = statistics.median(figures.values())
        for name, figure in figures.items():
            if figure < typical * (1 - _APART):
                share = 1 - figure / typical
                yield (
                    name,
                    finding("slow_node", what=what, figure=figure, share=share, typical=typical),
                )


def rows(nodes: Sequence[Node], between: Sequence[tuple[str, Finding]]) -> list[tuple[str, ...]]:
    """Return table rows, one per node: name, GPUs, verdict, problems."""
    table: list[tuple[str, ...]] = []
    for node in nodes:
        problems = [*node.problems, *(finding for name, finding in between if name == node.name)]
        text = "; ".join(f"{finding.check}: {finding.message}" for finding in problems) or "ready"
        worst: Level = (
            "failed" if any(f.level == "failed" for f in problems) else "slow" if problems else "ok"
        )
        table.append((MARKS[worst], node.name, _gpus(node), text))
    return table


def page(nodes: Sequence[Node], between: Sequence[tuple[str, Finding]]) -> str:
    """Return one self-contained HTML page: each problem with its remedy, and all checks and figures
    by nodes.
    """
    problems = [*((node.name, finding) for node in nodes for finding in node.problems), *between]
    return html.rendered("nodes.html", title="Preflight", nodes=nodes, problems=problems)
