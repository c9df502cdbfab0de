"""Checks that need torch: each is a script of ``inside``, which ends with an assertion where
something is wrong.
"""

import shutil
from pathlib import Path

import pytest
from training_kit import Python

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "tutorial",
    "pretraining",
    "models",
    "exports llama3.1-8b",
    "own_text",
    "collectives",
    "best_evaluation",
    "odd_weights",
    "finetune_matrix some",
    "reference_models",
    "data",
    "deepseek",
    "compiled_blocks",
    "fp8_autocast",
    "compiled_kernels gfx942 sm_90",
    "clocks",
    "facts_of_a_run",
    "burn_in --tries 5 element stuck-rank",
)
# The same for every family and fault, and for the second architecture of a vendor.
LONG = ("exports", "finetune_matrix every", "burn_in", "compiled_kernels gfx950")


@pytest.mark.parametrize(
    "name", [*SCRIPTS, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_every_script_ends_well(python: Python, name: str) -> None:
    script, *words = name.split()
    ended = python.run(
        "-W", "ignore", str(Path(__file__).parent / f"inside/{script}.py"), *words, timeout=900
    )
    assert ended.returncode == 0, ended.stderr


def test_unit_tests_that_need_torch_pass(python: Python, tmp_path: Path) -> None:
    """A Python without torch and numpy skips them."""
    packages = Path(pytest.__file__).parents[1]
    for name in ("_pytest", "pytest", "pluggy", "iniconfig"):
        shutil.copytree(packages / name, tmp_path / name)
    shutil.copy(packages / "py.py", tmp_path)
    for folder in ("tests/unit/training", "tests/unit/turbo", "tests/unit/system", "benchmarks"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results", "reports")
        )
    files = [
        str(path)
        for path in sorted((tmp_path / "tests/unit").rglob("test_*.py"))
        if "importorskip(" in path.read_text()
    ]
    paths = ":".join(map(str, (Path(__file__).with_name("faults"), tmp_path, ROOT / "src")))
    words = (
        "-W",
        "ignore",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        *files,
    )
    ended = python.run(*words, timeout=900, PYTHONPATH=paths)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout and "error" not in ended.stdout
