"""What a check of the machine found, and the machine as its files describe it."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from primus.files import text_if_readable
from primus.gpus.detect import Found, detect
from primus.system.mounts import IMAGE_FILE

Level = Literal["ok", "failed", "slow", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``failed``: a job would fail or compute wrong; ``slow``: it runs slower than it could.

    ``remedy`` is what to do about it; of a skipped check, ``said`` is the reason.
    """

    check: str
    level: Level
    said: str
    remedy: str = ""


def ok(check: str, said: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check=check, level="ok", said=said)


def failed(check: str, said: str, remedy: str) -> Finding:
    """A job would fail, or compute wrong."""
    return Finding(check=check, level="failed", said=said, remedy=remedy)


def slow(check: str, said: str, remedy: str) -> Finding:
    """A job would run slower than it could."""
    return Finding(check=check, level="slow", said=said, remedy=remedy)


def skipped(check: str, why: str) -> Finding:
    """The check does not apply, or nothing tells."""
    return Finding(check=check, level="skipped", said=why)


def name_here() -> str:
    """The name by which the scheduler knows this machine: Slurm's or Kubernetes', else the host name."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("NODE_NAME") or os.uname().nodename


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine: its files below ``root``, the user whose rights count, and where a job writes.

    ``space`` (bytes: total, free) of a folder stands for the file system's answer where it is given.
    """

    root: Path = Path("/")
    uid: int = field(default_factory=os.geteuid)
    gids: frozenset[int] = field(default_factory=lambda: frozenset({os.getegid(), *os.getgroups()}))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    output: Path = field(default_factory=Path.cwd)
    space: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    gpus: Found = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus", detect(self.root))

    def text(self, path: str) -> str:
        """The content of a file; empty where it cannot be read."""
        return text_if_readable(self.root / path).strip()

    def component(self, name: str) -> str:
        """The version of a component of the image, in any case of letters; empty outside of an image."""
        try:
            found = json.loads(self.text(str(IMAGE_FILE.relative_to("/"))) or "{}").get("components", {})
            return next((str(version) for known, version in found.items() if known.lower() == name.lower()), "")
        except (ValueError, AttributeError):
            return ""

    def number(self, path: str) -> int | None:
        """The whole number in a file; None where there is none."""
        text = self.text(path)
        try:
            return int(text, 0)
        except ValueError:
            return None

    def glob(self, pattern: str) -> list[Path]:
        """Existing paths, in the order of their names; numbers count as such."""
        return sorted(self.root.glob(pattern), key=lambda path: [word.zfill(12) for word in path.parts])

    def openable(self, path: Path) -> bool:
        """Whether the user may read and write the file, by its mode."""
        try:
            mode = path.stat()
        except OSError:
            return False
        if self.uid == 0:
            return True
        if mode.st_uid == self.uid:
            wanted = stat.S_IRUSR | stat.S_IWUSR
        elif mode.st_gid in self.gids:
            wanted = stat.S_IRGRP | stat.S_IWGRP
        else:
            wanted = stat.S_IROTH | stat.S_IWOTH
        return mode.st_mode & wanted == wanted

    def bytes_of(self, folder: Path) -> tuple[int, int] | None:
        """Total and free bytes of the file system that ``folder`` is or will be on; None where nothing tells."""
        if str(folder) in self.space:
            return self.space[str(folder)]
        for path in (folder, *folder.parents):
            if path.exists():
                try:
                    usage = shutil.disk_usage(path)
                except OSError:
                    return None
                return usage.total, usage.free
        return None
