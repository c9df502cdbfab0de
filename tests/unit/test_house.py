"""The code stays easy to live in: bars on hidden imports, import circles and what takes the whole project."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from benchmarks.house import BARS, RESULT, circles, count, hidden_imports  # noqa: E402

SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    return count(SOURCE)


ROWS = {row["name"]: row for row in json.loads(RESULT.read_text())["rows"]}


@pytest.mark.parametrize("name", BARS)
def test_a_figure_meets_its_bar_or_is_not_worse_than_recorded(name: str, counted: dict[str, int]) -> None:
    assert ROWS[name]["bar"] == BARS[name]
    assert counted[name] <= max(BARS[name], ROWS[name]["value"])


def test_unit_tests_lie_in_folders_of_the_packages() -> None:
    packages = {path.parent.name for path in (ROOT / "src/primus").glob("*/__init__.py")}
    folders = {path.parent.name for path in (ROOT / "tests/unit").glob("*/test_*.py")}
    assert folders == packages


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their name alone, and refuses the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_what_joins_a_group_on_gloo_ends_with_leave() -> None:
    """Otherwise about one process in fifteen aborts on busy cores, after its work is done."""
    texts = {
        path: path.read_text() for folder in ("src", "tests/integration") for path in (ROOT / folder).rglob("*.py")
    }
    joining = {path for path, text in texts.items() if re.search(r'init_process_group\([^)]*"gloo"', text)}
    assert ROOT / "src/primus/training/loop/process.py" in joining
    assert [path for path in joining if not re.search(r"^ *gloo\.leave\(\)$", texts[path], re.M)] == []


def test_no_input_is_checked_with_assert() -> None:
    """python -O removes it."""
    files = (ROOT / "src").rglob("*.py")
    assert [path for path in files if re.search("except .*AssertionError", path.read_text())] == []


def test_imports_inside_functions_are_counted_once() -> None:
    tree = ast.parse(
        "import a\ndef f():\n    import b\n    def g():\n        from primus.x import y\n    if f:\n        import c\n"
    )
    assert sorted(what for _, _, what in hidden_imports({"m": tree})) == ["b", "c", "primus"]


def test_a_circle_is_found_and_types_make_none() -> None:
    a, b = "from primus import b", "def f():\n    import primus.a"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import primus.a"
    assert circles({"primus.a": ast.parse(a), "primus.b": ast.parse(b)}) == [["primus.a", "primus.b"]]
    assert circles({"primus.a": ast.parse(a), "primus.b": ast.parse(typed)}) == []
