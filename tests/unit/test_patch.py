"""Replacing a library's function only while it is what the replacement was written for."""

from types import ModuleType

import pytest

from primus_images.errors import HostError
from primus_images.patch import replace


def library() -> ModuleType:
    module = ModuleType("lib.sums")
    exec("def total(values, start=0): return start + sum(values)\nLIMIT = 0", module.__dict__)
    return module


def test_the_replacement_gets_what_was_there() -> None:
    lib = library()
    original = replace(
        lib, "total", lambda values, start=0: 2 * original(values, start), takes="values, start"
    )
    assert lib.total([1, 2]) == 6
    assert replace(lib, "LIMIT", 7) == 0
    assert lib.LIMIT == 7


@pytest.mark.parametrize(
    ("name", "takes", "message"),
    [
        ("sum_of", None, "lib.sums has no sum_of, which"),
        ("total", "values", "lib.sums has total\\(values, start\\), which"),
        ("total", "values, start, dtype", "lib.sums has total\\(values, start\\), which"),
    ],
)
def test_a_moved_or_changed_function_is_named(name: str, takes: str | None, message: str) -> None:
    lib = library()
    before = lib.total
    with pytest.raises(HostError, match=message) as caught:
        replace(lib, name, print, takes=takes)
    assert caught.value.hint == "use the version of lib that versions.yaml pins"
    assert lib.total is before
