"""A backend is a row of backends.yaml, its rules and a folder: no other module of the two rooms
asks for its name.
"""

import ast
from pathlib import Path

import pytest

from primus_images.cli.verb import parser_of
from primus_images.recipes.choose import values_of
from primus_images.recipes.rules import RULES
from primus_images.recipes.schema import backends
from primus_images.training.backends.protocol import BACKENDS

SOURCE = Path(__file__).parents[3] / "src/primus_images"
# The reference is written apart from what it judges; facts lists packages, one of which has a
# backend's name.
APART = (
    "training/judge/reference/",
    "training/run/facts.py",
    "training/backends/export.py",
    "recipes/rules/",
    "recipes/experiments/",
)


def test_every_backend_has_its_rules_its_start_and_its_entry() -> None:
    assert list(RULES) == list(BACKENDS) == list(backends())
    for name in backends():
        assert (SOURCE / "training/backends" / name / "entry.py").is_file()


def test_help_names_every_backend_and_mode() -> None:
    helps = {action.dest: action.help or "" for action in parser_of("train")._actions}
    for choice in ("backend", "mode"):
        assert all(word in helps[choice] for word in values_of(choice)), helps[choice]


@pytest.mark.parametrize("room", ["recipes", "training", "cli/image"])
def test_backends_are_not_told_apart_by_their_names(room: str) -> None:
    found = []
    for path in sorted((SOURCE / room).rglob("*.py")):
        short = path.relative_to(SOURCE).as_posix()
        if short.startswith(APART) or path.parent.name in backends():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
                found += [
                    f"{short}:{one.lineno}: {one.value}"
                    for part in parts
                    for one in ast.walk(part)
                    if isinstance(one, ast.Constant) and one.value in backends()
                ]
    # The model family of images is called like its backend.
    assert [one for one in found if not one.endswith(": flux")] == []
