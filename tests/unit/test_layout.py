"""Rules on where tests lie and what code may not do, which no linter checks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_unit_tests_lie_in_folders_of_the_packages() -> None:
    packages = {path.parent.name for path in (ROOT / "src/primus_images").glob("*/__init__.py")}
    folders = {path.parent.name for path in (ROOT / "tests/unit").glob("*/test_*.py")}
    assert folders == packages


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their name alone, and refuses the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_what_joins_a_group_on_gloo_ends_with_leave() -> None:
    """Otherwise about one process in fifteen aborts on busy cores, after its work is done."""
    texts = {
        path: path.read_text()
        for folder in ("src", "tests/integration")
        for path in (ROOT / folder).rglob("*.py")
    }
    joining = {
        path for path, text in texts.items() if re.search(r'init_process_group\([^)]*"gloo"', text)
    }
    assert ROOT / "src/primus_images/training/backends/loop/process.py" in joining
    assert [
        path for path in joining if not re.search(r"^ *gloo\.leave\(\)$", texts[path], re.M)
    ] == []


def test_no_input_is_checked_with_assert() -> None:
    """python -O removes it."""
    files = (ROOT / "src").rglob("*.py")
    assert [path for path in files if re.search("except .*AssertionError", path.read_text())] == []
