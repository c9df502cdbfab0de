"""Our engine compared with BuildKit on the same graph, in alternating runs. Run it with ``nox -s
bench``.

Both build from the same input folder. In each row the two sides alternate, and so does the side
that goes first, so that other load on the machine affects both. Files written by a run are synced
to disk before the next one starts.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from benchmarks.buildkit import BuildKit, private_daemon
from benchmarks.image import ImageProject, prepare
from benchmarks.measure import PRIMUS, Finished, peak_megabytes, result, run, summary
from benchmarks.synthetic import TARGETS, Graph, generate
from primus_images.errors import CheckFailed, PrimusError

RESULTS = Path(__file__).parent / "results"

OURS, THEIRS, OURS_ONE = "ours", "buildkit", "ours_one"

# The limit of each row. `ratio` is our time ÷ BuildKit's; `times` is our time ÷ that of `of` in the
# same row; other limits are absolute.
BARS: dict[str, dict[str, Any]] = {
    "cold": {"ratio": 0.6},
    "noop": {"ratio": 0.8},
    "component": {"ratio": 0.5},
    "recipe": {"ratio": 2.5},
    "four": {"times": 1.5, "of": OURS_ONE},
    "help": {"seconds": 0.1},
    "noop_memory": {"megabytes": 300},
    "cold_memory": {"megabytes": 300},
    "cpu_cold": {"ratio": 0.6},
    "cpu_noop": {"ratio": 0.8},
    "cpu_recipe": {"ratio": 2.5},
    "cpu_cold_memory": {"megabytes": 300},
    "assembly": {"ratio": 0.5},
}


class Side(Protocol):
    """One of the two builders, with its own store."""

    @property
    def name(self) -> str:
        """The name in the results."""

    def build(self, targets: Sequence[str]) -> tuple[str, Finished]:
        """Build the targets. Returns an identifier of the result, and the run."""

    def forget(self) -> None:
        """Empty the store."""


@dataclass(frozen=True, kw_only=True)
class Ours:
    """`primus build`, in a new process each time."""

    project: Path
    store: Path
    name: str = OURS

    def command(self, targets: Sequence[str]) -> list[str]:
        """Return the command line that builds ``targets``."""
        places = ["--project", str(self.project), "--store", str(self.store)]
        return [*PRIMUS, "build", *targets, *places, "--offline"]

    def build(self, targets: Sequence[str]) -> tuple[str, Finished]:
        """Build the targets with one command."""
        done = run(self.command(targets))
        # If there is nothing to do, the line begins with a message and a time.
        return done.lines[-1].split()[-1], done

    def forget(self) -> None:
        """Remove the store and the cached state of the project's files."""
        shutil.rmtree(self.store, ignore_errors=True)
        shutil.rmtree(self.project / ".primus", ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class OursOne:
    """Our builder on the first target only. The time of four targets is compared with it, in the
    same turns.
    """

    ours: Ours
    name: str = OURS_ONE

    def build(self, targets: Sequence[str]) -> tuple[str, Finished]:
        """Build the first target."""
        return self.ours.build(targets[:1])

    def forget(self) -> None:
        """Empty the store."""
        self.ours.forget()


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """`docker build` with BuildKit, once per target."""

    kit: BuildKit
    context: Path
    name: str = THEIRS
    options: tuple[str, ...] = ()

    def build(self, targets: Sequence[str]) -> tuple[str, Finished]:
        """Build the targets one after another, because docker.io has no bake."""
        return self.kit.build(self.context, targets, options=self.options)

    def forget(self) -> None:
        """Remove the images and the build cache."""
        self.kit.forget()


@dataclass(kw_only=True)
class Report:
    """The rows measured so far."""

    sides: Sequence[Side]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def compare(
        self,
        key: str,
        name: str,
        repeats: int,
        *,
        targets: Sequence[str],
        sides: Sequence[Side] | None = None,
        before: Callable[[int], None] = lambda turn: None,
        each: Callable[[Side], None] = lambda side: None,
        fresh: bool | None = None,
        judged: Sequence[str] = (OURS, THEIRS),
    ) -> None:
        """Measure one row. ``before`` runs once per turn and ``each`` once per side; neither is
        timed.

        ``fresh``: whether the image of each turn must differ from the previous one (True) or equal
        it (False), so that a fast but wrong build does not count. ``judged`` names the sides to
        which this applies.
        """
        taking = self.sides if sides is None else sides
        seen: dict[str, list[tuple[str, float]]] = {side.name: [] for side in taking}
        for turn in range(repeats):
            before(turn)
            order = list(taking) if turn % 2 == 0 else list(reversed(taking))
            for side in order:
                each(side)
                identity, done = side.build(targets)
                seen[side.name].append((identity, done.seconds))
                print(
                    f"  {key:<12} {side.name:<9} {done.seconds:8.3f} s", file=sys.stderr, flush=True
                )
        for side_name, runs in seen.items():
            changed = [a[0] != b[0] for a, b in itertools.pairwise(runs)]
            if fresh is not None and side_name in judged and any(c is not fresh for c in changed):
                what = (
                    "did not see a change" if fresh else "built another image from the same inputs"
                )
                raise CheckFailed(f"{name}: {side_name} {what}")
        self.add(
            key, name, "s", {side: [seconds for _, seconds in runs] for side, runs in seen.items()}
        )

    def add(self, key: str, name: str, unit: str, samples: Mapping[str, Sequence[float]]) -> None:
        """Add one row. Its ratio and verdict follow from the limit."""
        row: dict[str, Any] = {"key": key, "name": name, "unit": unit}
        row |= {side: summary(values) for side, values in samples.items() if values}
        if OURS in row and THEIRS in row:
            row["ratio"] = round(row[OURS]["median"] / row[THEIRS]["median"], 3)
        if key in BARS:
            row["bar"] = BARS[key]
            value = self._value(row)
            if value is not None:
                row["value"] = round(value, 3)
                row["met"] = value <= next(v for v in BARS[key].values() if not isinstance(v, str))
        self.rows.append(row)

    def _value(self, row: dict[str, Any]) -> float | None:
        bar = row["bar"]
        if OURS not in row:
            return None
        if "ratio" in bar:
            ratio: float | None = row.get("ratio")
            return ratio
        median = float(row[OURS]["median"])
        return median / float(row[bar["of"]]["median"]) if "of" in bar else median


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The number of repetitions of each kind of row."""

    slow: int
    fast: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the results. Returns 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small blobs, few repeats, no cpu image"
    )
    parser.add_argument(
        "--side", choices=("both", OURS, THEIRS), default="both", help="measure one side only"
    )
    parser.add_argument(
        "--skip-cpu", action="store_true", help="leave out the rows on the real cpu image"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file (default: benchmarks/results/engine.json)"
    )
    args = parser.parse_args(argv)
    try:
        result = _measure(args)
    except PrimusError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    out: Path = args.out or RESULTS / ("engine-quick.json" if args.quick else "engine.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    missed = [row["name"] for row in result["rows"] if row.get("met") is False]
    print(
        f"{len(result['rows'])} rows written to {out.name}; "
        + (f"missed: {', '.join(missed)}" if missed else "ok")
    )
    # Small blobs say nothing about the limits, so a quick run fails only on an error.
    return 1 if missed and not args.quick else 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    repeats = Repeats(slow=2, fast=3) if args.quick else Repeats(slow=5, fast=15)
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="primus-bench-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        graph = generate(root / "graph", blob_megabytes=1 if args.quick else 20)
        ours = Ours(project=graph.root, store=root / "store")
        if args.side == OURS:
            report = Report(sides=[ours])
            floor = _synthetic(report, graph, ours, repeats)
            tools: dict[str, str] = {}
        else:
            with private_daemon(root / "docker") as kit:
                theirs = Theirs(kit=kit, context=graph.root)
                report = Report(sides=[theirs] if args.side == THEIRS else [ours, theirs])
                floor = _synthetic(report, graph, None if args.side == THEIRS else ours, repeats)
                if args.side == "both" and not args.skip_cpu and not args.quick:
                    _cpu(
                        report,
                        prepare(Path(__file__).parents[1], root / "cpu", kit, "cpu"),
                        kit,
                        repeats,
                    )
                tools = tools_of(kit)
    workload = {
        "components": 12,
        "blob_megabytes": graph.blob_megabytes,
        "small_files_per_component": graph.small_files,
    }
    about = {"quick": bool(args.quick), "workload": workload, "memory_floor_megabytes": floor}
    return result("bench", _command(args), tools, before, report.rows) | about


def tools_of(kit: BuildKit) -> dict[str, str]:
    """Return the versions of the tools that both sides use."""
    return {
        "zstandard": metadata.version("zstandard"),
        "docker.io": kit.ask("version", "--format", "{{.Server.Version}}"),
        "docker storage driver": kit.ask("info", "--format", "{{.Driver}}"),
    }


def _command(args: argparse.Namespace) -> str:
    # Without --out, because a path of this machine means nothing to readers.
    words = (
        ["--quick"] * args.quick
        + [f"--side={args.side}"] * (args.side != "both")
        + ["--skip-cpu"] * args.skip_cpu
    )
    return " ".join(["nox -s bench", *(["--", *words] if words else [])])


def _synthetic(report: Report, graph: Graph, ours: Ours | None, repeats: Repeats) -> float:
    """Measure all rows on the synthetic graph. Returns the peak memory in MB that a child process
    starts with; smaller figures mean nothing.
    """
    one = TARGETS[:1]

    def empty(side: Side) -> None:
        side.forget()
        graph.warm()

    # Docker writes the current time into its images, so only ours can be reproducible from an empty
    # store.
    report.compare(
        "cold",
        "cold, inputs on disk",
        repeats.slow,
        targets=one,
        each=empty,
        fresh=False,
        judged=(OURS,),
    )
    report.compare("noop", "nothing changed", repeats.fast, targets=one, fresh=False)
    report.compare(
        "component",
        "1 of 12 components changed",
        repeats.slow,
        targets=one,
        before=graph.change_component,
        fresh=True,
    )
    report.compare(
        "recipe",
        "one recipe file changed",
        repeats.slow,
        targets=one,
        before=lambda turn: graph.change_recipe(turn + 1),
        fresh=True,
    )
    for side in report.sides:
        side.build(TARGETS)
    sides = [*report.sides, *([OursOne(ours=ours)] if ours else [])]
    name = "four targets, nothing changed"
    report.compare("four", name, repeats.fast, targets=TARGETS, sides=sides, fresh=False)
    # ru_maxrss of a child starts at its parent's peak.
    floor = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    if ours is None:
        return floor
    usage = [*PRIMUS, "--help"]
    run(usage)
    report.add(
        "help", "`primus --help`", "s", {OURS: [run(usage).seconds for _ in range(repeats.fast)]}
    )
    command = ours.command(one)
    report.add(
        "noop_memory",
        "peak memory, nothing changed",
        "MB",
        {OURS: [peak_megabytes(command) for _ in range(3)]},
    )
    peaks = []
    for _ in range(3):
        empty(ours)
        peaks.append(peak_megabytes(command))
    report.add("cold_memory", "peak memory, cold", "MB", {OURS: peaks})
    return floor


def _cpu(report: Report, ours: ImageProject, kit: BuildKit, repeats: Repeats) -> None:
    theirs = Theirs(kit=kit, context=ours.root, options=("--network", "none"))
    report.sides = [ours, theirs]
    one = [ours.target]
    kit.forget()
    report.compare(
        "cpu_cold",
        "cpu image: wheels on a built base, all fetched",
        repeats.slow,
        targets=one,
        each=lambda side: side.forget(),
        fresh=False,
        judged=(OURS,),
    )
    report.compare("cpu_noop", "cpu image: nothing changed", repeats.fast, targets=one, fresh=False)
    report.compare(
        "cpu_recipe",
        "cpu image: one recipe file changed",
        repeats.slow,
        targets=one,
        before=ours.change_recipe,
        fresh=True,
    )
    peaks = []
    for _ in range(2):
        ours.forget()
        peaks.append(peak_megabytes(ours.command(one)))
    report.add("cpu_cold_memory", "cpu image: peak memory, cold", "MB", {OURS: peaks})


if __name__ == "__main__":
    sys.exit(main())
