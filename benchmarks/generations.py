"""Time, memory and shared bytes of the images for AMD GPUs: `nox -s bench-generations`.

Works offline, on a copy of the repository's inputs with an empty store. The files must have been
fetched, for example by a build of all four targets. All figures are those of preview images built
from the committed locks.
"""

import argparse
import datetime
import hashlib
import io
import json
import math
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.measure import PRIMUS, machine, peak_megabytes, run
from primus_images.engine.kinds.debs import kernel_files
from primus_images.engine.kinds.wheels import wheel_entries
from primus_images.errors import CheckFailed, PrimusError
from primus_images.gpucode.elf import AMDGPU, read_elf
from primus_images.oci.layer import reference, walk, write_layer
from primus_images.oci.store import Layer, Store
from primus_images.oci.tar import Entry
from primus_images.plan.action import ImagePlan
from primus_images.plan.layers import plan_image
from primus_images.plan.project import Project, Workspace
from primus_images.plan.resolve import resolve
from primus_images.plan.skeleton import Prefix

TARGETS = ("mi300x", "mi325x", "mi350x", "mi355x")
ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "generations.json"
_NOOPS = 15


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the results. Returns 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="nox -s bench-generations --", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file")
    parser.add_argument("--once", action="store_true", help="one cold build instead of two")
    parser.add_argument(
        "--skip-cold", action="store_true", help="measure what the repository's own store holds"
    )
    args = parser.parse_args(argv)
    words = ["--once"] * args.once + ["--skip-cold"] * args.skip_cold
    before = os.getloadavg()
    try:
        with tempfile.TemporaryDirectory(
            prefix="primus-generations-", dir=ROOT / ".primus"
        ) as folder:
            report = Report(root=ROOT if args.skip_cold else _copy(Path(folder) / "project"))
            if not args.skip_cold:
                _cold(report, args.once)
            for measure in (_noop, _sharing, _host_code, _pruning):
                measure(report)
    except PrimusError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    result = {
        "generated": "by `nox -s bench-generations`; do not edit",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["nox -s bench-generations", *(["--", *words] if words else [])]),
        "machine": machine(),
        "versions": {
            "primus-images": metadata.version("primus-images"),
            "zstandard": metadata.version("zstandard"),
        },
        "load_average": {
            "before": [round(v, 2) for v in before],
            "after": [round(v, 2) for v in os.getloadavg()],
        },
        "rows": report.rows,
        "notes": report.notes,
    }
    args.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    missed = [row["name"] for row in report.rows if row.get("met") is False]
    print(
        f"{len(report.rows)} rows written to {args.out.name}; "
        + (f"missed: {', '.join(missed)}" if missed else "ok")
    )
    return 1 if missed else 0


def _copy(root: Path) -> Path:
    """Copy the repository's inputs and fetched files, without anything built from them. Returns the
    copy's folder.
    """
    for name in ("images", "recipes", "src"):
        shutil.copytree(
            ROOT / name, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "versions.yaml", root)
    (root / ".primus").mkdir()
    (root / ".primus" / "files").symlink_to((ROOT / ".primus" / "files").resolve())
    return root


def _forget(root: Path) -> None:
    for name in ("store", "cache", "unpacked", "logs"):
        shutil.rmtree(root / ".primus" / name, ignore_errors=True)


@dataclass(kw_only=True)
class Report:
    """The rows and notes measured so far, on the project at ``root``."""

    root: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def build(self, *targets: str) -> list[str]:
        """Return the command line that builds ``targets``."""
        return [*PRIMUS, "build", *targets, "--offline", "--project", str(self.root)]

    def add(self, name: str, value: float, unit: str, bar: tuple[str, float] | None = None) -> None:
        """Add one row; ``bar`` is ≤ or ≥, and the limit."""
        row: dict[str, Any] = {
            "name": name,
            "value": round(value, 3 if value < 10 else 2),
            "unit": unit,
        }
        if bar is not None:
            sign, limit = bar
            row["bar"] = {"sign": sign, "limit": limit}
            row["met"] = value <= limit if sign == "≤" else value >= limit
        self.rows.append(row)
        print(f"  {name}: {row['value']} {unit}", file=sys.stderr, flush=True)


def _cold(report: Report, once: bool) -> None:
    """Build mi355x from nothing, then the other three."""
    command = report.build("mi355x")
    used, begin = _processor_seconds(), time.perf_counter()
    peak = peak_megabytes(command)
    seconds = time.perf_counter() - begin
    (first,) = {image["digest"] for image in Project(report.root).workspace.store.images().values()}
    if once:
        report.notes.append("Seconds and memory are of one build: watching its memory lengthens it")
    else:
        _forget(report.root)
        used = _processor_seconds()
        cold = run(command)
        seconds = cold.seconds
        if cold.lines[-1] != first:
            raise CheckFailed(f"two builds from empty stores differ: {first} and {cold.lines[-1]}")
        report.notes.append(
            "Two builds of mi355x from empty stores gave the same digest; memory is that of the "
            "first"
        )
    used = _processor_seconds() - used
    report.add("mi355x preview, cold", seconds, "s", ("≤", 240))
    report.add(
        "mi355x preview, cold: processor time, which other work on the machine hardly changes",
        used,
        "s",
    )
    report.add("mi355x preview, cold: peak memory of all processes", peak, "MB", ("≤", 500))
    for target in ("mi350x", "mi300x", "mi325x"):
        report.add(f"{target} preview after those above", run(report.build(target)).seconds, "s")


def _noop(report: Report) -> None:
    for name, targets, bar in (
        ("mi355x preview", TARGETS[-1:], ("≤", 0.2)),
        ("all four", TARGETS, None),
    ):
        run(report.build(*targets))
        seconds = statistics.median(run(report.build(*targets)).seconds for _ in range(_NOOPS))
        report.add(f"{name}, nothing to do (median of {_NOOPS})", seconds, "s", bar)


def _sharing(report: Report) -> None:
    command = [*PRIMUS, "plan", *TARGETS, "--json", "--project", str(report.root)]
    plans = json.loads("\n".join(run(command).lines))
    layers = {
        plan["target"]: {row["key"]: row["bytes"] for row in plan["layers"]} for plan in plans
    }
    for first, second, bar in (
        ("mi350x", "mi355x", ("≥", 99.0)),
        ("mi300x", "mi325x", ("≥", 99.0)),
        ("mi300x", "mi355x", None),
    ):
        shared = sum(size for key, size in layers[first].items() if key in layers[second])
        larger = max(sum(layers[target].values()) for target in (first, second))
        share = math.floor(10_000 * shared / larger) / 100
        report.add(f"{first} ↔ {second}, shared bytes of the larger image", share, "%", bar)


def _host_code(report: Report) -> None:
    """Report what the device layers of both architectures have in common: the host code of
    libraries with GPU code.
    """
    store, found = Project(report.root).workspace.store, []
    for target in ("mi300x", "mi355x"):
        plan = _plan(report, target)
        kernels = [store.layer(action.key) for action in plan.layers if action.kind == "kernels"]
        found.append(dict(part for layer in kernels if layer for part in _host_parts(store, layer)))
    alike = found[0].keys() & found[1].keys()
    size = sum(found[0][digest] for digest in alike)
    report.add(
        "mi300x ↔ mi355x, host code of libraries with GPU code, in both device layers",
        size / 1e6,
        "MB",
    )


def _host_parts(store: Store, layer: Layer) -> Iterator[tuple[str, int]]:
    """Yield the digest and compressed size of each host library without its GPU code."""
    for member in walk(reference(layer), store.blob_path(layer.blob.digest)):
        if member.kind != "file":
            continue
        data = b"".join(member.chunks)
        if not data.startswith(b"\x7fELF") or (elf := read_elf(io.BytesIO(data))).machine == AMDGPU:
            continue
        offset, size = elf.places().get(".hip_fatbin", (0, 0))
        host = data[:offset] + data[offset + size :]
        yield hashlib.sha256(host).hexdigest(), len(zstandard.compress(host, 3))


def _pruning(report: Report) -> None:
    workspace, plan = Project(report.root).workspace, _plan(report, "mi355x")
    layers = {
        action.name: layer
        for action in plan.layers
        if (layer := workspace.store.layer(action.key)) is not None
    }
    size, unpacked = (
        sum(x.blob.size for x in layers.values()),
        sum(x.unpacked for x in layers.values()),
    )
    whole = _unpruned(workspace, plan, layers)
    before = sum(x.blob.size for x in whole.values()), sum(x.unpacked for x in whole.values())
    report.add("mi355x preview, compressed", size / 1e6, "MB")
    report.add("mi355x preview with all that pruning leaves out, compressed", before[0] / 1e6, "MB")
    report.add(
        "mi355x preview: smaller by pruning, compressed",
        100 * (1 - size / before[0]),
        "%",
        ("≥", 40.0),
    )
    report.add(
        "mi355x preview: smaller by pruning, unpacked", 100 * (1 - unpacked / before[1]), "%"
    )
    report.notes.append(
        "Pruning leaves out kernel files of other GPUs, their code in libraries (whose files "
        "keep their length, with "
        "zeros in its place: only compressed layers get smaller), and NVIDIA's tools in Triton"
    )


def _plan(report: Report, target: str) -> ImagePlan:
    project = Project(report.root)
    return plan_image(resolve(project, target), project.workspace.stats)


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _unpruned(
    workspace: Workspace, plan: ImagePlan, layers: Mapping[str, Layer]
) -> dict[str, Layer]:
    """Return the image's layers, with pruned layers replaced by unpruned ones."""
    files, whole = workspace.files, dict(layers)
    with tempfile.TemporaryDirectory(dir=workspace.folder) as folder:
        store = Store(Path(folder) / "store")
        store.prepare()
        for action in plan.layers:
            spec: Mapping[str, Any] = action.spec
            if action.kind == "kernels":
                found: list[Entry] = []
                for deb in action.files:
                    patterns = spec["kernels"][deb.name]
                    found += kernel_files(
                        None, files.path(deb.sha256), patterns, Path(folder) / deb.name
                    )
                whole[action.name] = write_layer(store, found)
            elif "without" in spec:
                prefix = Prefix(root=spec["prefix"], python=spec["python"])
                (wheel,) = action.files
                path = files.path(wheel.sha256)
                kept = {e.path for e in wheel_entries(path, wheel.file, prefix, spec["without"])}
                rest = [e for e in wheel_entries(path, wheel.file, prefix) if e.path not in kept]
                whole[f"{action.name}, what is left out"] = write_layer(store, rest)
    return whole


if __name__ == "__main__":
    sys.exit(main())
