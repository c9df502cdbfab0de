"""What the integration tests share: the repository's own cpu image, and a Python with torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from host_tools import missing
from project_kit import Kit

REPOSITORY = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults")
INSIDE = Path(__file__).with_name("inside")


@pytest.fixture(scope="session")
def cpu_image() -> Kit:
    """The repository, with its cpu image built from the committed lock."""
    if reason := missing("mmdebstrap") if os.geteuid() == 0 else missing("mmdebstrap", "newuidmap"):
        pytest.skip(reason)
    kit = Kit(REPOSITORY)
    kit.build("cpu")
    return kit


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """How to start Python with torch: that of PRIMUS_TEST_PYTHON, else the cpu image's, in the sandbox."""
    chosen = os.environ.get("PRIMUS_TEST_PYTHON")
    if chosen:
        return ["env", f"PYTHONPATH={FAULTS}:{REPOSITORY / 'src'}", chosen]
    kit = request.getfixturevalue("cpu_image")
    outputs = tmp_path_factory.getbasetemp()
    lend = [
        "-v",
        f"{outputs}:{outputs}",
        "-v",
        f"{FAULTS}:/faults:ro",
        "-v",
        f"{INSIDE}:{INSIDE}:ro",
        "-v",
        f"{REPOSITORY / 'docs'}:{REPOSITORY / 'docs'}:ro",
        "-e",
        "PYTHONPATH=/faults",
        "-e",
        "PRIMUS_FAULT",
    ]
    return kit.command("run", "cpu", "--project", str(kit.root), *lend, "--", "python3")
