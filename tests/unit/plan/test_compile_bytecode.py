"""The portions in which modules are compiled."""

import pytest

from primus_images.plan import compile_bytecode
from primus_images.plan.compile_bytecode import packs


@pytest.mark.parametrize("sizes", [[], [3], [4, 5, 6], [10, 1, 9, 1, 10], [0, 0, 25, 0, 1]])
def test_portions_hold_every_module_once_and_begin_where_the_last_one_ended(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_bytecode, "PACK", 10)
    index = [(f"m{number}.py", size) for number, size in enumerate(sizes)]
    portions = list(packs(index))
    assert [number for number, _, _ in portions] == list(range(len(portions)))
    every_module = []
    for _, _, modules in portions:
        every_module += modules
    assert every_module == index
    end = 0
    for _, begin, modules in portions:
        assert begin == end
        of_modules = [size for _, size in modules]
        end += sum(of_modules)
        # Each is full with its last module; only the last portion may be smaller.
        assert sum(of_modules[:-1]) < 10
        assert sum(of_modules) >= 10 or modules is portions[-1][2]
