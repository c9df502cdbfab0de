"""A Slurm job: the batch script for ``sbatch``, rendered from a plan and the site's options."""

import re
import shlex
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from primus.errors import HostError, InputError
from primus.launch.plan import EXAMPLE_IMAGE, REFERENCE, Plan, bash, refuse_secrets, refuse_unfit, vendor
from primus.waits import answer_of

Container = Literal["pyxis", "docker", "podman", "apptainer", "none"]
CONTAINERS: tuple[Container, ...] = ("pyxis", "docker", "podman", "apptainer", "none")
# Passed into a container by name if set when the job runs: what each task needs to find the others, and what the ranks
# read. Their values are never written to the script.
_FORWARDED = (
    "MASTER_ADDR", "MASTER_PORT", "RDZV_ID", "SLURM_JOB_ID", "SLURM_NODEID", "SLURM_RESTART_COUNT", "SLURMD_NODENAME",
    "NODE_ADDR", "HF_TOKEN", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX",
    "NCCL_DEBUG",
)  # fmt: skip
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,@:+-]*")
_TIME = re.compile(r"\d+|\d+(:[0-5]\d){1,2}|\d+-\d{1,2}(:[0-5]\d){0,2}")
_OPTION = re.compile("-.+", re.DOTALL)
# Options of sbatch that would change what the plan shows, or that a requeued job could not continue with.
_SET_BY_JOB = re.compile(
    "-[NnatGZ].*|--(nodes|ntasks.*|array|gpus(-per-node)?|time|wrap|export(-file)?|signal|open-mode|no-requeue|"
    "no-allocate|test-only)(=.*)?"
)
_FILE = re.compile(r"\.*/")
_PROTOCOL = re.compile(r"^((docker|oras|library)://)?([^/@#]+@(?=.*#))?")
# Pyxis takes an image from Docker Hub unless # follows the registry.
_REGISTRY = re.compile(r"^(docker://)?(\w[^/#]*[.:][^/#]*|localhost)/")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(=.*)?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The options of `primus launch slurm`. An empty text leaves the choice to Slurm. ``grace`` is in seconds."""

    container: Container = "none"
    image: str = ""
    output: Path = Path("runs")
    name: str = ""
    partition: str = ""
    account: str = ""
    time: str = ""
    grace: int = 60
    restarts: int = 20
    port: int = 0
    environment: tuple[str, ...] = ()
    mounts: tuple[Path, ...] = ()
    resume_from: str = ""
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.container != "none" and not self.image:
            raise InputError(f"--container {self.container} needs --image", hint="--image rocm/primus:v26.11-mi300x")
        for option, text in (("partition", self.partition), ("account", self.account)):
            refuse_unfit(option, text, _WORD, "a name of Slurm", "letters, digits and _.,@:+-")
        refuse_unfit("time", self.time, _TIME, "a duration of Slurm", "MINUTES, HH:MM:SS or D-HH:MM:SS")
        for word in self.environment:
            if not _VARIABLE.fullmatch(word):
                raise InputError(f"--env: {word!r} is neither NAME nor NAME=VALUE")
            if "=" in word and word.partition("=")[0] in _FORWARDED[:8]:
                raise InputError(
                    f"--env {word}: the job sets it itself", hint="--port N sets the port of the rendezvous"
                )
        for word in self.extra:
            refuse_unfit("sbatch", word or " ", _OPTION, "an option", "for example --sbatch=--qos=high")
            if _SET_BY_JOB.fullmatch(word):
                hint = "`primus launch --help` has the options"
                raise InputError(f"--sbatch={word}: the job sets it itself", hint=hint)
        for text in (self.image, self.name, self.resume_from, *self.extra, str(self.output)):
            if not text.isprintable():
                raise InputError(f"{text!r} contains a control character")
        secrets = (*self.environment, *self.extra, self.image)
        refuse_secrets(secrets, "export it, and pass its name only: --env HF_TOKEN")
        if self.container != "none":
            self._refuse_unfit_in_containers()
        if (limit := limit_of(self.time)) and self.grace >= limit:
            raise InputError(f"--grace {self.grace}: the job would be told to end at its start: --time is {self.time}")
        if self.port > 65535:
            raise InputError(f"--port: {self.port} is not a port", hint="at most 65535")

    def _refuse_unfit_in_containers(self) -> None:
        image = self.image
        # Pyxis and apptainer also accept image files, and names with a protocol; pyxis a user and a registry before #.
        if self.container in ("pyxis", "apptainer"):
            image = "" if _FILE.match(image) else _PROTOCOL.sub("", image).replace("#", "/", 1)
        refuse_unfit("image", image, REFERENCE, "the name of an image", EXAMPLE_IMAGE)
        mounts = [("mount", path) for path in self.mounts]
        for option, path in (("output", self.output), ("resume-from", Path(self.resume_from)), *mounts):
            if {*":,"} & {*(place := str(path))}:
                hint = "containers separate paths by : and , so mount a folder above it, or a link to it"
                raise InputError(f"--{option}: {place} contains : or ,", hint=hint)
            if place == "/":
                raise InputError(f"--{option}: / is that of the container", hint="name a folder below it")


def limit_of(text: str) -> float | None:
    """Return the seconds of a time limit as Slurm reads it; None for 0, which is no limit, and a text that is none."""
    if not _TIME.fullmatch(text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # The first part is hours after days or of three parts, and minutes otherwise.
    sizes = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * size for part, size in zip(parts, sizes, strict=False)) or None


def container_here() -> Container:
    """Return the container runtime of this cluster: pyxis if srun supports it, else the first installed program."""
    if srun := shutil.which("srun"):
        with suppress(subprocess.TimeoutExpired, OSError), answer_of("srun"):
            usage = subprocess.run([srun, "--help"], capture_output=True, errors="replace", check=False, timeout=20)
            if "--container-image" in usage.stdout:
                return "pyxis"
    return next((program for program in CONTAINERS[1:4] if shutil.which(program)), "none")


def script(plan: Plan, site: Site) -> str:
    """Return the batch script. It contains no secret, and does not depend on the machine that renders it."""
    name = site.name or "primus-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(plan.recipe.name).name.removesuffix(".yaml"))
    gpus = plan.ranks if vendor(plan.recipe.gpu) else None
    options = {
        "job-name": name, "nodes": plan.nodes, "ntasks-per-node": 1, "gpus-per-node": gpus,
        "exclusive": True, "partition": site.partition, "account": site.account, "time": site.time, "requeue": True,
        "open-mode": "append", "signal": f"B:USR1@{site.grace}", "output": f"{site.output / 'slurm-%j.txt'}",
    }  # fmt: skip
    chosen = {key: value for key, value in options.items() if value}
    flags = (f"--{key}" if value is True else f"--{key}={shlex.quote(str(value))}" for key, value in chosen.items())
    pairs = (word.partition("=") for word in site.environment)
    exports = [f"export {name}={shlex.quote(value)}" for name, equals, value in pairs if equals]
    head = [*(f"#SBATCH {option}" for option in (*flags, *site.extra)), "#", *(f"# {line}" for line in plan.lines())]
    resume = shlex.quote(site.resume_from) if site.resume_from else ""
    variables = {
        "steps": plan.resumable, "restarts": site.restarts, "root": shlex.quote(str(site.output)), "resume": resume,
        "port": site.port or "", "task": _task(plan, site),
    }  # fmt: skip
    return "\n".join(["#!/bin/bash", *head, "", *exports, bash("slurm", variables, _srun(plan, site))])


def _task(plan: Plan, site: Site) -> str:
    """Return the shell function of one node. Quotes in it are evaluated on the node."""
    train = f'{shlex.join(plan.command)} --output "$OUTPUT" ${{RESUME_FROM:+--resume-from "$RESUME_FROM"}}'
    address = "addresses=($NODE_ADDRESSES); export NODE_ADDR=${addresses[$SLURM_NODEID]}"
    engine = "" if site.container in ("none", "pyxis") else f"{_engine(plan, site)} "
    return shlex.quote(f"{address}; exec {engine}primus {train}")


def _names(site: Site) -> list[str]:
    return list(dict.fromkeys([*_FORWARDED, *(word.partition("=")[0] for word in site.environment)]))


def _mounts(plan: Plan, site: Site) -> list[str]:
    recipe = [plan.recipe.path.parent] if plan.recipe.by_path else []
    resumed = [Path(site.resume_from)] if site.resume_from else []
    return [shlex.quote(str(path)) for path in (site.output, *site.mounts, *resumed, *recipe)]


def _engine(plan: Plan, site: Site) -> str:
    """Return the command that runs a container on this node, with only the rights that its GPUs need."""
    image, maker = shlex.quote(site.image), vendor(plan.recipe.gpu)
    if site.container == "apptainer":
        gpus = {"amd": ["--rocm"], "nvidia": ["--nv"]}.get(maker, [])
        binds = [word for path in _mounts(plan, site) for word in ("--bind", path)]
        source = image if re.match(r"[./]|\w+://", site.image) else f"docker://{image}"
        return " ".join(["apptainer", "exec", *gpus, *binds, source])
    words = [site.container, "run", "--rm", "--network", "host", "--ipc", "host", "--ulimit", "memlock=-1"]
    if maker == "amd":
        words += ["--device", "/dev/kfd", "--device", "/dev/dri"]
        words += ["$(stat -c '--group-add %g' /dev/kfd /dev/dri/renderD* | sort -u)"]
    elif maker == "nvidia":
        words += ["--gpus", "all"] if site.container == "docker" else ["--device", "nvidia.com/gpu=all"]
    words += ["$([[ ! -e /dev/infiniband ]] || echo --device /dev/infiniband)"]
    words += [word for path in _mounts(plan, site) for word in ("-v", f"{path}:{path}")]
    words += [word for name in _names(site) for word in ("-e", name)]
    return " ".join([*words, image])


def _srun(plan: Plan, site: Site) -> str:
    # srun's exit code is the highest of the tasks. When a task fails, the others end by themselves with a message; any
    # that remain are killed afterwards.
    words = ["srun", "--nodes", str(plan.nodes), "--ntasks", str(plan.nodes), "--ntasks-per-node=1"]
    # The first node judges a run after the others have ended.
    words += ["--kill-on-bad-exit=0", f"--wait={60 if plan.resumable else 0}", "--label"]
    if site.container == "pyxis":
        mounts = ",".join(f"{path}:{path}" for path in _mounts(plan, site))
        image = _REGISTRY.sub(r"\1\2#", site.image.removeprefix("docker.io/"))
        words += [f"--container-image={shlex.quote(image)}", f"--container-mounts={mounts}"]
        words += ["--no-container-mount-home", f"--container-env={','.join(_names(site))}"]
    return " ".join([*words, 'bash -c "$task"'])


def submit(text: str, folder: Path, *, wait: bool = False) -> tuple[int, str]:
    """Submit the script with sbatch. Returns the job's number and an exit code: of the job with ``wait``, else 0.

    Raises HostError if sbatch is missing or refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise HostError("sbatch is not installed here", hint="run it on a login node; --dry-run prints the script")
    folder.mkdir(parents=True, exist_ok=True)
    words = ["sbatch", "--parsable", *(["--wait"] if wait else [])]
    with answer_of("sbatch"):
        done = subprocess.run(words, input=text, capture_output=True, errors="replace", check=False)
    # A site's plugin may print lines of its own before the number.
    number = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
    if not number.isdigit():
        reason = " ".join(done.stderr.split())[:400] or "it gave no reason"
        raise HostError(f"sbatch refused the job: {reason}", hint="--dry-run prints the script")
    return (done.returncode if wait else 0), number
