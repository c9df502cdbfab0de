"""What a word ``key=value`` of the command line sets, and what its text becomes."""

from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.recipes.overrides import choices_among, is_setting, read_override
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import Choices


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("corpus=12", "assets.corpus", "12"),
        ("corpus=a # b.jsonl", "assets.corpus", "a # b.jsonl"),
        # Quotes are YAML's, as in a recipe.
        ('corpus="a b.jsonl"', "assets.corpus", "a b.jsonl"),
        ("corpus=", "assets.corpus", ""),
        ("steps=5", "finetune.training.steps", 5),
        ("lr=1e-4", "finetune.training.lr", 1e-4),
        ("training.steps=5", "finetune.training.steps", 5),
        ("finetune.training.steps=5", "finetune.training.steps", 5),
        ("model.layers=2", "model.layers", 2),
        ("checkpoint=30m", "saving.minutes", 30.0),
        ("checkpoint=2h", "saving.minutes", 120.0),
        ("checkpoint=90s", "saving.minutes", 1.5),
        ("keep=3", "saving.keep", 3),
    ],
)
def test_a_word_sets_a_key_by_its_short_or_long_name(word: str, key: str, value: object) -> None:
    override = read_override(word, backends()["finetune"])
    assert (override.key, override.value) == (key, value)
    assert override.typed


@pytest.mark.parametrize("word", ["steps", "", "=5", "="])
def test_a_word_without_key_and_value_is_refused(word: str) -> None:
    with pytest.raises(InputError, match="is not key=value") as caught:
        read_override(word, backends()["finetune"])
    assert caught.value.where == "command line"
    assert caught.value.hint == "example: training.steps=5"


@pytest.mark.parametrize(
    ("text", "key"),
    [("1234567m", "checkpoint"), ("0m", "checkpoint"), ("5d", "checkpoint"), ("m", "checkpoint")],
)
def test_what_is_no_time_is_no_number_of_minutes(text: str, key: str) -> None:
    override = read_override(f"{key}={text}", backends()["finetune"])
    assert override.key != "saving.minutes"


@pytest.mark.parametrize(
    ("words", "choices", "others"),
    [
        ([], Choices(), []),
        (["nodes=2", "steps=5"], Choices(nodes=2), ["steps=5"]),
        (["proxy=true"], Choices(proxy=True), []),
        (["corpus=~/a"], Choices(), [f"corpus={Path.home()}/a"]),
        (["corpus=~a", "corpus=a/~/b"], Choices(), ["corpus=~a", "corpus=a/~/b"]),
    ],
)
def test_choices_are_told_from_settings(
    words: list[str], choices: Choices, others: list[str]
) -> None:
    assert choices_among(Choices(), words) == (choices, others)


@pytest.mark.parametrize(
    ("before", "words", "message"),
    [
        (Choices(), ["nodes=1", "nodes=2"], "nodes is set twice: nodes=1 and nodes=2"),
        (Choices(nodes=1), ["nodes=1"], "nodes is set twice: nodes=1 and nodes=1"),
        (Choices(proxy=False), ["proxy=true"], "proxy is set twice: proxy=false and proxy=true"),
    ],
)
def test_a_choice_is_made_once(before: Choices, words: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        choices_among(before, words)
    assert caught.value.message == message
    assert caught.value.where == "command line"
    assert caught.value.hint == "keep one of the two"


@pytest.mark.parametrize(
    "word", ["nodes=0", "nodes=+2", "nodes=0x2", "nodes=1234567890", "nodes=", "proxy=yes"]
)
def test_a_choice_in_another_spelling_is_refused(word: str) -> None:
    with pytest.raises(InputError) as caught:
        choices_among(Choices(), [word])
    assert str(caught.value.where).startswith("command line")


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("corpus", True),
        ("tokenizer", True),
        ("chat_template", True),
        ("keep", True),
        ("saving.keep", True),
        ("lr", True),
        ("tp", True),
        ("nothing.of.this", False),
    ],
)
def test_a_setting_of_any_backend_is_known(key: str, known: bool) -> None:
    assert is_setting(key) is known
