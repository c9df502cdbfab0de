"""Starting one job on this machine: its files, its ranks, its checks, and its result."""

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
from primus_images.errors import HostError, InputError
from primus_images.files import json_if_readable, write_file
from primus_images.training.backends.protocol import backend_of
from primus_images.training.judge import checks
from primus_images.training.run import failure, hang, metrics, outcome, processes, ranks
from primus_images.training.run.job import Job
from primus_images.training.run.logs import METRICS, Clock, read_run
from primus_images.training.run.outcome import Outcome, RunResult, write_result, write_stop
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
    """Raise HostError if a package or program that the job or its backend needs is missing."""
    if job.wrap and shutil.which(job.wrap[0]) is None:
        raise HostError(
            f"--wrap: there is no program {job.wrap[0]} here", hint="install it, or name its path"
        )
    knows = job.recipe.knows
    packages = list(knows.packages)
    for key, package in knows.needs.items():
        if job.recipe.section(knows.name).get(key):
            packages.append(package)
    missing = [name for name in packages if not importable(name)]
    if missing:
        names = " and ".join(missing)
        raise HostError(
            f"{names} cannot be imported by {sys.executable}",
            hint="run this inside a primus image, or install the missing packages",
        )


def shared_folder(job: Job) -> Path | None:
    """Create and return the folder of kernels that runs on this GPU share.

    None if there is none that this user may write to.
    """
    return _created(ranks.compiled_before(job))


def tokens_folder(job: Job) -> Path | None:
    """Create and return the folder of tokens that runs share.

    None if there is none that this user may write to.
    """
    return _created(ranks.tokens_before(job))


def _created(folder: Path | None) -> Path | None:
    if folder is None:
        return None
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        return folder
    return None


def prepare(job: Job, progress: Callable[[str], None] = lambda _: None) -> Job:
    """Create the job's folder with the files for the ranks.

    Returns the job with the optimizations that it uses. The nodes of a job share the folder, and
    each writes the same files atomically. Raises InputError if the folder contains another run, and
    as :func:`primus_images.turbo.trial.decide`.
    """
    folder = ranks.folder_of_node(job, os.environ)
    try:
        _create_folders(job, folder)
        return _prepared(job, folder, progress)
    except OSError as error:
        with contextlib.suppress(OSError):
            (folder / "log.txt").unlink(missing_ok=True)
        raise _cannot_write(job, error) from error


def _create_folders(job: Job, folder: Path) -> None:
    taken = InputError(
        f"{folder} already holds a run", hint="choose another --output, or delete it"
    )
    if folder == job.output and (job.output / "checkpoint").exists():
        raise taken
    try:
        # The tokens are in that of all nodes, and any of them may be the first.
        for place in (folder, job.output):
            (place / "cache").mkdir(parents=True, exist_ok=True)
        # If two runs start at the same moment, only one of them creates it.
        (folder / "log.txt").touch(exist_ok=False)
    except FileExistsError as error:
        raise taken from error


def _prepared(job: Job, folder: Path, progress: Callable[[str], None]) -> Job:
    shared = shared_folder(job)
    try:
        backend_of(job.recipe).tokenize(job, tokens_folder(job), progress)
        environment = ranks.environment(job, os.environ)
        trial = decide(
            job.recipe,
            shared or folder / "cache",
            environment,
            progress,
            repeated=job.judge_every > 0,
        )
        job = replace(job, trial=trial)
        for name, text in ranks.files(job).items():
            write_file(job.output / name, text)
    except BaseException:
        (folder / "log.txt").unlink(missing_ok=True)
        raise
    return job


def _cannot_write(job: Job, error: OSError) -> HostError:
    hint = "choose another --output"
    if error.errno == errno.EACCES:
        hint = f"give user {os.geteuid()} the right to write to the folder, or {hint}"
    elif error.errno == errno.EROFS:
        mount = '-v "$PWD/runs:/workspace/runs" (without :ro)'
        hint = f"in a container, mount a folder with {mount}; or {hint}"
    return HostError(f"cannot write to {job.output}: {error.strerror}", hint=hint)


class _Follower:
    """Follows the log of a job while it runs, and ends the ranks if they are silent for too long.

    ``ended`` are then the ranks that were able to leave a stack.
    """

    def __init__(
        self, job: Job, folder: Path, on_line: Callable[[str], None], patience: float
    ) -> None:
        self.clock = Clock(self._add_step)
        self.ended: set[int] | None = None
        self._job = job
        self._folder = folder
        self._on_line = on_line
        self._patience = patience

    def line(self, text: str) -> None:
        self.clock.line(text)
        self._on_line(text)

    def patience(self) -> float:
        """Return the seconds without a line after which the ranks are ended; 0: never."""
        if self.clock.arrivals or not self._patience:
            return self._patience
        return max(self._patience, STARTING_SECONDS)

    def end_ranks(self, launcher: int) -> None:
        self.ended = hang.end_ranks(launcher, self._job.output, self.patience())

    def add_reasons(self) -> None:
        """Add to the log why the ranks were ended, and the stacks that they left."""
        lines = []
        if self.ended is not None:
            lines.append(f"primus: no progress for {self.patience():g} s, so the ranks were ended")
        for rank, stack in hang.stacks(self._job.output).items():
            lines += [f"[rank{rank}]: {line}" for line in stack.splitlines()]
        with (self._folder / "log.txt").open("a", encoding="utf-8") as log:
            for line in lines:
                log.write(f"{line}\n")
                self._on_line(f"{line}\n")

    def _add_step(self, lines: str) -> None:
        series = read_run(self._folder, lines)
        facts = json_if_readable(self._job.output / "facts.json")
        row = metrics.lines_of(series, self._job.recipe, facts)[-1]
        with (
            contextlib.suppress(OSError),
            (self._folder / METRICS).open("a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(row) + "\n")


def start(job: Job, on_line: Callable[[str], None], patience: float = 0) -> Outcome:
    """Run a job after :func:`prepare`, and apply the checks for any run.

    On another node than 0, only the exit code's. After ``patience`` seconds without a line from any
    rank (0: never), they are ended, and the one that hangs is named. Before the first step, which
    imports and compilation precede, these are at least ``STARTING_SECONDS``.
    """
    argv = ranks.argv(job, sys.executable, os.environ)
    folder = ranks.folder_of_node(job, os.environ)
    follower = _Follower(job, folder, on_line, patience)
    several = job.recipe.get("nodes", int) > 1
    try:
        with contextlib.closing(follower.clock), explained(lambda: ranks.awaited(job, os.environ)):
            ended = processes.run(
                argv,
                log=folder / "log.txt",
                environment=ranks.environment(job, os.environ),
                watch=processes.Watch(
                    on_line=follower.line,
                    patience=follower.patience,
                    on_silence=follower.end_ranks,
                    should_end=lambda: several and failure.known(job.output),
                ),
            )
    except KeyboardInterrupt as signal:
        write_stop(str(signal), folder)
        raise
    exit_code = ended.exit_code
    reason = ""
    if ended.exit_code and ended.disk_full:
        reason = str(failure.DISK_FULL)
    if not (folder / "log.txt").exists():
        exit_code = exit_code or 1
        reason = "the folder of the run was removed while it ran"
        folder.mkdir(parents=True, exist_ok=True)
    follower.add_reasons()
    if follower.ended is not None:
        hung = hang.name_hung(job.output, follower.patience(), follower.ended)
        if several and not hung:
            time.sleep(_OTHERS_NAME_IT)
    elif exit_code and several:
        failure.share(job.output, folder / "log.txt", _OTHERS_SAY_WHY)
    run = RunResult(
        exit_code=exit_code,
        seconds=round(ended.seconds, 2),
        argv=tuple(argv),
        optimizations=job.turbo,
        optimizations_off=dict(job.trial.off) if job.trial else {},
        host_memory_gib=round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 3),
    )
    write_result(run, folder)
    if folder == job.output and job.judged and exit_code == 0:
        write_file(job.output / "clock.json", json.dumps(follower.clock.arrivals) + "\n")
        _judge(job)
    return _outcome(job, folder, run, reason)


def _outcome(job: Job, folder: Path, run: RunResult, reason: str) -> Outcome:
    """Apply the checks, and complete the result and the metrics in the folder of the run.

    ``reason`` is that of a failure if the folder may not contain it.
    """
    result = outcome.read(job, run.exit_code, folder, reason)
    verdicts: tuple[checks.Verdict, ...] = (checks.exit_code(result.exit_code, result.cause),)
    if folder == job.output:
        verdicts = outcome.basic_verdicts(result)
    rows = metrics.lines_of(result.series, job.recipe, result.facts)
    write_file(folder / METRICS, "".join(json.dumps(row) + "\n" for row in rows))
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
