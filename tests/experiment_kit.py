"""A folder in which commands of older documents run an experiment."""

from pathlib import Path

import pytest


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the test run in ``folder``, without variables of experiments."""
    monkeypatch.chdir(folder)
    for name in ("EXP", "NNODES", "BACKEND", "PRIMUS_TEAM", "PRIMUS_USER"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PRIMUS_ROOT", "PRIMUS_ALLOW_UNMAPPED"):
        # A command sets them for its own process.
        monkeypatch.setenv(name, "")
    return folder
