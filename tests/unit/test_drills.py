"""The changes that CONTRIBUTING.md describes, made on a copy of the repository, with the commands
that it names.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from primus_images.recipes.load import names
from project_kit import make_project
from tables import text_of

ROOT = Path(__file__).parents[2]
PARTS = (
    "src",
    "images",
    "recipes",
    "docs",
    "versions.yaml",
    "README.md",
    "CHANGELOG.md",
    "benchmarks",
    "noxfile.py",
    "pyproject.toml",
    # The page of older documents is made from the data of their tests.
    "tests/fixtures",
)

ARCH = text_of("gpu_arch.yaml")
ROW = text_of("gpu_row.yaml")

Primus = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in PARTS:
        source, target = ROOT / name, tmp_path / "repository" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(
                source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(source, target)
    return tmp_path / "repository"


@pytest.fixture
def primus(copy: Path) -> Primus:
    def run(
        *words: str, cwd: Path = copy, module: str = "primus_images.cli.main"
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(copy / "src")}
        command = [sys.executable, "-m", module, *words]
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} has no {old!r}"
    path.write_text(text.replace(old, new))


def test_a_gpu_generation(copy: Path, primus: Primus) -> None:
    """Each step that was forgotten is named, with the file to change."""
    table, image = copy / "src/primus_images/gpus/generations.yaml", copy / "images/mi440x.yaml"
    image.write_text(
        (copy / "images/mi355x.yaml")
        .read_text()
        .replace("mi355x", "mi440x")
        .replace("MI355X", "MI440X")
    )

    def refused() -> str:
        done = primus("plan", "mi440x")
        assert done.returncode == 2
        return done.stderr

    assert "images/mi440x.yaml:9:1: no GPU generation is called 'mi440x'" in refused()
    change(table, "  - name: h200\n", ROW + "  - name: h200\n")
    assert re.search(
        r" gpus/generations.yaml:\d+:5: mi440x: there is no architecture 'gfx1251'", refused()
    )
    change(table, "  - arch: sm_90\n", ARCH + "  - arch: sm_90\n")
    (lacking,) = re.findall(
        r" gpus/generations.yaml:\d+:5: mi440x has no entry for .* variables (.*) \(", refused()
    )
    for name in lacking.split(", "):
        entry = rf"(  - name: {name}\n(?:    .*\n)*?    for: \[[^]]*(?:gfx950|mi350x))"
        table.write_text(re.sub(entry, r"\1, gfx1251", table.read_text(), count=1))
    assert "flash-attention has no pin for mi440x" in refused()
    change(copy / "versions.yaml", ", mi355x", ", mi355x, mi440x")
    # A stand-in for `nox -s lock`, which asks the indexes: the packages are those of the other
    # generation.
    lock = (copy / "images/locks/debian/mi355x.json").read_text()
    (copy / "images/locks/debian/mi440x.json").write_text(
        lock.replace('"target": "mi355x"', '"target": "mi440x"')
    )
    planned = primus("plan", "mi440x")
    assert planned.returncode == 0, planned.stderr
    assert "kernels gfx1251" in planned.stdout
    assert primus("list", "--gpu", "mi440x").stdout.count("mi440x") >= len(names(copy / "recipes"))
    # As the site's data for ROCm's pages has them.
    tag = "primus_train/torchtitan_MI440X_llama3_8b-BF16-pretrain"
    assert (
        "resolved for mi440x"
        in primus("compat", "madengine", "run", "--tags", tag, "--dry-run").stderr
    )
    assert primus(module="docs.generated").returncode == 0
    assert primus("--check", module="docs.generated").returncode == 0


def test_a_model(copy: Path, primus: Primus) -> None:
    recipe = (copy / "recipes/llama3.1-8b.yaml").read_text()
    (copy / "recipes/my-model.yaml").write_text(
        recipe.partition("cases:")[0]
        .replace("name: llama3.1-8b", "name: my-model")
        .replace("Llama 3.1 8B", "My model")
    )
    assert "8.03 B parameters" in primus("show", "my-model", "--gpu", "mi355x").stdout
    done = primus("train", "my-model", "--gpu", "mi355x", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "my-model" in primus("list").stdout


def test_a_gate(copy: Path, primus: Primus, tmp_path: Path) -> None:
    (copy / "src/primus_images/gates/rules/readme.py").write_text(
        '"""Every layer has a file called README."""\n'
        "from primus_images.gates.examined import Finding, GateReport\n"
        "def judge(examined):\n"
        "    found = [Finding(severity='error', layer=layer, message='no README')\n"
        "             for layer, facts in examined.facts.items() if 'README' not in "
        "facts.folders]\n"
        "    return GateReport(summary=f'{len(examined.facts)} layers', findings=tuple(found))\n"
    )
    kit = make_project(tmp_path / "project")
    built = primus("build", "demo", cwd=kit.root)
    assert built.returncode == 1
    assert "✗ readme" in built.stderr
    assert primus(module="docs.generated").returncode == 0
    assert (
        "| readme | Every layer has a file called README |" in (copy / "docs/gates.md").read_text()
    )


def test_a_pin(copy: Path, primus: Primus) -> None:
    change(copy / "versions.yaml", "version: 0.18.0", "version: 0.19.0")
    done = primus("plan", "cpu")
    assert done.returncode == 2
    assert "torchao" in done.stderr
    assert "lock" in done.stderr
