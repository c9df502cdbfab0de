"""All generated files of the repository: `python -m docs.generated` (`nox -s docs`) writes those
that are out of date.

One function makes them, so that --check and writing cannot disagree.
"""

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from docs import machine, old_lines
from docs.json_schema import json_schema, summary_of
from primus_images.errors import InputError, PrimusError
from primus_images.gates.rules import gates
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.plan.target import Target
from primus_images.recipes import schema
from primus_images.recipes.setting import WORDS
from primus_images.release.diff import HEAD, NONE, ROWS, escaped_rows, legend, row, section, table
from primus_images.release.history import History, load_history, newest_first
from primus_images.release.policy import Policy
from primus_images.schema import build, notes_of
from primus_images.turbo.optimizations import optimizations
from primus_images.versions.components import Versions
from primus_images.versions.filecache import FileCache
from primus_images.versions.lock import Lock
from primus_images.yamlfile import read, read_values, spell

_OURS = "primus"
_FOLDER = "src/primus_images/recipes/keys"
_SOURCES = Path(__file__).with_name("backend_keys.yaml")
_MEANINGS = Path(schema.__file__).with_name("meanings.yaml")
_OTHER_NAMES = _MEANINGS.with_name("other_names.yaml")


def generated(root: Path) -> dict[str, str]:
    """Return path in the repository → text, for every generated file."""
    project = Project.find(root)
    targets = [resolve(project, name) for name in project.target_names()]
    files = {
        f"docs/schemas/{name}.json": json.dumps(
            json_schema(cls, title=title), indent=2, ensure_ascii=False
        )
        + "\n"
        for name, cls, title in (
            ("versions", Versions, "versions.yaml: the file of pins"),
            ("image", Target, "images/<target>.yaml: the contents of one image"),
        )
    }
    files["docs/releases.md"] = _releases(load_history())
    files["docs/old-lines.md"] = old_lines.text()
    files["docs/keys.md"] = _recipe_keys()
    files["docs/environment.md"] = machine.environment(root)
    files["docs/support.md"] = machine.support(root)
    files["README.md"] = _filled(root, "README.md", "targets", _targets(root))
    for name, part, lines in (
        ("docs/index.md", "today", machine.today(root)),
        ("docs/gates.md", "gates", _gates()),
        ("docs/turbo.md", "optimizations", _optimizations()),
        ("docs/statements.md", "policy", _policy()),
    ):
        if (root / name).exists():
            files[name] = _filled(root, name, part, lines)
    locks = [target.lock for target in targets if target.lock]
    return files | backend_keys(root, project.versions, locks, project.workspace.files)


def stale(root: Path) -> dict[str, str]:
    """Return path → new text of the generated files that are missing or out of date."""

    def current(path: Path) -> str | None:
        return path.read_text(encoding="utf-8") if path.exists() else None

    return {name: text for name, text in generated(root).items() if current(root / name) != text}


def write(root: Path) -> tuple[str, ...]:
    """Write the files that are out of date. Returns their paths."""
    files = stale(root)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tuple(files)


def _filled(root: Path, name: str, part: str, lines: Sequence[str]) -> str:
    begin, end = f"<!-- {part} -->\n", "<!-- end -->"
    head, opened, rest = (root / name).read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not opened or not closed:
        raise InputError(f"the markers {begin.strip()} and {end} are missing", where=name)
    return head + begin + "\n".join([*lines, ""]) + end + tail


def _releases(history: History) -> str:
    every = newest_first(history.releases)
    rows = [row(release) for release in every]
    columns = [name for name in ROWS if name not in ("rocm", "pytorch")]
    lines = [
        "<!-- Generated from src/primus_images/release/history.yaml by `nox -s docs`; do not "
        "edit. -->",
        "# Releases published by AMD",
        "",
        "Every training image tag that AMD is known to have published, sorted by the number of the "
        "release, the newest first, then by name. No image of this project has been published. "
        "`primus releases NAME` shows everything known about a release. "
        "`primus diff v25.10 v26.8` compares two releases, and "
        "`primus diff v26.8 versions.yaml` compares a release with the current pins. Values "
        "that were not "
        "published are never filled in from elsewhere. Where several tables of a tag differ, "
        "these are the best known "
        "values.",
        "",
        *history.deprecations,
        "",
        *table(HEAD, escaped_rows(rows)),
        "",
        legend(rows),
        "",
        *section(
            "Components",
            ("tag", *map(_literal, columns)),
            [map(_literal, (r.reference, *map(r.components.get, columns))) for r in every],
            "Versions as published. Newer releases list more components; see `primus releases "
            "NAME`.",
        ),
    ]
    return "\n".join(lines)


def _literal(text: str | None) -> str:
    return f"`{text}`" if text else NONE


def _recipe_keys() -> str:
    rules = {
        **schema.recipe_rules(),
        **{f"model.{key}": rule for key, rule in schema.model_rules().items()},
    }
    lines = [
        "<!-- Generated from src/primus_images/recipes by `nox -s docs`; do not edit. -->",
        "# Keys of a recipe",
        "",
        "[Recipes](recipes.md) explains how they are used.",
        "",
    ]
    described: Any = read_values(_MEANINGS, _MEANINGS.name).data
    for part in described["sections"]:
        rows = [
            (f"`{key}`", meaning, *_accepted(rules.pop(key)))
            for key, meaning in part["keys"].items()
        ]
        lines += section(
            part["title"], ("key", "meaning", "default", "accepted"), rows, part.get("text", "")
        )
    if rules:
        raise InputError(
            f"{', '.join(rules)}: the meaning is missing",
            where=f"src/primus_images/recipes/{_MEANINGS.name}",
        )
    return "\n".join(lines + _names_in_other_trainers())


def _names_in_other_trainers() -> list[str]:
    """The table of the names that ``primus`` refuses, with what each is called here."""
    rows = []
    for name, name_here in read_values(_OTHER_NAMES, _OTHER_NAMES.name).data.items():
        key, comma, more = name_here.partition(",")
        rows.append((f"`{name}`", f"`{key}`{comma}{more}"))
    return section(
        "Names in other trainers",
        ("in transformers, TRL, axolotl or LLaMA-Factory", "here"),
        rows,
        "`primus` refuses these names, and prints the one to use.",
    )


def _accepted(rule: schema.Rule) -> tuple[str, str]:
    words = " or ".join(sorted(WORDS.get(name, name) for name in rule.types))
    accepted = ", ".join(f"`{word}`" for word in rule.choices) or (
        f"`{rule.bounds}`" if rule.bounds else words
    )
    return f"`{spell(rule.default)}`" if rule.default else "", accepted


def _gates() -> list[str]:
    rules = gates().items()
    return table(
        ("gate", "what must hold"),
        [(name, summary_of(rule).rstrip(".")) for name, rule in rules],
    )


def _optimizations() -> list[str]:
    rows = optimizations().values()
    return table(
        ("optimization", "what it does", "replaces"),
        [(row.name, row.title, row.replaces) for row in rows],
    )


def _policy() -> list[str]:
    notes = notes_of(Policy)
    rows = []
    for key, value in asdict(Policy()).items():
        if "doc" not in notes[key]:
            raise InputError(
                f"the policy's {key} has no description",
                where="src/primus_images/release/fields.yaml",
            )
        default = str(value or "")
        if isinstance(value, tuple):
            default = ", ".join(value)
        rows.append((f"`{key}`", notes[key]["doc"], default))
    return table(("key", "meaning", "default"), rows)


def _targets(root: Path) -> list[str]:
    rows = []
    for name in Project(root).target_names():
        for channel in Project(root).target(name)[0].channels:
            resolved = resolve(Project(root, channel=channel), name)
            lock, preview = resolved.lock, resolved.choice.preview
            status = (
                "not locked yet" if lock is None else "stale lock" if resolved.stale else "locked"
            )
            size = f"{sum(file.size for file in lock.distinct) / 1e6:,.0f} MB" if lock else "–"
            files = len(lock.distinct) if lock else "–"
            rows.append(
                (
                    f"`{name}`",
                    channel,
                    files,
                    size,
                    f"{status}{f'; preview: {preview}' if preview else ''}",
                )
            )
    return table(("target", "channel", "files in the lock", "size of the files", "status"), rows)


# The keys of each backend are read from the source of the pinned version. It is parsed instead of
# imported, because importing it needs torch. If a wheel was not fetched, the committed data stays,
# and only its version is compared.


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A dataclass in ``file`` of ``wheel``, whose fields are keys below the section ``under``."""

    wheel: str = _OURS
    file: str
    name: str
    under: str = ""


@dataclass(frozen=True, kw_only=True)
class _Sources:
    backends: Mapping[str, tuple[Declared, ...]]


def backend_keys(
    root: Path, versions: Versions, locks: Sequence[Lock], fetched: FileCache
) -> dict[str, str]:
    """Return path in the repository at ``root`` → text, for every backend's file of keys.

    The result is empty if the repository has no folder for these files. Raises InputError if a pin
    has changed and the wheel of the new version was not fetched.
    """
    if not (root / _FOLDER).is_dir():
        return {}
    pins = {
        pin.wheel: pin.version
        for component in versions.components.values()
        for pin in component.pins
    }
    files: dict[str, str] = {}
    for backend, classes in build(_Sources, read(_SOURCES)).backends.items():
        name = f"{_FOLDER}/{backend}.json"
        pinned = {item.wheel: str(pins[item.wheel]) for item in classes if item.wheel != _OURS}
        sources = [(item, _source(item, pinned, root, locks, fetched)) for item in classes]
        keys: dict[str, Any] = {}
        for item, text in sources:
            prefix = f"{item.under}." if item.under else ""
            keys |= (
                {prefix + key: entry for key, entry in dataclass_keys(text, item.name).items()}
                if text
                else {}
            )
        if all(text for _, text in sources):
            lines = ",\n".join(
                f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in keys.items()
            )
            files[name] = (
                f'{{\n  "versions": {json.dumps(pinned)},\n  "keys": {{\n{lines}\n  }}\n}}\n'
            )
            continue
        files[name] = committed = (root / name).read_text(encoding="utf-8")
        if json.loads(committed)["versions"] != pinned:
            raise InputError(
                f"the keys are for {json.loads(committed)['versions']}, but versions.yaml pins "
                f"{pinned}",
                where=name,
                hint="nox -s build-cpu fetches the wheels, then run nox -s docs",
            )
    return files


def _source(
    item: Declared,
    versions: Mapping[str, str],
    root: Path,
    locks: Sequence[Lock],
    fetched: FileCache,
) -> str | None:
    if item.wheel == _OURS:
        return (root / "src" / item.file).read_text(encoding="utf-8")
    for file in (file for lock in locks for file in lock.of("wheel")):
        path = fetched.path(file.sha256)
        if (file.name, file.version) == (item.wheel, versions[item.wheel]) and path.is_file():
            with zipfile.ZipFile(path) as wheel:
                return wheel.read(item.file).decode("utf-8")
    return None


def dataclass_keys(source: str, root: str) -> dict[str, dict[str, Any]]:
    """Return the fields of dataclass ``root`` in Python ``source``. Fields of nested dataclasses
    have dotted names.

    Fields of base classes in the same source come first; other base classes are declared
    separately. ``types`` is empty for a field whose type no YAML value has, such as a function or a
    class of the library.
    """
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    keys: dict[str, dict[str, Any]] = {}

    def walk(name: str, prefix: str) -> None:
        for base in classes[name].bases:
            if isinstance(base, ast.Name) and base.id in classes:
                walk(base.id, prefix)
        for field in classes[name].body:
            match field:
                case ast.AnnAssign(target=ast.Name(id=key)) if key.startswith("_"):
                    continue
                case ast.AnnAssign(target=ast.Name(id=key), annotation=ast.Name(id=inner)) if (
                    inner in classes
                ):
                    walk(inner, f"{prefix}{key}.")
                case ast.AnnAssign(target=ast.Name(id=key)):
                    keys[prefix + key] = _entry(field)

    walk(root, "")
    return keys


def _entry(field: ast.AnnAssign) -> dict[str, Any]:
    types: list[str] = []
    choices: list[str] = []
    items: list[str] = []
    opaque = _read(field.annotation, types, choices, items)
    entry: dict[str, Any] = {"types": [] if opaque else list(dict.fromkeys(types))}
    if choices:
        entry["choices"] = choices
    if items:
        entry["items"] = list(dict.fromkeys(items))
    value = field.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        words = {word.arg: word.value for word in value.keywords}
        match value.func.id:
            case "bounded":
                entry["bounds"] = ast.literal_eval(value.args[1])
                value = value.args[0]
            case "field" if "default_factory" in words:
                value = ast.List([]) if ast.unparse(words["default_factory"]) == "list" else None
            case "field":
                value = words.get("default")
    with suppress(ValueError):
        if value is not None and entry["types"]:
            entry["default"] = ast.literal_eval(value)
    return entry


def _read(annotation: ast.expr, types: list[str], choices: list[str], items: list[str]) -> bool:
    """Record the types that ``annotation`` accepts. Returns True if one of them is a type that no
    YAML value has.
    """
    several: list[ast.expr] = []
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            several = [left, right]
        case ast.Constant(value=None):
            types.append("None")
        case ast.Constant(value=str(text)):
            several = [ast.parse(text, mode="eval").body]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            several = [ast.Constant(None), inner]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=several)):
            pass
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            choices.extend(
                str(word.value) for word in _elements(inner) if isinstance(word, ast.Constant)
            )
            types.append("str")
        case ast.Subscript(
            value=ast.Name(id="List" | "Tuple" | "list" | "tuple" as name), slice=inner
        ):
            types.append(name.lower())
            return any(_read(element, items, choices, []) for element in _elements(inner))
        case ast.Name(id=name):
            types.append(name.lower())
            return name.lower() not in ("str", "int", "float", "bool", "list", "tuple")
        case _:
            return True
    opaque = [_read(part, types, choices, items) for part in several]
    return any(opaque)


def _elements(inner: ast.expr) -> Iterable[ast.expr]:
    return inner.elts if isinstance(inner, ast.Tuple) else [inner]


def main() -> int:
    """Write the files, or with ``--check`` name those that are out of date, with exit code 1."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument(
        "--project", type=Path, default=Path(__file__).parents[1], help="the repository"
    )
    options = parser.parse_args()
    try:
        names = stale(options.project) if options.check else write(options.project)
    except PrimusError as error:
        print(error, file=sys.stderr)
        return 2
    for name in names:
        print(f"{'out of date' if options.check else 'written'}: {name}")
    return int(options.check and bool(names))


if __name__ == "__main__":
    sys.exit(main())
