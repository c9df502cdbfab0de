"""Blocks that are recomputed are compiled, and PyTorch can keep what it traces of them for later runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent / "inside" / "compiled_blocks.py"


def test_blocks_are_compiled_once_and_their_graphs_can_be_kept(python: list[str]) -> None:
    ended = subprocess.run([*python, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for recompute, graphs in json.loads(ended.stdout.splitlines()[-1]).items():
        assert len(graphs) == 1, f"{recompute}: one graph for all three blocks"
        assert graphs[0]["why"] == "", recompute
        assert ("tag_activation_checkpoint" in graphs[0]["calls"]) == (recompute != "none")
        assert len(graphs[0]["policies"]) == (recompute == "selective")
        assert all("aten.mm.default" in name and "0x" not in name for name in graphs[0]["policies"])
