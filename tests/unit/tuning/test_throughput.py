"""`primus tune throughput`: the candidates, the order of the search, the recipe file, and runs that
go wrong.
"""

import json
from pathlib import Path

import pytest

from primus_images.cli.main import main
from primus_images.errors import CheckFailed, HostError
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.tuning.throughput import (
    Effort,
    Evidence,
    Point,
    Result,
    Search,
    candidates,
    different,
    overlay,
    search,
)

H200 = Choices(gpu="h200", precision="fp8")
FITS = 0.95 * 139.8 * 2**30


def _recipe(*words: str) -> Recipe:
    return resolve("llama3.1-8b", words, H200)


def _points(*words: str, available: float = FITS) -> list[Point]:
    return candidates(_recipe(*words), available, lambda _: ())


def test_the_recipe_itself_comes_first_and_every_candidate_keeps_the_tokens_of_a_step() -> None:
    points = _points("global_batch=64")
    assert points[0].words == ()
    assert len(points) == 2 * 3 * 4
    assert {point.recipe.global_batch for point in points if point.recipe} == {64}
    assert {(point.batch, point.recipe.accumulation) for point in points if point.recipe} == {
        (1, 8),
        (2, 4),
        (4, 2),
        (8, 1),
    }
    assert len({point.recipe.digest for point in points if point.recipe}) == len(points)


def test_a_global_batch_that_no_setting_names_is_kept_too() -> None:
    start = _recipe()
    recipes = [point.recipe for point in candidates(start, None, lambda _: ()) if point.recipe]
    assert len({recipe.local_batch for recipe in recipes}) > 1
    assert {recipe.global_batch for recipe in recipes} == {start.global_batch}


def test_a_batch_that_only_a_check_would_divide_is_a_candidate() -> None:
    start = resolve(
        "llama3-proxy",
        ["training.local_batch_size=2", "training.global_batch_size=2", "ranks=1"],
        Choices(gpu="cpu"),
    )
    points = candidates(start, None, lambda _: ())
    assert {point.batch: point.out for point in points} == {1: "", 2: ""}


@pytest.mark.parametrize("words", ["turbo=off", "turbo=fp8-linear", "turbo=auto"])
def test_optimizations_that_the_command_line_chooses_are_not_searched(words: str) -> None:
    points = _points(words, "global_batch=64")
    assert {point.turbo for point in points} == {words.partition("=")[2]}
    assert len(points) == 3 * 4


def test_the_planner_leaves_out_what_does_not_fit_and_checkpointing_makes_room() -> None:
    points = _points("global_batch=64")
    largest = {
        mode: max(
            one.batch
            for one in points
            if one.checkpointing == mode and one.turbo == "auto" and not one.out
        )
        for mode in ("none", "selective op", "full")
    }
    assert largest["none"] < largest["selective op"] < largest["full"]
    assert all("does not fit" in one.out for one in points if one.peak and one.peak > FITS)
    assert all(one.out for one in _points(available=2**30))


def test_a_missing_package_leaves_out_only_a_candidate_that_names_its_optimization() -> None:
    def missing(names: tuple[str, ...]) -> list[str]:
        return ["flash_attn"] if "flash-attention-4" in names else []

    automatic = candidates(_recipe(), FITS, missing)
    assert not any("flash_attn" in point.out for point in automatic)
    by_name = candidates(_recipe("turbo=flash-attention-4"), FITS, missing)
    assert {point.out for point in by_name if point.peak and point.peak < FITS} == {
        "flash_attn not installed"
    }


def test_no_smaller_batch_is_tried_after_one_that_is_slower() -> None:
    points = [Point("auto", "none", batch, (f"batch={batch}",)) for batch in (8, 4, 2, 1)]
    tried = []

    def rate(point: Point) -> float:
        tried.append(point.batch)
        return {8: 3.0, 4: 2.0, 2: 9.0, 1: 9.0}[point.batch]

    assert search(points, rate) == points[0]
    assert tried == [8, 4]


def test_the_search_finds_the_fastest_of_independent_settings_in_few_runs() -> None:
    points, ran = _points("global_batch=64", "training.local_batch_size=2"), []

    def rate(point: Point) -> float | None:
        ran.append(point)
        if point.checkpointing == "none" and point.batch == 4:
            return None  # out of memory, though the planner says that it fits
        turbo = {"off": 1.0, "auto": 1.2}[point.turbo]
        return (
            turbo
            * {"none": 100, "selective op": 95, "full": 70}[point.checkpointing]
            * (1 + point.batch / 10)
        )

    best = search(points, rate)
    assert best is not None
    assert (best.turbo, best.checkpointing, best.batch) == ("auto", "selective op", 4)
    assert not any(point.out for point in ran)
    assert len(ran) == len({point.words for point in ran})
    assert len(ran) <= 12 < len(points)


def test_other_losses_and_nan_are_named_and_rounding_is_not() -> None:
    assert different([7.0, 6.5], [7.0, 6.500001], 1e-4) == ""
    assert "step 2 is 6.40000" in different([7.0, 6.4], [7.0, 6.5], 1e-4)
    assert different([float("nan")], [7.0], 1e-4)
    assert different([], [7.0], 1e-4)


def test_a_point_that_learns_otherwise_than_the_start_has_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {"start": (7.0, 6.5), "alike": (7.0, 6.5), "apart": (7.0, 4.0), "failed": ()}
    said: list[str] = []
    points = [
        Point("auto", "none", number, (name,), recipe=_recipe())
        for number, name in enumerate(losses, 1)
    ]
    found = Search(points, "recipe", tmp_path, Effort(limit=1.0, warmup=0, pairs=1), said.append)
    turns = iter(losses)

    def run(_recipe: Recipe, _number: int) -> Result:
        name = next(turns)
        reason = "it hung" if name == "failed" else ""
        return Result(
            tokens_per_second=None if reason else 1234.5,
            memory_gib=None,
            losses=losses[name],
            reason=reason,
            seconds=1.0,
        )

    monkeypatch.setattr(found, "known", lambda _recipe, _number: None)
    monkeypatch.setattr(found, "run", run)
    assert [found.measure(point) for point in points] == [1234.5, 1234.5, None, None]
    assert [point.words for point, _ in found.rows] == [point.words for point in points]
    reasons = [result.reason for _, result in found.rows]
    assert reasons[:2] == ["", ""]
    assert "step 2 is 4.00000" in reasons[2]
    assert reasons[3] == "it hung"
    # Four candidates, and a pair of final runs.
    assert said[0] == f"run 1 of at most 6: {points[0].title}"
    assert said[1] == f"  {points[0].title}: 1,234 tokens/s/rank"
    assert said[6:] == [
        f"run 4 of at most 6: {points[3].title}",
        f"  {points[3].title}: it hung",
    ]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_written_file_gives_the_recipe_that_was_measured(
    tmp_path: Path, *, elsewhere: bool
) -> None:
    source = "llama3-proxy"
    if elsewhere:
        source = str(tmp_path / "mine" / "own.yaml")
        Path(source).parent.mkdir()
        Path(source).write_text("uses: [llama3-proxy.yaml]\nname: own\nassets.corpus: texts\n")
        (tmp_path / "mine" / "texts").mkdir()
    choices = Choices(gpu="cpu", precision="bf16")
    start = resolve(source, ["steps=7", "optimizer.lr=0.002"], choices)
    winner = candidates(start, None, lambda _: ())[-1].recipe
    assert winner is not None
    file = tmp_path / "tuned" / "fast.yaml"
    file.parent.mkdir()
    file.write_text(
        overlay(
            source,
            winner,
            ["torchtitan.training.steps"],
            Evidence(command="primus tune", because='said: "fast" # é'),
            file,
        )
    )
    again = resolve(str(file), ["steps=7"], choices)
    left = {"assets.corpus"} if elsewhere else set()
    assert {k: s.value for k, s in again.settings.items() if k not in left} == {
        k: s.value for k, s in winner.settings.items() if k not in left
    }
    assert again.asset("corpus") is not None
    assert again.asset_digests == winner.asset_digests
    # Another precision was not measured, and stays as it was.
    assert resolve(str(file), (), Choices(gpu="cpu", precision="fp32")).local_batch == 4


def _trials(folder: Path, limit: float = 60) -> tuple[Search, Recipe]:
    recipe = resolve("llama3-proxy", ["ranks=1"], Choices(gpu="cpu"))
    point = Point(turbo="off", checkpointing="none", batch=recipe.local_batch, recipe=recipe)
    return Search(
        [point], "llama3-proxy", folder, Effort(limit=limit, warmup=2, pairs=3), lambda _: None
    ), recipe


def test_a_run_that_fails_or_takes_too_long_is_a_result_with_its_reason(tmp_path: Path) -> None:
    # This environment has no PyTorch, so the command itself refuses.
    trials, recipe = _trials(tmp_path)
    failed = trials.run(recipe, 0)
    assert failed.tokens_per_second is None
    assert "cannot be imported" in failed.reason
    # What the machine lacks may be there at the next start.
    assert trials.known(recipe, 0) is None
    hung, recipe = _trials(tmp_path / "hung", limit=0.01)
    ended = hung.run(recipe, 0)
    assert ended.reason == "it took longer than 0.01 s"
    assert hung.known(recipe, 0) == ended
    assert hung.known(recipe, 1) is None


def test_a_damaged_result_is_measured_again_and_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path,
) -> None:
    trials, recipe = _trials(tmp_path, limit=0.01)
    trials.run(recipe, 0)
    kept = next(tmp_path.glob("*-0.json"))
    kept.write_bytes(kept.read_bytes()[:-9])
    assert trials.known(recipe, 0) is None
    (tmp_path / "file").touch()
    in_the_way, recipe = _trials(tmp_path / "file" / "below")
    with pytest.raises(HostError, match="cannot write to"):
        in_the_way.run(recipe, 0)


def test_the_plan_needs_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "tune",
        "throughput",
        "llama3.1-8b",
        "--gpu=h200",
        "--precision=fp8",
        "global_batch=64",
        "--dry-run",
    ]
    assert main(words) == 0
    assert "does not fit: 132.8 GiB can be used" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plan"]) == 24
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("reason", "rate", "said"),
    [
        ("", 10.0, ""),
        ("it hung", 10.0, "ran once and then failed: it hung"),
        ("no step", None, "ran once and then failed: no step"),
        ("", None, "ran once and then failed: "),
    ],
)
def test_a_winner_that_fails_in_its_final_runs_wins_nothing(
    reason: str, rate: float | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Point("auto", "none", 1, ())
    winner = Point("auto", "none", 2, ("batch=2",))
    effort = Effort(limit=1.0, warmup=0, pairs=3)
    found = Search([start, winner], "recipe", tmp_path, effort, print)
    rates = iter([8.0, 12.0, 10.0, 12.0, 9.0, 15.0])

    def result(point: Point, number: int) -> Result:
        speed = None if rate is None else next(rates)
        return Result(
            tokens_per_second=speed, memory_gib=None, losses=(), reason=reason, seconds=1.0
        )

    monkeypatch.setattr(found, "_result", result)
    if said:
        with pytest.raises(CheckFailed, match=said):
            found.pairs(winner)
    else:
        gain, spread = found.pairs(winner)
        assert (gain, spread) == (pytest.approx(12 / 9 - 1), pytest.approx(0.25))
