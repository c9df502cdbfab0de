"""Train a job with each silent fault, and some without one; write which checks failed.

    python every_fault.py OUT --seconds 600 --together 8

OUT gets one JSON line per run as it ends. Runs that OUT already holds are skipped. With --patches,
also print every fault that replaces a name that its module does not have.
"""

import importlib
import inspect
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "faults"))
from forks import forked
from silent import SILENT
from silent_jobs import Row, arguments, ended, job_of, record, rows, together
from warm import warm

from primus_images.training.backends.torchtitan import cpu
from primus_images.training.run import outcome
from primus_images.training.run.job import Job

# Name → backend and words of jobs without a fault.
HEALTHY = {
    name: (backend, ("steps=3", *words.split()))
    for name, backend, words in (
        ("healthy_torchtitan", "torchtitan", "checkpoint=2"),
        ("healthy_fsdp", "fsdp", "--precision=bf16 training.recompute=full"),
        (
            "healthy_finetune",
            "finetune",
            "--mode=lora --precision=bf16 training.recompute=full lora.dropout=0.1 "
            "eval.fraction=0.1 eval.every=2 checkpoint=2",
        ),
        ("healthy_flux", "flux", "--precision=bf16 training.recompute=full"),
        (
            "healthy_fused_torchtitan",
            "torchtitan",
            "--precision=bf16 turbo=linear-cross-entropy",
        ),
        # Weights and gradients in bfloat16, and weight decay that is added to the gradients.
        (
            "healthy_narrow_torchtitan",
            "torchtitan",
            "--precision=bf16 training.dtype=bfloat16 optimizer.name=Adam",
        ),
        # Ranks that share sequences: Megatron then weighs the balancing loss by the tokens of one
        # of them.
        (
            "healthy_experts_tensor_parallel",
            "megatron",
            "--recipe=mixtral-8x7b --precision=bf16 tp=2 ep=1",
        ),
    )
}


def run(name: str, settings: list[str], out: Path) -> None:
    """Train and judge the job ``name`` with ``settings``, and append its line to ``out``. Faults of
    one job are joined by ``+``.
    """
    faults = [] if name in HEALTHY else [SILENT[part] for part in name.split("+")]
    backend, words = (faults[0].backend, faults[0].words) if faults else HEALTHY[name]
    if backend != "flux":
        words = (*words, *settings)

    def judge(job: Job) -> tuple[Row, bool]:
        left = ended(job)
        names = [verdict.name for verdict in outcome.basic_verdicts(left) if not verdict.passed]
        named = {name.removeprefix("reference ") for name in names}
        told = all(named & set(fault.checks) for fault in faults) and "exit code" not in names
        fine = told if faults else not names
        return {"named_by": names, "ok": fine, "versions": left.facts.get("versions", {})}, fine

    kind = faults[0].kind if faults else "healthy"
    row: Row = {"name": name, "kind": kind, "backend": backend, "named_by": [], "ok": False}
    fault = name.replace("+", ",") if faults else ""
    record(row, fault, lambda folder: job_of(folder, backend, words), judge, out)


def new_names(name: str) -> None:
    """Print what the fault sets but its module, or a class of it, does not have."""
    fault = SILENT[name]
    module = importlib.import_module(fault.module)
    owners: list[Any] = [
        module,
        *(value for value in vars(module).values() if inspect.isclass(value)),
    ]
    before = [set(dir(owner)) for owner in owners]
    try:
        fault.change(module)
    except AttributeError as error:
        print(f"{name}: {error}")
    for owner, names in zip(owners, before, strict=True):
        for added in sorted(set(dir(owner)) - names):
            print(f"{name}: {owner.__name__} has no {added}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--names", nargs="*", help="the runs; the faults of one run are joined by +"
    )
    parser.add_argument("--settings", nargs="*", default=[], help="of all jobs that train on text")
    parser.add_argument(
        "--patches", action="store_true", help="look at the names that all faults replace"
    )
    options = parser.parse_args()
    warm()
    names = options.names or [*HEALTHY, *SILENT]
    done = {row["name"] for row in rows(options.out)}
    waiting = [name for name in names if name not in done]
    print(f"{len(names)} runs, {len(waiting)} to do", flush=True)
    together(
        [partial(run, name, options.settings, options.out) for name in waiting],
        options.together,
        options.seconds,
    )
    if options.patches:
        # torchtitan chooses its device when it is imported.
        cpu.patch_torch()
        for module in {fault.module for fault in SILENT.values()}:
            importlib.import_module(module)
        for name in SILENT:
            if os.waitpid(forked(partial(new_names, name)), 0)[1]:
                print(f"{name}: the patch failed", flush=True)


if __name__ == "__main__":
    main()
