"""Checks that need torch: each is a script of ``inside``, which ends with an assertion where something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_kit import Python

pytestmark = pytest.mark.integration

SCRIPTS = (
    "tutorial", "models", "exports", "own_text", "collectives", "odd_weights", "reference_models", "data", "deepseek",
    "compiled_blocks", "fp8_autocast", "compiled_kernels", "facts_of_a_run",
)  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_ends_well(python: Python, name: str) -> None:
    ended = python.run("-W", "ignore", str(Path(__file__).parent / f"inside/{name}.py"))
    assert ended.returncode == 0, ended.stderr
