"""Settings: bounds and shares, what a long run has besides, and the files that a recipe names."""

import json
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.recipes import indexed, load
from primus_images.recipes.assets import vocabulary
from primus_images.recipes.digest import digest_of_recipe, misstated
from primus_images.recipes.long import settings_of_long_run
from primus_images.recipes.resolve import resolve
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import Choices, Setting, ends_of, outside, share_of

STEPS = {"steps": 10.0}


@pytest.mark.parametrize(
    ("bounds", "value", "reason"),
    [
        ("[1, inf)", 1, None),
        ("[1, inf)", 0, "must be at least 1, not 0"),
        ("(0, 1]", 0, "must be greater than 0, not 0"),
        ("(0, 1]", 1, None),
        ("(0, 1]", 1.5, "must be at most 1, not 1.5"),
        ("[0, 1)", 1, "must be less than 1, not 1"),
        ("[0.5, 1)", 0.25, "must be at least 0.5, not 0.25"),
        ("[0, steps]", 10, None),
        ("[0, steps]", 11, "must be at most steps = 10, not 11"),
        ("[0, other]", 11, None),
        ("-1 | [1, inf)", -1, None),
        ("-1 | [1, inf)", 0, "must be -1 or at least 1, not 0"),
        ("-1 | [1, inf)", -2, "must be -1 or at least 1, not -2"),
    ],
)
def test_a_value_outside_its_bounds_says_which(
    bounds: str, value: float, reason: str | None
) -> None:
    fault = outside(bounds, value, STEPS.get)
    assert (fault[0] if fault else None) == reason
    if fault:
        assert fault[1] == ("steps" if "steps" in bounds else None)


@pytest.mark.parametrize("bounds", ["[1, 2", "1, 2", "[1,2]", "| [1, 2]", "[1, 2] "])
def test_what_is_no_interval_is_an_error(bounds: str) -> None:
    with pytest.raises(ValueError, match="is not an interval"):
        ends_of(bounds)


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5%", 0.005), ("100%", 1.0)])
def test_a_percentage_is_a_share(text: str, share: float) -> None:
    assert share_of(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["1", "%", "100.1%", "101%", "-1%", "1.%", "1000%", " 1%"])
def test_other_text_is_no_percentage(text: str) -> None:
    with pytest.raises(ValueError, match="is not a percentage"):
        share_of(text)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (Choices(), []),
        (Choices(nodes=2, gpu="mi300x"), ["--gpu=mi300x", "--nodes=2"]),
        (Choices(proxy=True), ["--proxy"]),
        (Choices(proxy=False, mode="lora"), ["--mode=lora", "proxy=false"]),
    ],
)
def test_choices_are_options(choices: Choices, words: list[str]) -> None:
    assert choices.words() == words


def settings(backend: str = "torchtitan", steps: Any = 501, **more: Any) -> dict[str, Setting]:
    values = {backends()[backend].key("steps"): steps, "mode": "pretrain"}
    for key, value in more.items():
        values[key.replace("__", ".")] = value
    return {key: Setting(value=value, origin="mine.yaml:1:1") for key, value in values.items()}


def added(backend: str, given: dict[str, Setting], *typed: str) -> dict[str, object]:
    words = {key: given[key] for key in typed}
    rows = settings_of_long_run(backends()[backend], given, words)
    for setting in rows.values():
        assert setting.origin == "a run of more than 500 steps"
        assert setting.because
    return {key: setting.value for key, setting in rows.items()}


@pytest.mark.parametrize("steps", [1, 500, "many"])
def test_a_short_run_stays_as_it_is(steps: object) -> None:
    assert added("torchtitan", settings(steps=steps)) == {}


def test_a_long_run_saves_by_time_and_keeps_few() -> None:
    rows = added("torchtitan", settings(mode="lora"))
    assert rows == {"saving.minutes": 30.0, "saving.keep": 3}
    assert added("torchtitan", settings(mode="lora", saving__keep=9)) == {"saving.minutes": 30.0}
    rows = added("torchtitan", settings(mode="lora", saving__minutes=5.0))
    assert rows == {"saving.keep": 3}
    by_steps = {**settings(mode="lora")}
    by_steps[backends()["torchtitan"].key("checkpoint")] = Setting(value=0, origin="mine.yaml:2:1")
    assert added("torchtitan", by_steps) == {}


@pytest.mark.parametrize(("steps", "warmup"), [(501, 5), (1000, 10), (1099, 10)])
def test_a_long_pretraining_warms_up_and_falls_to_a_tenth(steps: int, warmup: int) -> None:
    backend = backends()["torchtitan"]
    rows = added("torchtitan", settings(steps=steps))
    assert rows[f"torchtitan.{backend.warmup}"] == warmup
    assert rows[f"torchtitan.{backend.least_share}"] == 0.1
    assert rows[f"torchtitan.{backend.schedule}"] == "cosine"


def test_a_backend_with_a_least_rate_gets_a_tenth_of_its_rate() -> None:
    backend = backends()["megatron"]
    assert not backend.least_share
    given = settings("megatron")
    given[backend.key("lr")] = Setting(value=0.002, origin="mine.yaml:3:1")
    rows = added("megatron", given)
    assert rows[f"megatron.{backend.least_rate}"] == pytest.approx(0.0002)


@pytest.mark.parametrize(
    ("origin", "typed", "replaced"),
    [
        ("mine.yaml:1:1", False, False),
        (f"{load.folder()}/a.yaml:1:1", False, True),
        (f"{load.folder()}/a.yaml:1:1", True, False),
    ],
)
def test_only_a_value_that_primus_brings_is_replaced(
    origin: str, typed: bool, replaced: bool
) -> None:
    key = f"torchtitan.{backends()['torchtitan'].schedule}"
    given = {**settings(), key: Setting(value="linear", origin=origin)}
    assert (key in added("torchtitan", given, *([key] if typed else []))) is replaced


@pytest.mark.parametrize(
    ("files", "name", "index"),
    [
        (["a.idx"], "a", "a.idx"),
        (["a.idx"], "a.bin", "a.idx"),
        (["a.idx", "a.bin"], "a.bin", "a.idx"),
        (["a.bin"], "a.bin", "a.bin"),
        (["a", "a.idx"], "a", "a"),
        ([], "a", "a"),
    ],
)
def test_a_tokenized_corpus_is_named_by_either_file(
    files: list[str], name: str, index: str, tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).touch()
    assert indexed.named(tmp_path / name) == tmp_path / index
    assert indexed.is_index(tmp_path / index) is index.endswith(".idx")
    assert indexed.tokens_of(tmp_path / "a.idx") == tmp_path / "a.bin"


@pytest.mark.parametrize(
    ("content", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 7}}}, 8),
        ({"model": {"vocab": [["a", 0.1], ["b", 0.2]]}}, 2),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 4}, {"id": 2}]}, 5),
        ({"model": {"vocab": {"a": 9}}, "added_tokens": None}, 10),
        ({"model": {"vocab": {}}}, 0),
    ],
)
def test_a_vocabulary_is_as_large_as_its_largest_id(
    content: object, size: int, tmp_path: Path
) -> None:
    assert vocabulary(tmp_path) == 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert vocabulary(tmp_path) == size


def test_a_vocabulary_may_be_counted_without_added_tokens(tmp_path: Path) -> None:
    content = {"model": {"vocab": {"a": 3}}, "added_tokens": [{"id": 4}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert vocabulary(tmp_path, added=False) == 4


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"vocab": {"a": "x"}}}'])
def test_what_is_no_tokenizer_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match="not a tokenizer file: ") as caught:
        vocabulary(tmp_path)
    assert caught.value.where == str(tmp_path / "tokenizer.json")
    assert "model.vocab and added_tokens" in str(caught.value.hint)


CHOSEN = {"name": "a", "backend": "b", "mode": "c", "precision": "d", "gpu": "e"}
ABOUT = {
    **CHOSEN,
    "settings": CHOSEN,
    "assets": {"corpus": "1"},
    "sha256": digest_of_recipe(CHOSEN, {"corpus": "1"}),
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, ""),
        ({"assets": {"corpus": "2"}}, "its settings are not those of recipe "),
        ({"gpu": "x"}, "it is of another recipe: its gpu is e, and it says x"),
        ({"name": "x"}, "it is of another recipe: its name is a, and it says x"),
        ({"name": "/mine/x.yaml"}, ""),
        ({"mode": "/x"}, "it is of another recipe: its mode is c, and it says /x"),
    ],
)
def test_a_record_states_the_recipe_that_it_hashes(change: dict[str, Any], sentence: str) -> None:
    wrong = misstated({**ABOUT, **change})
    assert wrong.startswith(sentence)
    assert bool(wrong) is bool(sentence)


def test_a_record_without_assets_is_not_hashed_again() -> None:
    about = {key: value for key, value in ABOUT.items() if key != "assets"}
    assert misstated({**about, "sha256": "0" * 64}) == ""


WARMUP = "torchtitan.lr_scheduler.warmup_steps"


@pytest.mark.parametrize(
    ("words", "warmup", "origin"),
    [
        (["steps=3"], 3, ", at most the 3 steps"),
        (["steps=3", "lr_scheduler.warmup_steps=2"], 2, "warmup_steps=2"),
        (["lr_scheduler.warmup_steps=9"], 9, "warmup_steps=9"),
        (["steps=501"], 5, "a run of more than 500 steps"),
    ],
)
def test_a_warm_up_ends_with_the_run_unless_it_is_typed(
    words: list[str], warmup: int, origin: str
) -> None:
    choices = Choices(gpu="mi300x", nodes=1, backend="torchtitan")
    setting = resolve("llama3.1-8b", words, choices).settings[WARMUP]
    assert setting.value == warmup
    assert setting.origin.endswith(origin)
