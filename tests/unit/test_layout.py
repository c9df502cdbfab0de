"""Rules on where tests lie and what code may not do, which no linter checks."""

import ast
import re
from itertools import pairwise
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
    joining = set()
    without_leave = []
    for folder in ("src", "tests/integration"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if re.search(r'init_process_group\([^)]*"gloo"', text):
                joining.add(path)
                if not _calls_of_leave(ast.parse(text)):
                    without_leave.append(path)
    assert ROOT / "src/primus_images/training/backends/loop/process.py" in joining
    assert without_leave == []


def test_nothing_stands_after_leave() -> None:
    """``leave()`` ends the process: an assertion after it never runs."""
    never_run = [
        f"{path}:{after.lineno}"
        for folder in ("src", "tests/integration")
        for path in (ROOT / folder).rglob("*.py")
        for after in _calls_of_leave(ast.parse(path.read_text()))
        if after is not None
    ]
    assert never_run == []


def _calls_of_leave(tree: ast.Module) -> list[ast.stmt | None]:
    """For each ``gloo.leave()`` of a module: the statement after it in its block, or None."""
    following = []
    for node in ast.walk(tree):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if not isinstance(statements, list):
                continue
            for statement, after in pairwise([*statements, None]):
                if isinstance(statement, ast.Expr) and ast.unparse(statement) == "gloo.leave()":
                    following.append(after)
    return following


def test_no_input_is_checked_with_assert() -> None:
    """python -O removes it."""
    files = (ROOT / "src").rglob("*.py")
    assert [path for path in files if re.search("except .*AssertionError", path.read_text())] == []
