"""What the integration tests share: the repository's own cpu image."""

from __future__ import annotations

from pathlib import Path

import pytest

from project_kit import Kit

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cpu_image() -> Kit:
    """The repository, with its cpu image built from the committed lock."""
    kit = Kit(REPOSITORY)
    kit.build("cpu", "--locked")
    return kit
