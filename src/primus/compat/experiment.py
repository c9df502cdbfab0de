"""A Primus experiment file → a recipe: the recipe of its model, with what the file overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from primus.compat.translate import Option, Translation, table, translate, typed
from primus.errors import InputError, nearest
from primus.recipes.backends import backends
from primus.recipes.setting import Value
from primus.yamlfile import Document, Scalar, Tree, read_values, spell

_HEAD = ("work_group", "user_name", "exp_name", "workspace")
_TRAINER = ("framework", "config", "model", "overrides")
_PLACE = ("modules", "pre_trainer")
_PLACEHOLDER = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment file: the recipe of its model, what that model adds to it, and the file's overrides."""

    path: Path
    name: str
    backend: str
    recipe: str
    precision: str
    settings: Mapping[str, Scalar]
    overrides: tuple[Option, ...]

    def translated(self, more: Sequence[Option] = ()) -> Translation:
        """Translate the file's overrides, and ``more`` after them, to settings of the recipe."""
        done = translate(self.backend, [*self.overrides, *more])
        done.settings = {**self.settings, **done.settings}
        done.precision = done.precision or self.precision
        return done


def is_experiment(path: Path) -> bool:
    """Whether the file has the key ``modules``, which only Primus experiments have. InputError for invalid YAML."""
    data = read_values(path).data
    return isinstance(data, dict) and "modules" in data


def read_experiment(path: Path, environment: Mapping[str, str]) -> Experiment:
    """Read an experiment file. Raises InputError with the place of what no recipe has."""
    document = read_values(path)
    _check_keys(document, (), [*_HEAD, "modules"])
    _check_keys(document, _PLACE[:1], _PLACE[1:])
    trainer = _check_keys(document, _PLACE, _TRAINER)
    backend = _text(document, (*_PLACE, "framework"), environment)
    stems = table("paths")["stems"]
    if backend not in stems:
        raise _no("framework", backend, stems, document.where((*_PLACE, "framework")))
    config = _text(document, (*_PLACE, "config"), environment) if "config" in trainer else "pre_trainer.yaml"
    if re.sub(r"\.ya?ml$", "", config) != "pre_trainer":
        raise InputError(
            f"{config} is not Primus's own pre_trainer.yaml", where=document.where((*_PLACE, "config")),
            hint="write what it sets under overrides",
        )  # fmt: skip
    model = re.sub(r"\.ya?ml$", "", _text(document, (*_PLACE, "model"), environment))
    stem = model.removesuffix("-fp8")
    if stem not in stems[backend]:
        raise _no("model", model, stems[backend], document.where((*_PLACE, "model")))
    row = stems[backend][stem]
    overrides: list[Option] = []
    if trainer.get("overrides") is not None:
        _flatten(document, (*_PLACE, "overrides"), environment, overrides)
    return Experiment(
        path=path, backend=backend, overrides=tuple(overrides), precision="fp8" if model != stem else "bf16",
        name=_text(document, ("exp_name",), environment) if _at(document, ("exp_name",)) is not None else path.stem,
        recipe=row if isinstance(row, str) else row["recipe"], settings={} if isinstance(row, str) else row["settings"],
    )  # fmt: skip


def recipe_text(source: Experiment, done: Translation, nodes: int) -> str:
    """Return the text of the recipe file. Its settings are a case, so that the proxy keeps its own sizes.

    ``nodes`` is the number of nodes that the experiment was written for. Its global batch is that of all of them.
    """
    settings, several = dict(done.settings), f", nodes: {nodes}" if nodes > 1 else ""
    case = f"  - when: {{backend: {source.backend}, proxy: false"
    lines = [
        f"# Imported from {source.path.name} by `primus import-exp`. What the file does not set is the recipe's.",
        f"uses: [{source.recipe}.yaml]",
        f"name: {spell(source.name)}",
        f"description: {spell(f'{source.recipe} as {source.path.name} has it')}",
        f"default: {{backend: {source.backend}, mode: pretrain, precision: {done.precision}{several}}}",
    ]
    key = f"{source.backend}.{backends()[source.backend].keys['global_batch']}"
    exact: list[str] = []
    if several and isinstance(batch := settings.get(key), int) and batch > 0:
        exact = [f"{case}{several}}}", f"    {key}: {spell(settings.pop(key))}"]
        if batch % nodes == 0:
            # A recipe's global batch is that of one node, and grows with their number.
            settings[key] = batch // nodes
    if settings:
        lines += ["cases:", f"{case}}}", *(f"    {name}: {spell(setting)}" for name, setting in settings.items())]
    elif exact:
        lines.append("cases:")
    lines += [*exact, *(f"# {sentence}" for sentence in done.left_out)]
    lines += [f"# not expressible: {option.key}: {spell(option.value)}" for option, _ in done.unmapped]
    return "\n".join(lines) + "\n"


def _flatten(document: Document, key: tuple[str, ...], environment: Mapping[str, str], overrides: list[Option]) -> None:
    tree, where = _at(document, key), document.where(key)
    if isinstance(tree, dict):
        for name in tree:
            _flatten(document, (*key, str(name)), environment, overrides)
        return
    name = ".".join(key[len(_PLACE) + 1 :])
    if not name:
        raise InputError("overrides must be a mapping of keys to values", where=where)
    if isinstance(tree, list) and any(isinstance(item, list | dict) for item in tree):
        raise InputError("a list may contain plain values only", where=where)
    items = [_filled(item, where, environment) for item in (tree if isinstance(tree, list) else [tree])]
    setting: Value = [item for item in items if not isinstance(item, list)] if isinstance(tree, list) else items[0]
    # Primus reads the text "null" as null in overrides.
    overrides.append(Option(key=name, value=None if setting == "null" else setting, where=where))


def _filled(tree: Tree, where: str, environment: Mapping[str, str]) -> Value:
    """Replace ``${VAR}`` and ``${VAR:default}`` in text, and convert the result to a number or boolean."""
    if not isinstance(tree, str) or "${" not in tree:
        return tree  # type: ignore[return-value]

    def variable(match: re.Match[str]) -> str:
        text = environment.get(match[1], match[2])
        if text is None:
            raise InputError(f"{match[1]} is not set in the environment", where=where, hint=f"export {match[1]}=…")
        return text

    text = _PLACEHOLDER.sub(variable, tree)
    if "${" in text:
        raise InputError(f"{tree!r} has an unclosed ${{", where=where)
    return typed(text)


def _at(document: Document, key: tuple[str, ...]) -> Tree:
    tree: Tree = document.data
    for part in key:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _check_keys(document: Document, key: tuple[str, ...], allowed: Sequence[str]) -> Mapping[str, Tree]:
    tree = _at(document, key)
    if not isinstance(tree, dict):
        what = ".".join(key) or "an experiment"
        raise InputError(f"{what} must be a mapping of keys to values", where=document.where(key))
    for name in tree:
        if name not in allowed:
            raise _no("key", name, allowed, document.where((*key, name)))
    return tree


def _text(document: Document, key: tuple[str, ...], environment: Mapping[str, str]) -> str:
    tree = _at(document, key)
    if not isinstance(tree, str):
        raise InputError(f"{'.'.join(key)} is missing", where=document.where(key))
    return str(_filled(tree, document.where(key), environment))


def _no(what: str, name: str, choices: Iterable[str], where: str) -> InputError:
    recipe, here = "recipe for the " if what == "model" else "", " here" if what == "key" else ""
    message = f"there is no {recipe}{what} {name!r}{here}" + nearest(name, choices)
    return InputError(message, where=where, hint=f"there are: {', '.join(choices)}")
