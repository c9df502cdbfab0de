"""What a user gets wrong ends with exit code 2 and a sentence that names the place, never with a
traceback.
"""

from pathlib import Path
from typing import Any

import pytest

from bad_inputs import INPUTS, fault


@pytest.mark.parametrize("given", INPUTS, ids=[one["name"].replace(" ", "-") for one in INPUTS])
def test_a_bad_input_is_a_sentence(given: dict[str, Any], tmp_path: Path) -> None:
    assert fault(given, tmp_path) is None


def test_there_are_many_of_them() -> None:
    assert len({one["name"] for one in INPUTS}) == len(INPUTS) >= 460
    assert len({tuple(one["run"]) for one in INPUTS if one["run"][0] == "show"}) >= 150
