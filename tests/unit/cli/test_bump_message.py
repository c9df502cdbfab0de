"""The commit that `primus bump` makes says what moved."""

from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.cli.host.bump import _message

COMPONENTS: Any = {
    name: SimpleNamespace(pins=(SimpleNamespace(version="1"), SimpleNamespace(version="2")))
    for name in ("torch", "vision")
}


@pytest.mark.parametrize(
    ("moves", "release", "message"),
    [
        ({("torch", 1): "3"}, None, "Bump torch 2 → 3"),
        (
            {("torch", 0): "3", ("vision", 1): "4"},
            None,
            "Bump 2 pins\n\ntorch 1 → 3\nvision 2 → 4",
        ),
        ({("torch", 0): "3"}, "v26.12", "Begin v26.12\n\ntorch 1 → 3"),
        ({}, "v26.12", "Begin v26.12"),
    ],
)
def test_one_pin_is_the_subject_and_several_are_listed(
    moves: dict[tuple[str, int], str], release: str | None, message: str
) -> None:
    assert _message(COMPONENTS, moves, release) == message
