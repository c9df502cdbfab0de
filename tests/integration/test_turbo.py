"""Our own Triton kernels compile for the GPUs that images are made for. Triton's compiler needs no GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent / "inside" / "compiled_kernels.py"


def test_every_kernel_compiles_for_every_gpu(python: list[str]) -> None:
    archs = ("gfx942", "gfx950", "sm_90")
    ended = subprocess.run([*python, str(SCRIPT), *archs], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    sizes = json.loads(ended.stdout)
    assert set(sizes) == set(archs)
    assert all(len(sizes[arch]) >= 13 and min(sizes[arch].values()) > 0 for arch in archs)
