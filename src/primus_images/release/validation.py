"""Running the validation suite in an image, one container a job, and recording the evidence."""

import json
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from primus_images.release import golden
from primus_images.release.cells import Cell
from primus_images.release.hardware import Hardware, ran_on, require_gpus
from primus_images.release.records import FILE, image_folder, make_room
from primus_images.release.summary import GATE, Validated, mark
from primus_images.report.html import page
from primus_images.sandbox.container import Command, Mount, RootFs
from primus_images.sandbox.engine import Engine
from primus_images.sandbox.engines import choose
from primus_images.schema import read_json
from primus_images.terminal import say
from primus_images.training.judge import proof, suite
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import NO_GPU, Machine, Rates, Record, RecordedImage
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


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to validate.

    The jobs get the GPUs of ``hardware``, and ``wrap`` before the Python of each rank. A cell that
    has passed before is run again with ``again``, and with ``recording``, because its golden curve
    is about to be recorded and not compared.
    """

    output: Path
    engine: str
    quiet: bool
    hardware: Hardware
    again: bool = False
    recording: bool = False
    wrap: tuple[str, ...] = ()


def validate(
    plan: ImagePlan, workspace: Workspace, cells: Sequence[tuple[Cell, str]], options: Options
) -> list[Validated]:
    """Train each cell in the image of ``plan`` at its level of the suite, and check the results.

    A recipe is resolved here and again in the image; a difference fails the record. A cell that has
    already passed with the same image content, recipe, suite and GPU is not run again. For a
    preview, whose gates may fail, an earlier record counts if its jobs passed and its gates had the
    same outcome as now. On CPUs, two cells run at the same time.

    Raises HostError for a recipe with more ranks than GPUs, and KeyboardInterrupt if a job was
    interrupted. The interrupted cell then has no record; earlier cells keep theirs.
    """
    resolved = plan.resolved
    runner = choose(options.engine)
    root = root_of_image(workspace.store, workspace.unpacked, resolved.name, ref=resolved.ref)
    with choose_progress(options.quiet) as progress:
        gates = judge(examine(plan, workspace, progress))
    # Plan all cells first, so that an invalid recipe does not end the command after an hour of
    # training.
    planned = [planned_jobs(cell, level, resolved, options.wrap) for cell, level in cells]
    for jobs in planned:
        require_gpus(suite.recipe_of(jobs), options.hardware)
    together = 1
    if len(cells) > 1 and options.hardware.gpu == NO_GPU and runner.name == "podman":
        together = _TOGETHER
    validation = _Validation(
        resolved=resolved,
        root=root,
        gates=gates,
        cells=[cell for cell, _ in cells],
        runner=runner,
        options=options,
        together=together,
    )
    return _each(validation.validate_cell, planned, together, validation.stopped)


def planned_jobs(
    cell: Cell, level: str, resolved: ResolvedTarget, wrap: tuple[str, ...]
) -> tuple[Job, ...]:
    """Return the jobs of a cell at a level of the suite."""
    recipes = resolved.root / "recipes"
    request = suite.Request(recipe=cell.recipe, choices=cell.choices, among=recipes, wrap=wrap)
    return suite.plan(request, _INSIDE, level)


@dataclass(frozen=True, kw_only=True)
class _Validation:
    """The validation of one image, whose root file system is ``root``.

    When ``stopped`` is set, its jobs are interrupted.
    """

    resolved: ResolvedTarget
    root: RootFs
    gates: Checked
    cells: Sequence[Cell]
    runner: Engine
    options: Options
    together: int
    stopped: Event = field(default_factory=Event)

    @property
    def image(self) -> RecordedImage:
        return RecordedImage(
            ref=self.root.name,
            manifest=digest_of(self.root.manifest),
            content=digest_of(self.root.config_bytes),
        )

    def validate_cell(self, number: int, jobs: Sequence[Job]) -> Validated:
        """Validate the cell of a number, counted from 1."""
        cell = self.cells[number - 1]
        folder = self._folder(cell)
        shown = f"[{number}/{len(self.cells)}] {cell}"
        if not (self.options.again or self.options.recording):
            earlier = passed_before(folder, self._state(jobs), self.gates)
            if earlier:
                made = f"already trained on {earlier.made} in this image"
                self._tell(f"✓ {shown}: {made}; --again trains it again")
                return Validated(record=earlier, folder=folder, earlier=True)
        if len(self.cells) > 1:
            self._tell(f"▸ {shown}")
        make_room(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Evidence is about the bytes of the image, so they are what the jobs must read.
        self.runner.verify(self.root)
        outcomes = suite.run(jobs, lambda job: self._run(job, folder))
        record = self._record(jobs, outcomes)
        if not self.options.recording:
            record = _with_curve(record, self.resolved)
        content = json.dumps(record.as_json(), indent=2, ensure_ascii=False, allow_nan=False)
        write_file(folder / FILE, content + "\n")
        (folder / "report.html").write_text(page(record), encoding="utf-8")
        if self.together > 1:
            self._tell(f"{mark(record.passed)} {shown}: {len(record.verdicts)} checks")
        return Validated(record=record, folder=folder)

    def _folder(self, cell: Cell) -> Path:
        """Return the folder of a cell's validation: that of the image, the cell and the GPU."""
        name = cell.folder
        if self.options.hardware.gpu != NO_GPU:
            name += f"-{self.options.hardware.gpu}"
        return image_folder(self.options.output / self.resolved.name, self.image) / name

    def _tell(self, line: str) -> None:
        if not self.options.quiet:
            say(line)

    def _state(self, jobs: Sequence[Job]) -> tuple[str, ...]:
        recipe = suite.recipe_of(jobs)
        return (
            self.image.content,
            recipe.digest,
            suite.digest(recipe, jobs),
            self.options.hardware.gpu,
            shlex.join(jobs[0].wrap),
        )

    def _run(self, job: Job, folder: Path) -> Outcome:
        """Run a job in a container of its own, with ``folder`` as ``/out``."""
        if self.stopped.is_set():
            raise KeyboardInterrupt
        here = folder / job.output.relative_to(_INSIDE)
        if here.exists():
            # Files of an interrupted validation must not be mistaken for those of this one.
            shutil.rmtree(here)
        here.mkdir(parents=True)  # a refused job writes its reason only to a folder that exists
        show = self.together == 1 and not self.options.quiet
        if show:
            say(f"▸ {job.name}: primus {' '.join(job.arguments())}")
        command = Command(
            argv=("timeout", "--kill-after=20", str(_JOB_SECONDS), "primus", *job.arguments()),
            env={"PRIMUS_NO_BANNER": "1"},
            mounts=(Mount(source=folder, target=str(_INSIDE), read_only=False),),
            devices=self.options.hardware.devices,
        )
        console = folder / f"{job.name}.console.txt"
        with console.open("wb") as log:
            code = self.runner.run(self.root, command, stdout=log, stderr=None if show else log)
        if code in _INTERRUPTED or self.stopped.is_set():
            raise KeyboardInterrupt
        return outcome.read(job, code, here, _no_run(code, here, console.name))

    def _record(self, jobs: Sequence[Job], outcomes: Mapping[str, Outcome]) -> Record:
        hardware = self.options.hardware
        verdicts = [*suite.judge(jobs, outcomes)]
        not_run = []
        if hardware.gpu != NO_GPU:
            verdicts.append(ran_on(hardware.gpu, outcomes))
        elif self.resolved.arch:
            why = f" ({hardware.why})" if hardware.why else ""
            not_run.append(
                f"the GPU part ({self.resolved.arch}): the jobs ran on the CPU{why}, which does "
                "not count as a pass for the GPU"
            )
        unjudged = proof.unjudged(suite.recipe_of(jobs))
        if unjudged:
            not_run.append(f"the comparison with the reference: {unjudged}")
        not_run += suite.left_out(suite.recipe_of(jobs), jobs)
        verdicts += [_gate_verdict(report) for report in self.gates.reports]
        machine = Machine(gpus=hardware.names, driver=hardware.driver, firmware=hardware.firmware)
        place = suite.Place(
            target=self.resolved.name,
            image=self.image,
            gpu=hardware.gpu,
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            engine=self.runner.name,
            machine=machine,
        )
        record = suite.record(jobs, outcomes, verdicts, place)
        return replace(
            record,
            suite=replace(record.suite, rates=_suite_rates(self.resolved.root)),
            gates=self.gates.as_json(),
            not_run=tuple(not_run),
        )


def _each(
    validate_cell: Callable[[int, Sequence[Job]], Validated],
    planned: Sequence[Sequence[Job]],
    together: int,
    stopped: Event,
) -> list[Validated]:
    if together == 1:
        return [validate_cell(number, jobs) for number, jobs in enumerate(planned, 1)]
    with ThreadPoolExecutor(together) as pool:
        futures = [
            pool.submit(validate_cell, number, jobs) for number, jobs in enumerate(planned, 1)
        ]
        try:
            return [future.result() for future in futures]
        except BaseException:
            # Only this thread gets signals. The others must neither go on nor write records of jobs
            # that were ended.
            for future in futures:
                future.cancel()
            stopped.set()
            stop_all()
            raise


def _no_run(code: int, output: Path, console: str) -> str:
    """Return why a job has no log: it hung, or was refused before its ranks started.

    Empty if it has one.
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


def passed_before(folder: Path, state: tuple[str, ...], gates: Checked) -> Record | None:
    """Return the record in ``folder`` if its jobs passed, in the same state as now.

    The state is image content, recipe, suite, GPU and wrapper. The gates must have the same outcome
    as now, too.
    """
    try:
        record = Record.of(read_json(folder / FILE).data)
    except (OSError, InputError):
        return None
    before = (
        record.image.content,
        record.recipe.sha256,
        record.suite.sha256,
        record.gpu,
        record.wrap,
    )
    judged = {v.name: v.passed for v in record.verdicts if v.name.startswith(GATE)}
    now = {f"{GATE}{report.gate}": report.passed for report in gates.reports}
    trained = all(verdict.name in judged for verdict in record.failed)
    if before == state and judged == now and trained and record.verdicts:
        return record
    return None


def _suite_rates(root: Path) -> Rates | None:
    """Return what the repository last recorded of the suite itself; None without such records."""
    try:
        faults = _result(root, "silent-faults")
        healthy = _result(root, "healthy-seeds")
        return Rates(
            faults=len(faults["faults"]),
            named=sum(bool(fault["named_by"]) for fault in faults["faults"]),
            healthy=len(healthy["runs"]),
            refused=sum(bool(run["failed"]) for run in healthy["runs"]),
            recorded=(faults["date"], healthy["date"]),
        )
    except (OSError, InputError, KeyError, TypeError):
        return None


def _result(root: Path, name: str) -> Any:
    return read_json(root / f"benchmarks/results/{name}.json").data


def _with_curve(record: Record, resolved: ResolvedTarget) -> Record:
    """Return the record with the comparison of its losses with the golden curve."""
    if golden.name_of(record) is None or not record.passed:
        return record
    recorded = golden.recorded(resolved.root, resolved.name + resolved.choice.suffix)
    comparison = golden.compared(recorded, record)
    if isinstance(comparison, str):
        return replace(record, not_run=(*record.not_run, comparison))
    return replace(record, verdicts=(*record.verdicts, comparison), passed=comparison.passed)


def _gate_verdict(report: GateReport) -> Verdict:
    reason = report.summary
    if report.errors:
        reason += f"; {report.errors[0].path}: {report.errors[0].message}"
    return Verdict(name=f"{GATE}{report.gate}", passed=report.passed, reason=reason)
