"""The startup time of `primus train` in excess of torchtitan's own command: `nox -s
bench-launcher`.

Builds the cpu image and measures both inside it in turns; see ``benchmarks.starts``.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import PRIMUS, result, run, summary
from primus_images.errors import HostError, PrimusError

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "launcher.json"
_INSIDE = "/opt/benchmarks"
_REPEATS = 15
# Limits in seconds: the median of the added startup time, and of a command that shows a recipe.
_START, _SHOW = 1.0, 0.15


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the results. Returns 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="nox -s bench-launcher --", description=__doc__)
    parser.add_argument(
        "--repeats", type=int, default=_REPEATS, help=f"pairs of starts (default: {_REPEATS})"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file")
    args = parser.parse_args(argv)
    words = ["--", "--repeats", str(args.repeats)] if args.repeats != _REPEATS else []
    load = os.getloadavg()
    try:
        found = _measure(args.repeats)
    except PrimusError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    command, about = " ".join(["nox -s bench-launcher", *words]), {"commands": found["commands"]}
    measured = result("bench-launcher", command, found["versions"], load, _rows(found)) | about
    args.out.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    missed = [row["name"] for row in measured["rows"] if row.get("met") is False]
    print(f"written to {args.out.name}; " + (f"missed: {', '.join(missed)}" if missed else "ok"))
    return 1 if missed else 0


def _measure(repeats: int) -> dict[str, Any]:
    """Run ``benchmarks.starts`` in the image. Returns its output."""
    places = ["--project", str(ROOT)]
    run([*PRIMUS, "build", "cpu", *places], cwd=ROOT)
    inside = [
        *PRIMUS,
        "run",
        "cpu",
        *places,
        "--no-entrypoint",
        "-e",
        f"PYTHONPATH={_INSIDE}",
        "-v",
        f"{ROOT / 'benchmarks'}:{_INSIDE}/benchmarks:ro",
        "--",
        "python3",
        "-m",
        "benchmarks.starts",
        "--repeats",
        str(repeats),
    ]
    done = subprocess.run(
        inside, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise HostError(f"the measurement inside the image ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = [
        {
            "name": (
                f"from the command to torchtitan's trainer, {ranks} "
                f"rank{'s' if ranks != '1' else ''}"
            ),
            "unit": "s",
            **{side: summary([pair[side] for pair in pairs]) for side in ("ours", "bare")},
            **_judged("overhead", [pair["ours"] - pair["bare"] for pair in pairs], _START),
        }
        for ranks, pairs in found["pairs"].items()
    ]
    before = {
        "name": f"`{found['commands']['plan']}`, the part before any rank",
        "ours": summary(found["plan"]),
    }
    show = {"name": f"`{found['commands']['show']}`", **_judged("ours", found["show"], _SHOW)}
    return [*rows, {"unit": "s", **before}, {"unit": "s", **show}]


def _judged(key: str, samples: Sequence[float], bar: float) -> dict[str, Any]:
    seen = summary(samples)
    return {key: seen, "bar": {"seconds": bar}, "met": seen["median"] <= bar}


if __name__ == "__main__":
    sys.exit(main())
