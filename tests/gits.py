"""Git repositories that tests make."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


def git(folder: Path, *words: str) -> str:
    """Run git in ``folder``, without the user's settings. Returns what it prints."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "git",
        "-C",
        str(folder),
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.invalid",
        *words,
    ]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout.strip()


def head(folder: Path) -> str:
    """The commit at HEAD."""
    return git(folder, "rev-parse", "HEAD")


def commit(folder: Path, files: Mapping[str, str], part: tuple[str, str] | None = None) -> str:
    """Commit everything below ``folder``, and ``files``, to the branch main. Returns the commit.

    ``part`` is the path of a submodule and its commit.
    """
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A", "-f")
    if part:
        git(folder, "update-index", "--add", "--cacheinfo", f"160000,{part[1]},{part[0]}")
    git(folder, "commit", "-q", "-m", "one")
    return head(folder)
