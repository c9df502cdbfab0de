"""What a word ``key=value`` of the command line sets, and what its text becomes."""

import pytest

from primus_images.recipes.overrides import read_override
from primus_images.recipes.schema import backends


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
