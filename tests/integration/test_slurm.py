"""Jobs of a real Slurm: two virtual nodes train proxies over gloo, and what goes wrong there is put
right or named.

Each event comes to a job at a random moment (``--slurm-seed``). ``--slurm-events 20`` repeats each
20 times.

PRIMUS_TEST_PYTHON is a Python with torch and torchtitan; without it, or without Slurm, these tests
are skipped. With ``stand-in`` in its place, tests/slurm_trainer.py takes the steps: nothing is
trained, and the events of training are skipped.
"""

import filecmp
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import slurm_kit
from project_kit import free_port, until
from slurm_kit import Job, Slurm

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("PRIMUS_TEST_PYTHON", "")
STAND_IN = "stand-in"
WHY = slurm_kit.missing() or ("" if PYTHON else "PRIMUS_TEST_PYTHON names no Python with torch")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.skipif(bool(WHY), reason=WHY)]

STEPS, INTERVAL, STALL = 120, 24, 60
# A step takes 20 ms or more, and an event comes up to a second after it is due.
LATEST = STEPS - 60
# Jobs at the same time: most of an event's seconds are spent waiting for Slurm or for a limit.
TOGETHER = 3
# Held by a repetition that needs nodes of its own.
ALONE = threading.Lock()
# Backend → the recipe and its words. Most of a job's seconds go into starting Python; the training
# itself is small.
PROXIES = {
    "fsdp": (
        "llama3.1-8b",
        "--proxy",
        "--backend",
        "fsdp",
        "--mode",
        "pretrain",
        "--precision",
        "fp32",
        f"fsdp.training.checkpoint_interval={INTERVAL}",
        "fsdp.training.micro_batch_size=2",
        "fsdp.training.global_batch_size=4",
        "fsdp.training.seq_len=64",
    ),
    "torchtitan": (
        "llama3-proxy",
        f"checkpoint.interval={INTERVAL}",
        "training.local_batch_size=2",
        "training.global_batch_size=4",
        "training.seq_len=64",
    ),
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's own are too long for a socket
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def slurm(folder: Path) -> Iterator[Slurm]:
    # Two nodes for each job, and one to spare.
    cluster = Slurm(folder / "cluster", nodes=3 * TOGETHER)
    tools = folder / "bin"
    tools.mkdir()
    program = f"{PYTHON} -m primus_images.cli.main"
    if PYTHON == STAND_IN:
        program = f"{sys.executable} {ROOT / 'tests/slurm_trainer.py'}"
    (tools / "primus").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (tools / "primus").chmod(0o755)
    cluster.environment |= {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, folder: Path) -> dict[str, Job]:
    jobs = {name: launch(slurm, folder / "runs", name) for name in PROXIES}
    for job in jobs.values():
        assert job.ended()["JobState"] == "COMPLETED", job.said()
    return jobs


def launch(slurm: Slurm, runs: Path, backend: str, *words: str) -> Job:
    return Job(slurm, runs, *PROXIES[backend], "--steps", str(STEPS), *words)


def whole(attempt: Path) -> dict[int, Path]:
    """Step → checkpoint, of those that count as complete."""
    found = {}
    for path in (attempt / "checkpoint").glob("step-*"):
        if (path / ".metadata").is_file() and (path / "recipe.json").is_file():
            found[int(path.name.removeprefix("step-"))] = path
    return found


@dataclass(kw_only=True)
class Case:
    """One repetition: its job, the job that nothing happened to, and what is recorded. ``wrong``
    are sentences.
    """

    slurm: Slurm
    runs: Path
    backend: str
    undisturbed: Job
    chance: random.Random
    job: Job = field(init=False)
    row: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    processes: dict[int, int] = field(default_factory=dict)

    def start(self, *words: str, steps: tuple[int, int] = (0, LATEST)) -> None:
        """Submit, and wait for the moment of the fault: after a step, or while the ranks start
        (step 0).
        """
        self.job = launch(self.slurm, self.runs, self.backend, *words)
        step, more = self.chance.randint(*steps), self.chance.random()
        starting = step == 0 or self.chance.random() < 0.2
        if starting and steps[0] == 0:
            self.job.running()
            time.sleep(10 * more)
            self.row["moment"] = f"{10 * more:.1f} s after the start"
            return
        self.ranks()  # now: they may have ended when they are found later
        self.job.reach(step)
        time.sleep(0.2 * more)
        self.row["moment"] = f"{0.2 * more:.2f} s after step {step}"

    def ranks(self) -> dict[int, int]:
        """Rank → process, as soon as there are two. Looking for them takes seconds on a busy
        machine.
        """
        self.job.running()
        pids, number = self.job.slurm.pids, self.job.number
        found = until(
            lambda: (
                time.sleep(1) or self.processes.update(pids(number)) or len(self.processes) == 2
            ),
            300,
        )
        assert found, self.job.said()
        return self.processes

    def rank(self) -> tuple[int, int]:
        """One of the ranks, and its process."""
        return self.chance.choice(sorted((self.processes or self.ranks()).items()))

    def ends(self, state: str, job: Job | None = None, restarts: tuple[int, ...] = (0,)) -> None:
        """Wait for the end, which is to be ``state`` after one of ``restarts``."""
        job, started = job or self.job, time.monotonic()
        ended = job.ended()
        self.row |= {
            "ended": ended["JobState"].lower(),
            "seconds": round(time.monotonic() - started, 1),
        }
        if ended["JobState"] != state or int(ended["Restarts"]) not in restarts:
            self.wrong.append(
                f"{ended['JobState']} after {ended['Restarts']} restarts: {job.said()[-600:]}"
            )

    def named(self, pattern: str) -> None:
        """The job's own result gives the reason."""
        told = ""
        with suppress(OSError, ValueError):
            told = str(self.job.result().get("cause"))
        self.row["reason"] = re.sub(r"/\S+", "PATH", told)[:160]
        if not re.search(pattern, told):
            self.wrong.append(f"the reason is {told!r}: {self.job.said()[-600:]}")

    def same(self, job: Job, first: int) -> None:
        """The last attempt of ``job`` begins at step ``first``, reaches the end, and has the
        undisturbed losses.
        """
        # An attempt that is preempted at once leaves no folder.
        last = int(job.attempts[-1].name.removeprefix("attempt-"))
        losses, others = job.losses(last), self.undisturbed.losses(0)
        self.row |= {"continued from step": first - 1, "steps with equal loss": len(losses)}
        if not losses or (min(losses), max(losses)) != (first, STEPS):
            self.wrong.append(
                f"steps {sorted(losses)[:1]}–{sorted(losses)[-1:]}, not {first}–{STEPS}"
            )
        if different := [step for step in losses if losses[step] != others.get(step)]:
            self.wrong.append(
                f"the loss of step {different[0]} differs from that of the undisturbed job"
            )

    def kept(self) -> int:
        """The newest complete checkpoint before the last step. Each must be the undisturbed job's,
        byte for byte.
        """
        newest, count = 0, 0
        for attempt in self.job.attempts:
            for step, path in whole(attempt).items():
                other, count = whole(self.undisturbed.attempts[0])[step], count + 1
                names = [file.name for file in other.glob("*.distcp")]
                if names != filecmp.cmpfiles(path, other, names, shallow=False)[0]:
                    self.wrong.append(f"checkpoint {path.parent.parent.name} step {step} differs")
                newest = max(newest, step if step < STEPS else 0)
        self.row["checkpoints"] = self.row.get("checkpoints", 0) + count
        return newest


def node_lost(case: Case) -> None:
    case.start()
    lose_a_node(case, restarts=1)


def lose_a_node(case: Case, restarts: int) -> None:
    """End a node of the running job, which then completes after ``restarts`` in all."""
    name = case.chance.choice(case.slurm.nodes(case.job.number))
    case.slurm.kill_node(name)
    try:
        case.ends("COMPLETED", restarts=(restarts,))
    finally:
        case.slurm.start_node(name, boots=True)
    continued(case)


def node_restarted(case: Case) -> None:
    """The node is back before Slurm misses it."""
    case.start()
    name = case.chance.choice(case.slurm.nodes(case.job.number))
    case.slurm.kill_node(name)
    time.sleep(case.chance.uniform(0.5, 5))
    case.slurm.start_node(name, boots=True)
    case.ends("COMPLETED", restarts=(1,))
    continued(case)


def continued(case: Case) -> None:
    """The last attempt went on from the newest checkpoint that the attempts before it left."""
    earlier = [
        step for attempt in case.job.attempts[:-1] for step in whole(attempt) if step < STEPS
    ]
    case.kept()
    case.same(case.job, max(earlier, default=0) + 1)


def rank_killed(case: Case) -> None:
    case.start()
    rank, pid = case.rank()
    os.kill(pid, signal.SIGKILL)
    case.ends("FAILED")
    case.named(rf"(?s)(rank {rank}: )?.*(ended by signal 9|Signal 9 \(SIGKILL\))")
    case.kept()


def preempted(case: Case) -> None:
    case.start()
    case.slurm.run("scancel", "--signal=USR1", "--batch", case.job.number, check=False)
    case.ends("COMPLETED", restarts=(1,))
    continued(case)


def rank_hung(case: Case) -> None:
    # Before the first step, the limit is 1800 s.
    words = ["comm.train_timeout_seconds=600"] * (case.backend == "torchtitan")
    case.start("--stall-timeout", str(STALL), *words, steps=(1, LATEST))
    rank, pid = case.rank()
    os.kill(pid, signal.SIGSTOP)
    case.ends("FAILED")
    case.named(rf"rank {rank}: hung: no progress for {STALL} s; its process is stopped")
    case.kept()


def rank_slow(case: Case) -> None:
    case.start()
    _, pid = case.rank()
    for _ in range(case.chance.randint(2, 6)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(case.chance.uniform(0.2, 1.5))
            os.kill(pid, signal.SIGCONT)
        time.sleep(case.chance.uniform(0.1, 0.5))
    case.ends("COMPLETED")
    case.kept()
    case.same(case.job, 1)


def disk_full(case: Case) -> None:
    """Another file takes all that is left of the disk, until there is room again."""
    case.runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256M", "tmpfs", case.runs], check=True)
    try:
        case.start(steps=(1, LATEST))  # the last checkpoint is still to come
        filler = case.runs / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 22))
        case.ends("FAILED")
        case.named("No space left on device")
        filler.unlink()
        newest = case.kept()
        words = ("--resume-from", str(case.job.folder / "attempt-0")) if newest else ()
        again = launch(case.slurm, case.runs, case.backend, *words)
        case.ends("COMPLETED", again)
        case.same(again, newest + 1)
    finally:
        subprocess.run(["umount", "--lazy", case.runs], check=True)


def rebooted_at_once(case: Case) -> None:
    """The node is back in less than a second."""
    case.start()
    name = case.chance.choice(case.slurm.nodes(case.job.number))
    case.slurm.kill_node(name)
    case.slurm.start_node(name, boots=True)
    case.ends("COMPLETED", restarts=(1,))
    continued(case)


def both_nodes_lost(case: Case) -> None:
    case.start()
    names = case.slurm.nodes(case.job.number)
    for name in names:
        case.slurm.kill_node(name)
    try:
        case.ends("COMPLETED", restarts=(1,))
    finally:
        for name in names:
            case.slurm.start_node(name, boots=True)
    continued(case)


def both_nodes_restarted(case: Case) -> None:
    case.start()
    names = case.slurm.nodes(case.job.number)
    for name in names:
        case.slurm.kill_node(name)
    time.sleep(case.chance.uniform(0.5, 5))
    for name in names:
        case.slurm.start_node(name, boots=True)
    case.ends("COMPLETED", restarts=(1,))
    continued(case)


def second_fault(case: Case) -> None:
    """Wait for a moment of the second attempt, while its ranks start."""
    case.slurm.restarted(case.job.number, 1)
    time.sleep(case.chance.uniform(0, 5))


def restarted_twice(case: Case) -> None:
    """A node of each of two attempts is restarted."""
    case.start()
    for attempt in range(2):
        if attempt:
            second_fault(case)
        name = case.chance.choice(case.slurm.nodes(case.job.number))
        case.slurm.kill_node(name)
        time.sleep(case.chance.uniform(0, 3))
        case.slurm.start_node(name, boots=True)
    case.ends("COMPLETED", restarts=(2,))
    continued(case)


def requeued_twice(case: Case) -> None:
    """By the operator, without a warning."""
    case.start()
    case.slurm.run("scontrol", "requeue", case.job.number)
    second_fault(case)
    case.slurm.run("scontrol", "requeue", case.job.number)
    case.ends("COMPLETED", restarts=(2,))
    continued(case)


def preempted_twice(case: Case) -> None:
    case.start()
    case.slurm.run("scancel", "--signal=USR1", "--batch", case.job.number)
    second_fault(case)
    case.slurm.run("scancel", "--signal=USR1", "--batch", case.job.number)
    case.ends("COMPLETED", restarts=(2,))
    continued(case)


def preempted_then_lost(case: Case) -> None:
    case.start()
    case.slurm.run("scancel", "--signal=USR1", "--batch", case.job.number)
    second_fault(case)
    lose_a_node(case, restarts=2)


def controller_restarted(case: Case) -> None:
    """Slurm's controller is away for some seconds. The job does not need it."""
    # The controller forgets a job of the seconds before it is killed.
    case.start(steps=(1, LATEST))
    case.slurm.kill_daemon("slurmctld")
    time.sleep(case.chance.uniform(0, 5))
    case.slurm.start_controller()
    case.ends("COMPLETED")
    case.kept()
    case.same(case.job, 1)


def daemon_restarted(case: Case) -> None:
    """Slurm's daemon of a node is restarted, as by an upgrade. The steps there go on."""
    case.start(steps=(1, LATEST))
    name = case.chance.choice(case.slurm.nodes(case.job.number))
    case.slurm.kill_daemon(name)
    time.sleep(case.chance.uniform(0, 3))
    case.slurm.start_daemon(name)
    case.ends("COMPLETED")
    case.kept()
    case.same(case.job, 1)


def node_drained(case: Case) -> None:
    """Nothing new starts on the node. The job there ends by itself."""
    case.start()
    node = f"NodeName={case.chance.choice(case.slurm.nodes(case.job.number))}"
    case.slurm.run("scontrol", "update", node, "State=DRAIN", "Reason=repair")
    try:
        case.ends("COMPLETED")
    finally:
        case.slurm.run("scontrol", "update", node, "State=RESUME")
    case.kept()
    case.same(case.job, 1)


def cancelled(case: Case) -> None:
    """By the user: every rank ends."""
    case.start()
    case.slurm.run("scancel", case.job.number)
    case.ends("CANCELLED")
    if not until(lambda: not case.slurm.pids(case.job.number), 30):
        case.wrong.append(f"ranks go on: {case.slurm.pids(case.job.number)}")
    case.kept()


def both_ranks_killed(case: Case) -> None:
    case.start(steps=(1, LATEST))
    for pid in case.ranks().values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    case.ends("FAILED")
    case.named(r"(?s)ended by signal 9|Signal 9 \(SIGKILL\)")
    case.kept()


def no_gpu(case: Case) -> None:
    """The nodes of the partition have no GPU, and the job is for one."""
    case.job = Job(case.slurm, case.runs, "llama3.1-8b", "--gpu", "mi300x", "--force")
    case.row["moment"] = "at the start"
    case.ends("FAILED")
    said = case.job.said()
    found = re.search(".*no GPU.*", said)
    if found is None or "Traceback" in said:
        case.wrong.append(said[-600:])
    else:
        case.row["reason"] = found[0][:160]


def meeting(case: Case) -> int:
    """Wait until the job has chosen the port at which its ranks will meet, and return it."""
    case.job.running()
    chosen: list[int] = []

    def look() -> bool:
        chosen.extend(int(port) for port in re.findall(r"meeting at \S+:(\d+)", case.job.said()))
        return bool(chosen)

    assert until(look, 60), case.job.said()
    case.row["moment"] = "before the ranks met"
    return chosen[-1]


def says(case: Case, sentence: str) -> None:
    """The job's log has the sentence."""
    if not re.search(sentence, case.job.said()):
        case.wrong.append(f"{sentence!r} is not said: {case.job.said()[-600:]}")


def nothing_left(case: Case) -> None:
    """No process of the job goes on."""
    if not until(lambda: not case.slurm.processes_of(case.job.number), 30):
        case.wrong.append(f"processes go on: {case.slurm.processes_of(case.job.number)}")


def rebooted_before_the_meeting(case: Case) -> None:
    """The second node boots before Slurm misses it, while the first one waits for its ranks."""
    time.sleep(15)  # the events before this one boot nodes, too
    case.job = launch(case.slurm, case.runs, case.backend)
    meeting(case)
    name = case.slurm.nodes(case.job.number)[1]
    case.slurm.kill_node(name)
    case.slurm.start_node(name, boots=True)
    case.ends("COMPLETED", restarts=(1,))
    says(case, f"node {name} was restarted; requeued")
    # Without a look at the boots, the first node would wait for 600 s.
    if case.row["seconds"] > 300:
        case.wrong.append(f"the end came after {case.row['seconds']} s")
    continued(case)


def steps_lost(case: Case) -> None:
    """Slurm's daemon takes the steps of its node with it, as a wrong KillMode of systemd does."""
    case.start(steps=(1, LATEST))
    name = case.chance.choice(case.slurm.nodes(case.job.number))
    case.slurm.kill_node(name)
    case.slurm.start_node(name)
    case.ends("COMPLETED", restarts=(1,))
    continued(case)


def cancelled_in_the_queue(case: Case) -> None:
    case.job = launch(case.slurm, case.runs, case.backend, "--sbatch=--hold")
    case.row["moment"] = "in the queue"
    case.slurm.run("scancel", case.job.number)
    case.ends("CANCELLED")
    if case.job.folder.exists():
        case.wrong.append("it has run")


def cancelled_before_the_meeting(case: Case) -> None:
    case.job = launch(case.slurm, case.runs, case.backend)
    meeting(case)
    time.sleep(case.chance.uniform(0, 2))
    case.slurm.run("scancel", case.job.number)
    case.ends("CANCELLED")
    nothing_left(case)


def time_limit(case: Case) -> None:
    """A rank is stopped, so that Slurm's limit comes before the last step."""
    minutes = "2" if PYTHON == STAND_IN else "5"  # an attempt of it must end within them
    case.start("--time", minutes, "--grace", "40", steps=(1, LATEST))
    _, pid = case.rank()
    os.kill(pid, signal.SIGSTOP)
    case.slurm.restarted(case.job.number, 1, 400)
    case.ends("COMPLETED", restarts=(1,))
    says(case, "the job was told to end; requeued")
    continued(case)


def preempted_by_slurm(case: Case) -> None:
    """A job of a partition that goes first needs the nodes. Slurm tells the steps alone."""
    case.start(steps=(1, LATEST))
    nodes = ",".join(case.slurm.nodes(case.job.number))
    words = ("--partition=urgent", "--nodes=2", f"--nodelist={nodes}", "--wrap=sleep 3")
    output = f"--output={case.runs}/urgent.txt"
    urgent = case.slurm.run("sbatch", "--parsable", *words, output).stdout.strip()
    if (ended := case.slurm.ended(urgent))["JobState"] != "COMPLETED":
        case.wrong.append(f"the urgent job: {ended}")
    case.ends("COMPLETED", restarts=(1,))
    says(case, "the job was (told to end|preempted); requeued")
    continued(case)


def port_in_use(case: Case) -> None:
    """Another program has the port that follows from the job's number."""
    case.job = launch(case.slurm, case.runs, case.backend, "--sbatch=--hold")
    case.row["moment"] = "at the start"
    port = 20000 + int(case.job.number)
    with socket.create_server(("", port)):
        case.slurm.run("scontrol", "release", case.job.number)
        case.ends("COMPLETED")
    says(case, rf"meeting at \S+:{port + 1}\b")
    case.same(case.job, 1)


def given_port_in_use(case: Case) -> None:
    port = free_port()
    with socket.create_server(("", port)):
        case.job = launch(case.slurm, case.runs, case.backend, "--port", str(port))
        case.row["moment"] = "at the start"
        case.ends("FAILED")
    says(case, f"--port {port} is taken on node n")


def port_taken_meanwhile(case: Case) -> None:
    """Another program takes the port after the job has chosen it, and before it is opened."""
    case.job = launch(case.slurm, case.runs, case.backend)
    port = meeting(case)
    with socket.create_server(("", port)):
        case.ends("COMPLETED", restarts=(1,))
    says(case, f"port {port} was taken meanwhile; requeued")
    continued(case)


def store_wanted(case: Case) -> None:
    """Another program wants the port of the ranks' store before rank 0 has imported PyTorch."""
    case.job = launch(case.slurm, case.runs, case.backend)
    case.ranks()
    given = Path(f"/proc/{case.processes[0]}/environ").read_text().split("\0")
    variables = dict(word.split("=", 1) for word in given if "=" in word)
    with socket.socket() as other:
        with suppress(OSError):
            other.bind(("", int(variables["MASTER_PORT"])))
            other.listen()
        case.row["moment"] = "before the ranks met"
        case.ends("COMPLETED")
    case.same(case.job, 1)


def out_of_memory(case: Case) -> None:
    """Slurm ends a step that takes more memory than the job asked for."""
    memory = "50" if PYTHON == STAND_IN else "300"
    words = (f"--sbatch=--mem={memory}", "--sbatch=--acctg-freq=1")
    case.job = launch(case.slurm, case.runs, case.backend, *words)
    case.row["moment"] = "when the limit is reached"
    case.ends("FAILED")
    says(case, rf"StepId={case.job.number}.0 exceeded memory limit")
    says(case, "failed with exit code")
    nothing_left(case)


def no_shared_folder(case: Case) -> None:
    """One of the two nodes has another disk at the place of the results."""
    first, second = case.slurm.names[-2:]
    case.runs.mkdir()
    with ALONE:
        case.slurm.kill_node(second)
        case.slurm.start_node(second, without=case.runs)
        try:
            nodes = f"--sbatch=--nodelist={first},{second}"
            case.job = launch(case.slurm, case.runs, case.backend, nodes)
            case.row["moment"] = "at the start"
            case.ends("FAILED")
        finally:
            case.slurm.kill_node(second)
            case.slurm.start_node(second)
    says(case, f"node {second} has no {case.job.folder}, .* must be a folder that all nodes share")


def spool_full(case: Case) -> None:
    """The folder in which Slurm's daemon of a node keeps jobs is full."""
    nodes = case.slurm.names[-2:]
    name = case.chance.choice(nodes)
    case.row["moment"] = f"at the start, on node {nodes.index(name)}"
    with ALONE, case.slurm.without_room(name):
        words = (case.backend, f"--sbatch=--nodelist={','.join(nodes)}")
        case.job = launch(case.slurm, case.runs, *words)
        if name == nodes[0]:
            # Slurm takes the job back and keeps it, until the operator has made room.
            case.slurm.held(case.job.number)
        else:
            case.ends("COMPLETED")
    case.slurm.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
    if name == nodes[0]:
        case.slurm.run("scontrol", "release", case.job.number)
        case.ends("COMPLETED", restarts=(1,))
    case.kept()
    case.same(case.job, 1)


def suspended(case: Case) -> None:
    """By the operator, for longer than ranks may be silent."""
    case.start("--stall-timeout", str(STALL), steps=(1, LATEST))
    case.slurm.run("scontrol", "suspend", case.job.number)
    time.sleep(10 if PYTHON == STAND_IN else STALL + 10)
    case.slurm.run("scontrol", "resume", case.job.number)
    case.ends("COMPLETED")
    case.kept()
    case.same(case.job, 1)


def rank_killed_without_controller(case: Case) -> None:
    """The job fails while Slurm's controller is away, which cannot say how the nodes are."""
    case.start(steps=(1, LATEST))
    rank, pid = case.rank()
    case.slurm.kill_daemon("slurmctld")
    os.kill(pid, signal.SIGKILL)
    time.sleep(case.chance.uniform(20, 40))
    case.slurm.start_controller()
    case.ends("FAILED")
    case.named(rf"(?s)(rank {rank}: )?.*(ended by signal 9|Signal 9 \(SIGKILL\))")
    says(case, "failed with exit code")


def restarts_used_up(case: Case) -> None:
    case.start("--restarts", "1")
    case.slurm.run("scancel", "--signal=USR1", "--batch", case.job.number)
    second_fault(case)
    case.slurm.run("scancel", "--signal=USR1", "--batch", case.job.number)
    case.ends("FAILED", restarts=(1,))
    says(case, "not requeued: this was attempt 1, and --restarts is 1")
    case.kept()


def script_killed(case: Case) -> None:
    """The kernel ends the job's own script, when memory runs out on the first node."""
    case.start(steps=(1, LATEST))
    for pid in case.slurm.processes_of(case.job.number):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "slurm_script\n":
                os.kill(pid, signal.SIGKILL)
    case.ends("FAILED")
    nothing_left(case)
    case.kept()


def requeued_and_held(case: Case) -> None:
    """By the operator, who lets the job go on later."""
    case.start()
    case.slurm.run("scontrol", "requeuehold", case.job.number)
    case.slurm.held(case.job.number)
    time.sleep(case.chance.uniform(0, 5))
    case.slurm.run("scontrol", "release", case.job.number)
    case.ends("COMPLETED", restarts=(1,))
    continued(case)


def munge_restarted(case: Case) -> None:
    """Nobody vouches for Slurm's messages for some seconds."""
    case.start(steps=(1, LATEST))
    case.slurm.kill_daemon("munged")
    time.sleep(case.chance.uniform(0, 5))
    case.slurm.start_munge()
    case.ends("COMPLETED")
    case.kept()
    case.same(case.job, 1)


EVENTS: dict[str, Callable[[Case], None]] = {
    "node lost": node_lost,
    "node restarted": node_restarted,
    "rank killed": rank_killed,
    "preempted": preempted,
    "disk full": disk_full,
    "slow rank": rank_slow,
    "hung rank": rank_hung,
    "quick reboot": rebooted_at_once,
    "both nodes lost": both_nodes_lost,
    "both nodes restarted": both_nodes_restarted,
    "restarted twice": restarted_twice,
    "requeued twice": requeued_twice,
    "preempted twice": preempted_twice,
    "preempted, then a node lost": preempted_then_lost,
    "controller restarted": controller_restarted,
    "daemon restarted": daemon_restarted,
    "node drained": node_drained,
    "cancelled": cancelled,
    "both ranks killed": both_ranks_killed,
    "no GPU": no_gpu,
    "rebooted before the ranks met": rebooted_before_the_meeting,
    "daemon and steps lost": steps_lost,
    "cancelled in the queue": cancelled_in_the_queue,
    "cancelled before the ranks met": cancelled_before_the_meeting,
    "time limit": time_limit,
    "preempted by Slurm": preempted_by_slurm,
    "port in use": port_in_use,
    "given port in use": given_port_in_use,
    "port taken meanwhile": port_taken_meanwhile,
    "store's port wanted": store_wanted,
    "out of memory": out_of_memory,
    "no shared folder": no_shared_folder,
    "spool folder full": spool_full,
    "suspended": suspended,
    "rank killed without the controller": rank_killed_without_controller,
    "restarts used up": restarts_used_up,
    "script killed": script_killed,
    "requeued and held": requeued_and_held,
    "munge restarted": munge_restarted,
}


# What primus itself must notice in its ranks.
OF_TRAINING = ("disk full", "hung rank", "store's port wanted")


@pytest.mark.skipif(PYTHON == STAND_IN, reason="the stand-in does not train")
def test_two_nodes_train_and_each_rank_has_a_log(undisturbed: dict[str, Job]) -> None:
    for job in undisturbed.values():
        assert job.result()["passed"] is True
        assert len(job.losses(0)) == STEPS
        assert sorted(whole(job.attempts[0])) == [*range(INTERVAL, STEPS + 1, INTERVAL)]
        assert (job.folder / "attempt-0" / "node-1" / "log.txt").is_file()
        ranks = [path for path in job.folder.rglob("stdout.log") if path.parent.name.isdigit()]
        assert len(ranks) == 2
        told = job.slurm.job(job.number)
        assert (told["NumNodes"], told["Requeue"], told["ExitCode"]) == ("2", "1", "0:0")


@pytest.mark.timeout(6 * 3600)  # with --slurm-events 20
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_ends_right_and_loses_nothing(
    event: str,
    slurm: Slurm,
    folder: Path,
    undisturbed: dict[str, Job],
    request: pytest.FixtureRequest,
) -> None:
    if PYTHON == STAND_IN and event in OF_TRAINING:
        pytest.skip("the stand-in does not train")
    repetitions, seed = (
        int(request.config.getoption(name)) for name in ("--slurm-events", "--slurm-seed")
    )

    def repeat(number: int) -> list[str]:
        chance = random.Random(f"{seed} {event} {number}")
        backend = list(PROXIES)[number % len(PROXIES)]
        runs = folder / f"{event.replace(' ', '-')}-{number}"
        case = Case(
            slurm=slurm, runs=runs, backend=backend, undisturbed=undisturbed[backend], chance=chance
        )
        try:
            EVENTS[event](case)
        except (AssertionError, OSError, ValueError, LookupError) as error:
            case.wrong.append(f"{type(error).__name__}: {str(error)[:800]}")
        finally:
            slurm.run("scancel", case.job.number, check=False)
        # The rows of benchmarks/results/slurm-events.json, with pytest's option -s.
        print(
            json.dumps(
                {
                    "event": event,
                    "repetition": number,
                    "backend": backend,
                    **case.row,
                    "wrong": case.wrong,
                }
            )
        )
        if not case.wrong:
            shutil.rmtree(runs, ignore_errors=True)
        return [
            f"repetition {number} ({backend}, {case.row.get('moment')}): {sentence}"
            for sentence in case.wrong
        ]

    with ThreadPoolExecutor(TOGETHER) as pool:
        wrong = [
            sentence for sentences in pool.map(repeat, range(repetitions)) for sentence in sentences
        ]
    assert not wrong, "\n".join(wrong)
