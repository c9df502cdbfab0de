"""Count figures that show how maintainable the code is, from its syntax trees: `python -m benchmarks.house`.

The figures are import statements inside functions by kind, import cycles, functions that take the whole project, lines,
modules, and modules that share a name. `tests/unit/test_house.py` enforces the limits.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/house.json"
# Largest number allowed. "hidden" are imports inside functions: of this project's own modules, of Python's, and of
# libraries installed on the host. Libraries that only images contain, such as torch, are imported where they are used.
BARS = {
    "hidden imports of own modules": 40,
    "hidden imports of Python's modules": 12,
    "hidden imports of host libraries": 32,
    "import circles": 0,
    "functions that take the whole project": 8,
}
_HOST = {"argcomplete", "docker", "hyperscan", "isal", "jsonschema", "packaging", "requests", "rich", "urllib3"}
_HOST |= {"kubernetes", "pip", "yaml", "zstandard"}
_AT_THE_START = {"lines": 37_704, "hidden imports of own modules": 231, "functions that take the whole project": 59}

Trees = Mapping[str, ast.Module]


def modules(source: Path) -> dict[str, ast.Module]:
    """Return dotted name → syntax tree of every module below ``source``."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def hidden_imports(trees: Trees) -> list[tuple[str, int, str]]:
    """Return the module, line and imported package of every import statement inside a function."""
    found = []
    for name, tree in trees.items():
        for function in _functions(tree):
            for node in _inside(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    what = node.names[0].name if isinstance(node, ast.Import) else node.module or ""
                    found.append((name, node.lineno, what.partition(".")[0]))
    return found


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a function, without those of nested functions, which are counted separately."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _inside(child)


def circles(trees: Trees) -> list[list[str]]:
    """Return the groups of modules that import each other at run time. Imports under TYPE_CHECKING do not count."""
    needs = {name: set(_imports(tree, trees)) - {name} for name, tree in trees.items()}
    reached = {name: _reach(name, needs) for name in needs}
    groups = {tuple(sorted(m for m in reached[n] if n in reached[m])) for n in needs if n in reached[n]}
    return [list(group) for group in sorted(groups)]


def _reach(name: str, needs: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [*needs[name]]
    while todo:
        if (one := todo.pop()) not in found:
            found.add(one)
            todo += needs[one]
    return found


def _imports(node: ast.AST, trees: Trees) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in trees)
        elif isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                if full in trees or child.module in trees:
                    yield full if full in trees else child.module
        yield from _imports(child, trees)


def _takes_project(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = (n for a in every if a.annotation for n in ast.walk(a.annotation) if isinstance(n, ast.Name))
    return any(name.id == "Project" for name in names)


def count(source: Path) -> dict[str, int]:
    """Return every figure, under its name in :data:`BARS`, and a few more."""
    trees = modules(source)
    hidden = Counter(what for _, _, what in hidden_imports(trees))
    return {
        "hidden imports of own modules": hidden["primus"],
        "hidden imports of Python's modules": sum(n for what, n in hidden.items() if what in sys.stdlib_module_names),
        "hidden imports of host libraries": sum(n for what, n in hidden.items() if what in _HOST),
        "hidden imports, all": hidden.total(),
        "import circles": len(circles(trees)),
        "functions that take the whole project": sum(_takes_project(f) for t in trees.values() for f in _functions(t)),
        "modules": len(trees),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in source.rglob("*.py")),
    }


def main() -> None:
    """Write the result."""
    found = count(ROOT / "src")
    rows = [{"name": name, "value": value, "bar": BARS.get(name)} for name, value in found.items()]
    rows = [{**row, "before": _AT_THE_START[row["name"]]} if row["name"] in _AT_THE_START else row for row in rows]
    result = {"generated": "by `python -m benchmarks.house`; do not edit", "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, value in found.items():
        bar = f" (bar: {BARS[name]})" if name in BARS else ""
        print(f"{name}: {value:,}{bar}")


if __name__ == "__main__":
    main()
