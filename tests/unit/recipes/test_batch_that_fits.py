"""A setting that a recipe gives as a list becomes the first entry that fits the GPU."""

from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import Place, resolve
from primus_images.recipes.rules import USABLE, gpu_bytes, predict
from primus_images.recipes.setting import Choices

H200 = Choices(gpu="h200", precision="bf16")
CUT = ("ranks=2", "model.layers=12")


def llama(*words: str, memory: float | None = None) -> Recipe:
    return resolve("llama3.1-8b", words, H200, place=Place(memory=memory))


def test_the_largest_that_fits_is_taken_and_the_origin_says_so() -> None:
    there = USABLE * (gpu_bytes("h200") or 0)
    for words in ((), ("ranks=4",), CUT):
        recipe = llama(*words)
        assert predict(recipe).peak <= there
        assert recipe.local_batch == 4 or predict(recipe, recipe.local_batch + 1).peak > there
        assert (
            "the first of 4, 3, 2 that fits"
            in recipe.settings[recipe.knows.key("local_batch")].origin
        )
    assert [llama(*words).local_batch for words in (("ranks=4",), CUT)] == [2, 4]


def test_the_memory_of_the_machine_decides_where_it_is_not_that_of_the_generation() -> None:
    smaller = llama(*CUT, memory=88 * 2**30)
    assert (smaller.local_batch, predict(smaller).peak <= USABLE * 88 * 2**30) == (3, True)
    assert llama(*CUT, memory=1.0).local_batch == 2


def test_a_global_batch_must_be_a_multiple_and_a_number_of_the_user_is_taken_as_it_is() -> None:
    assert [
        llama(*CUT, f"training.{word}").local_batch
        for word in ("global_batch_size=12", "local_batch_size=7")
    ] == [
        3,
        7,
    ]


def test_gathered_weights_are_kept_where_they_fit() -> None:
    key = "torchtitan.parallelism.fsdp_reshard_after_forward"
    recipes = [
        resolve("deepseek-16b", words, H200)
        for words in (("ranks=4",), ("ranks=2", "model.layers=8"))
    ]
    assert [recipe.settings[key].value for recipe in recipes] == ["default", "never"]
    assert "the first of never, default that fits" in recipes[0].settings[key].origin


def test_fine_tuning_recomputes_only_what_does_not_fit_otherwise() -> None:
    for ranks, values in ((2, ("none", 4)), (1, ("full", 1))):
        recipe = resolve(
            "qwen3-8b", [f"ranks={ranks}"], Choices(gpu="h200", backend="finetune", mode="full")
        )
        assert (recipe.settings["finetune.training.recompute"].value, recipe.local_batch) == values


def test_of_several_lists_the_first_combination_that_fits_is_taken() -> None:
    chosen = []
    for gib in (139, 90, 70, 50, 40):
        choices = Choices(gpu="h200", backend="finetune", mode="full")
        recipe = resolve("llama3.1-8b", ["ranks=4"], choices, place=Place(memory=gib * 2**30))
        chosen.append((recipe.settings["finetune.training.recompute"].value, recipe.local_batch))
    assert chosen == [("none", 4), ("none", 3), ("none", 2), ("full", 4), ("full", 1)]
