"""Settings that contradict each other: each has one sentence, and a way out."""

from typing import Any

import pytest
import yaml

from primus_images.errors import InputError
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from tables import text_of

ROWS = yaml.safe_load(text_of("recipe_faults.yaml"))


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: " ".join([row["backend"], row["recipe"], *row["words"]])
)
def test_a_contradiction_is_one_sentence_and_its_way_out(row: dict[str, Any]) -> None:
    usual = {"backend": row["backend"], "gpu": "mi355x", "precision": "bf16"}
    choices = Choices(**{**usual, **row.get("choices", {})})
    said = None
    hint = None
    try:
        resolve(row["recipe"], row["words"], choices)
    except InputError as error:
        said = error.message
        hint = error.hint
    assert (said, hint) == (row.get("said"), row.get("hint"))
