"""Source trees of real projects, from bare git directories that the user has:
``$PRIMUS_TEST_SOURCES/NAME.git``.
"""

import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest


def repository(name: str) -> Path:
    """The bare git directory of a project. Skips the test, with the reason, where it is missing."""
    folder = os.environ.get("PRIMUS_TEST_SOURCES")
    if not folder:
        pytest.skip(
            "PRIMUS_TEST_SOURCES names no folder of bare git directories (aiter.git, "
            "Primus-Turbo.git)"
        )
    path = Path(folder) / f"{name}.git"
    if not path.is_dir():
        pytest.skip(f"PRIMUS_TEST_SOURCES has no {name}.git")
    return path


def has_commit(path: Path, commit: str) -> bool:
    """Whether the repository holds ``commit``."""
    words = ["git", "--git-dir", str(path), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def take(path: Path, commit: str, folders: Sequence[str], to: Path) -> None:
    """Write ``folders`` of a commit (everything when empty) under ``to``."""
    to.mkdir(parents=True, exist_ok=True)
    words = ["git", "--git-dir", str(path), "archive", "--format=tar", commit, *folders]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as archive:
        assert archive.stdout is not None
        with tarfile.open(fileobj=archive.stdout, mode="r|") as tar:
            tar.extractall(to, filter="data")
    assert archive.returncode == 0
