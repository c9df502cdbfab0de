"""Train recipes on this machine's GPUs, check each run, and write the measurements.

    python -m benchmarks.gpu OUT.json --what WORDS CELL [CELL ...]

A CELL is RECIPE:BACKEND:MODE:PRECISION, then any key=value arguments after further colons.
``bare:`` before a torchtitan cell runs torchtitan's own trainer with the same settings, without
this project's code, for comparison.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primus_images.recipes.architecture import size
from primus_images.recipes.load import folder
from primus_images.recipes.setting import Choices
from primus_images.training.backends.torchtitan import render
from primus_images.training.judge import suite
from primus_images.training.judge.suite import LEVELS
from primus_images.training.run import logs, metrics, outcome
from primus_images.training.run.job import Job
from primus_images.training.run.metrics import of_recipe_unit
from primus_images.training.run.outcome import Outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("cells", nargs="+")
    parser.add_argument("--what", required=True)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--suite", choices=LEVELS, default="quick", help="how much of the suite each cell runs"
    )
    parser.add_argument(
        "--proxy",
        action="store_true",
        help="train the recipes' proxies, which the reference judges",
    )
    parser.add_argument("--runs", type=Path, default=Path("/tmp/primus-gpu"))
    options = parser.parse_args()
    # A separate folder, because the machine may still contain runs of another call.
    options.runs = options.runs / time.strftime("%Y%m%d-%H%M%S")
    results: list[dict[str, Any]] = []
    for number, cell in enumerate(options.cells):
        began = time.monotonic()
        result = one(cell, options.runs / f"{number}", options)
        result["wall_seconds"] = round(time.monotonic() - began, 1)
        results.append(result)
        print(
            json.dumps({k: result[k] for k in ("cell", "passed", "summary", "wall_seconds")}),
            flush=True,
        )
        document = {
            "what": options.what,
            "date": time.strftime("%Y-%m-%d"),
            "command": "python -m " + command(options),
            "host": host(),
            "results": results,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(result["passed"] for result in results) else 1


def _train(job: Job) -> Outcome:
    """Run ``job`` as a user would: with ``primus train`` on this machine, without a container."""
    words = [sys.executable, "-m", "primus_images.cli.main", *job.arguments(), "--json"]
    return outcome.read(
        job, subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode
    )


def command(options: argparse.Namespace) -> str:
    """Return the command line, with placeholders for the file name and the description, and without
    paths of this machine.
    """
    names = {str(options.out): "OUT.json", options.what: "WORDS"}
    words = (names.get(word, word) for word in sys.argv[1:])
    return " ".join(["benchmarks.gpu", *(word for word in words if "/" not in word)])


def one(cell: str, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one cell. Returns its verdicts, figures and series."""
    words = cell.removeprefix("bare:").split(":")
    recipe, backend, mode, precision = words[:4]
    choices = Choices(backend=backend, mode=mode, precision=precision, proxy=options.proxy or None)
    settings = [f"ranks={options.ranks}", *words[4:]]
    if not options.proxy and not any(word.startswith("training.steps=") for word in settings):
        settings.append(f"training.steps={options.steps}")
    jobs = suite.plan(
        suite.Request(recipe=recipe, overrides=settings, choices=choices), root, options.suite
    )
    job = jobs[0]
    unit = of_recipe_unit(job.recipe.architecture, job.recipe.seq_len)
    common = {
        "cell": cell,
        "recipe_sha256": job.recipe.digest,
        "gpu": job.recipe.gpu,
        "ranks": job.recipe.world_size,
        "seq_len": job.recipe.seq_len,
        "local_batch": job.recipe.local_batch,
        "global_batch": job.recipe.global_batch,
        "parameters": size(job.recipe.architecture).total,
        "gflop_per_unit": {"causal": unit.causal / 1e9, "non_causal": unit.non_causal / 1e9},
    }
    if cell.startswith("bare:"):
        return common | bare(job)
    outcomes = suite.run(jobs, _train)
    verdicts = suite.judge(jobs, outcomes)
    left = outcomes["base"]
    if left.exit_code:
        print(_why(job.output / "log.txt"), flush=True)
    if mode == "lora":
        # The number that the run itself counted as trained. The gradients of the others are not
        # computed.
        unit = of_recipe_unit(
            job.recipe.architecture,
            job.recipe.seq_len,
            adapters=left.facts.get("trainable_parameters", 0),
        )
        common["gflop_per_unit"] = {
            "causal": unit.causal / 1e9,
            "non_causal": unit.non_causal / 1e9,
        }
    facts = {key: value for key, value in left.facts.items() if key != "linears"}
    linears = dict(left.facts.get("linears", {}))
    linears.pop("plain", None)
    return common | {
        "passed": all(verdict.passed for verdict in verdicts),
        "jobs": [job.name for job in jobs],
        "exit_code": left.exit_code,
        "seconds": left.run.seconds,
        "summary": asdict(left.summary),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "facts": facts | {"linears": linears},
        "series": metrics.rows(left.series, job.recipe, left.facts),
        "settings": {key: setting.value for key, setting in job.recipe.settings.items()},
    }


def _why(log: Path) -> str:
    """Return the log's errors and its end, because torchrun's own report follows the cause by many
    lines.
    """
    lines = (
        log.read_text(errors="replace").splitlines() if log.exists() else []
    )  # the job may have been refused
    return "\n".join([*[line for line in lines if "Error" in line][:10], *lines[-20:]])


def bare(job: Job) -> dict[str, Any]:
    """Run torchtitan's own ``train.py`` with its own model of the same size."""
    job.output.mkdir(parents=True)
    corpus = job.output / "corpus"
    corpus.mkdir()
    (corpus / "corpus.jsonl").write_bytes((folder() / "assets" / "corpus.jsonl").read_bytes())
    text = (
        render.toml(job)
        .replace('flavor = "recipe"', 'flavor = "8B"')
        .replace('"recipe_corpus"', '"c4_test"')
    )
    (job.output / "bare.toml").write_text(
        text.replace(f'"{job.recipe.asset("corpus")}"', f'"{corpus}"')
    )
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(job.recipe.world_size),
        "--standalone",
        "-m",
        "torchtitan.train",
        "--job.config_file",
        str(job.output / "bare.toml"),
    ]
    began = time.monotonic()
    log = job.output / "log.txt"
    with log.open("w") as file:
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    series = logs.read_steps(log.read_text(errors="replace"))
    if code:
        print(_why(log), flush=True)
    summary = metrics.summarize(series, job.recipe, {})
    return {
        "passed": code == 0 and len(series.steps) == job.recipe.steps,
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 1),
        "summary": asdict(summary),
        "series": metrics.rows(series, job.recipe, {}),
    }


def host() -> dict[str, Any]:
    """Return a description of the machine."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpus = (
            subprocess.run(query, capture_output=True, text=True, check=True)
            .stdout.strip()
            .splitlines()
        )
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    shown = (
        "NCCL_NVLS_ENABLE",
        "PYTORCH_CUDA_ALLOC_CONF",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
    )
    return {
        "gpus": gpus,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "environment": {name: os.environ[name] for name in shown if name in os.environ},
    }


if __name__ == "__main__":
    sys.exit(main())
