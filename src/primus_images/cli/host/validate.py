"""`primus validate`: train in a built image, and check the results."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from primus_images.cli.host.common import SingleOptions, resolved_target
from primus_images.cli.verb import answer, note
from primus_images.engine.pipeline import Options as BuildOptions, build
from primus_images.errors import InputError
from primus_images.plan.layers import plan_images
from primus_images.plan.resolve import ResolvedTarget
from primus_images.recipes.choose import CPU
from primus_images.release import golden
from primus_images.release.cells import Cell, cell_of, cells_of
from primus_images.release.hardware import choose_gpus, cpu_model
from primus_images.release.summary import Validated, outcome_text, table
from primus_images.release.validation import Options, planned_jobs, validate as validate_cells
from primus_images.terminal import Screen, counted, say
from primus_images.training.judge.record import NO_GPU

Cells = Sequence[tuple[Cell, str]]
"""Cells, each with a level of the suite."""


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(SingleOptions):
    """The options of ``validate``."""

    offline: bool
    recipe: str | None
    suite: str | None
    again: bool
    record_golden: bool
    output: Path | None
    engine: str
    wrap: Sequence[str]
    gpus: str | None
    dry_run: bool


def validate(options: ValidateOptions) -> int:
    """Build the image, train in it and check the results.

    Each job of the suite runs in its own container.
    """
    if options.record_golden and not options.suite:
        raise InputError(
            "--record-golden records every backend and mode of a recipe", hint="add --suite quick"
        )
    resolved, workspace = resolved_target(options)
    if options.record_golden and options.recipe:
        locked = resolved.lock.files if resolved.lock else ()
        golden.check_locked(resolved.root, resolved.ref, locked)
    hardware = choose_gpus(options.gpus, resolved.gpu)
    if hardware.names or hardware.why:
        names = ", ".join(hardware.names) or f"none ({hardware.why})"
        note(options, f"GPUs: {names}")
    cells = cells_to_train(resolved, hardware.gpu, recipe=options.recipe, level=options.suite)
    if options.dry_run:
        return _show(cells, resolved, options)
    build_options = BuildOptions(offline=options.offline, engine=options.engine, quiet=options.json)
    (built,) = build(plan_images([resolved], workspace.stats), workspace, build_options)
    workspace.stats.save()
    validated = validate_cells(
        built.image.plan,
        workspace,
        cells,
        Options(
            output=(options.output or resolved.root / "out" / "validation").absolute(),
            engine=options.engine,
            quiet=options.json,
            hardware=hardware,
            again=options.again,
            recording=options.record_golden,
            wrap=tuple(options.wrap),
        ),
    )
    if options.record_golden:
        _record_golden(resolved, validated, keep=options.recipe is not None)
    return _report(validated, options)


def cells_to_train(
    resolved: ResolvedTarget, gpu: str, *, recipe: str | None, level: str | None
) -> Cells:
    """Return the cells that a validation of the target trains, each with its level of the suite."""
    target = resolved.target
    if not target.recipes and not recipe:
        raise InputError(
            f"target {resolved.name} names no recipe",
            where=resolved.place(),
            hint="primus validate --recipe NAME",
        )
    names = (recipe,) if recipe else target.recipes
    device = CPU if gpu == NO_GPU else gpu
    # The folder from which the image's recipes layer is made; this code may be installed elsewhere.
    cells = cells_of(names, device, target.trained_in, resolved.root / "recipes")
    if level:
        return [(cell, level) for cell in cells]
    # One recipe is enough to check that runs repeat and resume. The others only have to train.
    chosen = [(cell_of(names[0], device), "standard")]
    if target.trained_in and not recipe:
        chosen += [(cell, "quick") for cell in cells]
    return chosen


def _show(cells: Cells, resolved: ResolvedTarget, options: ValidateOptions) -> int:
    rows = []
    counts = []
    total = 0
    for cell, level in cells:
        jobs = planned_jobs(cell, level, resolved, tuple(options.wrap))
        commands = [shlex.join(["primus", *job.arguments()]) for job in jobs]
        rows.append({"cell": str(cell), "suite": level, "jobs": commands})
        counts.append((str(cell), level, str(len(jobs))))
        total += len(jobs)
    lines = Screen.of().table(counts, head=("recipe", "suite", "jobs"), right=(2,))
    return answer(options, rows, [*lines, f"{counted(total, 'job')} in {resolved.ref}"])


def _record_golden(resolved: ResolvedTarget, validated: Sequence[Validated], *, keep: bool) -> None:
    records = [cell.record for cell in validated]
    today = time.strftime("%Y-%m-%d", time.gmtime())
    curves = golden.of_records(resolved.ref, records, date=today, cpu=cpu_model())
    golden.save(resolved.root, curves, keep=keep)
    say(f"{len(curves.curves)} golden curves of {resolved.ref} recorded")


def _report(validated: Sequence[Validated], options: ValidateOptions) -> int:
    documents = [cell.record.as_json() for cell in validated]
    if len(validated) == 1:
        text = outcome_text(validated[0].record, validated[0].folder)
    else:
        text = table(validated)
    passed = all(cell.record.passed for cell in validated)
    document = documents if len(documents) > 1 or options.suite else documents[0]
    return answer(options, document, [Screen.of().fit(text)], passed=passed)
