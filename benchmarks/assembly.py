"""Assembling a whole image from fetched files, compared with ``docker build`` of the same wheels on
the same base.

Both sides start with all files on disk, including the base and the wheels built from source. Both
unpack the same wheels, compile their bytecode (ours without the libraries' tests) and end with an
image. Run it with ``nox -s bench-assembly``.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.buildkit import BuildKit, private_daemon
from benchmarks.engine import OURS, RESULTS, THEIRS, Report, Theirs, tools_of
from benchmarks.image import ImageProject, prepare
from benchmarks.measure import peak_megabytes, peak_of_tree, result
from primus_images.errors import PrimusError


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the results. Returns 1 if the limit is missed."""
    parser = argparse.ArgumentParser(prog="nox -s bench-assembly --", description=__doc__)
    parser.add_argument(
        "target", nargs="?", default="h200", help="image to assemble (default: h200)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns (default: 3)")
    parser.add_argument(
        "--folder", type=Path, help="where both sides keep their gigabytes (default: TMPDIR)"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file (default: benchmarks/results/TARGET-assembly.json)"
    )
    args = parser.parse_args(argv)
    try:
        measured = _measure(args)
    except PrimusError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    out: Path = args.out or RESULTS / f"{args.target}-assembly.json"
    out.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    row = measured["rows"][0]
    print(f"{args.target}: {row['ratio']:.2f} of docker build's time; written to {out.name}")
    return 0 if row["met"] else 1


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()
    with (
        tempfile.TemporaryDirectory(
            prefix="primus-bench-", dir=args.folder, ignore_cleanup_errors=True
        ) as folder,
        private_daemon(Path(folder) / "docker") as kit,
    ):
        ours = prepare(Path(__file__).parents[1], Path(folder) / args.target, kit, args.target)
        theirs = Theirs(kit=kit, context=ours.root, options=("--network", "none"))
        report = Report(sides=[ours, theirs])
        targets = [args.target]
        report.compare(
            "assembly",
            f"{args.target} image from fetched files",
            args.repeats,
            targets=targets,
            each=lambda side: side.forget(),
            fresh=False,
            judged=(OURS,),
        )
        _memory(report, ours, theirs, targets)
        about = {"target": args.target, "sizes": _sizes(ours, kit)}
        command = f"nox -s bench-assembly -- {args.target} --repeats {args.repeats}"
        return result("bench-assembly", command, tools_of(kit), load, report.rows) | about


def _memory(report: Report, ours: ImageProject, theirs: Theirs, targets: Sequence[str]) -> None:
    """Measure memory in one extra run of each side, because measuring it slows the run. The
    daemon's figure includes its children.
    """
    ours.forget()
    mine = peak_megabytes(ours.command(targets))
    theirs.forget()
    with peak_of_tree(theirs.kit.daemon) as peak:
        theirs.build(targets)
    report.add("assembly_memory", "peak memory", "MB", {OURS: [mine], THEIRS: peak})


def _sizes(ours: ImageProject, kit: BuildKit) -> dict[str, int]:
    layers = ours.layers()
    return {
        "wheels": len(ours.wheels()),
        "wheel_bytes": sum(wheel.size for wheel in ours.wheels()),
        "layers": len(layers),
        "compressed_bytes": sum(layer.blob.size for layer in layers),
        "unpacked_bytes": sum(layer.unpacked for layer in layers),
        "docker_bytes": int(
            kit.ask("image", "inspect", "--format", "{{.Size}}", f"bench-{ours.target}")
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
