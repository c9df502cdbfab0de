"""Running one job on this machine: writing its files, launching its ranks, checking it, writing the
result.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import primus_images
from primus_images.errors import HostError, InputError, PrimusError
from primus_images.files import json_if_readable, write_file
from primus_images.refusals import refusal
from primus_images.training.backends.backend import backend_of
from primus_images.training.judge import checks
from primus_images.training.run import failure, machine, metrics, outcome, processes, ranks
from primus_images.training.run.job import Job
from primus_images.training.run.logs import METRICS, Clock, read_run
from primus_images.training.run.outcome import Outcome, RunResult, write_result
from primus_images.turbo.optimizations import importable
from primus_images.turbo.trial import decide
from primus_images.waits import explained

# The least silence that counts as a hang before the first step.
STARTING_SECONDS = 1800.0
# Seconds that a node whose ranks only wait for another's, or only lost them, gives the others to
# name the cause.
_OTHERS_NAME_IT = 5.0
_OTHERS_SAY_WHY = 15.0


def check_backend(job: Job) -> None:
    """Raise HostError if a package or program is not installed that the job or its backend needs."""
    if job.wrap and shutil.which(job.wrap[0]) is None:
        raise HostError(
            f"--wrap: there is no program {job.wrap[0]} here", hint="install it, or name its path"
        )
    knows = job.recipe.knows
    optional = [
        package for key, package in knows.needs.items() if job.recipe.section(knows.name).get(key)
    ]
    missing = [name for name in (*knows.packages, *optional) if not importable(name)]
    if missing:
        names = " and ".join(missing)
        raise HostError(
            f"{names} cannot be imported by {sys.executable}",
            hint="run this inside a primus image, or install the missing packages",
        )


def shared_folder(job: Job) -> Path | None:
    """Create and return the folder that runs on this GPU share; None if there is none that this
    user may write to.
    """
    folder = ranks.compiled_before(job)
    if folder:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
    if folder and os.access(folder, os.W_OK):
        return folder
    return None


def prepare(job: Job, progress: Callable[[str], None] = lambda _: None) -> Job:
    """Create the job's folder with the files for the ranks. Returns the job with the optimizations
    that it uses.

    The nodes of a job share the folder, and each writes the same files atomically. Raises
    InputError if the folder contains another run, and as :func:`primus_images.turbo.trial.decide`.
    """
    folder = ranks.folder_of_node(job, os.environ)
    taken = InputError(
        f"{folder} already holds a run", hint="choose another --output, or delete it"
    )
    if folder == job.output and (job.output / "checkpoint").exists():
        raise taken
    try:
        for place in (
            folder,
            job.output,
        ):  # the tokens' is that of all nodes, and any of them may be the first
            (place / "cache").mkdir(parents=True, exist_ok=True)
        # If two runs start at the same moment, only one of them creates it.
        (folder / "log.txt").touch(exist_ok=False)
    except FileExistsError as error:
        raise taken from error
    except OSError as error:
        raise _cannot_write(job, folder, error) from error
    shared = shared_folder(job)
    try:
        backend_of(job.recipe).tokenize(job, shared, progress)
        environment = ranks.environment(job, os.environ)
        job = replace(
            job, trial=decide(job.recipe, shared or folder / "cache", environment, progress)
        )
        for name, text in ranks.files(job).items():
            write_file(job.output / name, text)
    except OSError as error:
        raise _cannot_write(job, folder, error) from error
    except BaseException:
        (folder / "log.txt").unlink(missing_ok=True)
        raise
    return job


def _cannot_write(job: Job, folder: Path, error: OSError) -> PrimusError:
    with contextlib.suppress(OSError):
        (folder / "log.txt").unlink(missing_ok=True)
    name = {errno.EACCES: "no_right_to_write", errno.EROFS: "read_only"}.get(
        error.errno or 0, "cannot_write"
    )
    return refusal(name, output=job.output, error=error.strerror, user=os.geteuid())


def start(job: Job, on_line: Callable[[str], None], patience: float = 0) -> Outcome:
    """Run a job after :func:`prepare`, and apply the checks for any run; on another node than 0,
    only the exit code's.

    After ``patience`` seconds without a line from any rank (0: never), they are ended, and the one
    that hangs is named. Before the first step, which imports and compilation precede, these are at
    least ``STARTING_SECONDS``.
    """
    argv = ranks.argv(job, sys.executable, os.environ)
    environment = ranks.environment(job, os.environ)
    folder = ranks.folder_of_node(job, os.environ)
    meter = machine.energy_meter(job.recipe.gpu, job.recipe.get("ranks", int), environment)

    def add_step(log: str, joules: float | None) -> None:
        rows = metrics.rows(
            read_run(folder, log), job.recipe, json_if_readable(job.output / "facts.json")
        )
        with contextlib.suppress(OSError), (folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1] | {"joules": joules}) + "\n")

    clock = Clock(meter, add_step)

    def line(text: str) -> None:
        clock.line(text)
        on_line(text)

    def patient() -> float:
        if clock.arrivals or not patience:
            return patience
        return max(patience, STARTING_SECONDS)

    # What is called at a stall: the commands of the ranks that were ended.
    stalls: list[dict[int, str]] = []

    def silent(launcher: int) -> None:
        stalls.append(failure.end_ranks(launcher, job.output, patient()))

    several = job.recipe.get("nodes", int) > 1
    with contextlib.closing(clock), explained(lambda: ranks.awaited(job, os.environ)):
        ended = processes.run(
            argv,
            log=folder / "log.txt",
            environment=environment,
            on_line=line,
            patience=patient,
            on_silence=silent,
            hopeless=lambda: several and failure.known(job.output),
        )
    stalled = [f"primus: no progress for {patient():g} s, so the ranks were ended\n"] * len(stalls)
    stacks = failure.stacks(job.output).items()
    for text in [
        *stalled,
        *(f"[rank{rank}]: {line}\n" for rank, stack in stacks for line in stack.splitlines()),
    ]:
        with (folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write(text)
        on_line(text)
    if stalls and not failure.name_hung(job.output, patient(), stalls[0]) and several:
        time.sleep(_OTHERS_NAME_IT)
    elif ended.exit_code and several:
        failure.share(job.output, folder / "log.txt", _OTHERS_SAY_WHY)
    run = RunResult(
        exit_code=ended.exit_code,
        seconds=round(ended.seconds, 2),
        argv=tuple(argv),
        optimizations=job.turbo,
        optimizations_off=dict(job.trial.off) if job.trial else {},
        host_memory_gib=round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 3),
    )
    write_result(run, folder)
    first = folder == job.output
    if first and job.judged and ended.exit_code == 0:
        write_file(job.output / "clock.json", json.dumps(clock.arrivals) + "\n")
        _judge(job)

    reason = ""
    if ended.exit_code and ended.disk_full:
        reason = str(failure.DISK_FULL)
    result = outcome.read(job, ended.exit_code, folder, reason)
    if first:
        verdicts = outcome.basic_verdicts(result)
    else:
        verdicts = (checks.exit_code(result.exit_code, result.cause),)
    lines = metrics.rows(result.series, job.recipe, result.facts)
    write_file(folder / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
    passed = all(verdict.passed for verdict in verdicts)
    run = replace(run, passed=passed, cause=result.cause, verdicts=verdicts, summary=result.summary)
    write_result(run, folder)
    return replace(result, run=run)


def _judge(job: Job) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    # The folder of this package, without anything else that the caller has on Python's path.
    environment["PYTHONPATH"] = str(Path(primus_images.__file__).parents[1])
    command = [
        sys.executable,
        "-s",
        "-P",
        "-m",
        "primus_images.training.judge.reference.replay",
        str(job.output),
    ]
    with (job.output / "reference.txt").open("w", encoding="utf-8") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
