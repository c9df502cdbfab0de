"""Measure what a user gets: `primus train` with its defaults against `--turbo off`, in alternation.

    python -m benchmarks.speed OUT.json --ranks 2 --repeats 3 CASE [CASE ...]

A CASE is NAME=RECIPE, then any options and key=value words of `primus train` after further colons,
as in `llama3.1-8b-fp8=llama3.1-8b:--precision:fp8:model.layers=12`. A word `stock:` before a
key=value applies it to the runs with `--turbo off` only. The variant `selective` is a run with
`--turbo off` that recomputes selectively. Every run is a process of its own, from the command to
the result. The file is written after every run, a failed run does not stop the others, and the
ratios are of the medians over the runs.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import host

PACKAGES = (
    "torch",
    "triton",
    "torchtitan",
    "torchao",
    "flash-attn-4",
    "transformers",
    "diffusers",
    "peft",
)
_VARIANTS = {
    "default": [],
    "stock": ["--turbo", "off"],
    "selective": ["--turbo", "off", "activation_checkpoint.mode=selective"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--what", default="")
    parser.add_argument("--variants", nargs="+", default=["default", "stock"], choices=_VARIANTS)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warmup", type=int, default=5, help="steps that do not count")
    parser.add_argument(
        "--until", type=float, default=3600, help="seconds after which no run begins"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds that one run may take")
    parser.add_argument("--runs", type=Path, default=Path("/tmp/primus-speed"))
    options = parser.parse_args()
    began = time.monotonic()
    rows: list[dict[str, Any]] = (
        json.loads(options.out.read_text())["results"] if options.out.exists() else []
    )
    for _ in range(options.repeats):
        for case in options.cases:
            for variant in options.variants:
                if time.monotonic() - began > options.until:
                    print(f"no time for {variant} of {case}", flush=True)
                    continue
                row = one_run(case, variant, options)
                rows.append(row)
                shown = (
                    "name",
                    "variant",
                    "passed",
                    "tokens_per_second",
                    "memory_gib",
                    "first_step_seconds",
                    "seconds",
                )
                print(json.dumps({key: row.get(key) for key in shown}), flush=True)
                options.out.write_text(
                    json.dumps(document(rows, options), indent=1) + "\n", encoding="utf-8"
                )
    return 0


def one_run(case: str, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one command. Returns its figures."""
    name, _, rest = case.partition("=")
    recipe, *words = rest.split(":")
    output = options.runs / f"{name}-{variant}-{time.time_ns()}"
    stock_only = {words[i + 1] for i, word in enumerate(words[:-1]) if word == "stock"}
    words = [w for w in words if w != "stock" and (variant != "default" or w not in stock_only)]
    command = [
        sys.executable,
        "-m",
        "primus_images.cli.main",
        "train",
        recipe,
        "--gpu",
        options.gpu,
        "--ranks",
        str(options.ranks),
        "--steps",
        str(options.steps),
        "--output",
        str(output),
        "--compile-cache",
        str(options.runs / "compile-cache"),
        *words,
        *_VARIANTS[variant],
    ]
    began = time.time()
    with (options.runs.parent / "speed.log").open("a") as log:
        log.write(f"\n== {' '.join(command)}\n")
        log.flush()
        try:
            code = subprocess.run(
                command, stdout=log, stderr=log, timeout=options.limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    row: dict[str, Any] = {
        "name": name,
        "variant": variant,
        "command": " ".join(["primus", *command[3:]]),
        "exit_code": code,
        "seconds": round(time.time() - began, 1),
    }
    try:
        row |= figures(output, began, options.warmup)
    except (OSError, ValueError, KeyError, IndexError) as error:
        row["error"] = f"{type(error).__name__}: {error}"
    if code and (output / "log.txt").exists():
        row["log"] = (output / "log.txt").read_text(errors="replace")[-1500:]
    shutil.rmtree(output / "checkpoint", ignore_errors=True)
    return row


def figures(output: Path, began: float, warmup: int) -> dict[str, Any]:
    """Return the figures of a finished run in ``output`` that began at the time ``began``."""
    result = json.loads((output / "result.json").read_text())
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rates = sorted(step["tokens_per_second"] for step in steps if step["step"] > warmup)
    return {
        "passed": result["passed"],
        "summary": result["summary"],
        "optimizations": result["optimizations"],
        "off": result["optimizations_off"],
        "failed_checks": [v["name"] for v in result["verdicts"] if not v["passed"]],
        "tokens_per_second": rates[len(rates) // 2],
        "slowest": rates[0],
        "fastest": rates[-1],
        "memory_gib": max((step.get("memory_gib") or 0 for step in steps), default=None),
        "loss": [step["loss"] for step in steps],
        "first_step_seconds": _first_step(output, began),
    }


def _first_step(output: Path, began: float) -> float | None:
    """Return the seconds from the command to torchtitan's line of step 1. Other backends log no
    times.
    """
    text = re.sub(r"\x1b\[[\d;]*m", "", (output / "log.txt").read_text(errors="replace"))
    match = re.search(r"\[titan\] (\S+ \S+),(\d+) .*step: +1 ", text)
    if match is None:
        return None
    return round(
        time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")) + int(match[2]) / 1e3 - began, 1
    )


def document(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the result: every run, and for each case the ratios of the defaults to the other
    variants.
    """
    rates: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.get("passed"):
            rates.setdefault((row["name"], row["variant"]), []).append(row["tokens_per_second"])
    ratios = []
    for (name, variant), there in rates.items():
        here = rates.get((name, "default"))
        if variant != "default" and here:
            ratios.append(
                {
                    "name": name,
                    "ratio": round(median(here) / median(there), 4),
                    "default": median(here),
                    variant: median(there),
                    "runs": [len(here), len(there)],
                    "spread": [round(max(each) / min(each) - 1, 4) for each in (here, there)],
                }
            )
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "what": options.what,
        "date": time.strftime("%Y-%m-%d"),
        "host": host(),
        "versions": versions,
        "ranks": options.ranks,
        "warmup_steps": options.warmup,
        "ratios": ratios,
        "results": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
