"""Memory and CPU limits through control groups, version 1 or 2, whichever is mounted."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from primus.errors import HostError
from primus.sandbox.model import Limits

__all__ = ["Groups", "limited"]

_PERIOD_US = 100_000


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The control groups of one run. ``procs`` are the files a process writes 0 to in order to join."""

    paths: tuple[Path, ...] = ()

    @property
    def procs(self) -> list[str]:
        """Files that take the joining process's id."""
        return [str(path / "cgroup.procs") for path in self.paths]

    def oom_kills(self) -> int:
        """How many processes the kernel killed for going over the memory limit."""
        for path in self.paths:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    for line in (path / name).read_text().splitlines():
                        if line.startswith("oom_kill "):
                            return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Remove the groups; the last processes may take a moment to leave."""
        for path in self.paths:
            for _ in range(100):
                try:
                    path.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.02)
                else:
                    break


@dataclass(frozen=True, kw_only=True)
class _Controller:
    version: int
    mount: Path
    own: str


def limited(name: str, limits: Limits) -> Groups:
    """Make control groups ``name`` that enforce ``limits``; HostError when this machine or user cannot."""
    wanted = [key for key, value in (("memory", limits.memory_bytes), ("cpu", limits.cpus)) if value is not None]
    made: list[Path] = []
    try:
        found = {key: _find(key) for key in wanted}
        unified = [key for key in wanted if found[key].version == 2]
        for key in wanted:
            group = _make(found[key], unified, name)
            if group not in made:
                made.append(group)
            _set(group, key, limits)
    except OSError as error:
        Groups(paths=tuple(made)).remove()
        raise HostError(
            f"this machine does not let you set a {' or '.join(wanted)} limit: {error.strerror} ({error.filename})",
            hint="run as root, use --engine docker, or start primus without the limit under: "
            "systemd-run --user --scope -p MemoryMax=… -p CPUQuota=…",
        ) from error
    except HostError:
        Groups(paths=tuple(made)).remove()
        raise
    return Groups(paths=tuple(made))


def _find(key: str) -> _Controller:
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    second: _Controller | None = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split(" ")[3:5]
        if kind == "cgroup" and key in options.split(" ")[-1].split(",") and key in own:
            return _Controller(version=1, mount=Path(point), own=_below(own[key], root))
        if kind == "cgroup2" and "" in own:
            second = _Controller(version=2, mount=Path(point), own=_below(own[""], root))
    if second and key in _words(second.mount / "cgroup.controllers"):
        return second
    raise HostError(
        f"this machine has no {key} control group, so a {key} limit cannot be enforced",
        hint="leave the limit out, or boot with the controller enabled (often cgroup_enable=memory)",
    )


def _below(path: str, root: str) -> str:
    # Inside a container the mount shows a part of the hierarchy only.
    return path.removeprefix(root.rstrip("/")).lstrip("/") if root != "/" else path.lstrip("/")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _make(found: _Controller, unified: list[str], name: str) -> Path:
    start = found.mount / found.own
    if found.version == 1:
        group = start / f"primus-{name}"
        group.mkdir(exist_ok=True)
        return group
    # Version 2 forbids processes beside child groups, so the new group goes beside ours or further up: below
    # the nearest ancestor that hands all controllers to its children. A process has one group there.
    place = start
    while place != found.mount and not set(unified) <= set(_words(place / "cgroup.subtree_control")):
        place = place.parent
    for key in unified:
        if key not in _words(place / "cgroup.subtree_control"):
            (place / "cgroup.subtree_control").write_text(f"+{key}")
    group = place / f"primus-{name}"
    group.mkdir(exist_ok=True)
    return group


def _set(group: Path, key: str, limits: Limits) -> None:
    if key == "memory":
        amount = str(limits.memory_bytes)
        if (group / "memory.max").exists():
            (group / "memory.max").write_text(amount)
            swap = group / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
            return
        (group / "memory.limit_in_bytes").write_text(amount)
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(amount)
        return
    quota = max(1000, round((limits.cpus or 0) * _PERIOD_US))
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        return
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(quota))
