"""Reading an experiment file of Primus, and the presets that it names, as Primus merges them.

An experiment names a framework, a preset of its trainer (``config``), a preset of its model
(``model``) and overrides. Presets extend others. Primus merges trainer, model and overrides in this
order; of several values of a key, the last counts.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from primus_images.errors import InputError, alike
from primus_images.recipes.setting import Value
from primus_images.yamlfile import Document, Key, Scalar, Tree, read_values, value

# Where the text of AMD's checkout is, if the user names no other place.
ROOT = "PRIMUS_ROOT"
_IN_IMAGE = Path("/workspace/Primus")
_PRESETS = Path("primus/configs")
_PLACEHOLDER = re.compile(r"\$\{([^:{}]+)(?::([^}]*))?\}")
_TRAINERS = ("pre_trainer", "post_trainer")
# What names the presets below a preset; the first two in Primus of 2025.
_EXTENDS = ("includes", "bases", "extends")
_DEEPEST = 64
# Keys of a module, and what a file has beside its modules.
_OF_MODULE = ("framework", "config", "model", "overrides")
_BESIDE = ("work_group", "user_name", "exp_name", "exp_meta_info", "workspace", "platform")

Level: TypeAlias = Literal["trainer", "model", "override"]


@dataclass(frozen=True, kw_only=True)
class Argument:
    """The value of one key, and where the file has it. ``level`` says which file: see above."""

    key: str
    value: Value
    where: str
    level: Level = "override"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment file.

    ``trainer`` is its module, ``pre_trainer`` or ``post_trainer``. ``root`` is the checkout that
    has its presets; None if there is none, so that ``arguments`` are the overrides alone.
    ``places`` are where the file names model, config and framework. ``unread`` are its other keys.
    """

    path: Path
    name: str
    trainer: str
    framework: str
    model: str
    config: str
    arguments: Mapping[str, Argument]
    places: Mapping[str, str] = field(default_factory=dict)
    root: Path | None = None
    unread: tuple[str, ...] = ()


def is_experiment(path: Path) -> bool:
    """Whether the file has the key ``modules`` or ``extends``, which only experiments have.

    Raises InputError for invalid YAML.
    """
    if not path.is_file():
        return False
    data = read_values(path, last_wins=True).data
    return isinstance(data, dict) and ("modules" in data or "extends" in data)


def root_of(path: Path, environment: Mapping[str, str]) -> Path | None:
    """Return the checkout of Primus that has the presets of the experiment ``path``.

    It is the folder that PRIMUS_ROOT names, else the nearest folder above the experiment that has
    presets, else /workspace/Primus. Raises InputError if PRIMUS_ROOT names another folder.
    """
    named = environment.get(ROOT)
    if named:
        root = Path(named)
        if not (root / _PRESETS).is_dir():
            raise InputError(
                f"there is no {_PRESETS}, which a checkout of Primus has",
                where=f"{ROOT}={named}",
                hint="name the folder of the checkout: --primus-root DIR",
            )
        return root
    for folder in (*path.absolute().parents, _IN_IMAGE):
        if (folder / _PRESETS).is_dir():
            return folder
    return None


def read_experiment(
    path: Path, environment: Mapping[str, str] = os.environ, *, alone: bool = False
) -> Experiment:
    """Read an experiment, the files that it extends, and the presets that it names.

    With ``alone``, presets are not looked for. Raises InputError with the place of what is wrong.
    """
    documents = _documents(path, (), {})
    modules = [_modules(document) for document in documents]
    own = documents[-1]
    if not any(modules):
        raise InputError("an experiment needs modules: {pre_trainer: …}", where=own.where())
    trainer = _trainer(own, modules)
    place: Key = ("modules", trainer)
    words: dict[str, str] = {}
    places = {}
    for name, usual in (("framework", None), ("model", None), ("config", f"{trainer}.yaml")):
        words[name], places[name] = _word(documents, place, name, usual, environment)
    for document in documents:
        _refuse_unknown(document, place)
    root = None
    if not alone:
        root = root_of(path, environment)
    merged: dict[str, Argument] = {}
    if root is not None:
        for level, folder in (("trainer", "modules"), ("model", "models")):
            word = words["config" if level == "trainer" else "model"]
            where = places["config" if level == "trainer" else "model"]
            file = _preset(root / _PRESETS / folder / words["framework"], word, where)
            _merge(merged, _flattened(file, cast(Level, level), environment))
    for document in documents:
        _merge(merged, _overrides(document, (*place, "overrides"), environment))
    data = cast("dict[str, Tree]", own.data)
    title = _filled(data.get("exp_name") or path.stem, own.where(("exp_name",)), environment)
    return Experiment(
        path=path,
        name=re.sub(r"[^A-Za-z0-9._+-]+", "-", str(title)).strip("-.")[:100] or "experiment",
        trainer=trainer,
        arguments=merged,
        places=places,
        root=root,
        unread=_unread(documents, trainer),
        **words,
    )


def _read(path: Path) -> Document:
    return read_values(path, last_wins=True)


def _modules(document: Document) -> dict[str, Any]:
    data: Any = document.data
    if not isinstance(data, dict) or not isinstance(data.get("modules"), dict):
        return {}
    modules: dict[str, Any] = data["modules"]
    return modules


def _module(document: Document, trainer: str) -> dict[str, Any]:
    module: Any = _modules(document).get(trainer)
    if isinstance(module, dict):
        return module
    return {}


def _trainer(own: Document, modules: Sequence[Mapping[str, Any]]) -> str:
    for name in _TRAINERS:
        if any(isinstance(module.get(name), dict) for module in modules):
            return name
    raise InputError(
        f"modules has neither {' nor '.join(_TRAINERS)} with a framework and a model",
        where=own.where(("modules",)),
    )


def _word(
    documents: Sequence[Document],
    place: Key,
    name: str,
    usual: str | None,
    environment: Mapping[str, str],
) -> tuple[str, str]:
    """Return what the last document says of ``name``, and where. Raises InputError if none does."""
    where = documents[-1].where((*place, name))
    word: Tree = usual
    for document in documents:
        module = _module(document, str(place[-1]))
        if module.get(name) is not None:
            where = document.where((*place, name))
            word = module[name]
    if word is None:
        raise InputError(f"{name} is missing", where=where, hint=f"add {name}: …")
    filled = _filled(word, where, environment)
    if not isinstance(filled, str):
        raise InputError(f"{name} must be text, not {filled!r}", where=where)
    return filled, where


def _refuse_unknown(document: Document, place: Key) -> None:
    """Raise InputError for a key that a module does not have, or that stands outside of it."""
    for name in _module(document, str(place[-1])):
        if name not in _OF_MODULE:
            raise InputError(
                f"{name} is not a key of a module",
                where=document.where((*place, name)),
                hint="it has framework, config, model and overrides",
            )
    data = cast("dict[str, Tree]", document.data)
    for name in _OF_MODULE:
        if name in data:
            raise InputError(
                f"{name} stands outside of modules, where nothing reads it",
                where=document.where((name,)),
                hint=f"indent it below {place[-1]}",
            )


def _unread(documents: Sequence[Document], trainer: str) -> tuple[str, ...]:
    """Return the keys that nothing reads: beside the modules, and other modules."""
    unread = []
    for document in documents:
        data = cast("dict[str, Tree]", document.data)
        unread += [name for name in data if name not in ("modules", *_EXTENDS, *_BESIDE)]
        unread += [f"modules.{name}" for name in _modules(document) if name != trainer]
    return tuple(dict.fromkeys(unread))


def _overrides(
    document: Document, place: Key, environment: Mapping[str, str]
) -> dict[str, Argument]:
    overrides = _module(document, str(place[-2])).get("overrides")
    if overrides is None:
        return {}
    if not isinstance(overrides, dict):
        raise InputError(
            "overrides must be a mapping of keys to values", where=document.where(place)
        )
    return _leaves(document, place, overrides, "override", environment)


def _preset(folder: Path, word: str, where: str) -> Path:
    name = word
    if not name.endswith((".yaml", ".yml")):
        name = f"{name}.yaml"
    file = folder / name
    if ".." in Path(name).parts or not file.is_file():
        known = [one.name for one in folder.glob("*.yaml") if one.is_file()]
        raise InputError(
            f"there is no preset {name} in {folder}{alike(name, known)}",
            where=where,
            hint="name another checkout of Primus: --primus-root DIR",
        )
    return file


def _flattened(file: Path, level: Level, environment: Mapping[str, str]) -> dict[str, Argument]:
    """Return the keys of a preset over those that it extends."""
    merged: dict[str, Argument] = {}
    for document in _documents(file, (), {}):
        data = cast("dict[str, Tree]", document.data)
        own = {key: tree for key, tree in data.items() if key not in _EXTENDS}
        _merge(merged, _leaves(document, (), own, level, environment))
    return merged


def _documents(
    file: Path, above: tuple[Path, ...], known: dict[Path, tuple[Document, ...]]
) -> tuple[Document, ...]:
    """Return the documents of a file and of all that it extends, each once, the file's own last.

    Later ones count. ``above`` are the files that extend this one, ``known`` those that were read.
    """
    if file in known:
        return known[file]
    document = _read(file)
    data = document.data
    if not isinstance(data, dict):
        raise InputError("this must be a mapping of keys to values", where=document.where())
    ordered: dict[int, Document] = {}
    for word in _EXTENDS:
        for name in _names(document, word):
            below = Path(os.path.normpath(file.parent / name))
            where = document.where((word,))
            if below == file or below in above:
                circle = [*above[above.index(below) :], file] if below in above else [file]
                shown = " → ".join(path.name for path in (*circle, below))
                raise InputError(f"files extend each other in a circle: {shown}", where=where)
            if len(above) >= _DEEPEST:
                raise InputError(f"more than {_DEEPEST} files extend one another", where=where)
            if not below.is_file():
                raise InputError(f"there is no file {name}, which this extends", where=where)
            for extended in _documents(below, (*above, file), known):
                ordered.pop(id(extended), None)
                ordered[id(extended)] = extended
    known[file] = (*ordered.values(), document)
    return known[file]


def _names(document: Document, word: str) -> list[str]:
    """Return the files that a document extends."""
    data = cast("dict[str, Tree]", document.data)
    extended = data.get(word) or []
    names = extended if isinstance(extended, list) else [extended]
    if not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{word} must be the name of a file, or a list of names", where=document.where((word,))
        )
    return cast("list[str]", names)


def _merge(merged: dict[str, Argument], more: Mapping[str, Argument]) -> None:
    """Replace keys. A value replaces a mapping of the same name, and the other way round."""
    mappings = {key.partition(".")[0] for key in (*merged, *more) if "." in key}
    for key, argument in more.items():
        parts = key.split(".")
        above = {".".join(parts[:number]) for number in range(1, len(parts))}
        for other in list(merged) if parts[0] in mappings else ():
            if other in above or other.startswith(f"{key}."):
                del merged[other]
        merged.pop(key, None)
        merged[key] = argument


def _leaves(
    document: Document,
    place: Key,
    tree: Mapping[str, Tree],
    level: Level,
    environment: Mapping[str, str],
) -> dict[str, Argument]:
    leaves = {}
    for key, value_ in _flat(tree, ()):
        where = document.where((*place, *key))
        name = ".".join(map(str, key))
        filled = _leaf(value_, where, environment)
        leaves[name] = Argument(key=name, value=filled, where=where, level=level)
    return leaves


def _flat(tree: Mapping[str, Tree], prefix: Key) -> Iterator[tuple[Key, Tree]]:
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield from _flat(inner, (*prefix, name))
        else:
            yield (*prefix, name), inner


def _leaf(tree: Tree, where: str, environment: Mapping[str, str]) -> Value:
    if isinstance(tree, list):
        if any(isinstance(item, list | dict) for item in tree):
            raise InputError("a list may contain plain values only", where=where)
        return [cast(Scalar, _filled(item, where, environment)) for item in tree]
    filled = _filled(tree, where, environment)
    if filled == "null":
        # Primus reads the text "null" as null in overrides.
        return None
    return filled


def _filled(tree: Tree, where: str, environment: Mapping[str, str]) -> Value:
    """Replace ``${VAR}`` and ``${VAR:default}`` in text, and type the result."""
    if not isinstance(tree, str) or "${" not in tree:
        return cast(Value, tree)

    def variable(match: re.Match[str]) -> str:
        name, default = match.groups()
        text = environment.get(name, default)
        if text is None:
            raise InputError(
                f"{name} is not set in the environment", where=where, hint=f"export {name}=…"
            )
        return text

    text = _PLACEHOLDER.sub(variable, tree)
    if "${" in text:
        raise InputError(f"{tree!r} has an unclosed ${{, or a variable inside another", where=where)
    return typed(text)


def typed(text: str) -> Value:
    """Return the YAML value of ``text``, or the text if it is no scalar or list of scalars."""
    if not text:
        return text
    try:
        return value(text, "")
    except InputError:
        return text
