"""The pages of what a machine needs, and the table of images on the front page.

They are made from the tables and limits that the program itself reads.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import primus_images
from primus_images.gpus.table import load_table
from primus_images.launch import kubernetes, slurm
from primus_images.plan.project import Project
from primus_images.plan.resolve import ResolvedTarget, resolve
from primus_images.release.diff import section, table
from primus_images.yamlfile import read_values

_VARIABLES = Path(__file__).with_name("environment.yaml")
_PACKAGE = Path(primus_images.__file__).parent
_DRIVERS = _PACKAGE / "system/drivers.yaml"
_SUITES = _PACKAGE / "versions/suites.yaml"
_RANKS = _PACKAGE / "training/run/environment.yaml"


def today(root: Path) -> list[str]:
    """Return the table of what each image computes on, of the channel that builds it now."""
    rows = []
    for target in _targets(root):
        place = "the CPU"
        if target.gpu and not target.choice.preview:
            place = f"the GPU: {target.gpu.title}"
        image = f"`{target.versions.image.name}:{target.ref}`"
        rows.append((image, f"`primus build {target.name}`", place))
    return table(("image", "made by", "computes on"), rows)


def environment(root: Path) -> str:
    """Return the page of environment variables."""
    described: Any = read_values(_VARIABLES).data
    lines = [
        "<!-- Generated from docs/environment.yaml and the tables of images, GPUs and ranks by "
        "`nox -s docs`; do not edit. -->",
        "# Environment variables",
        "",
        "Set them before `primus`, or for a container by `docker run -e NAME=VALUE`. [Slurm]"
        "(slurm.md) and [Kubernetes](kubernetes.md) take `--env NAME=VALUE`. Pass secrets by "
        "name only (`-e NAME`, in Slurm `--env NAME`), in Kubernetes by `--hf-token-secret`.",
        "",
    ]
    for part in described["sections"]:
        rows = [(f"`{name}`", meaning) for name, meaning in part["rows"].items()]
        lines += section(part["title"], ("variable", "meaning"), rows)
    lines += section(
        "Set in the images",
        ("variable", "value", "images", "why"),
        _of_images(root),
        "`docker run -e NAME=VALUE` overrides each.",
    )
    ranks: Any = read_values(_RANKS).data
    lines += section(
        "Set for ranks",
        ("variable", "value"),
        [(f"`{name}`", f"`{value}`") for name, value in ranks["usual"].items()],
        "Each process of a run gets these values, unless you set others.",
    )
    return "\n".join(lines)


def _of_images(root: Path) -> Iterator[tuple[str, ...]]:
    holders: dict[tuple[str, str, str], list[str]] = {}
    for target in _targets(root):
        rows = [(row.name, row.value, row.why) for row in target.target.environment]
        if target.gpu:
            for row in load_table().of(target.gpu):
                if row.value is not None:
                    rows.append((row.name, row.value, row.why))
        for variable in rows:
            holders.setdefault(variable, []).append(target.name)
    for (name, value, why), targets in holders.items():
        yield f"`{name}`", f"`{value}`", ", ".join(targets), why


def support(root: Path) -> str:
    """Return the page of requirements."""
    lines = [
        "<!-- Generated from the limits that the program checks by `nox -s docs`; do not edit. -->",
        "# Requirements",
        "",
        "What `primus` needs, and what was tested. [Preflight](preflight.md) checks a machine.",
        "",
        *section("Programs", ("what", "needs", "tested"), _programs(root)),
        *section(
            "Images",
            ("image", "channel", "operating system", "glibc, at least", "Python"),
            _systems(root),
            "An image brings its own libraries. The host needs a kernel for x86-64, and for AMD "
            "GPUs the driver `amdgpu`.",
        ),
        *section(
            "GPUs",
            ("GPU", "architecture", "memory", "precisions with a published peak"),
            _gpus(),
            "`primus list --gpu NAME` lists what fits one. Images are built for these.",
        ),
        *section(
            "Drivers of AMD GPUs",
            ("`amdgpu`", "came with ROCm", "supports ROCm", "source"),
            _drivers(),
            "`cat /sys/module/amdgpu/version` prints the version. Preflight refuses a driver whose "
            "row lacks the ROCm of the image. It does not judge a driver without a row.",
        ),
    ]
    return "\n".join(lines)


def _programs(root: Path) -> list[tuple[str, str, str]]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = project["requires-python"].removeprefix(">=")
    slurm_year, slurm_month = slurm.LEAST_VERSION
    major, minor = kubernetes.LEAST_VERSION
    return [
        ("Python", f"{python} or newer", "3.11, 3.12"),
        ("machine that builds", "Debian or Ubuntu, x86-64", "Debian 12, Ubuntu 24.04"),
        ("Docker, to run an image", "20.10 or newer", "20.10, without a GPU"),
        (
            "Docker, for GPUs by CDI",
            "28.2 or newer; 25 or newer with `features.cdi`",
            "not with a GPU",
        ),
        ("podman, to build and run", "4 or newer", "4.3, 4.9 and 5.4, without a GPU"),
        ("Slurm", f"{slurm_year}.{slurm_month:02} or newer", "22.05"),
        ("Slurm with images", "pyxis, Docker 20.10, podman 4 or apptainer 1.0 on the nodes", ""),
        (
            "Kubernetes",
            f"{major}.{minor} or newer, with the device plugin of the vendor",
            "an API server without nodes",
        ),
        ("cosign, to sign and verify", "3 or newer", "3.1"),
    ]


def _systems(root: Path) -> Iterator[tuple[str, ...]]:
    suites: Any = read_values(_SUITES).data
    for target in _targets(root):
        bases = dict(target.target.bases)
        if not bases and target.choice.base:
            bases[target.choice.channel] = target.choice.base
        for channel, name in bases.items():
            base = target.versions.bases[name]
            suite = suites[base.suite]
            maker = suite.get("maker", "debian").capitalize()
            row = (f"{maker} {base.suite}", f"2.{suite['glibc']}", base.python)
            yield f"`{target.name}`", channel, *row


def _gpus() -> Iterator[tuple[str, ...]]:
    known = load_table()
    for gpu in known.generations:
        if gpu.no_image:
            continue
        peaks = ", ".join(peak.dtype for peak in gpu.peaks)
        yield gpu.title, gpu.arch, f"{gpu.memory.gb:g} GB", peaks


def _drivers() -> Iterator[tuple[str, ...]]:
    drivers: Any = read_values(_DRIVERS).data
    for version, row in drivers["amdgpu"].items():
        yield f"`{version}`", row["rocm"], ", ".join(row["supports"]), row["source"]


def _targets(root: Path) -> list[ResolvedTarget]:
    project = Project(root)
    return [resolve(project, name) for name in project.target_names()]
