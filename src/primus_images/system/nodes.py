"""Micro-benchmarks and burn-in of a machine's GPUs, and the comparison of machines."""

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
from primus_images.gpus.table import Dtype, arch_of, generation, load_table, peak
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
_HANGS = "hangs"
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


def _usable(host: Host) -> tuple[tuple[str, ...], str]:
    """Return the visible GPUs of ``host``, and the reason if PyTorch cannot use any."""
    gpus = visible(len(host.gpus.names), host.environment)
    if not host.gpus.names:
        return gpus, "no GPU on this machine"
    if not gpus:
        return gpus, "the environment hides all GPUs: unset HIP_VISIBLE_DEVICES"
    if importlib.util.find_spec("torch") is None:
        return gpus, "PyTorch is not installed here; run it in the image"
    return gpus, ""


def _fp8(host: Host) -> str:
    """Return the format of FP8 of the GPUs' matrix units; empty if there is none."""
    name = host.gpus.generation
    if name:
        return arch_of(generation(name)).fp8
    return ""


def benchmark(host: Host) -> tuple[list[Finding], list[Measurement]]:
    """Measure the GPUs of ``host`` and judge the figures.

    A finding states the reason if nothing can be measured.
    """
    gpus, reason = _usable(host)
    if reason:
        return [finding("no_benchmark", reason=reason)], []
    ranks = measure(len(gpus), _fp8(host))
    if isinstance(ranks, str):
        return [finding("broken_benchmark", reason=ranks)], []
    figures = measurements(host.gpus.generation, ranks)
    findings: list[Finding] = []
    for measurement in figures:
        findings += judge(measurement)
    return findings, figures


def measure(ranks: int, fp8: str, seconds: float = 300) -> list[dict[str, Any]] | str:
    """Return the figures of each rank, or the reason for a failure.

    ``fp8`` is the format of the matrix units.
    """
    with tempfile.TemporaryDirectory(prefix="primus-preflight-") as name:
        folder = Path(name)
        deadline = time.monotonic() + seconds

        def late() -> bool:
            return time.monotonic() > deadline

        code = _run(folder, ranks, fp8, 0, late)
        if code and late():
            return f"the GPUs did not finish within {seconds:g} s"
        states = _states(folder, ranks)
        if code or not all(states):
            return _failure(folder)
        return states


def _run(folder: Path, ranks: int, fp8: str, burn_in: float, should_end: Callable[[], bool]) -> int:
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks)]
    command += ["-m", "primus_images.system.measure", str(folder), fp8, str(burn_in)]
    # cuBLAS repeats its results only with a workspace of fixed size.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    # torchrun starts the ranks without its own options.
    environment["PYTHONSAFEPATH"] = "1"
    log = folder / "log.txt"
    watch = processes.Watch(should_end=should_end)
    # It also ends the ranks, which torchrun starts in sessions of their own.
    ended = processes.run(command, log=log, environment=environment, watch=watch)
    return ended.exit_code


def _states(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json_if_readable(folder / f"rank-{rank}.json") for rank in range(ranks)]


def _failure(folder: Path) -> str:
    reason = "no reason given"
    log = text_if_readable(folder / "log.txt")
    for line in log.splitlines():
        if "Error" in line:
            reason = line.strip()[:300]
            break
    return f"PyTorch fails on the GPUs: {reason}"


class _Progress:
    """Watches the ranks of a burn-in, by the states that they write to ``folder``."""

    def __init__(
        self, folder: Path, ranks: int, seconds: float, say: Callable[[str], None], patience: float
    ) -> None:
        self.states: list[dict[str, Any]] = []
        self.hangs = False
        self._folder = folder
        self._ranks = ranks
        self._seconds = seconds
        self._say = say
        self._patience = patience
        self._began = time.monotonic()
        self._changed = self._began
        self._reported = self._began

    def read(self) -> None:
        """Read the states of all ranks."""
        self.states = _states(self._folder, self._ranks)

    def should_end(self) -> bool:
        """Report progress. Returns whether no state has changed for too long."""
        now = time.monotonic()
        before = self.states
        self.read()
        if self.states != before:
            self._changed = now
        if not all(before):
            # The seconds of the report are counted from the state of the last rank to begin.
            self._began = now
        started = all(self.states)
        if started and now - self._reported > _REPORT_SECONDS:
            self._reported = now
            self._report(now - self._began)
        patience = self._patience
        if not started:
            patience *= 3  # PyTorch is being loaded
        self.hangs = now - self._changed > patience
        return self.hangs

    def _report(self, seconds: float) -> None:
        verdict = "no wrong result"
        wrong = sum(bool(state["wrong"]) for state in self.states)
        if wrong:
            verdict = f"{wrong} of {self._ranks} GPUs with wrong results"
        number = self.states[0]["round"]
        progress = f"{seconds:.0f} of {self._seconds:.0f} s"
        self._say(f"burn-in: {progress}, round {number}, {verdict}")


def burn_in(
    host: Host, seconds: float, say: Callable[[str], None], patience: float = 120
) -> list[Finding]:
    """Compute, keep and exchange known values on all GPUs for ``seconds``.

    Names each GPU that gets others. ``say`` prints progress. A GPU that does not finish a part of
    it within ``patience`` seconds hangs. Raises HostError if PyTorch cannot use any GPU.
    """
    gpus, reason = _usable(host)
    if reason:
        raise HostError(f"--burn-in: {reason}", hint="run it in the image, on a machine with GPUs")
    count = len(gpus)
    with tempfile.TemporaryDirectory(prefix="primus-preflight-") as name:
        folder = Path(name)
        progress = _Progress(folder, count, seconds, say, patience)
        code = _run(folder, count, _fp8(host), seconds, progress.should_end)
        progress.read()
        failure = ""
        if code or not all(progress.states):
            failure = _failure(folder)
        if failure and progress.hangs:
            failure = _HANGS
    problems = []
    for sentence in _wrong(progress.states, gpus, failure):
        problems.append(finding("wrong_result", what=sentence))
    if problems:
        return problems
    number = progress.states[0].get("round", 0)
    rounds = counted(number, "round")
    return [finding("burn_in", gpus=counted(count, "GPU"), rounds=rounds)]


def _wrong(states: Sequence[Mapping[str, Any]], gpus: Sequence[str], failure: str) -> Iterator[str]:
    """Yield a sentence for what each rank counted, and for what ended or hung.

    The first one names the rank that takes part in all that is wrong, if others only receive it
    from there.
    """
    names = []
    for gpu, state in zip(gpus, states, strict=True):
        name = f"GPU {gpu} of {name_here()}"
        if state:
            name += f" ({state['device']})"
        names.append(name)
    source = _common_source(states)
    if source is not None:
        yield f"{names[source]}: it takes part in everything that is wrong, and no other GPU does"
    for rank, state in enumerate(states):
        for row in state.get("wrong", ()):
            part = _part(rank, row, gpus)
            rounds = counted(row["rounds"], "round")
            when = f"in {rounds}, first in round {row['first']}"
            wrong = f"{row['elements']:,} of {row['of']:,} elements are wrong {when}"
            yield f"{names[rank]}: {part}: {wrong}"
    for rank, end in _ends(states, failure):
        part = _part(rank, states[rank], gpus)
        yield f"{names[rank]}: {part} {end}"
    explained = any("error" in state for state in states)
    if failure not in ("", _HANGS) and not explained:
        yield failure


def _part(rank: int, row: Mapping[str, Any], gpus: Sequence[str]) -> str:
    """Return what a rank did, and with which other GPUs."""
    part = str(row.get("what", "the start of PyTorch"))
    others = []
    for other in row.get("ranks", ()):
        if other != rank:
            others.append(gpus[other])
    if others:
        return f"{part} with GPU {', '.join(others)}"
    return part


def _common_source(states: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the only rank that takes part in all of several wrong results, if there is one."""
    groups = set()
    for state in states:
        for row in state.get("wrong", ()):
            groups.add(tuple(row["ranks"]))
    every_rank = set(range(len(states)))
    common = every_rank.intersection(*groups)
    if len(groups) > 1 and len(common) == 1:
        return common.pop()
    return None


def _ends(states: Sequence[Mapping[str, Any]], failure: str) -> Iterator[tuple[int, str]]:
    """Yield the rank that failed first, or those for which the others wait."""
    errors = []
    for rank, state in enumerate(states):
        if "error" in state:
            errors.append((state["failed_at"], rank))
    if errors:
        # The ranks that lose their peer fail later.
        _, rank = min(errors)
        yield rank, f"fails: {states[rank]['error']}"
    elif failure == _HANGS:
        places = []
        for state in states:
            number = state.get("round", 0)
            places.append((number, state.get("place", -1)))
        first = min(places)
        for rank, place in enumerate(places):
            if place == first:
                yield rank, f"of round {first[0]} does not end"


def measurements(name: str, ranks: Sequence[Mapping[str, Any]]) -> list[Measurement]:
    """Group the figures of all ranks by benchmark, with what is expected of the GPU ``name``."""
    results = []
    for what, unit in UNITS.items():
        figures = tuple(float(rank[what]) for rank in ranks if what in rank)
        if not figures:
            continue
        # A collective has one figure, because all ranks wait for each other.
        if what in _COLLECTIVES:
            figures = (min(figures),)
        least, source = _expected(name, what, len(ranks))
        measurement = Measurement(
            what=what,
            unit=unit,
            figures=figures,
            least=least,
            most=peak_of(name, what),
            source=source,
        )
        results.append(measurement)
    return results


def _expected(name: str, what: str, ranks: int) -> tuple[float | None, str]:
    """Return the least figure that is expected, and its source, or the reason why there is none."""
    row = EXPECTED.get((name, what))
    if row is None:
        return None, "no table knows this GPU"
    if row.get("gpus") not in (None, ranks):
        return None, f"the published figure is of {row['gpus']} GPUs"
    return row["least"], row["source"]


def peak_of(name: str, what: str) -> float | None:
    """Return the most that the GPU can reach, from the table of generations; None if unknown."""
    generations = {gpu.name: gpu for gpu in load_table().generations}
    gpu = generations.get(name)
    if gpu is None or what in _COLLECTIVES:
        return None
    if what == "memory":
        return gpu.memory.tb_s
    dtype: Dtype = "bf16"
    if what == "gemm fp8":
        dtype = "fp8"
    row = peak(gpu, dtype)
    if row:
        return row[0]
    return None


def judge(benchmark: Measurement) -> Iterator[Finding]:
    """Judge the figures of one benchmark, alone and beside the other GPUs."""
    collective = benchmark.what in _COLLECTIVES
    typical = statistics.median(benchmark.figures)
    remedies = _TABLE["remedies"]
    usual = remedies["gemm bf16"]
    if collective:
        usual = remedies["all-reduce"]
    texts: Any = {
        "what": benchmark.what,
        "least": benchmark.least or 0,
        "most": benchmark.most or 0,
        "source": benchmark.source,
        "remedy": remedies.get(benchmark.what, usual),
    }
    sound = True
    for gpu, figure in enumerate(benchmark.figures):
        problem = _problem(benchmark, figure, typical)
        if problem:
            sound = False
            shown = f"{figure:,.4g} {benchmark.unit}"
            if not collective:
                shown = f"GPU {gpu}: {shown}"
            below = 1 - figure / typical
            yield finding(problem, figure=shown, share=below, **texts)
    if sound:
        name = "as_expected"
        if benchmark.least is None:
            name = "unjudged"
        lowest = min(benchmark.figures)
        shown = f"{lowest:,.4g}"
        if len(benchmark.figures) > 1:
            highest = max(benchmark.figures)
            shown += f"–{highest:,.4g}"
        yield finding(name, figure=f"{shown} {benchmark.unit}", **texts)


def _problem(benchmark: Measurement, figure: float, typical: float) -> str:
    if benchmark.most is not None and figure > benchmark.most * _ABOVE_PEAK:
        return "above_peak"
    if benchmark.least is not None and figure < benchmark.least:
        return "below_least"
    if figure < typical * (1 - _APART):
        return "below_others"
    return ""


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
    """Return (node, finding) for problems that show only between nodes.

    Raises InputError if a node has two documents.
    """
    names = Counter(node.name for node in nodes)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise InputError(
            f"two documents are from node {name}", hint="give one document for each node"
        )
    problems = list(_odd(nodes, "GPUs", _gpus))
    problems += _odd(nodes, "driver", _driver)
    problems += _odd(nodes, "RDMA", _rdma)
    problems += _slowest(nodes)
    return problems


def _gpus(node: Node) -> str:
    counts = Counter(node.gpus)
    kinds = [f"{count} × {name}" for name, count in counts.items()]
    return ", ".join(kinds) or "no GPU"


def _driver(node: Node) -> str:
    return node.driver


def _rdma(node: Node) -> str:
    for result in node.findings:
        if result.check == "RDMA":
            return result.message.partition(";")[0]
    return "no RDMA device"


def _odd(
    nodes: Sequence[Node], check: str, property_of: Callable[[Node], str]
) -> Iterator[tuple[str, Finding]]:
    """Yield the nodes of which something is not as on most."""
    values = {node.name: property_of(node) for node in nodes}
    counts = Counter(values.values())
    usual, _ = counts.most_common(1)[0]
    for name, value in values.items():
        if value != usual:
            what = value or "unknown"
            most = usual or "an unknown one"
            yield name, finding("odd_node", check=check, what=what, usual=most)


def _slowest(nodes: Sequence[Node]) -> Iterator[tuple[str, Finding]]:
    benchmarks: dict[str, dict[str, float]] = {}
    for node in nodes:
        for row in node.measurements:
            name = f"{row.what} ({row.unit})"
            figures = benchmarks.setdefault(name, {})
            figures[node.name] = min(row.figures)
    for what, figures in benchmarks.items():
        typical = statistics.median(figures.values())
        for name, figure in figures.items():
            share = 1 - figure / typical
            if share > _APART:
                slow = finding("slow_node", what=what, figure=figure, share=share, typical=typical)
                yield name, slow


def rows(nodes: Sequence[Node], between: Sequence[tuple[str, Finding]]) -> list[tuple[str, ...]]:
    """Return table rows, one per node: mark, name, GPUs, problems."""
    table: list[tuple[str, ...]] = []
    for node in nodes:
        problems = list(node.problems)
        for name, problem in between:
            if name == node.name:
                problems.append(problem)
        worst: Level = "ok"
        sentences = []
        for problem in problems:
            sentences.append(f"{problem.check}: {problem.message}")
            if worst != "failed":
                worst = problem.level
        verdict = "; ".join(sentences) or "ready"
        table.append((MARKS[worst], node.name, _gpus(node), verdict))
    return table


def page(nodes: Sequence[Node], between: Sequence[tuple[str, Finding]]) -> str:
    """Return one HTML page: problems with their remedies, and all checks and figures by nodes."""
    problems = []
    for node in nodes:
        problems += [(node.name, problem) for problem in node.problems]
    problems += between
    return html.rendered("nodes.html", title="Preflight", nodes=nodes, problems=problems)
