"""Train healthy jobs of every recipe, backend, mode and precision with many seeds; write which checks failed.

With --gpu, the same small models are trained on a GPU. The reference repeats them on the CPU.

    python healthy.py OUT --seconds 600 --seeds 20 --together 8

OUT gets one JSON line per run as it ends. Runs that OUT already holds are skipped. A run that does not end normally is
a line as well. When the time is over, the runs in progress are ended and not written.

With --evidence, a line also has what the checks read. After a change of limits, --again judges such lines anew:

    python healthy.py OUT --again
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from silent_jobs import Row, arguments, prepare, record, rows, together

from primus.recipes.catalogue import entries
from primus.recipes.setting import Choices
from primus.training import outcome, proof, suite
from primus.training.failure import stacks
from primus.training.job import Job, JobResult
from primus.training.logs import Series, Step

Cell = tuple[str, str, str, str]
KEYS = ("recipe", "backend", "mode", "precision")


def cells() -> list[Cell]:
    """Recipe, backend, mode and precision of everything that the proxies train."""
    return [(e.recipe, e.backend, e.mode, precision) for e in entries() for precision in e.proxy]


def job_of(cell: Cell, gpu: str, seed: int, steps: int, folder: Path) -> Job:
    """The job that the quick suite of this cell runs, with another seed."""
    recipe, backend, mode, precision = cell
    choices = Choices(backend=backend, mode=mode, gpu=gpu, proxy=True, precision=precision)
    words = [f"seed={seed}", *([f"steps={steps}"] if steps else [])]
    return suite.plan(recipe, folder, words, choices, level="quick")[0]


def largest(file: Path) -> dict[str, list[object]]:
    """The largest errors of gradients and blocks, as multiples of the noise, and shares of constants, in deviations;
    with names.
    """
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    rows = [(f"step {step['step']}: {row['name']}", row) for step in found.get("steps", ()) for row in step["blocks"]]
    seen = [(key, row[key], name) for name, row in rows for key in ("typical", "token", "position") if key in row]
    seen += [
        ("longer", abs(row["share"]), f"{name} ± {row['noise']:.2g}")
        for name, row in rows
        if "share" in row and "gradients" not in name
    ]
    for name, row in found.get("constants", {}).items():
        share = abs(row["share"] - row["rounding"])
        if share > 0.05:
            seen.append(("constant", share / row["deviation"], f"{name}: {share:.2g}"))
    steps = [step for step in found.get("steps", ()) if "gaps" in step]
    usual = proof.usual_gaps(steps)
    for step in steps:
        for kind, (gap, name) in step["gaps"].items():
            noise = max(usual.get(kind, 0.0), step.get("noise", {}).get("gaps", {}).get(kind, (0.0,))[0])
            if noise > 0 and step["closest"] > proof._TIE:
                seen.append(("gradient", (gap - proof._LEAST["gradient"]) / noise, f"step {step['step']}: {name}"))
    kept: dict[str, list[object]] = {}
    for key, value, name in sorted(seen, key=lambda one: one[1]):
        kept[key] = [round(value, 5), name]
    return kept


def again(out: Path) -> int:
    """Judge the lines of ``out`` that have evidence by today's limits, and print those that fail. Returns how many."""
    judged, failing = 0, 0
    for row in rows(out):
        if evidence := row.get("evidence"):
            judged += 1
            series = Series(steps=tuple(Step(**step) for step in evidence["steps"]))
            wrong = [f"{v.name}: {v.reason}" for v in proof.verdicts(evidence["proof"], series) if not v.passed]
            failing += bool(wrong)
            if wrong:
                print(*(row[key] for key in KEYS), row["seed"], *wrong, sep="; ")
    print(f"{failing} of {judged} runs fail")
    return failing


def one(cell: Cell, gpu: str, seed: int, steps: int, keep: bool, out: Path, port: int) -> None:
    """Train and judge one run, and append its line to ``out``; with its evidence, if ``keep``."""
    row: Row = dict(zip(KEYS, cell, strict=True)) | {"seed": seed}
    began = time.monotonic()

    def judge(job: Job, code: int) -> tuple[Row, bool]:
        left = outcome.read(job, JobResult(exit_code=code, output=job.output))
        found = suite.judge([job], {"base": left})
        failed = [f"{v.name}: {v.reason} ({v.measured}, {v.limit})" for v in found if not v.passed]
        fine = not (code or failed)
        return {
            "steps": job.recipe.steps,
            "judged": job.judged,
            "checks": len(found),
            "failed": failed,
            "largest": largest(job.output / "proof.json"),
            "torch": left.facts.get("versions", {}).get("torch", ""),
            "seconds": round(time.monotonic() - began, 1),
            **({"evidence": _evidence(left)} if keep else {}),
            **({} if fine else {"stacks": {rank: text[:4000] for rank, text in stacks(job.output).items()}}),
        }, fine

    record(row, "-", partial(job_of, cell, gpu, seed, steps), judge, lambda sentence: {"failed": [sentence]}, out, port)


def _evidence(left: outcome.Outcome) -> Row:
    return {"proof": left.proof, "steps": [asdict(step) for step in left.series.steps]}


def main() -> None:
    parser = arguments(__doc__, "RECIPE BACKEND MODE PRECISION")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="0: the recipe's own")
    parser.add_argument("--gpu", default="cpu", help="cpu, or the GPU generation to train on")
    parser.add_argument("--evidence", action="store_true", help="keep what the checks read, 60 KB per run")
    parser.add_argument("--again", action="store_true", help="train nothing: judge the evidence in OUT")
    options = parser.parse_args()
    if options.again:
        sys.exit(min(1, again(options.out)))
    prepare(on_cpu=options.gpu == "cpu")
    done = {(*(row[key] for key in KEYS), row["seed"]) for row in rows(options.out)}
    wanted = [cell for cell in cells() if re.search(options.only, " ".join(cell))]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    left = [(cell, seed) for seed in seeds for cell in wanted if (*cell, seed) not in done]
    print(f"{len(wanted)} cells, {len(left)} runs", flush=True)
    runs = [partial(one, cell, options.gpu, seed, options.steps, options.evidence, options.out) for cell, seed in left]
    together(runs, options.together, options.seconds)


if __name__ == "__main__":
    main()
