"""The time to a job's first step, without and with compiled kernels kept from an earlier run.

    python -m benchmarks.warm_start OUT.json NAME@RECIPE[:WORD…] [NAME@RECIPE[:WORD…] …]

A WORD is anything that ``primus train`` takes after the recipe, such as ``ranks=1`` or ``--turbo=off``. Each case has
its own, initially empty ``--compile-cache``, and runs once without kept kernels and then with them. The time is
measured from the start of the command to its line for the first step, so it includes Python's imports and the model.
The file is written after every case, and a failed case does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu import host
from benchmarks.turbo import PACKAGES

_FIRST = re.compile(r"^ *step +1/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--what", required=True)
    parser.add_argument("--repeats", type=int, default=1, help="runs with kept kernels for each case")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--until", type=float, default=540, help="seconds after which no run is started")
    options = parser.parse_args()
    deadline = time.monotonic() + options.until
    results: list[dict[str, Any]] = []
    for case in options.cases:
        results.append(result := _one(case, options, deadline))
        print(json.dumps({k: v for k, v in result.items() if k != "steps"}), flush=True)
        ratios = [{"name": r["name"], "ratio": r["ratio"], "bar": 0.4} for r in results if r.get("ratio")]
        document = {
            "what": options.what, "date": time.strftime("%Y-%m-%d"), "host": host(),
            "python": platform.python_version(), "versions": dict(_versions()), "ratios": ratios, "results": results,
        }  # fmt: skip
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all("error" not in result for result in results) else 1


def _versions() -> list[tuple[str, str]]:
    return [(d.name, d.version) for d in metadata.distributions() if d.name in PACKAGES]


def _one(case: str, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Return the seconds to the first step, without and then with kept kernels, and the lines of all steps."""
    name, _, rest = case.partition("@")
    words = rest.split(":")
    shown = " ".join(["primus train", *words, f"--steps {options.steps}", "--compile-cache DIR"])
    result: dict[str, Any] = {"name": name, "command": shown, "seconds": [], "steps": []}
    with tempfile.TemporaryDirectory(prefix="primus-warm-") as folder:
        for number in range(1 + options.repeats):
            if time.monotonic() > deadline:
                break
            lines, first = _run(words, Path(folder), number, options.steps)
            result["steps"].append([line for line in lines if line.lstrip().startswith("step ")])
            if first is None:
                result["error"] = "\n".join(lines[-12:])
                break
            result["seconds"].append(round(first, 2))
    if len(result["seconds"]) > 1:
        cold, *warm = result["seconds"]
        result["ratio"] = round(sorted(warm)[len(warm) // 2] / cold, 3)
    return result


def _run(words: list[str], folder: Path, number: int, steps: int) -> tuple[list[str], float | None]:
    """Return the lines of one run, and when the first step's line came; None if it never did or the run failed."""
    command = [
        sys.executable, "-m", "primus.cli.main", "train", *words, "--steps", str(steps),
        "--output", str(folder / f"run{number}"), "--compile-cache", str(folder / "kept"),
    ]  # fmt: skip
    lines: list[str] = []
    first, began = None, time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout
        for line in running.stdout:
            if first is None and _FIRST.match(line):
                first = time.monotonic() - began
            lines.append(line.rstrip())
    return lines, None if running.returncode else first


if __name__ == "__main__":
    sys.exit(main())
