"""The kernel drivers of GPUs, and what each supports."""

from pathlib import Path
from typing import Any

from primus_images.yamlfile import read_values


def drivers() -> dict[str, Any]:
    """Return the table of drivers by name."""
    table: dict[str, Any] = read_values(Path(__file__).with_name("drivers.yaml")).data
    return table


def amdgpu_drivers(rocm: str) -> list[str]:
    """Return the versions of the kernel driver that support this ROCm, of those in the table."""
    release = ".".join(rocm.split(".")[:2])
    rows = drivers()["amdgpu"].items()
    return [version for version, row in rows if release in row["supports"]]
