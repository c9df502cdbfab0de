"""`primus project`: its errors over the committed runs are those that its page states."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from primus_images.cli.image.project import Projection, projected
from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.yamlfile import read_values

ROOT = Path(__file__).parents[3]
TABLE = read_values(ROOT / "src/primus_images/recipes/throughput.yaml").data
ROWS = json.loads((ROOT / "benchmarks/results/projection.json").read_text())["rows"]


def run(row: dict) -> tuple[float, Projection]:
    """The tokens per second and GPU of a row, and what is projected for it."""
    for backend in ("torchtitan", "fsdp", "megatron"):
        choices = Choices(backend=backend, gpu=row["gpu"], precision=row["precision"])
        words = [*row["words"], *(["turbo=off"] if row["turbo"] == "off" else [])]
        try:
            recipe = resolve(row["recipe"], [*words, f"seq_len={row['seq_len']}"], choices)
        except InputError:
            continue
        reached = projected(recipe)
        nodes = max(1, row["gpus"] // 8)
        rate = reached.tokens_per_second * 0.99 ** (nodes.bit_length() - 1)
        return row["tokens_per_second"], replace(reached, tokens_per_second=rate)
    raise AssertionError(row)


def test_a_share_is_the_median_of_the_runs_that_are_not_held_out() -> None:
    fitted: dict[tuple[object, ...], list[float]] = {}
    for row in ROWS:
        if not row["held_out"]:
            measured, reached = run(row)
            key = (row["gpu"], row["precision"], reached.mfu)
            fitted.setdefault(key, []).append(reached.mfu * measured / reached.tokens_per_second)
    for (_, _, share), shares in fitted.items():
        assert share == pytest.approx(median(shares), abs=1e-3)
    assert len(fitted) == len(TABLE["shares"])


def test_projections_meet_their_bar_and_the_page_states_their_errors() -> None:
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in ROWS:
        measured, reached = run(row)
        assert reached.calibrated
        errors[row["held_out"]].append(abs(reached.tokens_per_second / measured - 1))
    every = [*errors[True], *errors[False]]
    assert len(every) >= 40
    for some in (every, errors[True]):
        assert median(some) <= 0.10
        assert sum(error <= 0.25 for error in some) >= 0.9 * len(some)
    page = " ".join((ROOT / "docs/tuning.md").read_text().split())
    near = sum(error <= 0.25 for error in errors[True])
    assert f"{len(errors[True])} of {len(every)} runs are held out" in page
    assert (
        f"by {median(errors[True]):.1%} in the median, and {near} of them by at most 25 %" in page
    )


def test_a_range_of_nodes_is_projected_and_a_layout_that_fits_is_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["project", "llama3.1-70b", "--gpu", "h200", "--nodes", "1..3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["nodes"], row["gpus"]) for row in rows] == [(1, 8), (2, 16), (3, 24)]
    assert rows[1]["layout"] == "dp16"
    assert rows[1]["days"] > rows[2]["days"]
    assert main(["project", "deepseek-v3", "--gpu", "mi355x", "--nodes", "8..32", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["layout"] for row in rows] == ["", "dp8 pp16 ep8", "dp16 pp16 ep8"]
    assert main(["project", "llama3.1-8b", "--gpu", "mi355x", "--nodes", "512"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "since no such run on this GPU is known (AMD's document v25.2; "
        "benchmarks/results/speed-4xh200.json)" in text
    )
    assert main(["project", "deepseek-v3", "--gpu", "mi355x", "--nodes", "2"]) == 1
