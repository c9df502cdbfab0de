"""The control groups that an OCI runtime created for a run: finding them, counting OOM kills, removing them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path

_PATIENCE_S = 2.0


def groups_of(state: Path) -> list[Path]:
    """Return the groups of the one container whose runtime keeps its state below ``state``; none without a state."""
    for name in ("state.json", "status"):
        for path in state.glob(f"*/{name}"):
            with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
                found = json.loads(path.read_text())
                if name == "status":  # crun
                    group = str(found.get("cgroup-path") or "").lstrip("/")
                    return [Path("/sys/fs/cgroup", group)] if "primus-" in group else []
                return [Path(group) for group in found["cgroup_paths"].values() if "primus-" in group]
    return []


def oom_kills(groups: Iterable[Path]) -> int:
    """Return how many processes the kernel killed for exceeding the memory limit."""
    for path in groups:
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in (path / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
    return 0


def remove(groups: Iterable[Path]) -> bool:
    """Remove the groups. Returns False if one still has processes after a while."""
    end = time.monotonic() + _PATIENCE_S
    gone = [_gone(group, end) for group in groups]
    return all(gone)


def _gone(group: Path, end: float) -> bool:
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            # The last processes may need a moment to exit.
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        else:
            return True
