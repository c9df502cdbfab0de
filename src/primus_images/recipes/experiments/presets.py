"""Reading an experiment file of Primus, and the presets that it names, as Primus merges them.

An experiment names a framework, a preset of its trainer (``config``), a preset of its model
(``model``) and overrides. Presets extend others. Primus merges trainer, model and overrides in this
order; of several values of a key, the last counts.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from primus_images.errors import InputError
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
# A preset that extends itself would never end.
_DEEPEST = 16

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
    ``places`` are where the file names model, config and framework.
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


def is_experiment(path: Path) -> bool:
    """Whether the file has the key ``modules``, which only experiments have.

    Raises InputError for invalid YAML.
    """
    if not path.is_file():
        return False
    data = read_values(path, last_wins=True).data
    return isinstance(data, dict) and "modules" in data


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
    """Read an experiment and the presets that it names.

    With ``alone``, presets are not looked for. Raises InputError with the place of what is wrong.
    """
    document = _read(path)
    data = document.data
    if not isinstance(data, dict) or not isinstance(data.get("modules"), dict):
        raise InputError("an experiment needs modules: {pre_trainer: …}", where=document.where())
    trainer = _trainer(document, data["modules"])
    module = data["modules"][trainer]
    place: Key = ("modules", trainer)
    words: dict[str, str] = {}
    places = {}
    for name, usual in (("framework", None), ("model", None), ("config", f"{trainer}.yaml")):
        places[name] = document.where((*place, name))
        words[name] = str(_filled(module.get(name, usual), places[name], environment))
        if module.get(name, usual) is None:
            raise InputError(f"{name} is missing", where=places[name], hint=f"add {name}: …")
    _refuse_unknown(document, place, module)
    root = None
    if not alone:
        root = root_of(path, environment)
    merged: dict[str, Argument] = {}
    if root is not None:
        for level, folder in (("trainer", "modules"), ("model", "models")):
            word = words["config" if level == "trainer" else "model"]
            where = places["config" if level == "trainer" else "model"]
            file = _preset(root / _PRESETS / folder / words["framework"], word, where)
            _merge(merged, _flattened(file, cast(Level, level), environment, 0))
    overrides = module.get("overrides")
    if overrides is not None:
        place = (*place, "overrides")
        if not isinstance(overrides, dict):
            raise InputError(
                "overrides must be a mapping of keys to values", where=document.where(place)
            )
        _merge(merged, _leaves(document, place, overrides, "override", environment))
    title = _filled(data.get("exp_name") or path.stem, document.where(("exp_name",)), environment)
    return Experiment(
        path=path,
        name=re.sub(r"[^A-Za-z0-9._+-]+", "-", str(title)).strip("-.")[:100] or "experiment",
        trainer=trainer,
        arguments=merged,
        places=places,
        root=root,
        **words,
    )


def _read(path: Path) -> Document:
    return read_values(path, last_wins=True)


def _trainer(document: Document, modules: Mapping[str, Any]) -> str:
    for name in _TRAINERS:
        if isinstance(modules.get(name), dict):
            return name
    raise InputError(
        f"modules has neither {' nor '.join(_TRAINERS)} with a framework and a model",
        where=document.where(("modules",)),
    )


def _refuse_unknown(document: Document, place: Key, module: Mapping[str, Any]) -> None:
    for name in module:
        if name not in ("framework", "model", "config", "overrides"):
            raise InputError(
                f"{name} is not a key of a module",
                where=document.where((*place, name)),
                hint="it has framework, config, model and overrides",
            )


def _preset(folder: Path, word: str, where: str) -> Path:
    name = word
    if not name.endswith((".yaml", ".yml")):
        name = f"{name}.yaml"
    file = folder / name
    if ".." in Path(name).parts or not file.is_file():
        raise InputError(
            f"there is no preset {name} in {folder}",
            where=where,
            hint="name another checkout of Primus: --primus-root DIR",
        )
    return file


def _flattened(
    file: Path, level: Level, environment: Mapping[str, str], depth: int
) -> dict[str, Argument]:
    """Return the keys of a preset over those that it extends."""
    document = _read(file)
    data = document.data
    if not isinstance(data, dict):
        raise InputError("a preset must be a mapping of keys to values", where=document.where())
    if depth > _DEEPEST:
        raise InputError("presets extend each other without end", where=document.where())
    merged: dict[str, Argument] = {}
    for word in _EXTENDS:
        extended = data.get(word) or []
        names = extended if isinstance(extended, list) else [extended]
        for name in names:
            below = file.parent / str(name)
            if not below.is_file():
                where = document.where((word,))
                raise InputError(f"there is no preset {name}, which this extends", where=where)
            _merge(merged, _flattened(below, level, environment, depth + 1))
    own = {key: tree for key, tree in data.items() if key not in _EXTENDS}
    _merge(merged, _leaves(document, (), own, level, environment))
    return merged


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
        raise InputError(f"{tree!r} has an unclosed ${{", where=where)
    return typed(text)


def typed(text: str) -> Value:
    """Return the YAML value of ``text``, or the text if it is no scalar or list of scalars."""
    if not text:
        return text
    try:
        return value(text, "")
    except InputError:
        return text
