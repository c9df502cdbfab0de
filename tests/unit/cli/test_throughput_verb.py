"""What the search for the fastest settings measures, with made results, and where it may write."""

from pathlib import Path

import pytest

from primus_images.cli.main import main
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.tuning.throughput import Effort, Point, Result, Search
from tables import table_of


class MadeSearch(Search):
    """Larger micro batches are faster."""

    def run(self, recipe: Recipe, number: int) -> Result:
        runs.append((recipe.local_batch, number))
        return Result(
            tokens_per_second=recipe.local_batch, memory_gib=1, losses=(7.0,), reason="", seconds=10
        )


runs: list[tuple[int, int]] = []


def test_start_and_winner_run_alternately(tmp_path: Path) -> None:
    words = ("validation.accumulation=1", "torchtitan.training.local_batch_size={}")
    recipes = [
        resolve("llama3-proxy", [word.format(size) for word in words], Choices(gpu="cpu"))
        for size in (1, 2)
    ]
    points = [
        Point(turbo="off", checkpointing="none", batch=recipe.local_batch, recipe=recipe)
        for recipe in recipes
    ]
    search = MadeSearch(
        points, "llama3-proxy", tmp_path, Effort(limit=1, warmup=0, pairs=3), lambda _: None
    )
    assert [search.measure(point) for point in points] == [1, 2]
    search.pairs(points[1])
    assert runs[2:] == [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("name", "message"),
    table_of("throughput_verb.an_output_that_cannot_be_a_recipe_file_is_refused_before_the_search"),
)
def test_an_output_that_cannot_be_a_recipe_file_is_refused_before_the_search(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert (
        main(["tune", "throughput", "llama3-proxy", "--gpu=cpu", "--output", str(tmp_path / name)])
        == 2
    )
    assert message in capsys.readouterr().err
