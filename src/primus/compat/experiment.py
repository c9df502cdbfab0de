"""Primus's experiment files, as users have them: read, filled in, and turned into recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from primus.compat.tables import preset
from primus.compat.translate import Translation, translate
from primus.compat.words import Given, spelt, typed
from primus.errors import InputError, nearest
from primus.recipes.model import Scalar, Value
from primus.yamlfile import Document, Plain, read

__all__ = ["Experiment", "experiment", "is_experiment", "recipe_text"]

_HEAD = ("work_group", "user_name", "exp_name", "workspace")
_TRAINER = ("framework", "config", "model", "overrides")
_BASES = ("extends", "bases", "includes")
_PLACEHOLDER = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")
_FRAMEWORKS = ("megatron", "torchtitan")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One file: which recipe it trains by which backend, and what it sets."""

    path: Path
    name: str
    recipe: str
    backend: str
    given: tuple[Given, ...]
    precision: str | None
    settings: Mapping[str, Scalar]

    def translated(self, more: Sequence[Given] = ()) -> Translation:
        """The file's keys and then those of ``more``, in words of the recipe."""
        done = translate(self.backend, [*self.given, *more])
        done.settings = {**self.settings, **done.settings}
        if self.precision:
            done.choices.setdefault("precision", self.precision)
        done.choices.setdefault("precision", "bf16")
        return done


def is_experiment(path: Path) -> bool:
    """Whether the file has ``modules``, which only an experiment of Primus has. InputError when it is not YAML."""
    data = read(path).data
    return isinstance(data, dict) and "modules" in data


def experiment(path: Path, environment: Mapping[str, str]) -> Experiment:
    """Read an experiment file. InputError with the place of what it lacks or has too much of."""
    document = read(path)
    data = _mapping(document, ())
    modules = _mapping(document, ("modules",))
    for key in data:
        if key not in (*_HEAD, "modules"):
            raise _no_key(document, (key,), [*_HEAD, "modules"])
    for key in modules:
        if key != "pre_trainer":
            raise _no_key(document, ("modules", key), ["pre_trainer"])
    trainer = _mapping(document, ("modules", "pre_trainer"))
    for key in trainer:
        if key not in _TRAINER:
            raise _no_key(document, ("modules", "pre_trainer", key), _TRAINER)
    place = ("modules", "pre_trainer")
    framework = _text(document, (*place, "framework"), environment)
    if framework not in _FRAMEWORKS:
        raise InputError(
            f"there is no framework {framework!r}" + nearest(framework, _FRAMEWORKS),
            where=document.where((*place, "framework")), hint=f"there are: {', '.join(_FRAMEWORKS)}",
        )  # fmt: skip
    model = _text(document, (*place, "model"), environment)
    given: list[Given] = []
    own = path.parent / model
    if own.is_file():
        model = _layers(own, environment, given, (path,)) or own.name
    recipe, settings, precision = preset(framework, Path(model).name, document.where((*place, "model")))
    config = trainer.get("config")
    if isinstance(config, str) and (path.parent / config).is_file():
        _layers(path.parent / config, environment, given, (path,))
    if "overrides" in trainer and trainer["overrides"] is not None:
        _flatten(document, (*place, "overrides"), len(place) + 1, environment, given)
    name = _text(document, ("exp_name",), environment) if "exp_name" in data else path.stem
    return Experiment(
        path=path, name=name, recipe=recipe, backend=framework, given=tuple(given), precision=precision,
        settings=settings,
    )  # fmt: skip


def recipe_text(source: Experiment, done: Translation) -> str:
    """The recipe file that trains what the experiment trains. Its settings are a case: a proxy keeps its own."""
    lines = [
        f"# Imported from {source.path.name} by `primus import-exp`.",
        f"uses: [{source.recipe}.yaml]",
        f"name: {spelt(source.name)}",
        f"description: {spelt(f'{source.recipe} as {source.path.name} has it')}",
        f"default: {{backend: {source.backend}, mode: pretrain, precision: {done.choices['precision']}}}",
    ]
    if any(key.endswith(".global_batch_size") for key in done.settings):
        lines.append("# The global batch is that of one node here: n nodes take n times it.")
    if done.settings:
        lines += ["cases:", f"  - when: {{backend: {source.backend}, proxy: false}}"]
        lines += [f"    {key}: {spelt(value)}" for key, value in done.settings.items()]
    lines += [f"# {sentence}" for sentence in done.left_out]
    lines += [f"# cannot be said: {one.given.key}: {spelt(one.given.value)}" for one in done.unmapped]
    return "\n".join(lines) + "\n"


def _layers(path: Path, environment: Mapping[str, str], into: list[Given], above: tuple[Path, ...]) -> str | None:
    """Read a preset of the user's own and the files it extends, those first; the name of a base that is no file."""
    if path in above:
        raise InputError(f"{path.name} extends itself", where=str(path))
    document = read(path)
    data = _mapping(document, ())
    base: str | None = None
    for word in _BASES:
        value = data.get(word)
        if value is None:
            continue
        for index, name in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(name, str):
                raise InputError(f"{word} must name files", where=document.where((word, index)))
            near = path.parent / name
            found = _layers(near, environment, into, (*above, path)) if near.is_file() else Path(name).name
            base = found or base
    for key in data:
        if key not in _BASES:
            _flatten(document, (key,), 0, environment, into)
    return base


def _flatten(
    document: Document, key: tuple[str | int, ...], skip: int, environment: Mapping[str, str], into: list[Given]
) -> None:
    value = _at(document, key)
    if isinstance(value, dict):
        for name in value:
            _flatten(document, (*key, name), skip, environment, into)
        return
    dotted = ".".join(map(str, key[skip:]))
    where = document.where(key)
    if not dotted:
        raise InputError("overrides must be a mapping of keys to values", where=where)
    into.append(Given(key=dotted, value=_value(value, where, environment), where=where))


def _value(value: Plain, where: str, environment: Mapping[str, str]) -> Value:
    if isinstance(value, list):
        items = [_value(item, where, environment) for item in value]
        if any(isinstance(item, list) for item in items):
            raise InputError("a list may hold plain values only", where=where)
        return [item for item in items if not isinstance(item, list)]
    if isinstance(value, dict):
        raise InputError("a list may hold plain values only", where=where)
    return None if value is None else typed(_filled(value, where, environment))


def _filled(text: str, where: str, environment: Mapping[str, str]) -> str:
    """``${VAR}`` and ``${VAR:default}`` replaced by the environment's values."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in environment:
            return environment[name]
        if default is None:
            raise InputError(f"{name} is not set in the environment", where=where, hint=f"export {name}=…")
        return default

    filled = _PLACEHOLDER.sub(value, text)
    if "${" in filled:
        raise InputError(f"{text!r} holds a ${{ that is never closed", where=where)
    return filled


def _at(document: Document, key: tuple[str | int, ...]) -> Plain:
    value = document.data
    for part in key:
        value = value.get(part) if isinstance(value, dict) and isinstance(part, str) else None
    return value


def _mapping(document: Document, key: tuple[str | int, ...]) -> dict[str, Plain]:
    value = _at(document, key)
    if isinstance(value, dict):
        return value
    what = ".".join(map(str, key)) or "an experiment"
    raise InputError(f"{what} must be a mapping of keys to values", where=document.where(key))


def _text(document: Document, key: tuple[str | int, ...], environment: Mapping[str, str]) -> str:
    value = _at(document, key)
    if not isinstance(value, str):
        raise InputError(f"{'.'.join(map(str, key))} is missing", where=document.where(key))
    return _filled(value, document.where(key), environment)


def _no_key(document: Document, key: tuple[str | int, ...], known: Sequence[str]) -> InputError:
    word = str(key[-1])
    return InputError(
        f"there is no key {word!r} here" + nearest(word, known), where=document.where(key),
        hint=f"there are: {', '.join(known)}",
    )  # fmt: skip
