"""Validate an image: train in it and check the results."""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from primus.cli.host.common import CACHE, ENGINE, OFFLINE, SINGLE, cache_of, resolved_target
from primus.cli.verb import WRAP, answer, flag, folder, option, verb
from primus.engine.pipeline import Options, build
from primus.errors import InputError
from primus.plan.layers import plan_images
from primus.plan.resolve import ResolvedTarget
from primus.recipes.choose import CPU
from primus.release import golden
from primus.release.cells import NO_GPU, Cell, cells_of, choose, cpu_model
from primus.release.validation import outcome_text, table, validate as run_suites
from primus.terminal import Screen, counted
from primus.training import suite
from primus.training.suite import LEVELS


@verb(
    *SINGLE,
    OFFLINE,
    option("--recipe", metavar="NAME", help="recipe to train (default: the target's)"),
    option(
        "--suite",
        choices=LEVELS,
        help="train every recipe of the target by every backend and in every mode that it supports. quick: one run; "
        "standard: also repeated, resumed and with a split batch; full: also in another layout and every precision",
    ),
    flag("--again", "also run what has already passed for the same image and recipe"),
    flag("--record-golden", "write the FP32 curves to benchmarks/golden; needs --suite, and implies --again"),
    option("--output", type=folder, metavar="DIR", help="records and reports (default: out/validation)"),
    ENGINE,
    WRAP,
    option("--gpus", metavar="all|N|none", help="GPUs to use (default: all if the target is for them)"),
    flag("--dry-run", "print the jobs; build and train nothing"),
    CACHE,
    example="primus validate cpu --suite quick",
)
def validate(args: argparse.Namespace) -> int:
    """Build the image, train in it and check the results. Each job of the suite runs in its own container.

    All GPUs of the target's kind are used, otherwise the CPU. Writes record.json and report.html. What passed for the
    same image content, recipe, suite and GPU is not run again. Exit code 1: a job or a check failed.
    """
    if args.record_golden and not args.suite:
        raise InputError("--record-golden records every backend and mode of a recipe", hint="add --suite quick")
    resolved, workspace = resolved_target(args)
    gpus = choose(args.gpus, resolved.gpu)
    if not args.json and (gpus.names or gpus.why):
        print(f"GPUs: {', '.join(gpus.names) or f'none ({gpus.why})'}", file=sys.stderr)
    cells = _cells(resolved, gpus.gpu, recipe=args.recipe, level=args.suite)
    if args.dry_run:
        _show(cells, resolved, args)
        return 0
    options = Options(offline=args.offline, engine=args.engine, quiet=args.json)
    cache = cache_of(args)
    options = replace(options, pull=cache.pull) if cache else options
    (built,) = build(plan_images([resolved], workspace.stats), workspace, options)
    workspace.stats.save()
    if cache:
        cache.push([built.image.plan], workspace)
    validated = run_suites(
        built.image.plan,
        workspace,
        cells,
        output=(args.output or resolved.root / "out" / "validation").absolute(),
        engine=args.engine,
        quiet=args.json,
        again=args.again,
        recording=args.record_golden,
        hardware=gpus,
        wrap=args.wrap,
    )
    records = [cell.record for cell in validated]
    if args.record_golden:
        count = golden.record(
            resolved.root,
            resolved.ref,
            records,
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            cpu=cpu_model(),
            keep=args.recipe is not None,
        )
        print(f"{count} golden curves of {resolved.ref} recorded", file=sys.stderr)
    text = outcome_text(records[0], validated[0].folder) if len(validated) == 1 else table(validated)
    document = records if len(cells) > 1 or args.suite else records[0]
    answer(args, document, [Screen.of().fit(text)])
    return 0 if all(record["passed"] for record in records) else 1


def _show(cells: Sequence[tuple[Cell, str]], resolved: ResolvedTarget, args: argparse.Namespace) -> None:
    recipes = resolved.root / "recipes"
    planned = [
        (str(cell), level, suite.plan(cell.recipe, Path("/out"), (), cell.choices, level, recipes, args.wrap))
        for cell, level in cells
    ]
    rows = [
        {"cell": cell, "suite": level, "jobs": [shlex.join(["primus", *job.arguments()]) for job in jobs]}
        for cell, level, jobs in planned
    ]
    table = [(cell, level, str(len(jobs))) for cell, level, jobs in planned]
    lines = Screen.of().table(table, head=("recipe", "suite", "jobs"), right=(2,))
    answer(args, rows, [*lines, f"{counted(sum(len(jobs) for *_, jobs in planned), 'job')} in {resolved.ref}"])


def _cells(
    resolved: ResolvedTarget, gpu: str, *, recipe: str | None, level: str | None
) -> tuple[tuple[Cell, str], ...]:
    target = resolved.target
    if not target.recipes and not recipe:
        raise InputError(
            f"target {resolved.name} names no recipe", where=resolved.place(), hint="primus validate --recipe NAME"
        )
    names = (recipe,) if recipe else target.recipes
    device = CPU if gpu == NO_GPU else gpu
    # The folder from which the image's recipes layer is made; this code may be installed elsewhere.
    find = partial(cells_of, gpu=device, among=resolved.root / "recipes")
    if level:
        return tuple((cell, level) for cell in find(names, every=True, precisions=target.trained_in))
    # One recipe is enough to check that runs repeat and resume. The others only have to train.
    (first,) = find(names[:1], every=False)
    whole = target.trained_in and not recipe
    rest = find(names, every=True, precisions=target.trained_in) if whole else ()
    return (first, "standard"), *((cell, "quick") for cell in rest)
