"""The git repository of a project."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Checkout(NamedTuple):
    """The commit that is checked out, None outside git, and the files that differ from it."""

    commit: str | None
    edited: list[str]

    @property
    def version(self) -> str:
        """The version of what comes from the repository itself."""
        commit = self.commit or "unknown"
        return f"{commit}+edited" if self.edited else commit


def checkout(root: Path) -> Checkout:
    """Return what is checked out at ``root``."""
    commit = git(root, "rev-parse", "--verify", "HEAD").decode()
    status = git(root, "status", "--porcelain").decode()
    return Checkout(commit or None, [line[3:] for line in status.splitlines()])


def git(root: Path, *words: str) -> bytes:
    """Return what git prints, without line ends at its end; nothing if it fails or is missing."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return b""
    return done.stdout.rstrip(b"\n")
