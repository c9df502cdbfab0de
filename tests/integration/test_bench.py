from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from host_tools import needs

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.integration


# mypy already checks that benchmarks call what there is.
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a private dockerd needs root")
@needs("dockerd", "docker-buildx")
def test_a_quick_benchmark_measures_both_sides(tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    command = [sys.executable, "-m", "benchmarks.engine", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    if "did not come up" in done.stderr:
        pytest.skip(f"no dockerd here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    result = json.loads(text)
    rows = {row["key"]: row for row in result["rows"]}
    assert all("ratio" in rows[key] for key in ("cold", "noop", "component", "recipe", "four"))
    assert rows["noop_memory"]["ours"]["median"] < 300
    assert str(tmp_path) not in text
