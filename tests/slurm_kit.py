"""A real Slurm on this machine: its own munged, slurmctld and one slurmd for each of several
virtual nodes.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from project_kit import free_port, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def missing() -> str:
    """Why no Slurm can run here; empty when it can."""
    if "/usr/sbin" not in os.environ["PATH"].split(":"):
        os.environ["PATH"] += ":/usr/sbin"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """The cluster below ``folder``; nodes n1, n2, … with eight fake GPUs each."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder = folder
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("munge", "state", "gpus", *(f"spool/{name}" for name in self.names)):
            (folder / name).mkdir(parents=True)
        for number in range(8):
            (folder / "gpus" / str(number)).touch()
        self._configure()
        try:
            key = folder / "munge/key"
            key.write_bytes(os.urandom(128))
            key.chmod(0o400)
            self.start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-c")
            for name in self.names:
                self.start_node(name)
            self._until_idle()
        except BaseException:
            self.stop()
            raise

    def _configure(self) -> None:
        folder, host, cpus = (
            self.folder,
            socket.gethostname().partition(".")[0],
            os.cpu_count() or 1,
        )
        lines = [
            "ClusterName=test",
            # Ports follow from the numbers of jobs, and several clusters may be on this machine.
            f"FirstJobId={1000 * (1 + os.getpid() % 11)}",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={free_port()}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge/socket,cred_expire=1",
            "CryptoType=crypto/munge",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/%n.pid",
            f"SlurmctldLogFile={folder}/slurmctld.log",
            f"SlurmdLogFile={folder}/%n.log",
            "SelectType=select/cons_tres",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "ReturnToService=2",
            "GresTypes=gpu",
            # Only jobs that ask for it (--acctg-freq) are measured, and ended above their memory.
            "JobAcctGatherType=jobacct_gather/linux",
            "JobAcctGatherFrequency=0",
            "JobAcctGatherParams=OverMemoryKill",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "AccountingStorageType=accounting_storage/none",
            "SlurmdTimeout=10",
            "KillWait=10",
            "MessageTimeout=10",
            "UnkillableStepTimeout=30",
            "JobRequeue=1",
            "SchedulerParameters=sched_interval=2,batch_sched_delay=1,preempt_send_user_signal",
            *(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} "
                f"CPUs={cpus} "
                "RealMemory=2000 Gres=gpu:8"
                for name in self.names
            ),
            f"PartitionName=main Nodes={','.join(self.names)} Default=YES MaxTime=60 State=UP "
            "OverSubscribe=EXCLUSIVE PriorityTier=1 GraceTime=60",
            f"PartitionName=urgent Nodes={','.join(self.names)} MaxTime=60 State=UP "
            "OverSubscribe=EXCLUSIVE PriorityTier=2",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        files = ",".join(str(folder / "gpus" / str(number)) for number in range(8))
        (folder / "gres.conf").write_text(
            "".join(f"Name=gpu File={one}\n" for one in files.split(","))
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def start_munge(self) -> None:
        """Start munged, which vouches for every message of Slurm's."""
        folder = self.folder / "munge"
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={folder}/key",
            f"--socket={folder}/socket",
            f"--pid-file={folder}/pid",
            f"--log-file={folder}/log",
            f"--seed-file={folder}/seed",
        )
        until((folder / "socket").exists, 20)

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                words,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def start_node(self, name: str, *, boots: bool = False, without: Path | None = None) -> None:
        """Start the slurmd of a node. It ends steps that a former one left.

        With ``boots``, the machine has booted now. The folder ``without`` is another one there.
        """
        words = ["slurmd", "-D", "-c", "-N", name]
        if boots:
            words.append("-b")
        if without is not None:
            mount = f"mount -t tmpfs tmpfs {without} && exec {shlex.join(words)}"
            words = ["unshare", "--mount", "sh", "-c", mount]
        self._start(name, *words)

    def kill_daemon(self, name: str) -> None:
        """End munged, slurmctld, or the slurmd of a node, at once. Jobs go on."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def start_daemon(self, name: str) -> None:
        """Start the slurmd of a node whose steps go on."""
        self._start(name, "slurmd", "-D", "-N", name)

    def start_controller(self) -> None:
        """Start slurmctld again, with the jobs that it knew."""
        self._start("slurmctld", "slurmctld", "-D")

    def kill_node(self, name: str) -> None:
        """End the node's slurmd and all that it started, at once, as a power failure does."""
        daemon = self._daemons.pop(name)
        tasks = [pid for pid, given in self._processes() if given.get("SLURMD_NODENAME") == name]
        # slurmstepd itself carries no node's name. It goes first, or it would report how its tasks
        # ended.
        steps = [
            pid
            for pid in {*map(_parent, tasks)} - {0}
            if "slurmstepd" in Path(f"/proc/{pid}/comm").read_text()
        ]
        for pid in [daemon.pid, *steps, *tasks]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    @contextmanager
    def without_room(self, name: str) -> Iterator[None]:
        """Give a node, whose daemon starts anew, no room for what Slurm keeps there."""
        spool = self.folder / "spool" / name
        self.kill_node(name)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", spool], check=True)
        self.start_node(name)
        self._until_idle(name)
        with (spool / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        try:
            yield
        finally:
            self.kill_node(name)
            subprocess.run(["umount", "--lazy", spool], check=True)
            self.start_node(name)

    def _until_idle(self, *names: str) -> None:
        nodes = ",".join(names or self.names)

        def idle() -> bool:
            return {
                *self.run(
                    "sinfo", "--noheader", "--format=%T", f"--nodes={nodes}", check=False
                ).stdout.split()
            } == {"idle"}

        assert until(idle, 60), "\n".join(
            path.read_text()[-1500:] for path in self.folder.glob("*.log")
        )

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm."""
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=check, timeout=120
        )

    def job(self, number: str) -> dict[str, str]:
        """What scontrol tells of a job: JobState, ExitCode, Restarts, NodeList, …"""
        words = ("scontrol", "show", "job", number, "--oneliner")
        # The controller may have just been started again.
        assert until(lambda: self.run(*words, check=False).returncode == 0)
        told = self.run(*words).stdout
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    def nodes(self, number: str) -> list[str]:
        """The nodes of a job, the first one first."""
        return self.run(
            "scontrol", "show", "hostnames", self.job(number)["NodeList"]
        ).stdout.split()

    def ended(self, number: str, seconds: float = 300) -> dict[str, str]:
        """The job, once it is over."""
        deadline = time.monotonic() + seconds
        while True:
            job = self.job(number)
            if job["JobState"] in OVER:
                return job
            self._start_early(number, job)
            assert time.monotonic() < deadline, job
            time.sleep(1)

    def restarted(self, number: str, times: int, seconds: float = 300) -> None:
        """Wait until the job runs after this many restarts."""
        deadline = time.monotonic() + seconds
        while True:
            job = self.job(number)
            if (job["JobState"], job["Restarts"]) == ("RUNNING", str(times)):
                return
            self._start_early(number, job)
            assert time.monotonic() < deadline, job
            time.sleep(1)

    def held(self, number: str, seconds: float = 120) -> None:
        """Wait until the job is in the queue and stays there."""
        assert until(lambda: "held" in self.job(number)["Reason"].lower(), seconds), self.job(
            number
        )

    def _start_early(self, number: str, job: dict[str, str]) -> None:
        """Do not wait two minutes for a requeued job, as Slurm does."""
        if job["Reason"] == "BeginTime":
            # Its nodes refuse credentials of the second in which the job was ended, so it cannot
            # start at once.
            time.sleep(3)
            self.run("scontrol", "update", f"JobId={number}", "StartTime=now", check=False)

    def pids(self, number: str) -> dict[int, int]:
        """Rank → process, of the ranks of a job that run now."""
        ranks = {
            p: v for p, v in self._processes() if v.get("SLURM_JOB_ID") == number and "RANK" in v
        }
        # What a rank starts inherits its variables.
        return {
            int(given["RANK"]): pid for pid, given in ranks.items() if _parent(pid) not in ranks
        }

    def processes_of(self, number: str) -> list[int]:
        """Every process of a job: its script, its tasks, and what they started."""
        return [p for p, given in self._processes() if given.get("SLURM_JOB_ID") == number]

    def _processes(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Those of this cluster, with their variables."""
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "environ").read_text(errors="replace").split("\0")
                given = dict(word.split("=", 1) for word in words if "=" in word)
                if given.get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    yield int(entry.name), given

    def stop(self) -> None:
        """End every daemon and the steps below them."""
        with suppress(Exception):
            self.run("scancel", "--state=RUNNING", "--state=PENDING", "--full", check=False)
            time.sleep(1)
        for process in reversed(list(self._daemons.values())):
            process.terminate()
        for process in self._daemons.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
                continue
            process.kill()
            process.wait()


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


class Job:
    """A job that trains a proxy on two nodes with one rank each; ``runs`` gets its results."""

    def __init__(self, slurm: Slurm, runs: Path, recipe: str, *words: str) -> None:
        self.slurm = slurm
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "primus_images.cli.main",
                "launch",
                "slurm",
                recipe,
                "--nodes",
                "2",
                "--ranks",
                "1",
                "--gpu",
                "cpu",
                "--container",
                "none",
                "--output",
                str(runs),
                "--json",
                *words,
            ],
            env=slurm.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.number = str(json.loads(done.stdout)["job"])
        self.folder = runs / self.number
        self.log = runs / f"slurm-{self.number}.txt"

    def ended(self, seconds: float = 900) -> dict[str, str]:
        """What scontrol says of the job, once it is over.

        Its nodes wait up to 600 s for one that was lost before they met.
        """
        return self.slurm.ended(self.number, seconds)

    @property
    def attempts(self) -> list[Path]:
        """The folders of its attempts, in order."""
        return sorted(
            self.folder.glob("attempt-*"), key=lambda path: int(path.name.removeprefix("attempt-"))
        )

    def reach(self, step: int, seconds: float = 300) -> None:
        """Wait until the first attempt has logged ``step``."""
        log = self.folder / "attempt-0" / "log.txt"
        deadline, looked = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < deadline:
            with suppress(OSError):
                if any(
                    int(number) >= step for number in re.findall(r"step:\s*(\d+)", log.read_text())
                ):
                    return
            if (
                time.monotonic() - looked > 15
            ):  # on a busy machine, asking takes as long as many steps
                looked = time.monotonic()
                if self.slurm.job(self.number)["JobState"] not in (
                    "PENDING",
                    "RUNNING",
                    "CONFIGURING",
                ):
                    break
            time.sleep(0.05)
        raise AssertionError(self.said())

    def running(self, seconds: float = 60) -> None:
        """Wait until Slurm has started the job."""
        assert until(lambda: self.slurm.job(self.number)["JobState"] == "RUNNING", seconds), (
            self.said()
        )

    def result(self, attempt: int = 0) -> dict[str, object]:
        """What an attempt wrote about itself."""
        found: dict[str, object] = json.loads(
            (self.folder / f"attempt-{attempt}" / "result.json").read_text()
        )
        return found

    def losses(self, attempt: int) -> dict[int, float]:
        """Step → exact loss, of an attempt."""
        lines = (self.folder / f"attempt-{attempt}" / "exact.jsonl").read_text().splitlines()
        return {one["step"]: one["loss"] for one in map(json.loads, lines)}

    def said(self) -> str:
        """The job's own log."""
        return self.log.read_text() if self.log.exists() else "(no log)"
