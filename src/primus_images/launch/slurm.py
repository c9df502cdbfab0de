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
_FILE = re.compile(r"\.*/")
_PROTOCOL = re.compile(r"^((docker|oras|library)://)?([^/@#]+@(?=.*#))?")
# Pyxis takes an image from Docker Hub unless # follows the registry.
_REGISTRY = re.compile(r"^(docker://)?(\w[^/#]*[.:][^/#]*|localhost)/")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The options of `primus launch slurm`. An empty text leaves the choice to Slurm. ``grace`` is
    in seconds.
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
                hint="--image rocm/primus:v26.11-mi300x",
            )
        refuse_unfit(vars(self), "slurm")
        secrets = (*self.environment, *self.extra, self.image)
        refuse_secrets(secrets, "export it, and pass its name only: --env HF_TOKEN")
        if self.container != "none":
            image = self.image
            # Pyxis and apptainer also accept image files, and names with a protocol; pyxis a user
            # and a registry before #.
            if self.container in ("pyxis", "apptainer"):
                if _FILE.match(image):
                    image = ""
                else:
                    image = _PROTOCOL.sub("", image).replace("#", "/", 1)
            refuse_unfit({**vars(self), "image": image}, "containers")
        limit = limit_of(self.time)
        if limit and self.grace >= limit:
            raise InputError(
                f"--grace {self.grace}: the job would be told to end at its start: --time is "
                f"{self.time}"
            )


def limit_of(text: str) -> float | None:
    """Return the seconds of a time limit as Slurm reads it; None for 0 and words, which are no
    limit.
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # The first part is hours after days or of three parts, and minutes otherwise.
    if dash or len(parts) == 3:
        sizes = (3600, 60, 1)
    else:
        sizes = (60, 1)
    return (
        int(days or 0) * 86400 + sum(part * size for part, size in zip(parts, sizes, strict=False))
        or None
    )


def container_here() -> Container:
    """Return the container runtime of this cluster: pyxis if srun supports it, else the first
    installed program.
    """
    srun = shutil.which("srun")
    if srun:
        with suppress(subprocess.TimeoutExpired, OSError):
            if "--container-image" in captured([srun, "--help"], "srun", timeout=20).stdout:
                return "pyxis"
    return next((program for program in CONTAINERS[1:4] if shutil.which(program)), "none")


def script(plan: Plan, site: Site) -> str:
    """Return the batch script. It contains no secret, and does not depend on the machine that
    renders it.
    """
    name = site.name or "primus-" + re.sub(
        r"[^A-Za-z0-9_.-]+", "-", Path(plan.recipe.name).name.removesuffix(".yaml")
    )
    gpus = None
    if vendor(plan.recipe.gpu):
        gpus = plan.ranks
    options = {
        "job-name": name,
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
    chosen = {key: value for key, value in options.items() if value}
    flags = (
        f"--{key}" if value is True else f"--{key}={shlex.quote(str(value))}"
        for key, value in chosen.items()
    )
    pairs = (word.partition("=") for word in site.environment)
    exports = [f"export {name}={shlex.quote(value)}" for name, equals, value in pairs if equals]
    head = [
        *(f"#SBATCH {option}" for option in (*flags, *site.extra)),
        "#",
        *(f"# {line}" for line in plan.lines()),
    ]
    resume = ""
    if site.resume_from:
        resume = shlex.quote(site.resume_from)
    # What one node runs. Its quotes are evaluated there.
    if site.container in ("none", "pyxis"):
        engine = ""
    else:
        engine = f"{_engine(plan, site)} "
    train = (
        f'{shlex.join(plan.command)} --output "$OUTPUT" '
        f'${{RESUME_FROM:+--resume-from "$RESUME_FROM"}}'
    )
    address = "addresses=($NODE_ADDRESSES); export NODE_ADDR=${addresses[$SLURM_NODEID]}"
    variables = {
        "steps": plan.resumable,
        "restarts": site.restarts,
        "root": shlex.quote(str(site.output)),
        "resume": resume,
        "port": site.port or "",
        "task": shlex.quote(f"{address}; exec {engine}primus {train}"),
    }
    return "\n".join(
        ["#!/bin/bash", *head, "", *exports, bash("slurm", variables, _srun(plan, site))]
    )


def _names(site: Site) -> list[str]:
    return list(
        dict.fromkeys([*_DATA["forwarded"], *(word.partition("=")[0] for word in site.environment)])
    )


def _mounts(plan: Plan, site: Site) -> list[str]:
    if plan.recipe.by_path:
        recipe = [plan.recipe.path.parent]
    else:
        recipe = []
    if site.resume_from:
        resumed = [Path(site.resume_from)]
    else:
        resumed = []
    return [shlex.quote(str(path)) for path in (site.output, *site.mounts, *resumed, *recipe)]


def _engine(plan: Plan, site: Site) -> str:
    image = shlex.quote(site.image)
    words = _DATA["engines"][site.container]
    if site.container == "apptainer" and not re.match(r"[./]|\w+://", site.image):
        image = f"docker://{image}"
    own = (words.get(name, "") for name in ("run", vendor(plan.recipe.gpu), "fabric"))
    folders = (words["folder"].format(path) for path in _mounts(plan, site))
    variables = (words["variable"].format(name) for name in _names(site))
    return " ".join(filter(None, [site.container, *own, *folders, *variables, image]))


def _srun(plan: Plan, site: Site) -> str:
    # srun's exit code is the highest of the tasks. When a task fails, the others end by themselves
    # with a message; any that remain are killed afterwards.
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
    """Submit the script with sbatch. Returns an exit code, the job's with ``wait`` and else 0, and
    the job's number.

    Raises HostError if sbatch is missing or refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise HostError(
            "sbatch is not installed here",
            hint="run it on a login node; --dry-run prints the script",
        )
    folder.mkdir(parents=True, exist_ok=True)
    done = captured(["sbatch", "--parsable", *(["--wait"] if wait else [])], "sbatch", text=text)
    # A site's plugin may print lines of its own before the number.
    number = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
    if not number.isdigit():
        printed = (
            " ".join((done.stderr or done.stdout).split())[:400] or f"exit code {done.returncode}"
        )
        if done.returncode:
            raise HostError(
                f"sbatch refused the job: {printed}", hint="--dry-run prints the script"
            )
        raise HostError(
            f"sbatch names no job: {printed}", hint="squeue --me lists what it submitted"
        )
    return (done.returncode if wait else 0), number
