"""A Primus experiment file → a recipe: the recipe of its model, with what the file overrides."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus.compat.translate import Option, Translation, recipe_of, table, translate, typed
from primus.errors import InputError, nearest
from primus.recipes.schema import backends
from primus.recipes.setting import Value
from primus.schema import build
from primus.yamlfile import Document, Scalar, Tree, read_values, spell

_PLACE = ("modules", "pre_trainer")
_PLACEHOLDER = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")


@dataclass(frozen=True, kw_only=True)
class _Trainer:
    framework: str
    model: str
    config: str = "pre_trainer.yaml"
    overrides: Any = None


@dataclass(frozen=True, kw_only=True)
class _Modules:
    pre_trainer: _Trainer


@dataclass(frozen=True, kw_only=True)
class _File:
    modules: _Modules
    exp_name: str | None = None
    work_group: Any = None
    user_name: Any = None
    workspace: Any = None


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
        return translate(self.backend, [*self.overrides, *more], self.settings, self.precision)


def is_experiment(path: Path) -> bool:
    """Whether the file has the key ``modules``, which only Primus experiments have. InputError for invalid YAML."""
    data = read_values(path).data
    return isinstance(data, dict) and "modules" in data


def read_experiment(path: Path, environment: Mapping[str, str]) -> Experiment:
    """Read an experiment file. Raises InputError with the place of what no recipe has."""
    document = read_values(path)
    file = build(_File, document)
    trainer = file.modules.pre_trainer

    def text(name: str) -> str:
        return str(_filled(getattr(trainer, name), document.where((*_PLACE, name)), environment))

    backend, model = text("framework"), re.sub(r"\.ya?ml$", "", text("model"))
    stem = model.removesuffix("-fp8")
    stems = table("paths")["stems"]
    for name, word, what, choices in (
        ("framework", backend, "framework", stems),
        ("model", stem, "recipe for the model", stems.get(backend, ())),
    ):
        if word not in choices:
            message = f"there is no {what} {word!r}" + nearest(word, choices)
            raise InputError(message, where=document.where((*_PLACE, name)), hint=f"there are: {', '.join(choices)}")
    if re.sub(r"\.ya?ml$", "", config := text("config")) != "pre_trainer":
        where = document.where((*_PLACE, "config"))
        hint = "write what it sets under overrides"
        raise InputError(f"{config} is not Primus's own pre_trainer.yaml", where=where, hint=hint)
    recipe, settings = recipe_of(backend, stem)
    overrides = () if trainer.overrides is None else _flat(document, (), trainer.overrides, environment)
    return Experiment(
        path=path, backend=backend, recipe=recipe, settings=settings, overrides=tuple(overrides),
        precision="bf16" if model == stem else "fp8",
        name=str(_filled(file.exp_name or path.stem, document.where(("exp_name",)), environment)),
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


def _flat(document: Document, key: tuple[str, ...], tree: Tree, environment: Mapping[str, str]) -> Iterator[Option]:
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from _flat(document, (*key, str(name)), inner, environment)
        return
    where = document.where((*_PLACE, "overrides", *key))
    if not key:
        raise InputError("overrides must be a mapping of keys to values", where=where)
    if isinstance(tree, list) and any(isinstance(item, list | dict) for item in tree):
        raise InputError("a list may contain plain values only", where=where)
    items = [_filled(item, where, environment) for item in (tree if isinstance(tree, list) else [tree])]
    setting: Value = [item for item in items if not isinstance(item, list)] if isinstance(tree, list) else items[0]
    # Primus reads the text "null" as null in overrides.
    yield Option(key=".".join(key), value=None if setting == "null" else setting, where=where)


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
