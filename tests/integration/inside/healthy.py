"""Train healthy jobs of every recipe, backend, mode and precision with many seeds; write which
checks failed.

With --gpu, the same small models are trained on a GPU. The reference repeats them on the CPU. With
--configurations, the jobs are those of healthy.yaml instead.

    python healthy.py OUT --seconds 600 --seeds 20 --together 8
    python healthy.py OUT --configurations --together 2

OUT gets one JSON line per run as it ends. Runs that OUT already holds are skipped. A run that does
not end normally is a line as well. When the time is over, the runs in progress are ended and not
written.
"""

import re
import sys
import time
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from silent_jobs import Row, arguments, ended, job_of as small_job, record, rows, together
from warm import warm

from primus_images.recipes.load import entries
from primus_images.recipes.setting import Choices
from primus_images.training.judge import proof, suite
from primus_images.training.run import outcome
from primus_images.training.run.hang import stacks
from primus_images.training.run.job import Job
from primus_images.yamlfile import read_values

CONFIGURATIONS: list[str] = read_values(Path(__file__).with_suffix(".yaml")).data["configurations"]
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
    return suite.plan(
        suite.Request(recipe=recipe, overrides=words, choices=choices), folder, "quick"
    )[0]


def run(cell: Cell, gpu: str, seed: int, steps: int, out: Path) -> None:
    """Train and judge one run, and append its line to ``out``."""
    row: Row = dict(zip(KEYS, cell, strict=True)) | {"seed": seed, "failed": ["it was not judged"]}
    began = time.monotonic()

    def judge(job: Job) -> tuple[Row, bool]:
        left = ended(job)
        found = suite.judge([job], {"base": left})
        failed = [f"{v.name}: {v.reason} ({v.measured}, {v.limit})" for v in found if not v.passed]
        return {
            "steps": job.recipe.steps,
            "judged": job.judged,
            "checks": len(found),
            "failed": failed,
            "torch": left.facts.get("versions", {}).get("torch", ""),
            "seconds": round(time.monotonic() - began, 1),
            **(
                {}
                if not failed
                else {"stacks": {rank: text[:4000] for rank, text in stacks(job.output).items()}}
            ),
        }, not failed

    record(row, "", partial(job_of, cell, gpu, seed, steps), judge, out)


def configured(line: str, out: Path) -> None:
    """Train and judge the job of a configuration, and append its line to ``out``."""
    backend, *words = line.split()
    row: Row = {"configuration": line, "failed": ["it was not judged"]}
    began = time.monotonic()

    def judge(job: Job) -> tuple[Row, bool]:
        left = ended(job)
        unjudged = proof.unjudged(job.recipe)
        found = outcome.basic_verdicts(left)
        failed = [f"{v.name}: {v.reason} ({v.measured}, {v.limit})" for v in found if not v.passed]
        if unjudged:
            failed.append(unjudged)
        return {
            "checks": len(found),
            "failed": failed,
            "torch": left.facts.get("versions", {}).get("torch", ""),
            "seconds": round(time.monotonic() - began, 1),
        }, not failed

    record(row, "", lambda folder: small_job(folder, backend, tuple(words)), judge, out)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--only", default="", help="regular expression on RECIPE BACKEND MODE PRECISION"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="0: the recipe's own")
    parser.add_argument("--gpu", default="cpu", help="cpu, or the GPU generation to train on")
    parser.add_argument(
        "--configurations", action="store_true", help="train those of healthy.yaml, without seeds"
    )
    options = parser.parse_args()
    warm()
    if options.configurations:
        trained = {row["configuration"] for row in rows(options.out)}
        waiting = [line for line in CONFIGURATIONS if line not in trained]
        print(f"{len(CONFIGURATIONS)} configurations, {len(waiting)} to do", flush=True)
        runs = [partial(configured, line, options.out) for line in waiting]
        together(runs, options.together, options.seconds)
        return
    done = {(*(row[key] for key in KEYS), row["seed"]) for row in rows(options.out)}
    wanted = [cell for cell in cells() if re.search(options.only, " ".join(cell))]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    left = [(cell, seed) for seed in seeds for cell in wanted if (*cell, seed) not in done]
    print(f"{len(wanted)} cells, {len(left)} runs", flush=True)
    runs = [
        partial(run, cell, options.gpu, seed, options.steps, options.out) for cell, seed in left
    ]
    together(runs, options.together, options.seconds)


if __name__ == "__main__":
    main()
