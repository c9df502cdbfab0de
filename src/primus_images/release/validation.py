"""Running the validation suite in an image, one container a job, and recording the evidence."""

import json
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

from primus_images.engine.workshop import root_of_image
from primus_images.errors import InputError
from primus_images.files import write_file
from primus_images.gates.check import Outcome as Checked, judge
from primus_images.gates.examined import GateReport, examine
from primus_images.oci.store import digest_of
from primus_images.plan.action import ImagePlan
from primus_images.plan.project import Workspace
from primus_images.plan.resolve import ResolvedTarget
from primus_images.programs import stop_all
from primus_images.progress import choose_progress
from primus_images.refusals import refusal
from primus_images.release import golden
from primus_images.release.cells import Cell
from primus_images.release.hardware import NO_GPU, Hardware, ran_on, require_gpus
from primus_images.release.summary import GATE, Validated, mark
from primus_images.report.html import page
from primus_images.sandbox.container import Command, Devices, Mount, RootFs
from primus_images.sandbox.engines import Engine, choose
from primus_images.schema import read_json
from primus_images.terminal import say
from primus_images.training.judge import proof, suite
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.suite import Request
from primus_images.training.run import outcome
from primus_images.training.run.job import Job
from primus_images.training.run.outcome import Outcome, read_result

_INSIDE = Path("/out")
# A proxy trains in well under a minute. A job that takes longer than this hangs and must fail (exit
# code 124).
_JOB_SECONDS = 900
_TIMED_OUT = 124
# How many cells are validated at the same time on CPUs. A job waits a lot: for its other rank, its
# files, its disk.
_TOGETHER = 2
# 128 + SIGINT or SIGTERM: the user ended the job, so the job says nothing about the image.
_INTERRUPTED = (130, 143)


def validate(  # noqa: PLR0913
    plan: ImagePlan,
    workspace: Workspace,
    cells: Sequence[tuple[Cell, str]],
    *,
    output: Path,
    engine: str,
    quiet: bool,
    again: bool = False,
    recording: bool = False,
    hardware: Hardware,
    wrap: tuple[str, ...] = (),
) -> list[Validated]:
    """Train each cell in the image of ``plan`` at its level of the suite, and check the results.

    A recipe is resolved here and again in the image; a difference fails the record. A cell that has
    already passed with the same image content, recipe, suite and GPU is not run again, unless
    ``again`` is set. With ``recording``, all cells are run and not compared with golden curves,
    because these are about to be recorded. For a preview, whose gates may fail, an earlier record
    counts if its jobs passed and its gates had the same outcome as now. The jobs get the GPUs of
    ``hardware``, and ``wrap`` before the Python of each rank. On CPUs, two cells run at the same
    time.

    Raises HostError for a recipe with more ranks than GPUs, and KeyboardInterrupt if a job was
    interrupted. The interrupted cell then has no record; earlier cells keep theirs.
    """
    resolved = plan.resolved
    if quiet:

        def tell(_):
            return None
    else:
        tell = say
    runner = choose(engine)
    root = root_of_image(workspace.store, workspace.unpacked, resolved.name, ref=resolved.ref)
    with choose_progress(quiet) as progress:
        gates = judge(examine(plan, workspace, progress))
    image = {
        "ref": root.name,
        "manifest": digest_of(root.manifest),
        "content": digest_of(root.config_bytes),
    }
    # Plan all cells first, so that an invalid recipe does not end the command after an hour of
    # training.
    recipes = resolved.root / "recipes"
    planned = [
        suite.plan(
            Request(recipe=cell.recipe, choices=cell.choices, among=recipes, wrap=wrap),
            _INSIDE,
            level,
        )
        for cell, level in cells
    ]
    for jobs in planned:
        require_gpus(suite.recipe_of(jobs), hardware)
    together = 1
    if len(cells) > 1 and hardware.gpu == NO_GPU and runner.name == "podman":
        together = _TOGETHER
    stopped = Event()

    def validate_cell(number: int, jobs: Sequence[Job]) -> Validated:
        cell, _ = cells[number - 1]
        folder = output / resolved.name / cell.folder
        shown = f"[{number}/{len(cells)}] {cell}"
        if not (again or recording) and (
            earlier := _passed_before(folder, image, jobs, gates, hardware.gpu)
        ):
            tell(
                f"✓ {shown}: already trained on {earlier['made']} in this image; --again trains "
                "it again"
            )
            return Validated(record=earlier, folder=folder, earlier=True)
        if len(cells) > 1:
            tell(f"▸ {shown}")
        run_job = _runner(
            runner, root, folder, hardware.devices, stopped, show=together == 1 and not quiet
        )
        record = _evidence(
            resolved, jobs, suite.run(jobs, run_job), gates, image, runner.name, hardware
        )
        if not recording:
            _compare_curve(resolved, record)
        write_file(
            folder / "record.json",
            json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        )
        (folder / "report.html").write_text(page(record), encoding="utf-8")
        if together > 1:
            tell(f"{mark(record)} {shown}: {len(record['verdicts'])} checks")
        return Validated(record=record, folder=folder)

    return _each(validate_cell, planned, together, stopped)


def _each(
    validate_cell: Callable[[int, Sequence[Job]], Validated],
    planned: Sequence[Sequence[Job]],
    together: int,
    stopped: Event,
) -> list[Validated]:
    if together == 1:
        return [validate_cell(number, jobs) for number, jobs in enumerate(planned, 1)]
    with ThreadPoolExecutor(together) as pool:
        waiting = [
            pool.submit(validate_cell, number, jobs) for number, jobs in enumerate(planned, 1)
        ]
        try:
            return [each.result() for each in waiting]
        except BaseException:
            # Only this thread gets signals. The others must neither go on nor write records of jobs
            # that were ended.
            for each in waiting:
                each.cancel()
            stopped.set()
            stop_all()
            raise


def _runner(  # noqa: PLR0913
    runner: Engine, root: RootFs, folder: Path, devices: Devices, stopped: Event, *, show: bool
) -> Callable[[Job], Outcome]:
    """Return a function that runs each job in its own container, with ``folder`` as ``/out``.

    With ``show``, its progress is shown. When ``stopped`` is set, jobs are interrupted.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def run_job(job: Job) -> Outcome:
        if stopped.is_set():
            raise KeyboardInterrupt
        here = folder / job.output.relative_to(_INSIDE)
        if here.exists():
            # Files of an earlier validation must not be mistaken for those of this one.
            shutil.rmtree(here)
        here.mkdir(parents=True)  # a refused job writes its reason only to a folder that exists
        if show:
            say(f"▸ {job.name}: primus {' '.join(job.arguments())}")
        command = Command(
            argv=("timeout", "--kill-after=20", str(_JOB_SECONDS), "primus", *job.arguments()),
            env={"PRIMUS_NO_BANNER": "1"},
            mounts=(Mount(source=folder, target=str(_INSIDE), read_only=False),),
            devices=devices,
        )
        console = folder / f"{job.name}.console.txt"
        with console.open("wb") as log:
            code = runner.run(root, command, stdout=log, stderr=None if show else log)
        if code in _INTERRUPTED or stopped.is_set():
            raise KeyboardInterrupt
        return outcome.read(job, code, here, _no_run(code, here, console.name))

    return run_job


def _no_run(code: int, output: Path, console: str) -> str:
    """Return why a job has no log: it hung, or was refused before its ranks started. Empty if it
    has one.
    """
    if code == _TIMED_OUT:
        return f"the job did not end within {_JOB_SECONDS} s"
    if code == 0 or (output / "log.txt").exists():
        return ""
    with suppress(OSError, InputError):
        refused = read_result(output).refused
        if refused:
            return refused
    return f"the job did not start (exit code {code}); {console} has what it printed"


def _passed_before(
    folder: Path, image: Mapping[str, Any], jobs: Sequence[Job], gates: Checked, gpu: str = NO_GPU
) -> dict[str, Any] | None:
    recipe = suite.recipe_of(jobs)
    try:
        record: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        state = (
            record["image"]["content"],
            record["recipe"]["sha256"],
            record["suite"]["sha256"],
            record["gpu"],
        )
        verdicts = {verdict["name"]: verdict["passed"] for verdict in record["verdicts"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    judged = {name: passed for name, passed in verdicts.items() if name.startswith(GATE)}
    trained = all(passed for name, passed in verdicts.items() if name not in judged)
    now = (image["content"], recipe.digest, suite.digest(recipe, jobs), gpu)
    same = record.get("wrap", "") == shlex.join(jobs[0].wrap) and state == now
    same_gates = judged == {f"{GATE}{report.gate}": report.passed for report in gates.reports}
    if same and same_gates and trained and verdicts:
        return record
    return None


def _evidence(  # noqa: PLR0913, PLR0917
    resolved: ResolvedTarget,
    jobs: Sequence[Job],
    outcomes: Mapping[str, Outcome],
    gates: Checked,
    image: Mapping[str, Any],
    engine: str,
    hardware: Hardware,
) -> dict[str, Any]:
    verdicts = [*suite.judge(jobs, outcomes)]
    not_run = []
    if hardware.gpu != NO_GPU:
        verdicts.append(ran_on(hardware.gpu, outcomes))
    elif resolved.arch:
        why = ""
        if hardware.why:
            why = f" ({hardware.why})"
        not_run.append(refusal("no_gpu_part", arch=resolved.arch, why=why).message)
    unjudged = proof.unjudged(suite.recipe_of(jobs))
    if unjudged:
        not_run.append(f"the comparison with the reference: {unjudged}")
    machine = {
        "gpus": list(hardware.names),
        "driver": hardware.driver,
        "firmware": hardware.firmware,
    }
    record = suite.record(
        jobs,
        outcomes,
        [*verdicts, *map(_gate_verdict, gates.reports)],
        target=resolved.name,
        image=image,
        gpu=hardware.gpu,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        extra={"engine": engine, "machine": machine, "gates": gates.as_json(), "not_run": not_run},
    )
    record["suite"]["rates"] = _suite_rates(resolved.root)
    return record


def _suite_rates(root: Path) -> dict[str, Any] | None:
    """Return what the repository last recorded of the suite itself; None without such records."""
    try:
        faults, healthy = (
            read_json(root / f"benchmarks/results/{name}.json").data
            for name in ("silent-faults", "healthy-seeds")
        )
        return {
            "faults": len(faults["faults"]),
            "named": sum(bool(fault["named_by"]) for fault in faults["faults"]),
            "healthy": len(healthy["runs"]),
            "refused": sum(bool(run["failed"]) for run in healthy["runs"]),
            "recorded": [faults["date"], healthy["date"]],
        }
    except (OSError, InputError, KeyError, TypeError):
        return None


def _compare_curve(resolved: ResolvedTarget, evidence: dict[str, Any]) -> None:
    if golden.name_of(evidence) and evidence["passed"]:
        against = golden.compared(
            golden.recorded(resolved.root, resolved.name + resolved.choice.suffix), evidence
        )
        if isinstance(against, str):
            evidence["not_run"].append(against)
        else:
            evidence["verdicts"].append(asdict(against))
            evidence["passed"] = against.passed


def _gate_verdict(report: GateReport) -> Verdict:
    more = ""
    if report.errors:
        more = f"; {report.errors[0].path}: {report.errors[0].message}"
    return Verdict(name=f"{GATE}{report.gate}", passed=report.passed, reason=report.summary + more)
