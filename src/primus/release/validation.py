"""Running the validation suite in an image, with one container per job, and recording the evidence.

A validation trains cells of recipes, and its jobs get GPUs.
"""

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from primus.engine.workshop import root_of_image
from primus.errors import HostError, InputError
from primus.files import write_file
from primus.gates.check import Outcome as Checked, judge
from primus.gates.examined import GateReport, examine
from primus.gpus.detect import detect
from primus.gpus.table import Generation, by_product_name
from primus.oci.store import digest_of
from primus.plan.action import ImagePlan
from primus.plan.project import Workspace
from primus.plan.resolve import ResolvedTarget
from primus.programs import stop_all
from primus.progress import choose_progress
from primus.recipes import load
from primus.recipes.choose import CPU, PROXY_PRECISION, computes, supported
from primus.recipes.recipe import Recipe
from primus.recipes.setting import Choices
from primus.release import golden
from primus.report.html import page
from primus.sandbox.container import Command, Devices, Mount, RootFs, gpus
from primus.sandbox.engines import Engine, choose
from primus.schema import read_json
from primus.terminal import PLAIN, say
from primus.training import outcome, proof, suite
from primus.training.checks import Verdict
from primus.training.job import Job
from primus.training.outcome import Outcome, read_result

_INSIDE = Path("/out")
# A proxy trains in well under a minute. A job that takes longer than this hangs and must fail (exit code 124).
_JOB_SECONDS = 900
_TIMED_OUT = 124
# How many cells are validated at the same time on CPUs. A job waits a lot: for its other rank, its files, its disk.
_TOGETHER = 2
# 128 + SIGINT or SIGTERM: the user ended the job, so the job says nothing about the image.
_INTERRUPTED = (130, 143)
_GATE = "gate "
NO_GPU = "none"


class Cell(NamedTuple):
    """One recipe with one set of choices. ``choices`` contains the choices that differ from the recipe's defaults."""

    recipe: str
    choices: Choices
    folder: str

    def __str__(self) -> str:
        chosen = (self.choices.backend, self.choices.mode, self.choices.precision)
        return " ".join([self.recipe, *(word for word in chosen if word)])


def cells_of(
    recipes: Iterable[str], *, every: bool, gpu: str = CPU, precisions: Sequence[str] = (), among: Path | None = None
) -> tuple[Cell, ...]:
    """Return the cells of ``recipes``, which train their proxies on ``gpu`` (a generation or ``cpu``).

    ``among`` is the folder of recipes. With ``every``, there is a cell for each backend and mode that a recipe
    supports, otherwise only for its defaults. With ``precisions``, there is a cell for each of them that the backend
    supports for this recipe on ``gpu``, otherwise only for the proxy's own. Raises InputError for an unknown recipe, or
    one without a cell.
    """
    proxy = Choices(gpu=gpu, proxy=True)
    cells: list[Cell] = []
    for name in recipes:
        short = name.rpartition("/")[2].removesuffix(".yaml")
        if not every:
            cells.append(Cell(recipe=name, choices=proxy, folder=short))
            continue
        path = load.find(name, among)
        of_recipe = [
            Cell(
                recipe=name,
                choices=replace(proxy, backend=backend, mode=mode, precision=precision),
                folder="-".join(filter(None, (short, backend, mode, precision))),
            )
            for (backend, mode), offered in supported(load.read(path).settings).items()
            for precision in precisions or (None,)
            if precision is None or (precision in {PROXY_PRECISION, *offered} and computes(gpu, precision, backend))
        ]
        if not of_recipe:
            raise InputError(
                f"recipe {name} is trained in none of {', '.join(precisions)} on {gpu}",
                where=str(path),
                hint="add a precision that it supports to `trained_in` of the target",
            )
        cells += of_recipe
    return tuple(cells)


class Hardware(NamedTuple):
    """The GPUs that the jobs get.

    ``gpu`` is the name of the generation, or "none" for the CPU. ``names`` has one entry per GPU, as the driver reports
    it. ``driver`` and ``firmware`` are versions. ``why`` is the reason for using the CPU although the target is for a
    GPU.
    """

    gpu: str = NO_GPU
    names: tuple[str, ...] = ()
    driver: str = ""
    firmware: str = ""
    devices: Devices = Devices()
    why: str = ""


def choose_gpus(count: str | None, target_gpu: Generation | None) -> Hardware:
    """Return the GPUs for ``count``: ``all``, a number, or ``none``.

    None means all if the machine has the GPU that the target is for (``target_gpu``), otherwise none. Raises HostError
    if the machine lacks these GPUs, or if their product cannot be identified, because a record must name it.
    """
    machine = detect()
    if count is None:
        if target_gpu is None:
            return Hardware()
        if machine.generation != target_gpu.name:
            return Hardware(why=f"the target is for {target_gpu.title}; this machine: {machine.sentence()}")
        count = "all"
    if count == NO_GPU:
        return Hardware(why="--gpus none" if target_gpu else "")
    devices = gpus(count)
    if not machine.generation:
        raise HostError(
            f"--gpus {count}: the record must name the GPU, but this machine's cannot be identified: "
            f"{machine.sentence() if machine.names else 'its driver reports none'}",
            hint="--gpus none validates on the CPU",
        )
    names = machine.names if count == "all" else machine.names[: int(count)]
    return Hardware(
        gpu=machine.generation, names=names, driver=machine.driver, firmware=machine.firmware, devices=devices
    )


def ran_on(gpu: str, outcomes: Mapping[str, Outcome]) -> Verdict:
    """Check that every job reports, from its own process, a GPU of generation ``gpu``."""
    elsewhere = []
    for name, facts in ((name, ended.facts) for name, ended in outcomes.items()):
        device = facts.get("device", "unknown")
        product = facts.get("gpu") if device == "cuda" else device
        generation = by_product_name(str(product))
        if generation is None or generation.name != gpu:
            elsewhere.append(f"{name} ran on {product}")
    reason = "; ".join(elsewhere) or f"every job ran on {gpu}"
    return Verdict(name="on the GPU", passed=bool(outcomes) and not elsewhere, reason=reason)


def cpu_model() -> str:
    """Return the model of this machine's CPU from the kernel. Virtual machines often report only a general name."""
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    numbers = [f"{key} {entries[key]}" for key in ("cpu family", "model", "stepping") if key in entries]
    return ", ".join([entries.get("model name", "unknown"), *numbers])


class Validated(NamedTuple):
    """The evidence of one cell, its folder, and whether it is from an earlier validation."""

    record: dict[str, Any]
    folder: Path
    earlier: bool = False


def validate(
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

    A recipe is resolved here and again in the image; a difference fails the record. A cell that has already passed with
    the same image content, recipe, suite and GPU is not run again, unless ``again`` is set. With ``recording``, all
    cells are run and not compared with golden curves, because these are about to be recorded. For a preview, whose
    gates may fail, an earlier record counts if its jobs passed and its gates had the same outcome as now. The jobs get
    the GPUs of ``hardware``, and ``wrap`` before the Python of each rank. On CPUs, two cells run at the same time.

    Raises HostError for a recipe with more ranks than GPUs, and KeyboardInterrupt if a job was interrupted. The
    interrupted cell then has no record; earlier cells keep theirs.
    """
    resolved = plan.resolved
    tell = (lambda _: None) if quiet else say
    runner = choose(engine)
    root = root_of_image(workspace.store, workspace.unpacked, resolved.name, ref=resolved.ref)
    with choose_progress(quiet) as progress:
        gates = judge(examine(plan, workspace, progress))
    image = {"ref": root.name, "manifest": digest_of(root.manifest), "content": digest_of(root.config_bytes)}
    # Plan all cells first, so that an invalid recipe does not end the command after an hour of training.
    recipes = resolved.root / "recipes"
    planned = [suite.plan(cell.recipe, _INSIDE, (), cell.choices, level, recipes, wrap) for cell, level in cells]
    for jobs in planned:
        _enough(suite.recipe_of(jobs), hardware)
    together = _TOGETHER if len(cells) > 1 and hardware.gpu == NO_GPU and runner.name == "podman" else 1
    stopped = Event()

    def validate_cell(number: int, jobs: Sequence[Job]) -> Validated:
        cell, _ = cells[number - 1]
        folder = output / resolved.name / cell.folder
        shown = f"[{number}/{len(cells)}] {cell}"
        if not (again or recording) and (earlier := _passed_before(folder, image, jobs, gates, hardware.gpu)):
            tell(f"✓ {shown}: already trained on {earlier['made']} in this image; --again trains it again")
            return Validated(record=earlier, folder=folder, earlier=True)
        if len(cells) > 1:
            tell(f"▸ {shown}")
        run_job = _runner(runner, root, folder, hardware.devices, stopped, show=together == 1 and not quiet)
        record = _evidence(resolved, jobs, suite.run(jobs, run_job), gates, image, runner.name, hardware)
        if not recording:
            _compare_curve(resolved, record)
        write_file(folder / "record.json", json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        (folder / "report.html").write_text(page(record), encoding="utf-8")
        if together > 1:
            tell(f"{_mark(record)} {shown}: {len(record['verdicts'])} checks")
        return Validated(record=record, folder=folder)

    return _each(validate_cell, planned, together, stopped)


def _each(
    validate_cell: Callable[[int, Sequence[Job]], Validated], planned: Sequence[Sequence[Job]], together: int,
    stopped: Event,
) -> list[Validated]:  # fmt: skip
    if together == 1:
        return [validate_cell(number, jobs) for number, jobs in enumerate(planned, 1)]
    with ThreadPoolExecutor(together) as pool:
        waiting = [pool.submit(validate_cell, number, jobs) for number, jobs in enumerate(planned, 1)]
        try:
            return [each.result() for each in waiting]
        except BaseException:
            # Only this thread gets signals. The others must neither go on nor write records of jobs that were ended.
            for each in waiting:
                each.cancel()
            stopped.set()
            stop_all()
            raise


def _enough(recipe: Recipe, hardware: Hardware) -> None:
    if hardware.gpu != NO_GPU and recipe.world_size > len(hardware.names):
        raise HostError(
            f"{recipe.name} trains on {recipe.world_size} GPUs, but its job gets {len(hardware.names)}",
            hint="--gpus none validates on the CPU",
        )


def _runner(
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
            tty=False,
        )
        console = folder / f"{job.name}.console.txt"
        with console.open("wb") as log:
            code = runner.run(root, command, stdout=log, stderr=None if show else log)
        if code in _INTERRUPTED or stopped.is_set():
            raise KeyboardInterrupt
        return outcome.read(job, code, here, _no_run(code, here, console.name))

    return run_job


def _no_run(code: int, output: Path, console: str) -> str:
    """Return why a job has no log: it hung, or was refused before its ranks started. Empty if it has one."""
    if code == _TIMED_OUT:
        return f"the job did not end within {_JOB_SECONDS} s"
    if code == 0 or (output / "log.txt").exists():
        return ""
    with suppress(OSError, InputError):
        if refused := read_result(output).refused:
            return refused
    return f"the job did not start (exit code {code}); {console} has what it printed"


def _passed_before(
    folder: Path, image: Mapping[str, Any], jobs: Sequence[Job], gates: Checked, gpu: str = NO_GPU
) -> dict[str, Any] | None:
    recipe = suite.recipe_of(jobs)
    try:
        record: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        state = (record["image"]["content"], record["recipe"]["sha256"], record["suite"]["sha256"], record["gpu"])
        verdicts = {verdict["name"]: verdict["passed"] for verdict in record["verdicts"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    judged = {name: passed for name, passed in verdicts.items() if name.startswith(_GATE)}
    trained = all(passed for name, passed in verdicts.items() if name not in judged)
    now = (image["content"], recipe.digest, suite.digest(recipe, jobs), gpu)
    same = record.get("wrap", "") == shlex.join(jobs[0].wrap) and state == now
    same_gates = judged == {f"{_GATE}{report.gate}": report.passed for report in gates.reports}
    return record if same and same_gates and trained and verdicts else None


def _evidence(
    resolved: ResolvedTarget, jobs: Sequence[Job], outcomes: Mapping[str, Outcome], gates: Checked,
    image: Mapping[str, Any], engine: str, hardware: Hardware,
) -> dict[str, Any]:  # fmt: skip
    verdicts = [*suite.judge(jobs, outcomes)]
    not_run = []
    if hardware.gpu != NO_GPU:
        verdicts.append(ran_on(hardware.gpu, outcomes))
    elif resolved.arch:
        why = f" ({hardware.why})" if hardware.why else ""
        not_run.append(
            f"the GPU part ({resolved.arch}): the jobs ran on the CPU{why}, which does not count as a pass for the GPU"
        )
    if unjudged := proof.unjudged(suite.recipe_of(jobs)):
        not_run.append(f"the comparison with the reference: {unjudged}")
    machine = {"gpus": list(hardware.names), "driver": hardware.driver, "firmware": hardware.firmware}
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
            read_json(root / f"benchmarks/results/{name}.json").data for name in ("silent-faults", "healthy-seeds")
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
        against = golden.compared(golden.recorded(resolved.root, resolved.name + resolved.choice.suffix), evidence)
        if isinstance(against, str):
            evidence["not_run"].append(against)
        else:
            evidence["verdicts"].append(asdict(against))
            evidence["passed"] = against.passed


def _gate_verdict(report: GateReport) -> Verdict:
    errors = [f for f in report.findings if f.severity == "error"]
    more = f"; {errors[0].path}: {errors[0].message}" if errors else ""
    return Verdict(name=f"{_GATE}{report.gate}", passed=report.passed, reason=report.summary + more)


def table(validated: Sequence[Validated]) -> str:
    """Return one line per cell, and a summary line."""
    rows = []
    for cell in validated:
        record = cell.record
        losses = _losses(record)
        curve = f"loss {losses[0]:.3f} → {losses[-1]:.3f}" if losses else "no loss"
        failed = [v["name"] for v in record["verdicts"] if not v["passed"] and not v.get("skipped")]
        cause = next((f": {job['cause']}" for job in record["jobs"] if job.get("cause")), "")
        checks = f"✗ {', '.join(failed)}{cause}" if failed else f"{len(record['verdicts'])} checks"
        runs, kept = f"{len(record['jobs'])} runs", "  (kept)" if cell.earlier else ""
        name = f"{_mark(record)} {cell.folder.name}"
        rows.append((name, record["recipe"]["precision"], runs, curve, f"{checks}{kept}"))
    passed = sum(cell.record["passed"] for cell in validated)
    faults = {v["name"] for cell in validated for v in cell.record["verdicts"] if not v["passed"]}
    # Gates concern the image and fail in every cell, which must not hide that the jobs passed.
    image_only = faults and all(name.startswith(_GATE) for name in faults)
    because = f"; every job passed, but the image fails {', '.join(sorted(faults))}" if image_only else ""
    summary = "passed" if passed == len(validated) else "FAILED"
    return "\n".join([*PLAIN.table(rows), f"{summary}: {passed} of {len(validated)} passed{because}"])


def _mark(verdict: Mapping[str, Any]) -> str:
    return "✓" if verdict["passed"] else "✗"


def outcome_text(record: dict[str, Any], folder: Path) -> str:
    """Return the verdicts and the loss curve as a few lines."""
    lines = []
    jobs: dict[str, list[str]] = {job["name"]: [] for job in record["jobs"]}
    skipped: dict[str, list[str]] = {}
    causes = []
    for verdict in record["verdicts"]:
        job, colon, name = verdict["name"].partition(": ")
        if verdict.get("skipped"):
            skipped.setdefault(verdict["reason"], []).append(verdict["name"])
        elif verdict["passed"] and colon and job in jobs:
            jobs[job].append(name)
        elif name == "exit code" and not verdict["passed"]:
            causes.append(f"  ✗ {job} failed: {verdict['reason']}")
        else:
            lines.append(f"  {_mark(verdict)} {verdict['name']}: {verdict['reason']}")
    # The cause comes first, because all skipped checks follow from it.
    lines = [*causes, *(f"  ✓ {job}: {', '.join(names)}" for job, names in jobs.items() if names), *lines]
    lines += [f"  – {reason}: {', '.join(names)}" for reason, names in skipped.items()]
    lines += [f"  – not run: {sentence}" for sentence in record.get("not_run", ())]
    if losses := _losses(record):
        lines.append(f"  loss {losses[0]:.4f} → {losses[-1]:.4f} over {len(losses)} steps  {_spark(losses)}")
    left_out = sum(map(len, skipped.values()))
    passed = sum(verdict["passed"] for verdict in record["verdicts"])
    failed = len(record["verdicts"]) - passed - left_out
    more = f", {left_out} skipped" if left_out else ""
    summary = "passed" if record["passed"] else "FAILED"
    lines.append(f"{summary}: {passed} checks passed, {failed} failed{more}")
    lines.append(f"  → {os.path.relpath(folder / 'report.html')}")
    return "\n".join(lines)


def _losses(record: dict[str, Any]) -> list[float]:
    """Return the losses of the first job; none if one of them is missing or not finite, which a record has as null."""
    losses = [row["loss"] for row in record["jobs"][0].get("series", [])]
    return [] if None in losses else losses


def _spark(values: list[float]) -> str:
    low, high = min(values), max(values)
    blocks = "▁▂▃▄▅▆▇█"
    step = max(1, len(values) // 40)
    return "".join(blocks[round((v - low) / (high - low or 1) * 7)] for v in values[::step])
