"""`primus tune`: its stages and its search, with made results in place of measured ones."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from primus_images.cli.image.tune import _plan_lines
from primus_images.cli.main import main
from primus_images.recipes.recipe import Recipe
from primus_images.tuning.gemm import Place, alone
from primus_images.tuning.throughput import Point, Result, Search

THROUGHPUT = ["tune", "throughput", "llama3-proxy", "--gpu=cpu", "ranks=1", "--turbo=off"]
THROUGHPUT += ["global_batch=2", "local_batch=1", "--folder=kept"]
# Micro batch → tokens per second, unless a test has others.
RATES = {1: 1000.0, 2: 1500.0}


def made(rate: float | None, reason: str = "") -> Result:
    return Result(
        tokens_per_second=rate, memory_gib=2.5, losses=(7.0, 6.0), reason=reason, seconds=10
    )


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], Result]:
    """What runs give, by micro batch and number; others have the rate of their micro batch."""
    given: dict[tuple[int, int], Result] = {}

    def run(search: Search, recipe: Recipe, number: int) -> Result:
        batch = recipe.local_batch
        return given.get((batch, number)) or made(RATES[batch])

    monkeypatch.setattr(Search, "run", run)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name}-2.13")
    monkeypatch.setattr("primus_images.training.run.start.importable", lambda name: True)
    monkeypatch.chdir(tmp_path)
    return given


@pytest.mark.usefixtures("results")
def test_the_fastest_settings_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*THROUGHPUT, "--steps=13", "--output=mine.yaml"]) == 0
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines()]
    assert ["2", "none", "off", "1,500", "2.5", "fastest"] in rows
    assert ["1", "none", "off", "1,000", "2.5"] in rows
    text = " ".join(said.out.split())
    assert "batch 2, checkpointing none, turbo off: 50.0% faster, spread 0.0%, 3 pairs" in text
    assert "use it with: torchtitan.training.local_batch_size=2" in text
    assert said.out.splitlines()[-1] == "→ mine.yaml"
    assert "run 1 of at most" in said.err
    written = (tmp_path / "mine.yaml").read_text()
    assert re.search(
        r"# Written by: primus tune throughput llama3-proxy .*global_batch_size=2 ", written
    )
    (case,) = yaml.safe_load(written)["cases"]
    because = case["because"]
    assert "on a CPU (torch: torch-2.13" in because
    assert "trains 1,500 tokens/s/rank, the recipe's settings 1,000" in because
    assert "medians of 3 alternating runs each, gain 50.0%, spread 0.0%." in because
    # What only the measurement had is not of the recipe.
    assert not [key for key in case if "steps" in key or "checkpoint" in key]


@pytest.mark.usefixtures("results")
def test_the_search_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*THROUGHPUT, "--json", "--pairs=4"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    document = json.loads(said.out)
    assert (document["better"], document["output"]) == (True, None)
    assert (document["gain"], document["spread"]) == (0.5, 0)
    assert document["start_tokens_per_second"] == [1000] * 4
    assert document["winner_tokens_per_second"] == [1500] * 4
    assert document["versions"]["torch"] == "torch-2.13"
    rates = [run["tokens_per_second"] for run in document["runs"]]
    assert rates[:2] == [1000, 1500]
    assert any(word.endswith("=2") for word in document["winner"])


@pytest.mark.parametrize(
    ("rates", "line"),
    [
        (dict.fromkeys(RATES, 1000.0), "the recipe's own settings are the fastest"),
        (
            {(2, 1): 1000.0, (2, 2): 1600.0, (2, 3): 1100.0},
            "no change: in alternating runs, batch 2, checkpointing none, turbo off is 10.0% "
            "faster; the spread is 54.5%",
        ),
        (
            {(2, 1): 900.0, (2, 2): 900.0, (2, 3): 900.0},
            "is 10.0% slower; the spread is 0.0%",
        ),
    ],
)
def test_a_gain_within_the_spread_writes_no_file(
    rates: dict[Any, float],
    line: str,
    results: dict[tuple[int, int], Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for run, rate in rates.items():
        results[run if isinstance(run, tuple) else (run, 0)] = made(rate)
    assert main([*THROUGHPUT, "--output=mine.yaml"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(line)
    assert not (tmp_path / "mine.yaml").exists()


def test_a_setting_that_fails_is_left_out_and_a_start_that_fails_ends_it(
    results: dict[tuple[int, int], Result], capsys: pytest.CaptureFixture[str]
) -> None:
    results[2, 0] = made(None, "out of memory")
    assert main([*THROUGHPUT]) == 0
    assert ["2", "none", "off", "–", "2.5", "out", "of", "memory"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]
    results[1, 0] = made(None, "no such data")
    assert main([*THROUGHPUT]) == 1
    assert "the recipe's own settings failed: no such data" in capsys.readouterr().err


@pytest.mark.usefixtures("results")
def test_a_measurement_has_steps_after_its_warm_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = []

    def run(search: Search, recipe: Recipe, number: int) -> Result:
        steps.append(recipe.get(recipe.knows.key("steps"), int))
        return made(1000)

    monkeypatch.setattr(Search, "run", run)
    assert main([*THROUGHPUT, "--warmup=7"]) == 0
    assert set(steps) == {17}
    for count in ("7", "6"):
        assert main([*THROUGHPUT, "--warmup=7", f"--steps={count}"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "--steps must be greater than the 7 steps of --warmup" in said
    assert main([*THROUGHPUT, "--warmup=7", "--steps=8"]) == 0
    assert steps[-1] == 8


def test_a_plan_of_the_search_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tune", "throughput", "llama3.1-8b", "--gpu=h200", "global_batch=16", "--dry-run"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["micro", "batch", "checkpointing", "turbo", "predicted"]
    assert any(re.search(r"[0-9.]+ GiB +to try$", line) for line in lines)
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert round(document["available_bytes"] / 2**30, 1) == 132.8
    assert "recipe" not in document["plan"][0]
    # A machine without GPUs plans for packages that it does not have.
    assert not any("not installed" in row["out"] for row in document["plan"])
    assert not list(tmp_path.iterdir())


TUNE = ["tune", "gemm", "llama2-7b", "--gpu", "mi300x"]
SHAPES = [f"GemmTunableOp_BFloat16_TN,tn_{m}_2048_4096_ld_4096_4096_{m}" for m in (256, 512, 768)]
# Stands for `primus train`: it says how it was called, and records a shape if it is asked to.
TRAIN = """#!/bin/sh
echo "{\\"said\\": \\"$* TUNING=$PYTORCH_TUNABLEOP_TUNING OTHER=$PYTORCH_TUNABLEOP_VERBOSE\\"}"
exit $TRAIN_EXIT
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The folders of a recipe whose dump recorded three shapes, on a machine with two GPUs."""

    def measure(shapes: list[str], work: Path, gpus: list[str]) -> tuple[list[str], list[str]]:
        assert gpus == ["0", "1"]
        rows = [f"{shape},Gemm_Hipblaslt_7,0.5" for shape in shapes[1:]]
        return ["Validator,PT_VERSION,2.11.0"], [f"{shapes[0]},Default,0.5", *rows]

    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0")
    monkeypatch.setattr("primus_images.cli.image.tune.measure", measure)
    monkeypatch.setattr("primus_images.cli.image.tune.visible_gpus", lambda: ("0", "1"))
    place = Place(tmp_path / "output/tune_gemm/llama2-7b")
    place.shapes.mkdir(parents=True)
    (place.shapes / "tunableop_untuned_node0_gpu0.csv").write_text("\n".join(SHAPES) + "\n")
    (tmp_path / "train").write_text(TRAIN)
    (tmp_path / "train").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "train"))
    monkeypatch.setenv("TRAIN_EXIT", "0")
    monkeypatch.setenv("PYTORCH_TUNABLEOP_VERBOSE", "1")
    monkeypatch.chdir(tmp_path)
    return place


def test_gemms_are_measured_and_refused_to_another_recipe(
    recorded: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TUNE, "--stage", "tune"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "2 of 3 GEMMs are faster with another implementation than the default",
        f"→ {recorded.tuned}",
    ]
    assert said.err == "3 shapes; 2 GPUs\n"
    assert main([*TUNE, "--stage", "tune", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (len(document["shapes"]), document["changed"]) == (3, 2)
    assert json.loads(recorded.key.read_text())["pytorch"] == "2.11.0"
    assert main([*TUNE, "--stage", "use", "seq_len=1024"]) == 2
    assert "was measured with other settings of the recipe" in capsys.readouterr().err


@pytest.mark.usefixtures("recorded")
def test_all_stages_print_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TUNE, "--json"]) == 0
    out, err = capfd.readouterr()
    assert len(json.loads(out)["shapes"]) == 3
    first, second = (json.loads(line)["said"] for line in err.splitlines())
    assert "train llama2-7b --gpu=mi300x" in first
    assert "TUNING=1" not in first
    assert first.endswith("OTHER=")
    assert second.endswith("--json TUNING=0 OTHER=")


@pytest.mark.usefixtures("recorded")
def test_one_stage_runs_alone_with_its_number_of_steps(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*TUNE, "--stage", "dump", "--dump-steps", "7", "steps=90", "lr=1e-4"]) == 0
    out, err = capfd.readouterr()
    assert "steps=7 " in out
    assert "steps=90" not in out
    assert "lr=1e-4" in out or "lr=0.0001" in out
    assert "primus tune: PYTORCH_TUNABLEOP_" in err
    monkeypatch.setenv("TRAIN_EXIT", "9")
    assert main(TUNE) == 9
    assert "GEMMs are faster" not in capfd.readouterr().out


def test_a_dump_that_recorded_nothing_and_a_machine_without_gpus_are_refused(
    recorded: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in recorded.shapes.iterdir():
        file.unlink()
    assert main([*TUNE, "--stage", "dump"]) == 2
    assert "no GEMM is recorded in" in capsys.readouterr().err
    monkeypatch.setattr("primus_images.cli.image.tune.visible_gpus", lambda: ())
    assert main([*TUNE, "--stage", "dump"]) == 3
    assert "there is no GPU on this machine, or the environment hides all" in (
        " ".join(capsys.readouterr().err.split())
    )


def test_two_tunings_of_one_folder_do_not_race(
    recorded: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone(recorded.tuned.parent / "work"):
        assert main([*TUNE, "--stage", "tune"]) == 3
    assert "another process tunes in" in capsys.readouterr().err


@pytest.mark.usefixtures("recorded")
def test_gemms_of_a_cpu_are_not_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TUNE, "--stage", "tune", "--gpu", "cpu", "--proxy"]) == 2
    assert "tunes GEMMs of GPUs only" in capsys.readouterr().err


def test_a_point_that_is_left_out_says_why() -> None:
    tried = Point(turbo="off", checkpointing="none", batch=1, peak=3 * 2**30)
    lines = _plan_lines([tried, tried._replace(batch=64, peak=None, out="too large")])
    assert [line.split() for line in lines[1:]] == [
        ["1", "none", "off", "3.0", "GiB", "to", "try"],
        ["64", "none", "off", "–", "too", "large"],
    ]
