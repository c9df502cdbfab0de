"""``primus list`` and ``primus show``: golden text, JSON, refusals, completion, and what they
import.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import primus_images
from primus_images.cli.main import main
from primus_images.gpus.table import load_table
from tables import table_of, text_of

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden"
TINY = text_of("recipes/tiny.yaml")


@pytest.fixture(autouse=True)
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes that holds one."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.setenv("PRIMUS_RECIPES", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("golden", "words"), table_of("show_list.golden"))
def test_golden(
    golden: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    assert main([word.replace("steps=", "training.steps=") for word in words]) == 0
    text = capsys.readouterr().out
    if request.config.getoption("--regenerate-golden"):
        (GOLDEN / golden).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / golden).read_text(encoding="utf-8"), (
        "run pytest --regenerate-golden if it should say this"
    )


def test_what_show_must_say(capsys: pytest.CaptureFixture[str]) -> None:
    """The golden file may be written anew; this stays."""
    main(["show", "tiny", "--gpu", "mi355x", "training.steps=9"])
    text = capsys.readouterr().out
    assert "2 nodes × 8 ranks, 9 steps" in text
    assert "128 sequences of 512 = 65,536 tokens per step" in text, (
        "64 for one node, twice that for two"
    )
    assert "primus train tiny --gpu=mi355x training.steps=9" in text
    assert "ran out of memory" in text
    lines = {line.split()[0]: line.split()[-1] for line in text.splitlines() if ".yaml:" in line}
    assert lines["training.local_batch_size"].startswith("tiny.yaml:17:")


def test_json_of_show(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "tiny", "--gpu", "mi300x", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["torchtitan.training.local_batch_size"]["value"] == 2
    assert "because" not in shown["settings"]["torchtitan.training.local_batch_size"]
    assert (shown["backend"], shown["nodes"], shown["proxy"]) == ("torchtitan", 2, False)
    assert shown["tokens_per_step"] == 64 * 512
    # By hand: embedding and head, final norm, and twice (attention, gate, up and down, two norms).
    layer = 2 * 64 * (64 + 32) + 3 * 64 * 128 + 2 * 64
    assert shown["parameters"]["total"] == 2 * 1000 * 64 + 64 + 2 * layer


@pytest.mark.parametrize(("words", "pairs"), table_of("show_list.filters_of_list"))
def test_filters_of_list(
    words: list[str], pairs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "--json", *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [[e["backend"], precision] for e in shown for precision in e["precisions"]] == pairs


def test_gpus_that_cannot_hold_a_recipe_are_left_out(
    recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipes / "tiny.yaml"
    sizes = "layers: 42, hidden_size: 16384, heads: 128, kv_heads: 128, ffn_size: 65536"
    file.write_text(
        file.read_text().replace(
            "layers: 2, hidden_size: 64, heads: 4, kv_heads: 2, ffn_size: 128", sizes
        )
    )
    assert main(["list", "tiny", "--backend", "torchtitan", "--precision", "bf16"]) == 0
    table, line = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    large = {gpu.name: gpu.memory.gib > 220 for gpu in load_table().generations}
    small = [name for name, holds in large.items() if not holds]
    assert (
        line
        == f"too large, whatever the batch: tiny torchtitan pretrain bf16 on {', '.join(small)}"
    )
    assert table.endswith(" ".join(name for name, holds in large.items() if holds))
    for gpu, code, sentence in (
        ("h200", 1, "too large for a GPU, whatever the batch"),
        ("mi325x", 0, ""),
    ):
        assert main(["show", "tiny", "--gpu", gpu]) == 0
        assert ("too large" in (shown := capsys.readouterr().out)) == bool(code)
        assert sentence in shown
        assert main(["fit", "tiny", "--gpu", gpu]) == code
        capsys.readouterr()


@pytest.mark.parametrize("words", ["list", "show tiny --gpu h200"])
def test_nothing_heavy_is_imported(words: str) -> None:
    code = (
        f"import sys; from primus_images.cli.main import main; main({words.split()!r}); "
        "print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "requests", "rich", "docker", "numpy", "jsonschema"}
    assert not heavy & set(run.stderr.split())


@pytest.mark.parametrize("below", ["", "docs"])
def test_an_installed_copy_finds_the_project_it_stands_in(tmp_path: Path, below: str) -> None:
    shutil.copytree(
        Path(primus_images.__file__).parent,
        tmp_path / "lib/primus_images",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    command = [sys.executable, "-m", "primus_images.cli.main", "list"]
    env = {k: v for k, v in os.environ.items() if k != "PRIMUS_RECIPES"} | {
        "PYTHONPATH": str(tmp_path / "lib")
    }
    listed = subprocess.run(
        command, cwd=ROOT / below, env=env, capture_output=True, text=True, check=True
    )
    rows = listed.stdout.splitlines()[1:-1]
    assert {row.split()[0] for row in rows} == {path.stem for path in ROOT.glob("recipes/*.yaml")}
    lost = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (lost.returncode, lost.stderr.splitlines()) == (
        2,
        [
            "primus list: /opt/primus/recipes has no recipes",
            "  → change to a project folder, or set PRIMUS_RECIPES to a folder of recipes",
        ],
    )
