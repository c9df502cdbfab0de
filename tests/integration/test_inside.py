"""Checks that need torch: each is a script of ``inside``, which ends with an assertion where something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_kit import Python

pytestmark = pytest.mark.integration

INSIDE = Path(__file__).with_name("inside")
# The longest first: two run at a time.
SCRIPTS = (
    "tutorial", "models", "own_text", "collectives", "odd_weights", "reference_models", "data", "deepseek",
    "compiled_blocks", "fp8_autocast", "compiled_kernels", "facts_of_a_run",
)  # fmt: skip


def test_every_script_ends_well(python: Python) -> None:
    paths = [str(INSIDE / f"{script}.py") for script in SCRIPTS]
    ended = python.run("-W", "ignore", str(INSIDE / "every_script.py"), *paths)
    assert sorted(ended.stdout.splitlines()) == sorted(f"{script}: 0" for script in SCRIPTS), ended.stderr
