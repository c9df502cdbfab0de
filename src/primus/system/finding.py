"""The result of one check of a machine, and the machine as its files describe it."""

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
_LONGEST = 1000


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result. ``failed``: a job would fail or compute wrong results; ``slow``: it would run slower than it
    could.

    ``remedy`` tells what to do about it. For a skipped check, ``said`` is the reason.
    """

    check: str
    level: Level
    said: str
    remedy: str = ""

    def __post_init__(self) -> None:
        # Files of the machine and variables are quoted. They must not move the cursor or break the table.
        for name in ("said", "remedy"):
            text = "".join(c if c.isprintable() else " " for c in getattr(self, name))
            object.__setattr__(self, name, text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def ok(check: str, said: str) -> Finding:
    """Return the result of a check that found no problem."""
    return Finding(check=check, level="ok", said=said)


def failed(check: str, said: str, remedy: str) -> Finding:
    """Return a problem that makes a job fail or compute wrong results."""
    return Finding(check=check, level="failed", said=said, remedy=remedy)


def slow(check: str, said: str, remedy: str) -> Finding:
    """Return a problem that makes a job slower than it could be."""
    return Finding(check=check, level="slow", said=said, remedy=remedy)


def skipped(check: str, why: str) -> Finding:
    """Return the result of a check that does not apply, or has nothing to read."""
    return Finding(check=check, level="skipped", said=why)


def name_here() -> str:
    """Return the scheduler's name for this machine: Slurm's or Kubernetes', else the host name."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("NODE_NAME") or os.uname().nodename


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine: its files below ``root``, the user whose permissions count, and the folder a job writes to.

    ``space`` (total and free bytes of a folder) replaces the file system's answer in tests.
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
        """Return the content of a file; empty if it cannot be read."""
        return text_if_readable(self.root / path).strip()

    def component(self, name: str) -> str:
        """Return the version of a component of the image, ignoring case; empty outside an image."""
        try:
            found = json.loads(self.text(str(IMAGE_FILE.relative_to("/"))) or "{}").get("components", {})
            return next((str(version) for known, version in found.items() if known.lower() == name.lower()), "")
        except (ValueError, AttributeError):
            return ""

    def number(self, path: str) -> int | None:
        """Return the whole number in a file; None if there is none."""
        text = self.text(path)
        try:
            return int(text, 0)
        except ValueError:
            return None

    def glob(self, pattern: str) -> list[Path]:
        """Return the existing paths, sorted by name, with numbers in numeric order."""
        return sorted(self.root.glob(pattern), key=lambda path: [word.zfill(12) for word in path.parts])

    def openable(self, path: Path) -> bool:
        """Return whether the user may read and write the file, judging by its mode."""
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
        """Return total and free bytes of the file system of ``folder``, which may not exist yet; None if unknown."""
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
