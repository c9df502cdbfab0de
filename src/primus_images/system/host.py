"""The machine as its files describe it, and the result of one check of it."""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from primus_images.files import json_if_readable, text_if_readable
from primus_images.gpus.detect import Found, detect
from primus_images.refusals import refusal
from primus_images.system.issues import STATUS, Issue, debs, issues
from primus_images.yamlfile import read_values

Level = Literal["ok", "failed", "slow", "skipped"]
_FINDINGS: Any = read_values(Path(__file__).with_name("findings.yaml")).data
_LONGEST = 1000
# The file in which an image describes itself.
IMAGE_FILE = Path("/etc/primus/image.json")
MOUNTS = Path("/proc/self/mounts")
# File systems that are deleted with the container: its own writable layer, and memory.
_OWN = frozenset({"overlay", "tmpfs", "ramfs"})
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Finding:
    """One result. ``failed``: a job would fail or compute wrong results; ``slow``: it would run
    slower than it could.

    ``remedy`` tells what to do about it. For a skipped check, ``message`` is the reason.
    """

    level: Level
    check: str
    message: str
    remedy: str = ""

    def __post_init__(self) -> None:
        # Files of the machine and variables are quoted. They must not move the cursor or break the
        # table.
        for name in ("message", "remedy"):
            text = "".join(c if c.isprintable() else " " for c in getattr(self, name))
            object.__setattr__(self, name, text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")

    @property
    def problem(self) -> bool:
        """Whether it would fail a job or slow it down."""
        return self.level in ("failed", "slow")


def finding(name: str, /, *, level: Level | None = None, **values: object) -> Finding:
    """Return the finding ``name`` of ``findings.yaml`` with ``values`` in its texts. ``level``
    replaces its own.
    """
    row = _FINDINGS[name]
    usual = next(word for word in get_args(Level) if word in row)
    texts = (
        str(text).format(**values) for text in (row[usual], row["message"], row.get("remedy", ""))
    )
    return Finding(level or usual, *texts)


def name_here() -> str:
    """Return the scheduler's name for this machine: Slurm's or Kubernetes', else the host name."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("NODE_NAME") or os.uname().nodename


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine: its files below ``root``, the environment, and the folder a job writes to."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    output: Path = field(default_factory=Path.cwd)
    gpus: Found = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus", detect(self.root))

    def text(self, path: str | Path) -> str:
        """Return the content of a file below ``root``; empty if it cannot be read."""
        return text_if_readable(self.root / path).strip()

    def shown(self, path: Path) -> str:
        """Return the path as users of the machine know it."""
        return f"/{path.relative_to(self.root)}"

    def components(self) -> dict[str, str]:
        """Return the versions of the image's components, by names in lower case; empty outside an
        image.
        """
        components = json_if_readable(self.root / IMAGE_FILE.relative_to("/")).get("components")
        if isinstance(components, dict):
            return {k.lower(): str(v) for k, v in components.items()}
        return {}

    def issues(self, gpu: str | None) -> list[Issue]:
        """Return the known issues on ``gpu`` of the image that this code is in; none outside an
        image.
        """
        components = self.components()
        if not components:
            return []
        return issues({**debs(self.text(STATUS)), **components}, [gpu] if gpu else [])

    def number(self, path: str) -> int | None:
        """Return the whole number in a file; None if there is none."""
        try:
            return int(self.text(path), 0)
        except ValueError:
            return None

    def glob(self, pattern: str) -> list[Path]:
        """Return the existing paths, sorted by name, with numbers in numeric order."""
        return sorted(
            self.root.glob(pattern), key=lambda path: [word.zfill(12) for word in path.parts]
        )

    def bytes_of(self, folder: Path) -> tuple[int, int]:
        """Return total and free bytes of the file system of ``folder``, which may not exist yet.
        Raises OSError.
        """
        usage = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
        return usage.total, usage.free


def lost_warning(folder: Path) -> str:
    """Return a sentence if ``folder`` is deleted with this container, with the option that keeps
    it; otherwise "".

    Outside the images of this project, the result is always empty.
    """
    if not IMAGE_FILE.exists():
        return ""
    with suppress(OSError):
        folder = folder.resolve()
        kinds = {Path("/"): ""}
        for line in MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            if len(fields := line.split()) > 2:
                # A later mount on the same point hides the earlier one.
                kinds[Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[1]))] = fields[
                    2
                ]
        point = max(filter(folder.is_relative_to, kinds), key=lambda mount: len(mount.parts))
        if point == Path("/") or kinds[point] in _OWN:
            # A mount on the folder in which jobs start would hide the image's files there.
            if folder.parent in (Path("/"), Path.cwd()):
                mounted = folder
            else:
                mounted = folder.parent
            return str(refusal("lost_folder", folder=folder, name=mounted.name, mounted=mounted))
    return ""
