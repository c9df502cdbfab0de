"""Jobs that are disturbed at random and resumed: ``python -m benchmarks.soak ROWS --python PYTHON
BACKEND…``.

Each job trains the proxy of a backend on two ranks, with a checkpoint every 5 steps, on a small
disk of its own. It is disturbed and resumed until it reaches its last step, then the next one
starts, until ``--seconds`` are over. The backend ``pods`` trains on two nodes by the script of
`launch k8s`; its pods are killed, and started again. ``--parallel`` jobs run at once, each on
processors of its own. ROWS gets one JSON line per fault; all its lines are counted in
``results/soak.json``. With ``--merge`` they are added to it: without a backend, those of another
machine.

A full disk and a folder that becomes read-only need root and mounts, a lost network a namespace of
its own, a jump of the clock a C compiler. Without them, these faults are left out, and a line says
so. So is a backend whose packages are missing.

A fault is lost if a step of the job has another loss than in the undisturbed run, if the command
ends in anything but a sentence, if it fails without a fault, or if it does not end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count, cycle, islice
from multiprocessing import Process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from primus_images.launch.kubernetes import RUNS, Cluster, manifests
from primus_images.launch.plan import Plan
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.run import identity, outcome, processes
from primus_images.training.run.job import Job, steps

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/soak.json"
WARM = ROOT / "tests/integration/inside/warm.py"
STEPS, EVERY, DISK_MIB, LIMIT_S = 40, 5, 600, 240
MODES = {"finetune": "full"}
# libfaketime also lets time stand still for what waits (Debian 12), so only the clock of the day is
# changed.
_CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile int64_t *offset;
__attribute__((constructor)) static void start(void) {
    int file = open(getenv("CLOCK_FILE") ? getenv("CLOCK_FILE") : "", O_RDONLY);
    void *place = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (place != MAP_FAILED) offset = place;
    if (file >= 0) close(file);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int error = syscall(SYS_clock_gettime, id, now);
    int real = id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
    if (!error && offset && real) now->tv_sec += *offset;
    return error;
}
time_t time(time_t *copy) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (copy) *copy = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *copy, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    copy->tv_sec = now.tv_sec, copy->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


class Command:
    """``primus train`` in a fork of a process that has imported PyTorch, one at a time."""

    def __init__(self, python: str, folder: Path) -> None:
        self._clock = folder / "clock"
        self.jump(0)
        (folder / "clock.c").write_text(_CLOCK, encoding="utf-8")
        library = folder / "clock.so"
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler:
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-O1", "-o", library, folder / "clock.c"], check=True
            )
        fake = {"LD_PRELOAD": str(library), "CLOCK_FILE": str(self._clock)} if compiler else {}
        self.impossible = set() if compiler else {"clock_jump"}
        # A network that only this job has.
        space = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        if (
            not shutil.which("nsenter")
            or subprocess.run([*space, "true"], check=False, stderr=subprocess.DEVNULL).returncode
        ):
            self.impossible.add("network")
            space = []
        variables = {
            "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        }
        self._server = subprocess.Popen(
            [*space, python, "-W", "ignore", str(WARM)],
            env=os.environ | variables | fake,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def jump(self, days: float) -> None:
        """Set the clock of all its processes to ``days`` after now."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(int(days * 86400).to_bytes(8, "little", signed=True))

    def network(self, state: str) -> None:
        """Set the network of its processes ``up`` or ``down``."""
        words = [
            "nsenter",
            "--net",
            "--target",
            str(self._server.pid),
            "ip",
            "link",
            "set",
            "lo",
            state,
        ]
        subprocess.run(words, check=True)

    def start(self, job: Job, *more: str) -> None:
        """Start ``job``, with ``more`` options."""
        words = [
            "-m",
            "primus_images.cli.main",
            *job.arguments(),
            "--json",
            "--no-preflight",
            *more,
        ]
        assert self._server.stdin
        self._server.stdin.write(
            json.dumps({"words": words, "variables": {"HF_HUB_OFFLINE": "1"}}) + "\n"
        )
        self._server.stdin.flush()

    def ended(self, seconds: float) -> dict[str, Any] | None:
        """Return its exit code and its output, or None if it has not ended within ``seconds``."""
        assert self._server.stdout
        if not select.select([self._server.stdout], [], [], seconds)[0]:
            return None
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def ranks(self) -> list[int]:
        """Return the processes of the ranks: this server's great-grandchildren."""
        family = {self._server.pid}
        for _ in range(3):
            family = {pid for pid, (parent, _) in processes.processes().items() if parent in family}
        return sorted(family)

    def close(self) -> None:
        """End it."""
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()


class Attempt:
    """A job that runs, with what the faults need; ``undo`` puts its machine in order after it has
    ended.
    """

    def __init__(self, command: Command, job: Job, chance: random.Random) -> None:
        self.command, self.job, self.chance, self.limit_s = command, job, chance, float(LIMIT_S)
        self.undo: list[Callable[[], object]] = []

    def newest(self) -> Path | None:
        """Return its newest whole checkpoint."""
        saved = steps(self.job.output / "checkpoint")
        return next((step for step in reversed(saved) if identity.complete(step)), None)


def kill(attempt: Attempt) -> bool:
    """Kill one rank at random."""
    if ranks := attempt.command.ranks():
        os.kill(attempt.chance.choice(ranks), signal.SIGKILL)
    return bool(ranks)


def full_disk(attempt: Attempt) -> bool:
    """Fill the disk to the last byte."""
    disk = attempt.job.output.parent
    filler = disk / "filler"
    attempt.undo.append(filler.unlink)
    # Without a buffer, which would fail again when the file is closed.
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    return True


def read_only(attempt: Attempt) -> bool:
    """Make the folder of the run read-only."""
    folder = str(attempt.job.output)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    attempt.undo.append(lambda: subprocess.run(["umount", "-l", folder], check=True))
    # It is refused while a rank has opened a file there for writing since the first mount.
    remount = ["mount", "-o", "remount,bind,ro", folder]
    return any(
        subprocess.run(remount, check=False, stderr=subprocess.DEVNULL).returncode == 0
        for _ in range(50)
    )


def purge(attempt: Attempt) -> bool:
    """Delete the newest checkpoint, as another program may."""
    if newest := attempt.newest():
        shutil.rmtree(newest, ignore_errors=True)
    return newest is not None


def damage(attempt: Attempt) -> bool:
    """Cut a file of the newest checkpoint in half."""
    if newest := attempt.newest():
        file = attempt.chance.choice(sorted(newest.iterdir()))
        os.truncate(file, file.stat().st_size // 2)
    return newest is not None


def clock_jump(attempt: Attempt) -> bool:
    """Let the clock jump by up to three years."""
    attempt.command.jump(attempt.chance.choice((-1, 1)) * attempt.chance.choice((1, 40, 1000)))
    return True


def network(attempt: Attempt) -> bool:
    """Take the network from all ranks, until the job has ended."""
    attempt.undo.append(lambda: attempt.command.network("up"))
    attempt.command.network("down")
    return True


# The job goes on after the first ones, and ends by the last ones.
SURVIVED, ENDING = (purge, damage, clock_jump), (kill, kill, full_disk, read_only, network)
# Nothing else tells the ranks of a network that is lost.
STALL_S = 30


def job_of(backend: str, output: Path, resume_from: Path | None = None) -> Job:
    """Return the job of ``backend``; ``resume_from`` is the folder of a run."""
    name = "flux.1-dev" if backend == "flux" else "llama3.1-8b"
    words = [
        f"steps={STEPS}",
        f"checkpoint={EVERY}",
        *(["model.layers=2", "seq_len=64"] if backend != "flux" else []),
    ]
    words += ["checkpoint.keep_latest_k=2"] if backend == "torchtitan" else []
    choices = Choices(backend=backend, mode=MODES.get(backend, "pretrain"), gpu="cpu", proxy=True)
    recipe = resolve(name, words, choices)
    newest = resume_from and next(
        s for s in reversed(steps(resume_from / "checkpoint")) if identity.complete(s)
    )
    return Job(name="soak", recipe=recipe, output=output, resume_from=newest)


def losses(job: Job, code: int) -> dict[int, float]:
    """Return step → loss of what ``job`` logged."""
    return {step.step: step.loss for step in outcome.read(job, code).series.steps}


def disturb(attempt: Attempt) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run it with faults at random steps. Returns these, and how the command ended."""
    chance, rows = attempt.chance, list[dict[str, Any]]()
    survived, ending = (
        [f for f in kinds if f.__name__ not in attempt.command.impossible]
        for kinds in (SURVIVED, ENDING)
    )
    faults: list[Callable[[Attempt], bool]] = [
        chance.choice(survived) for _ in range(chance.randint(2, 6))
    ]
    faults += [chance.choice(ending)] if chance.random() < 0.85 else []
    first = attempt.job.first_step
    places = sorted(chance.randint(first, min(STEPS, first + 3 * EVERY)) for _ in faults)
    attempt.command.start(
        attempt.job, *(["--stall-timeout", str(STALL_S)] if network in faults else [])
    )
    began = time.monotonic()
    while (end := attempt.command.ended(0.05)) is None:
        with suppress(OSError):
            text = (attempt.job.output / "log.txt").read_text(errors="replace")
            if faults and max(map(int, re.findall(r"step:\s*(\d+)", text)), default=0) >= places[0]:
                time.sleep(chance.random() * 0.3)
                fault, place = faults.pop(0), places.pop(0)
                if fault(attempt):
                    rows.append(
                        {
                            "backend": attempt.job.recipe.backend,
                            "fault": fault.__name__,
                            "step": place,
                        }
                    )
        if time.monotonic() - began > attempt.limit_s:
            return rows, {"code": None, "err": f"it did not end within {attempt.limit_s:.0f} s"}
    for undo in reversed(attempt.undo):
        undo()
    return rows, end


def soak(
    command: Command, backend: str, disk: Path, seed: int, until: float
) -> Iterator[list[dict[str, Any]]]:
    """Yield the faults of one attempt after the other, each with the reason if it is lost."""
    chance = random.Random(seed)
    whole = job_of(backend, disk / "whole")
    began = time.monotonic()
    command.start(whole)
    end = command.ended(LIMIT_S) or {"code": None, "err": f"it did not end within {LIMIT_S} s"}
    if end["code"] == 3:
        yield [{"left_out": f"{backend}: {end['err'].strip()[-300:]}"}]
        return
    expected = losses(whole, end["code"]) if end["code"] == 0 else {}
    if sorted(expected) != [*range(1, STEPS + 1)]:
        yield [
            {
                "backend": backend,
                "fault": "none",
                "lost": f"without faults: {end['code']}: {end['err'][-600:]}",
            }
        ]
        return
    limit_s = 60 + 3 * (time.monotonic() - began)
    yield [{"left_out": name} for name in sorted(command.impossible)]
    shutil.rmtree(whole.output)
    number, resume_from = 0, None
    while time.monotonic() < until:
        number += 1
        job = job_of(backend, disk / f"attempt-{number}", resume_from)
        if job.first_step > STEPS:  # the run before was disturbed after its last checkpoint
            job = job_of(backend, disk / f"attempt-{number}")
        attempt = Attempt(command, job, chance)
        attempt.limit_s = limit_s
        rows, end = disturb(attempt)
        reason = judged(attempt.job, end, expected, [row["fault"] for row in rows])
        for row in rows:
            row |= {"seed": seed, "attempt": number, "from": attempt.job.first_step, "lost": reason}
            row["trained"] = len(losses(attempt.job, end["code"] or 0))
        yield rows or ([{"backend": backend, "fault": "none", "lost": reason}] if reason else [])
        if reason and end["code"] is None:
            return
        done = end["code"] == 0
        saved = attempt.newest() is not None
        for old in disk.glob("attempt-*"):
            if done or (saved and old != attempt.job.output):
                shutil.rmtree(old, ignore_errors=True)
        resume_from = None if done else attempt.job.output if saved else _whole(resume_from)


def _whole(run: Path | None) -> Path | None:
    return (
        run if run and any(identity.complete(step) for step in steps(run / "checkpoint")) else None
    )


def judged(job: Job, end: dict[str, Any], expected: dict[int, float], faults: list[str]) -> str:
    """Return why the attempt is lost; empty if it is not."""
    text = end["err"]
    if end["code"] not in (0, 1, 3):
        return f"exit code {end['code']}: {text[-600:]}"
    if "Traceback" in text:
        return f"a traceback: {text[-1500:]}"
    if end["code"] and not {"kill", "full_disk", "read_only", "network"} & {*faults}:
        log = (
            (job.output / "log.txt").read_text(errors="replace")
            if (job.output / "log.txt").exists()
            else ""
        )
        return f"it failed without a reason: {text[-600:]} {log[-1500:]}"
    logged = losses(job, end["code"])
    # A step that was not written exactly, as on a full disk, is in the log with 5 decimals.
    wrong = [
        step
        for step, loss in logged.items()
        if loss not in (expected[step], float(f"{expected[step]:.5f}"))
    ]
    if wrong:
        return (
            f"step {wrong[0]} has loss {logged[wrong[0]]!r}, and {expected[wrong[0]]!r} "
            "without faults"
        )
    if end["code"] == 0 and max(logged, default=0) != STEPS:
        return f"it ended well after step {max(logged, default=0)}"
    return ""


class Pods:
    """The pods of `launch k8s` on two nodes. As Kubernetes does, it starts each again that has
    failed.
    """

    def __init__(self, python: str, folder: Path, backend: str) -> None:
        recipe = job_of(backend, folder).recipe
        words = [word for word in recipe.overrides if not word.startswith("ranks=")]
        two = replace(recipe.choices, nodes=2)
        plan = Plan(recipe=resolve(recipe.name, [*words, "ranks=1"], two))
        script = manifests(plan, Cluster(image="a/b:c", name="x", claim="runs"))[1]["spec"][
            "template"
        ]["spec"]
        self._script = (
            script["containers"][0]["command"][2].replace("$$(", "$(").replace(RUNS, str(folder))
        )
        self._folder, self.nodes, self.codes = (
            folder,
            dict[int, subprocess.Popen[bytes]](),
            list[int](),
        )
        (folder / "bin").mkdir(parents=True)
        program = folder / "bin/primus"
        program.write_text(
            f'#!/bin/sh\nexec {python} -W ignore -m primus_images.cli.main "$@"\n', encoding="utf-8"
        )
        program.chmod(0o755)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        path = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}:{os.environ['PYTHONPATH']}",
        }
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NODE_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        self._variables = {**os.environ, **path, **meeting, "RUN_ID": "1"}

    def look(self) -> bool:
        """Start what must run. Returns whether both nodes have succeeded."""
        for node in (0, 1):
            pod = self.nodes.get(node)
            if pod and pod.poll():
                self.codes.append(pod.returncode)
            if pod is None or pod.poll():
                variables = {**self._variables, "JOB_COMPLETION_INDEX": str(node)}
                with (self._folder / f"pod-{node}.txt").open("ab") as out:
                    words = ["bash", "-c", self._script]
                    self.nodes[node] = subprocess.Popen(
                        words, env=variables, stdout=out, stderr=out
                    )
        return all(pod.poll() == 0 for pod in self.nodes.values())

    def kill(self, node: int, number: signal.Signals) -> None:
        """Send a pod's first process SIGTERM, as at its deletion, or SIGKILL to all, as when its
        node is lost.
        """
        family = {self.nodes[node].pid}
        while number == signal.SIGKILL:
            more = {
                pid for pid, (parent, _) in processes.processes().items() if parent in family
            } - family
            if not more:
                break
            family |= more
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def attempts(self) -> list[Path]:
        """Return the folders of its attempts, in order."""
        return sorted(
            self._folder.glob("x-1/attempt-*"),
            key=lambda path: int(path.name.removeprefix("attempt-")),
        )

    def losses(self) -> list[tuple[int, float]]:
        """Return the step and the loss of all that was logged, in order."""
        files = [
            path / "exact.jsonl" for path in self.attempts() if (path / "exact.jsonl").exists()
        ]
        rows = [
            json.loads(line)
            for path in files
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        return [(row["step"], row["loss"]) for row in rows]

    def close(self) -> None:
        """End all of them."""
        for node in self.nodes:
            self.kill(node, signal.SIGKILL)


def pods(python: str, folder: Path, seed: int, until: float) -> Iterator[list[dict[str, Any]]]:
    """Yield the killed pods of one job after the other, each with the reason if it is lost."""
    chance, backend = random.Random(seed), ("fsdp", "torchtitan")[seed % 2]
    expected: dict[int, float] = {}
    for number in count():
        job, rows = Pods(python, folder / str(number), backend), list[dict[str, Any]]()
        # The first job is left alone.
        moments = [chance.randint(1, 2 * EVERY)] if number else []
        began, reason = time.monotonic(), ""
        while not job.look() and not reason:
            time.sleep(0.1)
            logged = job.losses()
            if (
                moments
                and len(logged) >= moments[0]
                and all(pod.poll() is None for pod in job.nodes.values())
            ):
                name = chance.choice(("lost", "deleted"))
                job.kill(
                    chance.choice((0, 1)), signal.SIGKILL if name == "lost" else signal.SIGTERM
                )
                rows.append(
                    {
                        "backend": f"{backend}, two pods",
                        "fault": f"pod_{name}",
                        "step": logged[-1][0],
                    }
                )
                # Three attempts without a new checkpoint would end the job.
                moments = (
                    [len(logged) + chance.randint(EVERY + 2, 3 * EVERY)] if len(rows) < 4 else []
                )
            if time.monotonic() - began > LIMIT_S * (1 + len(rows)):
                reason = (
                    "it did not end: "
                    f"{(folder / str(number) / 'pod-0.txt').read_text(errors='replace')[-600:]}"
                )
        steps_logged = job.losses()
        expected = expected or dict(steps_logged)
        if wrong := [step for step, loss in steps_logged if loss != expected.get(step)]:
            reason = reason or f"step {wrong[0]} has another loss than without faults"
        elif {step for step, _ in steps_logged} != {*range(1, STEPS + 1)} or 2 in job.codes:
            reason = reason or f"exit codes {job.codes}, last step {max(expected, default=0)}"
        job.close()
        for row in rows:
            row |= {"seed": seed, "attempt": number, "lost": reason, "trained": len(steps_logged)}
        yield rows or (
            [{"backend": f"{backend}, two pods", "fault": "none", "lost": reason}] if reason else []
        )
        if reason or time.monotonic() > until:
            return


def small_disk(folder: Path, stack: ExitStack) -> set[str]:
    """Mount an empty disk of ``DISK_MIB`` on ``folder``. Returns the faults that are impossible
    without it.
    """
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode
    ):
        return {"full_disk", "read_only"}
    stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
    return set()


def work(
    options: argparse.Namespace, backend: str, seed: int, processors: set[int], until: float
) -> None:
    """Disturb jobs of ``backend`` on ``processors``, and append the faults to ROWS."""
    os.sched_setaffinity(0, processors)
    with ExitStack() as stack:
        if backend == "pods":
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="soak-")))
            write(options.rows, pods(options.python, folder, seed, until))
            return
        folder, disk = (
            Path(stack.enter_context(TemporaryDirectory(prefix="soak-"))) for _ in range(2)
        )
        impossible = small_disk(disk, stack)
        command = Command(options.python, folder)
        stack.callback(command.close)
        command.impossible |= impossible
        write(options.rows, soak(command, backend, disk, seed, until))


def write(file: Path, attempts: Iterator[list[dict[str, Any]]]) -> None:
    """Append the rows of ``attempts`` to ROWS."""
    for rows in attempts:
        text = "".join(json.dumps(row | {"processors": os.cpu_count()}) + "\n" for row in rows)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(text)
        print(text, end="", flush=True)


def record(rows: list[dict[str, Any]], earlier: dict[str, Any]) -> None:
    """Count ``rows`` in the result, beside what ``earlier`` counted."""
    faults = [row for row in rows if "fault" in row]
    counts = {name: Counter(numbers) for name, numbers in earlier.get("by_backend", {}).items()}
    for row in faults:
        counts.setdefault(row["backend"], Counter())[row["fault"]] += 1
    lost = [f"{row['backend']}, {row['fault']}: {row['lost']}" for row in faults if row["lost"]]
    lost = earlier.get("lost_because", []) + lost
    trained = {
        (row["backend"], row.get("seed"), row.get("attempt")): row.get("trained", 0)
        for row in faults
    }
    document = {
        "generated": "by `python -m benchmarks.soak`; do not edit",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processors": sorted(
            {*earlier.get("processors", []), *(row["processors"] for row in rows)}
        ),
        "steps": STEPS,
        "checkpoint_every": EVERY,
        "faults": earlier.get("faults", 0) + len(faults),
        "lost": len(lost),
        "attempts": earlier.get("attempts", 0) + len(trained),
        "steps_trained": earlier.get("steps_trained", 0) + sum(trained.values()),
        "by_backend": dict(sorted(counts.items())),
        "lost_because": lost,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(
        json.dumps(document, indent=1),
        *sorted({f"left out: {row['left_out']}" for row in rows if "left_out" in row}),
        sep="\n",
    )


def main() -> int:
    """Disturb jobs until the time is over, and write the result. Returns 1 if a fault is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("backends", nargs="*")
    parser.add_argument(
        "--python", default=sys.executable, help="a Python with PyTorch and the backends"
    )
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1, help="jobs at once; backends take turns")
    parser.add_argument(
        "--merge", action="store_true", help="add to the result what it has not counted yet"
    )
    options = parser.parse_args()
    # The disk is unmounted at the end in any case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    jobs = [
        *enumerate(
            islice(cycle(options.backends), max(options.parallel, len(options.backends))),
            options.seed,
        )
    ]
    processors = sorted(os.sched_getaffinity(0))
    shares = [
        {*processors[place :: options.parallel]} or {*processors}
        for place in range(options.parallel)
    ]
    for first in range(0, len(jobs), options.parallel):
        until = time.monotonic() + options.seconds
        workers = [
            Process(target=work, args=(options, backend, seed, share, until))
            for (seed, backend), share in zip(jobs[first:], shares, strict=False)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            print("a worker failed", file=sys.stderr)
            return 1
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]
    record(rows, json.loads(RESULT.read_text(encoding="utf-8")) if options.merge else {})
    return 1 if any(row.get("lost") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
