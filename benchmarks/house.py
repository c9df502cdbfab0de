"""Count figures that show how maintainable the code is, from its syntax trees: `python -m benchmarks.house`.

The figures are lines, modules, modules that a single other module imports, import cycles (names in strings count as
imports), variables whose name says nothing about their content, imports inside functions by kind, and the lines of
documentation that people write.
`tests/unit/test_house.py` enforces the limits.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/house.json"
# Largest number allowed. "hidden" are imports inside functions: of this project's own modules, of Python's, and of
# libraries installed on the host. Libraries that only images contain, such as torch, are imported where they are used.
BARS = {
    "lines of src": 38_000,
    "lines of tests": 28_000,
    "lines of Markdown in docs": 1_800,
    "modules": 240,
    "modules with one importer": 40,
    "lines of sandbox": 900,
    "lines of versions and fetch": 2_200,
    "vague names": 60,
    "import circles": 0,
    "hidden imports of own modules": 40,
    "hidden imports of Python's modules": 12,
    "hidden imports of host libraries": 32,
    "functions that take the whole project": 8,
}
_BEFORE = {
    "lines of src": 52_919,
    "lines of tests": 41_031,
    "modules": 435,
    "modules with one importer": 103,
    "lines of sandbox": 3_306,
    "lines of versions and fetch": 4_092,
}
_VAGUE = {"found", "one", "given", "made", "told", "said", "asked", "left", "kept", "known", "own", "wanted"}
_HOST = {"argcomplete", "docker", "jsonschema", "packaging", "requests", "rich", "urllib3"}
_HOST |= {"kubernetes", "installer", "msgpack", "yaml", "zstandard"}

Trees = Mapping[str, ast.Module]


def modules(source: Path) -> dict[str, ast.Module]:
    """Return dotted name → syntax tree of every module below ``source``."""
    trees = {}
    for path in sorted(source.rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def hidden_imports(trees: Trees) -> list[tuple[str, int, str]]:
    """Return the module, line and imported package of every import statement inside a function."""
    rows = []
    for name, tree in trees.items():
        for function in _functions(tree):
            for node in _inside(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    package = node.names[0].name if isinstance(node, ast.Import) else node.module or ""
                    rows.append((name, node.lineno, package.partition(".")[0]))
    return rows


def circles(trees: Trees) -> list[list[str]]:
    """Return the groups of modules that import each other at run time. Imports under TYPE_CHECKING do not count."""
    needs = {name: set(_imports(tree, trees)) - {name} for name, tree in trees.items()}
    reached = {name: _reach(name, needs) for name in needs}
    groups = {tuple(sorted(m for m in reached[n] if n in reached[m])) for n in needs if n in reached[n]}
    return [list(group) for group in sorted(groups)]


def single_importers(trees: Trees) -> list[str]:
    """Return the modules that exactly one other module imports. A package's ``__init__`` does not count."""
    importers: dict[str, set[str]] = {}
    for name, tree in trees.items():
        for module in set(_imports(tree, trees)) - {name}:
            importers.setdefault(module, set()).add(name)
    packages = {name.rpartition(".")[0] for name in trees}
    return sorted(name for name, users in importers.items() if len(users) == 1 and name not in packages)


def vague_names(trees: Trees) -> Counter[str]:
    """Return how often each vague word is the name of a variable or parameter that a module sets."""
    names: Counter[str] = Counter()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _VAGUE:
                names[node.id] += 1
            elif isinstance(node, ast.arg) and node.arg in _VAGUE:
                names[node.arg] += 1
    return names


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


def _reach(name: str, needs: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    todo = [*needs[name]]
    while todo:
        if (module := todo.pop()) not in reached:
            reached.add(module)
            todo += needs[module]
    return reached


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
        elif isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value in trees:
            # A module named in a string is imported through it.
            yield child.value
        yield from _imports(child, trees)


def _takes_project(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = (n for a in every if a.annotation for n in ast.walk(a.annotation) if isinstance(n, ast.Name))
    return any(name.id == "Project" for name in names)


def _lines(*folders: Path) -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines()) for folder in folders for path in folder.rglob("*.py")
    )


def _written(docs: Path) -> int:
    """Return the lines of the pages that people write, without those that `python -m docs.generated` writes."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(docs.rglob("*.md"))]
    generated = re.compile(r"^<!-- [a-z]+ -->\n.*?^<!-- end -->\n", re.MULTILINE | re.DOTALL)
    return sum(len(generated.sub("", text).splitlines()) for text in pages if not text.startswith("<!-- Generated"))


def count(source: Path) -> dict[str, int]:
    """Return every figure of the checkout whose packages are in ``source``, under its name in :data:`BARS`."""
    trees = modules(source)
    hidden = Counter(package for _, _, package in hidden_imports(trees))
    rooms = source / "primus"
    return {
        "lines of src": _lines(source),
        "lines of tests": _lines(source.parent / "tests"),
        "lines of Markdown in docs": _written(source.parent / "docs"),
        "modules": len(trees),
        "modules with one importer": len(single_importers(trees)),
        "lines of sandbox": _lines(rooms / "sandbox"),
        "lines of versions and fetch": _lines(rooms / "versions", rooms / "fetch"),
        "vague names": vague_names(trees).total(),
        "import circles": len(circles(trees)),
        "hidden imports of own modules": hidden["primus"],
        "hidden imports of Python's modules": sum(n for name, n in hidden.items() if name in sys.stdlib_module_names),
        "hidden imports of host libraries": sum(n for name, n in hidden.items() if name in _HOST),
        "hidden imports, all": hidden.total(),
        "functions that take the whole project": sum(_takes_project(f) for t in trees.values() for f in _functions(t)),
    }


def main() -> None:
    """Print the figures, and with `--rooms` those of each package. Write the result."""
    figures = count(ROOT / "src")
    rows = [{"name": name, "value": value, "bar": BARS.get(name)} for name, value in figures.items()]
    rows = [{**row, "before": _BEFORE[row["name"]]} if row["name"] in _BEFORE else row for row in rows]
    result = {"generated": "by `python -m benchmarks.house`; do not edit", "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, value in figures.items():
        bar = f" (bar: {BARS[name]:,})" if name in BARS else ""
        print(f"{name}: {value:,}{bar}")
    if "--rooms" in sys.argv:
        _print_rooms(modules(ROOT / "src"))


def _print_rooms(trees: Trees) -> None:
    rooms: dict[str, dict[str, ast.Module]] = {}
    for name, tree in trees.items():
        rooms.setdefault(".".join(name.split(".")[1:2]), {})[name] = tree
    single = Counter(".".join(name.split(".")[1:2]) for name in single_importers(trees))
    print(f"\n{'room':12} {'lines':>7} {'modules':>8} {'one importer':>13} {'vague names':>12}")
    for room, members in rooms.items():
        path = ROOT / "src/primus" / room
        size = (
            _lines(path)
            if path.is_dir() and room
            else sum(len(p.read_text().splitlines()) for p in [path.with_suffix(".py")] if p.exists())
        )
        print(f"{room:12} {size:7,} {len(members):8} {single[room]:13} {vague_names(members).total():12}")


if __name__ == "__main__":
    main()
