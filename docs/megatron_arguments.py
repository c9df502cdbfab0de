"""Lists all arguments of Megatron-LM: ``python -m docs.megatron_arguments CHECKOUT COMMIT``.

It reads the source text of a checkout at the commit of the pinned megatron-core, and writes
``megatron_arguments.json`` of the package that translates experiment files.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_TARGET = Path("src/primus_images/recipes/experiments/megatron_arguments.json")
_PARSER = "megatron/training/arguments.py"
# Dataclasses whose fields are arguments, too.
_CLASSES = (
    "megatron/training/common_config.py",
    "megatron/training/resilience_config.py",
    "megatron/training/training_config.py",
)


def main(checkout: str, commit: str) -> int:
    """Write the list. ``checkout`` is a folder of git, with or without a work tree."""
    arguments: dict[str, object] = {}
    for file in _CLASSES:
        arguments.update(_fields(_source(checkout, commit, file)))
    arguments.update(_added(_source(checkout, commit, _PARSER)))
    content = {"megatron_lm": commit, "arguments": dict(sorted(arguments.items()))}
    _TARGET.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _source(checkout: str, commit: str, file: str) -> ast.Module:
    command = ["git", "-C", checkout, "show", f"{commit}:{file}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return ast.parse(done.stdout)


def _fields(tree: ast.Module) -> Iterator[tuple[str, object]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, _literal(node.value)


def _added(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Yield destination and default of each ``add_argument``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "add_argument":
            continue
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        flags = [str(flag.value) for flag in node.args if isinstance(flag, ast.Constant)]
        name = _literal(options.get("dest"))
        if not isinstance(name, str):
            name = next(flag for flag in flags if flag.startswith("--"))
        action = _literal(options.get("action"))
        default = _literal(options.get("default"))
        if "default" not in options and action in ("store_true", "store_false"):
            default = action == "store_false"
        yield name.lstrip("-").replace("-", "_"), default


def _literal(node: ast.expr | None) -> object:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
