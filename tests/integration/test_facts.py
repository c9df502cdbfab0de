"""The facts that a run leaves are those of what ran."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

INSIDE = Path(__file__).parent / "inside"


def test_products_of_the_compiler_are_not_the_run_s(python: list[str]) -> None:
    """They made the check "precision" fail for FLUX in BF16: the compiler traces its linear layers in float32."""
    ended = subprocess.run([*python, str(INSIDE / "compiled_products.py")], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    compiling, compiled = json.loads(ended.stdout.splitlines()[-1])
    assert compiling == compiled
    assert "aten::mm float" not in compiling
    assert "aten::addmm BFloat16" in compiling


def test_any_change_of_the_weights_changes_their_digest(python: list[str]) -> None:
    ended = subprocess.run([*python, str(INSIDE / "weights_digest.py")], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert len(set(seen["digests"].values())) == len(seen["digests"])
    assert seen["again"] == seen["digests"]["plain"]
    assert seen["pieces"][0] == seen["pieces"][1] == seen["pieces"][2]
