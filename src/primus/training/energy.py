"""The energy of this node's GPUs in joules, from their own counters. None if no GPU has one."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from primus.recipes.choose import CPU
from primus.training import logs

Meter = Callable[[], float | None]
_AMD = "0x1002"


class Log:
    """Writes ``energy.jsonl``: joules per GPU between two logged steps, as the mean of the GPUs with a counter."""

    def __init__(self, file: Path, read: Meter | None) -> None:
        self._file = file
        self._read = read
        self._step = 0
        self._before: float | None = None

    def line(self, text: str) -> None:
        """Handle a line of the job's log. The first step of a run has no joules, because there is no step before it."""
        step = logs.step_in(text) if self._read else None
        if self._read is None or step is None or step.step <= self._step:
            return
        now, before = self._read(), self._before
        self._step, self._before = step.step, now
        if now is not None and before is not None and now > before:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step.step, "joules": round(now - before, 3)}) + "\n")


def meter(gpu: str, ranks: int, environment: Mapping[str, str], root: Path = Path("/")) -> Meter | None:
    """Return a function that reads the joules used since a fixed time: the mean of the job's ``ranks`` GPUs.

    Returns None if the recipe's ``gpu`` is a CPU, if the GPUs have no counter, or if it is unknown which GPUs of
    this machine the job uses.
    """
    return None if gpu == CPU else _nvidia(ranks, environment) or _amd(ranks, root)


def _nvidia(ranks: int, environment: Mapping[str, str]) -> Meter | None:
    """Read NVML's counter, in millijoules since the driver was loaded. The library comes with the driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    words = [str(number) for number in range(count.value)] if visible is None else visible.split(",")
    handles = []
    for word in words[:ranks]:
        handle = ctypes.c_void_p()
        error = (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(word)), ctypes.byref(handle))
            if word.strip().isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(word.strip().encode(), ctypes.byref(handle))
        )
        if error:
            return None
        handles.append(handle)

    def joules(handle: ctypes.c_void_p) -> float | None:
        used = ctypes.c_ulonglong()
        return None if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used)) else used.value / 1e3

    return _mean([lambda handle=handle: joules(handle) for handle in handles], ranks)  # type: ignore[misc]


def _amd(ranks: int, root: Path) -> Meter | None:
    """Read the kernel's counters, in microjoules. A container sees all cards, so there must be one for each rank."""
    files = [
        file
        for card in sorted((root / "sys/class/drm").glob("card[0-9]*"))
        if _word(card / "device/vendor") == _AMD
        for file in sorted((card / "device/hwmon").glob("*/energy1_input"))
    ]

    def joules(file: Path) -> float | None:
        word = _word(file)
        return int(word) / 1e6 if word.isdigit() else None

    return _mean([lambda file=file: joules(file) for file in files], ranks)  # type: ignore[misc]


def _mean(counters: Sequence[Meter], ranks: int) -> Meter | None:
    def read() -> float | None:
        values = [value for counter in counters if (value := counter()) is not None]
        return sum(values) / ranks if len(values) == ranks else None

    return read if len(counters) == ranks and read() is not None else None


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
