"""What the burn-in finds wrong on one rank, and what it writes of it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from primus_images.system import measure  # noqa: E402


@pytest.fixture
def burn_in(tmp_path: Path) -> Any:
    bench: Any = SimpleNamespace(rank=0, world=1, on_gpu=False, device=torch.device("cpu"))
    return measure.BurnIn(bench, tmp_path / "rank-0.json")


def written(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "rank-0.json").read_text())


def test_a_sound_machine_has_nothing_wrong_in_any_round(burn_in: Any, tmp_path: Path) -> None:
    begun = written(tmp_path)
    assert (begun["round"], begun["place"], begun["what"]) == (0, -1, "the start")
    assert begun["device"] == "CPU"
    for number in (1, 2, 3):
        burn_in.run(number)
    burn_in.note(round=4)
    assert (written(tmp_path)["round"], written(tmp_path)["wrong"]) == (4, [])
    # The last part is the one that a rank would hang in.
    assert written(tmp_path)["what"] == "memory"


def test_a_bit_of_memory_that_changes_between_rounds_is_counted(
    burn_in: Any, tmp_path: Path
) -> None:
    words = sum(map(len, burn_in._chunks))
    burn_in.run(1)
    burn_in._chunks[0][5] ^= 1
    burn_in._chunks[-1][-1] ^= 1 << 40
    burn_in.run(2)
    burn_in._chunks[0][0] ^= 1
    burn_in.run(3)
    burn_in.run(4)
    burn_in.note()
    (row,) = written(tmp_path)["wrong"]
    assert row == {
        "what": "memory",
        "ranks": [0],
        "elements": 3,
        "of": 2 * words,
        "rounds": 2,
        "first": 2,
    }


def test_a_product_that_is_wrong_in_one_element_is_counted(
    burn_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    burn_in.run(1)
    multiply: Callable[..., Any] = torch.mm

    def wrong(*matrices: Any) -> Any:
        product = multiply(*matrices)
        product[3, 4] += 64
        return product

    monkeypatch.setattr(torch, "mm", wrong)
    burn_in.run(2)
    burn_in.note()
    rows = {row["what"]: row for row in written(tmp_path)["wrong"]}
    assert rows.keys() == {"gemm bf16", "repeated gemm"}
    # Two products of 256 × 256, and one of 64 × 64 that is compared with that of the first round.
    assert (rows["gemm bf16"]["elements"], rows["gemm bf16"]["of"]) == (2, 2 * 256 * 256)
    assert (rows["repeated gemm"]["elements"], rows["repeated gemm"]["of"]) == (1, 64 * 64)
    assert {row["first"] for row in rows.values()} == {2}
