"""A Slurm job: the batch script for ``sbatch``, rendered from a plan and the site's options."""

import re
import shlex
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from primus_images.errors import HostError, InputError
from primus_images.launch.plan import Plan, bash, refuse_secrets, refuse_unfit, vendor
from primus_images.programs import captured
from primus_images.yamlfile import read_values

Container = Literal["pyxis", "docker", "podman", "apptainer", "none"]
CONTAINERS: tuple[Container, ...] = ("pyxis", "docker", "podman", "apptainer", "none")
_DATA: Any = read_values(Path(__file__).with_name("slurm.yaml")).data
# `srun --overlap` asks a node that the job uses.
LEAST_VERSION = (20, 11)
# Each node looks for the job's folder, which the first one has made. Network file systems show it
# some seconds later.
_SHARED = (
    'for _ in {1..60}; do [[ -d "${OUTPUT%/*}" ]] && break; sleep 1; done; '
    '[[ -d ${OUTPUT%/*} ]] || { echo "primus: node $SLURMD_NODENAME has no ${OUTPUT%/*}, which the '
    'first node made: --output must be a folder that all nodes share" >&2; exit 3; }'
)
_FILE = re.compile(r"\.*/")
_PROTOCOL = re.compile(r"^((docker|oras|library)://)?([^/@#]+@(?=.*#))?")
# Pyxis takes an image from Docker Hub unless # follows the registry.
_REGISTRY = re.compile(r"^(docker://)?(\w[^/#]*[.:][^/#]*|localhost)/")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The options of `primus launch slurm`. An empty text leaves the choice to Slurm.

    ``grace`` is in seconds.
    """

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
            raise InputError(
                f"--container {self.container} needs --image",
                hint="--image NAME, as `primus load` and `primus publish` print it",
            )
        refuse_unfit(vars(self), "slurm")
        secrets = (*self.environment, *self.extra, self.image)
        refuse_secrets(secrets, "export it, and pass its name only: --env HF_TOKEN")
        if self.container != "none":
            refuse_unfit({**vars(self), "image": self._name_of_image()}, "containers")
        limit = limit_of(self.time)
        if limit and self.grace >= limit:
            raise InputError(
                f"--grace {self.grace}: the job would be told to end at its start: --time is "
                f"{self.time}"
            )

    def _name_of_image(self) -> str:
        """Return the name of the image in a registry; empty for a file."""
        if self.container not in ("pyxis", "apptainer"):
            return self.image
        # These also accept image files, and names with a protocol; pyxis a user and a registry
        # before #.
        if _FILE.match(self.image):
            return ""
        return _PROTOCOL.sub("", self.image).replace("#", "/", 1)


def limit_of(text: str) -> float | None:
    """Return the seconds of a time limit as Slurm reads it.

    None for 0 and words, which are no limit.
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # The first part is hours after days or of three parts, and minutes otherwise.
    sizes = [60, 1]
    if dash or len(parts) == 3:
        sizes = [3600, 60, 1]
    seconds = int(days or 0) * 86400
    for part, size in zip(parts, sizes, strict=False):
        seconds += part * size
    return seconds or None


def container_here() -> Container:
    """Return the container runtime of this cluster.

    It is pyxis if srun supports it, or else the first program that is installed.
    """
    srun = shutil.which("srun")
    if srun:
        with suppress(subprocess.TimeoutExpired, OSError):
            if "--container-image" in captured([srun, "--help"], "srun", timeout=20).stdout:
                return "pyxis"
    for program in CONTAINERS[1:4]:
        if shutil.which(program):
            return program
    return "none"


def script(plan: Plan, site: Site) -> str:
    """Return the batch script.

    It contains no secret, and does not depend on the machine that renders it.
    """
    lines = ["#!/bin/bash", *_flags(plan, site), "#"]
    lines += [f"# {line}" for line in plan.lines()]
    lines.append("")
    for word in site.environment:
        name, equals, value = word.partition("=")
        if equals:
            lines.append(f"export {name}={shlex.quote(value)}")
    resume = ""
    if site.resume_from:
        resume = shlex.quote(site.resume_from)
    variables = {
        "steps": plan.resumable,
        "restarts": site.restarts,
        "root": shlex.quote(str(site.output)),
        "resume": resume,
        "port": site.port or "",
        "task": shlex.quote(_task(plan, site)),
    }
    lines.append(bash("slurm", variables, _srun(plan, site)))
    return "\n".join(lines)


def _flags(plan: Plan, site: Site) -> list[str]:
    gpus = 0
    if vendor(plan.recipe.gpu):
        gpus = plan.ranks
    options = {
        "job-name": site.name or _default_name(plan),
        "nodes": plan.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus,
        "exclusive": True,
        "partition": site.partition,
        "account": site.account,
        "time": site.time,
        "requeue": True,
        "open-mode": "append",
        "signal": f"B:USR1@{site.grace}",
        "output": f"{site.output / 'slurm-%j.txt'}",
    }
    flags = []
    for option, value in options.items():
        if value is True:
            flags.append(f"#SBATCH --{option}")
        elif value:
            flags.append(f"#SBATCH --{option}={shlex.quote(str(value))}")
    return flags + [f"#SBATCH {option}" for option in site.extra]


def _default_name(plan: Plan) -> str:
    recipe = Path(plan.recipe.name).name.removesuffix(".yaml")
    return "primus-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", recipe)


def _task(plan: Plan, site: Site) -> str:
    """Return what one node runs. Its quotes are evaluated there."""
    address = "addresses=($NODE_ADDRESSES); export NODE_ADDR=${addresses[$SLURM_NODEID]}"
    train = (
        f'primus {shlex.join(plan.command)} --output "$OUTPUT" '
        '${RESUME_FROM:+--resume-from "$RESUME_FROM"}'
    )
    if site.container not in ("none", "pyxis"):
        train = f"{_engine(plan, site)} {train}"
    return f"{address}; {_SHARED}; exec {train}"


def _names(site: Site) -> list[str]:
    """Return the names of the variables that a container gets."""
    names = [*_DATA["forwarded"]]
    names += [word.partition("=")[0] for word in site.environment]
    return list(dict.fromkeys(names))


def _mounts(plan: Plan, site: Site) -> list[str]:
    """Return the folders that a container sees."""
    paths = [site.output, *site.mounts]
    if site.resume_from:
        paths.append(Path(site.resume_from))
    if plan.recipe.by_path:
        paths.append(plan.recipe.path.parent)
    return [shlex.quote(str(path)) for path in paths]


def _engine(plan: Plan, site: Site) -> str:
    """Return the command that runs another in a container."""
    engine = _DATA["engines"][site.container]
    words = [site.container, engine["run"]]
    words += [engine.get(part, "") for part in ("user", vendor(plan.recipe.gpu), "fabric")]
    words += [engine["folder"].format(path) for path in _mounts(plan, site)]
    words += [engine["variable"].format(name) for name in _names(site)]
    image = shlex.quote(site.image)
    if site.container == "apptainer" and not re.match(r"[./]|\w+://", site.image):
        image = f"docker://{image}"
    words.append(image)
    return " ".join(word for word in words if word)


def _srun(plan: Plan, site: Site) -> str:
    # srun's exit code is the highest of the tasks. When a task fails, the others end by themselves
    # with a message; any that remain are killed afterwards.
    words = ["srun", "--nodes", str(plan.nodes), "--ntasks", str(plan.nodes), "--ntasks-per-node=1"]
    # The first node judges a run after the others have ended.
    seconds = 60 if plan.resumable else 0
    words += ["--kill-on-bad-exit=0", f"--wait={seconds}", "--label"]
    if site.container == "pyxis":
        image = _REGISTRY.sub(r"\1\2#", site.image.removeprefix("docker.io/"))
        mounts = ",".join(f"{path}:{path}" for path in _mounts(plan, site))
        names = ",".join(_names(site))
        words += [f"--container-image={shlex.quote(image)}", f"--container-mounts={mounts}"]
        words += ["--no-container-mount-home", f"--container-env={names}"]
    return " ".join([*words, 'bash -c "$task"'])


def _require_version() -> None:
    """Raise HostError if this Slurm lacks what the script calls. An unknown version is accepted."""
    version = re.search(
        r"slurm\S* (\d+)\.(\d+)", captured(["sbatch", "--version"], "sbatch").stdout
    )
    if version and (int(version[1]), int(version[2])) < LEAST_VERSION:
        raise HostError(
            f"this is Slurm {version[1]}.{version[2]}, which lacks `srun --overlap`",
            hint="Slurm 20.11 or newer is needed",
        )


def submit(text: str, folder: Path, *, wait: bool = False) -> tuple[int, str]:
    """Submit the script with sbatch. Return an exit code, and the job's number.

    The exit code is the job's with ``wait``, and else 0. Raises HostError if sbatch is missing or
    refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise HostError(
            "sbatch is not installed here",
            hint="run it on a login node; --dry-run prints the script",
        )
    _require_version()
    folder.mkdir(parents=True, exist_ok=True)
    command = ["sbatch", "--parsable"]
    if wait:
        command.append("--wait")
    done = captured(command, "sbatch", text=text)
    # A site's plugin may print lines of its own before the number.
    last_line = done.stdout.strip().rpartition("\n")[2]
    number = last_line.partition(";")[0]
    if not number.isdigit():
        output = " ".join((done.stderr or done.stdout).split())
        reason = output[:400] or f"exit code {done.returncode}"
        if done.returncode:
            raise HostError(f"sbatch refused the job: {reason}", hint="--dry-run prints the script")
        raise HostError(
            f"sbatch names no job: {reason}", hint="squeue --me lists what it submitted"
        )
    if wait:
        return done.returncode, number
    return 0, number
