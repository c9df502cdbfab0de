"""The machine as its files describe it, and the result of one check of it."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from primus_images.files import json_if_readable, text_if_readable
from primus_images.gpus.detect import DetectedGpus, detect
from primus_images.system.issues import STATUS, Issue, debs, issues
from primus_images.yamlfile import read_values

Level = Literal["ok", "failed", "slow", "skipped"]
_FINDINGS: Any = read_values(Path(__file__).with_name("findings.yaml")).data
_LONGEST = 1000
# The file in which an image describes itself.
IMAGE_FILE = Path("/etc/primus/image.json")
CHECKOUT = Path(__file__).resolve().parents[3]
MOUNTS = Path("/proc/self/mounts")
# File systems that are deleted with the container: its own writable layer, and memory.
_OWN = frozenset({"overlay", "tmpfs", "ramfs"})
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Finding:
    """One result, with the ``remedy`` for a problem.

    ``failed``: a job would fail or compute wrong results; ``slow``: it would run slower than it
    could. For a skipped check, ``message`` is the reason.
    """

    level: Level
    check: str
    message: str
    remedy: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", _printable(self.message))
        object.__setattr__(self, "remedy", _printable(self.remedy))

    @property
    def problem(self) -> bool:
        """Whether it would fail a job or slow it down."""
        return self.level in ("failed", "slow")


def _printable(text: str) -> str:
    """Files and variables are quoted. They must not move the cursor or break the table."""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    return "".join(char if char.isprintable() else " " for char in text)


def finding(name: str, /, *, level: Level | None = None, **values: object) -> Finding:
    """Return the finding ``name`` of ``findings.yaml`` with ``values`` in its texts.

    ``level`` replaces its own.
    """
    row = _FINDINGS[name]
    usual = next(word for word in get_args(Level) if word in row)
    check = str(row[usual]).format(**values)
    message = str(row["message"]).format(**values)
    remedy = str(row.get("remedy", "")).format(**values)
    return Finding(level or usual, check, message, remedy)


def name_here() -> str:
    """Return the scheduler's name for this machine: Slurm's or Kubernetes', else the host name."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("NODE_NAME") or os.uname().nodename


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine: its files below ``root``, the environment, and the folder a job writes to."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    output: Path = field(default_factory=Path.cwd)
    gpus: DetectedGpus = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus", detect(self.root))

    def text(self, path: str | Path) -> str:
        """Return the content of a file below ``root``; empty if it cannot be read."""
        return text_if_readable(self.root / path).strip()

    def shown(self, path: Path) -> str:
        """Return the path as users of the machine know it."""
        return f"/{path.relative_to(self.root)}"

    def components(self) -> dict[str, str]:
        """Return component in lower case → version in the image; empty outside an image."""
        file = self.root / IMAGE_FILE.relative_to("/")
        components = json_if_readable(file).get("components")
        if isinstance(components, dict):
            return {name.lower(): str(version) for name, version in components.items()}
        return {}

    def issues(self, gpu: str | None) -> list[Issue]:
        """Return the known issues on ``gpu`` of this image; none outside an image."""
        components = self.components()
        if not components:
            return []
        versions = {**debs(self.text(STATUS)), **components}
        gpus = []
        if gpu:
            gpus.append(gpu)
        return issues(versions, gpus)

    def number(self, path: str | Path) -> int | None:
        """Return the whole number in a file; None if there is none."""
        try:
            return int(self.text(path), 0)
        except ValueError:
            return None

    def glob(self, pattern: str) -> list[Path]:
        """Return the existing paths, sorted by name, with numbers in numeric order."""
        return sorted(self.root.glob(pattern), key=_by_number)

    def bytes_of(self, folder: Path) -> tuple[int, int]:
        """Return total and free bytes of the file system of ``folder``, which may not exist yet.

        Raises OSError.
        """
        there = next(path for path in (folder, *folder.parents) if path.exists())
        usage = shutil.disk_usage(there)
        return usage.total, usage.free


def _by_number(path: Path) -> list[str]:
    return [word.zfill(12) for word in path.parts]


def lost_warning(folder: Path) -> str:
    """Return a sentence if ``folder`` is deleted with this container; otherwise "".

    It names the option that keeps the folder. Outside the images of this project, the result is
    always empty.
    """
    if not IMAGE_FILE.exists():
        return ""
    with suppress(OSError):
        folder = folder.resolve()
        if _kind_of_mount(folder) in _OWN:
            # A mount on the folder in which jobs start would hide the image's files there.
            mounted = folder.parent
            if mounted in (Path("/"), Path.cwd()):
                mounted = folder
            return (
                f"{folder} is inside the container and is lost when the container is removed\n"
                f'  → to keep it, start the container with -v "$PWD/{mounted.name}:{mounted}"'
            )
    return ""


def _kind_of_mount(folder: Path) -> str:
    """Return the type of the file system of ``folder``; "overlay" if it is the container's own."""
    kinds = {}
    for line in MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split()
        if len(fields) > 2:
            # A later mount on the same point hides the earlier one.
            point = _ESCAPED.sub(_unescaped, fields[1])
            kinds[Path(point)] = fields[2]
    kinds[Path("/")] = "overlay"
    points = [point for point in kinds if folder.is_relative_to(point)]
    innermost = max(points, key=lambda point: len(point.parts))
    return kinds[innermost]


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))


def commit_of(checkout: Path, form: str = "%h") -> str:
    """Return the commit of a checkout in a ``form`` of git log; empty if it has none.

    Only a folder that is itself a checkout has one, not a folder inside another project.
    """
    if not (checkout / ".git").exists():
        return ""
    # Another user's checkout is read, too.
    words = ["git", "-C", str(checkout), "-c", "safe.directory=*", "log", "-1", "--abbrev=12"]
    try:
        done = subprocess.run(
            [*words, f"--format={form}"], capture_output=True, text=True, check=False
        )
    except OSError:  # git is not installed
        return ""
    return done.stdout.strip()
