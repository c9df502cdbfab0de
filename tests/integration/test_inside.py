"""Checks that need torch: each is a script of ``inside``, which ends with an assertion where something is wrong."""

from pathlib import Path

import pytest
from training_kit import Python

pytestmark = pytest.mark.integration

SCRIPTS = (
    "tutorial", "models", "exports llama3.1-8b", "own_text", "collectives", "odd_weights", "reference_models", "data",
    "deepseek", "compiled_blocks", "fp8_autocast", "compiled_kernels", "facts_of_a_run",
    "burn_in --tries 10 element swapped-message stuck-rank",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [*SCRIPTS, *(pytest.param(name, marks=pytest.mark.slow) for name in ("exports", "burn_in"))]
)
def test_every_script_ends_well(python: Python, name: str) -> None:
    script, *words = name.split()
    ended = python.run("-W", "ignore", str(Path(__file__).parent / f"inside/{script}.py"), *words, timeout=900)
    assert ended.returncode == 0, ended.stderr
