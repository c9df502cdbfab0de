"""The GPUs that a validation uses, and the check that its jobs ran on them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.errors import HostError
from primus.gpus.detect import Found, detect
from primus.gpus.table import by_product_name
from primus.sandbox.devices import gpus
from primus.training.checks import Verdict

if TYPE_CHECKING:
    from primus.gpus.generation import Generation
    from primus.sandbox.container import Devices
    from primus.training.outcome import Outcome

NO_GPU = "none"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The GPUs that the jobs get.

    ``gpu`` is the name of the generation, or "none" for the CPU. ``names`` has one entry per GPU, as the driver reports
    it. ``driver`` is the driver's version. ``why`` is the reason for using the CPU although the target is for a GPU.
    """

    gpu: str = NO_GPU
    names: tuple[str, ...] = ()
    driver: str = ""
    devices: tuple[Devices, ...] = ()
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the GPUs and the driver for a record."""
        return {"gpus": list(self.names), "driver": self.driver}


def choose(asked: str | None, wanted: Generation | None) -> Hardware:
    """Return the GPUs for ``asked``: ``all``, a number, or ``none``.

    None means all if the machine has the GPU that the target is for (``wanted``), otherwise none. Raises HostError if
    the machine lacks the requested GPUs, or if their product cannot be identified, because a record must name it.
    """
    found = detect()
    if asked is None:
        if wanted is None:
            return Hardware()
        if found.generation != wanted.name:
            return Hardware(why=f"the target is for {wanted.title}; this machine: {found.sentence()}")
        asked = "all"
    if asked == NO_GPU:
        return Hardware(why="--gpus none" if wanted else "")
    devices = gpus(asked)
    if not found.generation:
        raise HostError(
            f"--gpus {asked}: the record must name the GPU, but this machine's cannot be identified: "
            f"{found.sentence() if found.names else 'its driver reports none'}",
            hint="--gpus none validates on the CPU",
        )
    return Hardware(gpu=found.generation, names=_used(found, asked), driver=found.driver, devices=devices)


def _used(found: Found, asked: str) -> tuple[str, ...]:
    return found.names if asked == "all" else found.names[: int(asked)]


def ran_on(gpu: str, outcomes: Mapping[str, Outcome]) -> Verdict:
    """Check that every job reports, from its own process, a GPU of generation ``gpu``."""
    elsewhere = []
    for name, left in outcomes.items():
        shown = left.facts.get("gpu") if left.facts.get("device") == "cuda" else left.facts.get("device", "unknown")
        known = by_product_name(str(shown))
        if known is None or known.name != gpu:
            elsewhere.append(f"{name} ran on {shown}")
    reason = "; ".join(elsewhere) or f"every job ran on {gpu}"
    return Verdict(name="on the GPU", passed=bool(outcomes) and not elsewhere, reason=reason)


def cpu_model() -> str:
    """Return the model of this machine's CPU from the kernel. Virtual machines often report only a general name."""
    told: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            told.setdefault(key.strip(), value.strip())
    numbers = [f"{key} {told[key]}" for key in ("cpu family", "model", "stepping") if key in told]
    return ", ".join([told.get("model name", "unknown"), *numbers])
