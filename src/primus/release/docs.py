"""All generated files of the repository, from one function, so that --check and writing cannot disagree."""

from __future__ import annotations

import ast
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus.errors import InputError
from primus.gates.rules import gates
from primus.plan.project import Project
from primus.plan.resolve import resolve, resolve_all
from primus.plan.target import Target
from primus.release.gate_record import load_gate_records, lock_mark
from primus.release.history import load_history
from primus.release.show import page, table
from primus.schema import json_schema
from primus.terminal import bytes_text
from primus.versions.components import Versions
from primus.versions.filecache import FileCache
from primus.versions.lock import Lock

_OURS = "primus"
_FOLDER = "src/primus/recipes/keys"


def generated(root: Path) -> dict[str, str]:
    """Return path in the repository → text, for every generated file."""
    project = Project.find(root)
    targets = resolve_all(project, project.target_names())
    schemas = {
        "versions": json_schema(Versions, title="versions.yaml: the file of pins"),
        "image": json_schema(Target, title="images/<target>.yaml: the contents of one image"),
    }
    files = {
        f"docs/schemas/{name}.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        for name, schema in schemas.items()
    }
    files |= {
        "docs/releases.md": page(load_history()),
        "README.md": _filled(root, "README.md", {"targets": _targets(root)}),
    }
    if (root / "docs/gates.md").exists():
        files["docs/gates.md"] = _filled(root, "docs/gates.md", {"gates": _gates()})
    locks = [target.lock for target in targets if target.lock]
    files |= backend_keys(root, project.versions, locks, project.workspace.files)
    return files


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


def _filled(root: Path, name: str, parts: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a written page with new lines between each comment that names a part and the next ``end``."""
    text = (root / name).read_text(encoding="utf-8")
    for part, lines in parts.items():
        begin, end = f"<!-- {part} -->\n", "<!-- end -->"
        head, opened, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not opened or not closed:
            raise InputError(f"the markers {begin.strip()} and {end} are missing", where=name)
        text = head + begin + "\n".join([*lines, ""]) + end + tail
    return text


def _gates() -> list[str]:
    rules = gates().items()
    return table(
        ("gate", "what must hold"), [(name, str(rule.__doc__).partition("\n")[0].rstrip(".")) for name, rule in rules]
    )


def _targets(root: Path) -> list[str]:
    records = load_gate_records(root)
    rows = []
    for name in Project(root).target_names():
        for channel in Project(root).target(name).channels:
            resolved = resolve(Project(root, channel=channel), name)
            lock, preview = resolved.lock, resolved.choice.preview
            status = "not locked yet" if lock is None else "stale lock" if resolved.stale else "locked"
            files, image = ("–", "–"), ("–", "not checked yet")
            if lock is not None:
                files = (f"{len(lock.distinct)}", f"{sum(file.size for file in lock.distinct) / 1e6:,.0f} MB")
                record = records.get(name, {"channel": None, "lock": None})
                if (record["channel"], record["lock"]) == (channel, lock_mark(resolved.lock_path)):
                    failed = [gate["gate"] for gate in record["gates"] if not gate["passed"]]
                    size = bytes_text(sum(layer["bytes"] for layer in record["layers"]))
                    image = (size, f"fails {', '.join(failed)}" if failed else f"all {len(record['gates'])} pass")
            rows.append((f"`{name}`", channel, *files, *image, f"{status}{f'; preview: {preview}' if preview else ''}"))
    return table(("target", "channel", "files in the lock", "size of the files", "image", "gates", "status"), rows)


# The keys of each backend are read from the source of the pinned version. It is parsed instead of imported, because
# importing it needs torch. If a wheel was not fetched, the committed data stays, and only its version is compared.


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A dataclass in ``file`` of the wheel ``wheel``, whose fields are keys below the section ``under``."""

    wheel: str
    file: str
    name: str
    under: str


def _ours(file: str, name: str, under: str = "") -> Declared:
    return Declared(wheel=_OURS, file=f"primus/training/{file}.py", name=name, under=under)


def _megatron(file: str, name: str, under: str) -> Declared:
    return Declared(wheel="megatron-core", file=f"megatron/core/{file}.py", name=name, under=under)


_LOOP = _ours("loop/config", "LoopConfig", "training")
_SHARDING = _ours("loop/config", "ShardingConfig", "sharding")


def declared() -> Mapping[str, tuple[Declared, ...]]:
    """Return backend → the dataclasses that declare its keys. Base classes in other files come first."""
    return {
        "torchtitan": (
            Declared(wheel="torchtitan", file="torchtitan/config/job_config.py", name="JobConfig", under=""),
        ),
        "megatron": (
            _LOOP,
            _ours("megatron/render", "MegatronConfig"),
            _megatron("model_parallel_config", "ModelParallelConfig", "model"),
            _megatron("transformer/transformer_config", "TransformerConfig", "model"),
            _megatron("optimizer/optimizer_config", "OptimizerConfig", "optimizer"),
            _megatron("distributed/distributed_data_parallel_config", "DistributedDataParallelConfig", "ddp"),
        ),
        "finetune": (_LOOP, _SHARDING, _ours("finetune/backend", "FinetuneConfig")),
        "flux": (_LOOP, _SHARDING, _ours("flux/backend", "FluxConfig")),
        "fsdp": (_LOOP, _SHARDING, _ours("fsdp/llama", "FsdpConfig")),
    }


def backend_keys(root: Path, versions: Versions, locks: Sequence[Lock], fetched: FileCache) -> dict[str, str]:
    """Return path in the repository at ``root`` → text, for every backend's file of keys.

    The result is empty if the repository has no folder for these files. Raises InputError if a pin has changed and the
    wheel of the new version was not fetched.
    """
    if not (root / _FOLDER).is_dir():
        return {}
    pins = {
        pin.wheel: pin.version
        for component in versions.components.values()
        for pin in component.pins
        if pin.wheel is not None and pin.version is not None
    }
    files: dict[str, str] = {}
    for backend, classes in declared().items():
        name = f"{_FOLDER}/{backend}.json"
        pinned = {item.wheel: pins[item.wheel] for item in classes if item.wheel != _OURS}
        sources = {(item.wheel, item.file): _source(item, pinned, root, locks, fetched) for item in classes}
        texts = [text for text in sources.values() if text is not None]
        if len(texts) == len(sources):
            files[name] = document(backend, pinned, {place: text for place, text in sources.items() if text})
            continue
        files[name] = committed = (root / name).read_text(encoding="utf-8")
        if json.loads(committed)["versions"] != pinned:
            raise InputError(
                f"the keys are for {json.loads(committed)['versions']}, but versions.yaml pins {pinned}",
                where=name, hint="nox -s build-cpu fetches the wheels, then run nox -s docs",
            )  # fmt: skip
    return files


def _source(
    declaration: Declared, versions: Mapping[str, str], root: Path, locks: Sequence[Lock], fetched: FileCache
) -> str | None:
    if declaration.wheel == _OURS:
        return (root / "src" / declaration.file).read_text(encoding="utf-8")
    for file in (file for lock in locks for file in lock.files):
        if file.kind == "wheel" and (file.name, file.version) == (declaration.wheel, versions[declaration.wheel]):
            path = fetched.path(file.sha256)
            if path.is_file():
                with zipfile.ZipFile(path) as wheel:
                    return wheel.read(declaration.file).decode("utf-8")
    return None


def document(backend: str, versions: Mapping[str, str], sources: Mapping[tuple[str, str], str]) -> str:
    """Return the text of the backend's file of keys. ``sources`` maps (wheel, file) to source text."""
    keys: dict[str, dict[str, Any]] = {}
    for item in declared()[backend]:
        prefix = f"{item.under}." if item.under else ""
        fields = dataclass_keys(sources[item.wheel, item.file], item.name)
        keys.update({prefix + key: entry for key, entry in fields.items()})
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in keys.items())
    return f'{{\n  "versions": {json.dumps(versions)},\n  "keys": {{\n{lines}\n  }}\n}}\n'


def dataclass_keys(source: str, root: str) -> dict[str, dict[str, Any]]:
    """Return the fields of dataclass ``root`` in Python ``source``. Fields of nested dataclasses have dotted names.

    Fields of base classes in the same source come first; other base classes are declared separately. ``types`` is empty
    for a field whose type no YAML value has, such as a function or a class of the library.
    """
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    keys: dict[str, dict[str, Any]] = {}

    def walk(name: str, prefix: str) -> None:
        for base in classes[name].bases:
            if isinstance(base, ast.Name) and base.id in classes:
                walk(base.id, prefix)
        for field in classes[name].body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if field.target.id.startswith("_"):
                continue
            key = f"{prefix}{field.target.id}"
            if isinstance(field.annotation, ast.Name) and field.annotation.id in classes:
                walk(field.annotation.id, f"{key}.")
            else:
                keys[key] = _entry(field)

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
    try:
        default = ast.literal_eval(value) if value is not None else ...
    except ValueError:
        default = ...
    if default is not ... and entry["types"]:
        entry["default"] = default
    return entry


_PLAIN = {"str", "int", "float", "bool", "list", "tuple"}


def _read(annotation: ast.expr, types: list[str], choices: list[str], items: list[str]) -> bool:
    """Record the types that ``annotation`` accepts. Returns True if one of them is a type that no YAML value has."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _read(left, types, choices, items) | _read(right, types, choices, items)
        case ast.Constant(value=None):
            types.append("None")
        case ast.Constant(value=str(text)):
            return _read(ast.parse(text, mode="eval").body, types, choices, items)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            types.append("None")
            return _read(inner, types, choices, items)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=several)):
            judged = [
                _read(item, types, choices, items) for item in several
            ]  # a list, because each call records a type
            return any(judged)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            words: Iterable[ast.expr] = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            choices.extend(str(item.value) for item in words if isinstance(item, ast.Constant))
            types.append("str")
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name.lower() in ("list", "tuple"):
            types.append(name.lower())
            for element in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
                if _read(element, items, choices, []):
                    return True
        case ast.Name(id=name):
            types.append(name.lower())
            return name.lower() not in _PLAIN
        case _:
            return True
    return False
