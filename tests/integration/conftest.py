"""What the integration tests share: the repository's own cpu image, and a Python with torch."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_kit import SET, Python

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
def python(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Python]:
    """Python with torch: that of PRIMUS_TEST_PYTHON, else the cpu image's, in the sandbox."""
    if chosen := os.environ.get("PRIMUS_TEST_PYTHON"):
        command = ["env", f"PYTHONPATH={FAULTS}:{REPOSITORY / 'src'}", chosen]
    else:
        kit = request.getfixturevalue("cpu_image")
        outputs, docs = tmp_path_factory.getbasetemp(), REPOSITORY / "docs"
        mounts = (
            f"{outputs}:{outputs}",
            f"{FAULTS}:{FAULTS}:ro",
            f"{INSIDE}:{INSIDE}:ro",
            f"{docs}:{docs}:ro",
        )
        lend = [word for mount in mounts for word in ("-v", mount)]
        variables = [word for name in (f"PYTHONPATH={FAULTS}", *SET) for word in ("-e", name)]
        command = kit.command(
            "run", "cpu", "--project", str(kit.root), *lend, *variables, "--", "python3"
        )
    python = Python(command)
    yield python
    python.close()
