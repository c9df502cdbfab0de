"""What building the AMD generations costs and shares: `nox -s bench-generations`.

Works on a copy of the repository's inputs with an empty store, offline: the files must be fetched (a build of all four
targets does that). Every figure is of the preview images, from the locks as they are committed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.measure import PRIMUS, machine, peak_megabytes, run
from primus.errors import CheckFailed, PrimusError
from primus.images.execute import Workshop
from primus.images.filecache import FileCache
from primus.images.kernels import KernelFiles
from primus.images.layer import write_layer
from primus.images.plan import plan_image
from primus.images.project import Project
from primus.images.store import Store
from primus.progress import QuietProgress

TARGETS = ("mi300x", "mi325x", "mi350x", "mi355x")
ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "generations.json"
_NOOPS = 15


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the results; 1 when a bar is not met."""
    parser = argparse.ArgumentParser(prog="nox -s bench-generations --", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file")
    parser.add_argument("--once", action="store_true", help="one cold build instead of two")
    args = parser.parse_args(argv)
    before = os.getloadavg()
    try:
        with tempfile.TemporaryDirectory(prefix="primus-generations-", dir=ROOT / ".primus") as folder:
            rows, notes = _measure(_copy(Path(folder) / "project"), args.once)
    except PrimusError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    result = {
        "generated": "by `nox -s bench-generations`; do not edit",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "nox -s bench-generations" + (" -- --once" if args.once else ""),
        "machine": machine(),
        "versions": {"primus-images": metadata.version("primus-images"), "zstandard": metadata.version("zstandard")},
        "load_average": {"before": [round(v, 2) for v in before], "after": [round(v, 2) for v in os.getloadavg()]},
        "rows": rows,
        "notes": notes,
    }
    args.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    missed = [row["name"] for row in rows if row.get("met") is False]
    print(f"{len(rows)} rows written to {args.out.name}; " + (f"missed: {', '.join(missed)}" if missed else "ok"))
    return 1 if missed else 0


def _copy(root: Path) -> Path:
    """The repository's inputs, with its fetched files and nothing that was ever built from them."""
    for name in ("images", "recipes", "src"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "versions.yaml", root)
    (root / ".primus").mkdir()
    (root / ".primus" / "files").symlink_to((ROOT / ".primus" / "files").resolve())
    return root


def _forget(root: Path) -> None:
    for name in ("store", "cache", "unpacked", "logs"):
        shutil.rmtree(root / ".primus" / name, ignore_errors=True)


def _measure(root: Path, once: bool) -> tuple[list[dict[str, Any]], list[str]]:
    def build(*targets: str) -> list[str]:
        return [*PRIMUS, "build", *targets, "--offline", "--locked", "--project", str(root)]

    rows: list[dict[str, Any]] = []
    notes = []
    used, begin = _processor_seconds(), time.perf_counter()
    peak = peak_megabytes(build("mi355x"))
    seconds = time.perf_counter() - begin
    (first,) = {image["digest"] for image in Project(root).store.images().values()}
    if once:
        notes.append("Seconds and memory are of one build: watching its memory lengthens it")
    else:
        _forget(root)
        used = _processor_seconds()
        cold = run(build("mi355x"))
        seconds = cold.seconds
        if cold.lines[-1] != first:
            raise CheckFailed(f"two builds from empty stores differ: {first} and {cold.lines[-1]}")
        notes.append("Two builds of mi355x from empty stores gave the same digest; memory is that of the first")
    used = _processor_seconds() - used
    _row(rows, "mi355x preview, cold", seconds, "s", ("≤", 240))
    _row(rows, "mi355x preview, cold: processor time, which other work on the machine hardly changes", used, "s")
    _row(rows, "mi355x preview, cold: peak memory of all processes", peak, "MB", ("≤", 500))
    noop = statistics.median(run(build("mi355x")).seconds for _ in range(_NOOPS))
    _row(rows, f"mi355x preview, nothing to do (median of {_NOOPS})", noop, "s", ("≤", 0.2))
    for target in ("mi350x", "mi300x", "mi325x"):
        _row(rows, f"{target} preview after those above", run(build(target)).seconds, "s")
    four = statistics.median(run(build(*TARGETS)).seconds for _ in range(_NOOPS))
    _row(rows, f"all four, nothing to do (median of {_NOOPS})", four, "s")
    plans = json.loads("\n".join(run([*PRIMUS, "plan", *TARGETS, "--json", "--project", str(root)]).lines))
    sharing = {plan["target"]: plan["sharing"] for plan in plans}
    for one, other, bar in (
        ("mi350x", "mi355x", ("≥", 99.0)),
        ("mi300x", "mi325x", ("≥", 99.0)),
        ("mi300x", "mi355x", None),
    ):
        share = 100 * sharing[one]["with"][other]["share"]
        _row(rows, f"{one} ↔ {other}, shared bytes of the larger image", share, "%", bar)
    whole = _unpruned(root)
    project = Project(root)
    plan = plan_image(project, "mi355x", project.lock("mi355x"))
    layers = {action.name: layer for action in plan.layers if (layer := project.store.layer(action.key)) is not None}
    kernels = layers["kernels gfx950"]
    pruned, unpacked = sharing["mi355x"]["bytes"], sum(layer.unpacked for layer in layers.values())
    saved = whole["bytes"] - kernels.blob.size
    _row(rows, "mi355x preview, compressed", pruned / 1e6, "MB")
    _row(rows, "mi355x preview with the kernel files of all GPUs, compressed", (pruned + saved) / 1e6, "MB")
    _row(rows, "smaller by pruning, compressed", 100 * saved / (pruned + saved), "%", ("≥", 40.0))
    more = whole["unpacked"] - kernels.unpacked
    _row(rows, "smaller by pruning, unpacked", 100 * more / (unpacked + more), "%")
    return rows, notes


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _unpruned(root: Path) -> dict[str, int]:
    """The layer that the kernel files of all GPUs would be: its compressed and its unpacked bytes."""
    project = Project(root)
    plan = plan_image(project, "mi355x", project.lock("mi355x"))
    action = next(action for action in plan.layers if action.kind == "kernels")
    workshop = Workshop(project=project, files=FileCache(project.work / "files"), progress=QuietProgress())
    with tempfile.TemporaryDirectory(dir=project.work) as folder:
        store = Store(Path(folder) / "store")
        store.prepare()
        # Every path that matches names some architecture, and all of them begin so.
        found = KernelFiles(arch="gfx[0-9a-f]*")
        patterns: Any = action.spec["kernels"]
        for deb in action.files:
            found.take(workshop.files.path(deb.sha256), patterns[deb.name], Path(folder) / deb.name)
        layer = write_layer(store, found.entries)
        return {"bytes": layer.blob.size, "unpacked": layer.unpacked}


def _row(rows: list[dict[str, Any]], name: str, value: float, unit: str, bar: tuple[str, float] | None = None) -> None:
    row: dict[str, Any] = {"name": name, "value": round(value, 3 if value < 10 else 2), "unit": unit}
    if bar is not None:
        sign, limit = bar
        row["bar"] = {"sign": sign, "limit": limit}
        row["met"] = value <= limit if sign == "≤" else value >= limit
    rows.append(row)
    print(f"  {name}: {row['value']} {unit}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
