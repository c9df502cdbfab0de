"""Keys and options of Primus → settings of a recipe, by the table ``keys.yaml``. What it does not
know is refused.

A Primus experiment file becomes a recipe: that of its model, with what the file overrides.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from primus_images.errors import InputError, nearest
from primus_images.recipes.schema import backend_rules, backends
from primus_images.recipes.setting import Value
from primus_images.schema import build
from primus_images.yamlfile import Document, Scalar, Tree, read_values, spell, value

ALLOW_UNMAPPED = "--allow-unmapped leaves them out"
# Sections of the recipe in which a flat name of Megatron is looked up, in this order.
_SECTIONS = ("training", "model", "optimizer", "ddp")
_PLACE = ("modules", "pre_trainer")
_PLACEHOLDER = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One key with its value and its place: ``file:line:col``, or the option as typed."""

    key: str
    value: Value
    where: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The translation of one key. The comment at the top of ``keys.yaml`` explains the fields."""

    to: str | None = None
    choice: str | None = None
    values: Mapping[str, Scalar] | None = None
    prefix: str = ""
    needs: Sequence[str] = ()
    off: Sequence[str] = ()
    because: str = ""


@dataclass(kw_only=True)
class Translation:
    """The result of a translation.

    ``settings`` are keys of the recipe in order; a later value replaces an earlier one.
    ``precision`` is the command-line choice. ``sources`` maps settings to the options that they
    come from. ``left_out`` are sentences about keys that have no effect here. ``unmapped`` are
    options that no recipe can express, with the reason.
    """

    settings: dict[str, Value] = field(default_factory=dict)
    precision: str | None = None
    sources: dict[str, Option] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unmapped: list[tuple[Option, str]] = field(default_factory=list)

    def words(self) -> tuple[str, ...]:
        """Return the settings as ``key=value``."""
        return tuple(f"{key}={spell(setting)}" for key, setting in self.settings.items())

    def set(self, key: str, setting: Value, option: Option) -> None:
        """Set a key of the recipe, and record that its value comes from ``option``."""
        self.settings.pop(key, None)
        self.settings[key] = setting
        self.sources[key] = option

    def refuse_unmapped(self) -> None:
        """Raise InputError that names every unmapped option, one per line, if there are any."""
        if self.unmapped:
            (first, reason), *others = self.unmapped
            more = "".join(f"\n{option.where}: {option.key}: {why}" for option, why in others)
            raise InputError(f"{first.key}: {reason}{more}", where=first.where, hint=ALLOW_UNMAPPED)

    def placed(self, error: InputError) -> InputError:
        """Return ``error``, which is about a setting, with the key of Primus and its place instead."""
        option = self.sources.get(str(error.where).removeprefix("command line: ").partition("=")[0])
        if option:
            return InputError(f"{option.key}: {error.message}", where=option.where, hint=error.hint)
        return error


def options(words: Sequence[str]) -> list[Option]:
    """Parse ``--key value``, ``--key=value`` and ``--key`` (true). InputError for a word that
    belongs to no option.
    """
    parsed: list[Option] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise InputError(
                f"{word!r} belongs to no option",
                where="command line",
                hint="write --key value or --key=value, as in --training.local_batch_size 6",
            )
        key, separator, text = word[2:].partition("=")
        if not re.fullmatch(r"[A-Za-z][\w.-]*", key):
            raise InputError(f"{word!r} is not an option", where="command line")
        if not separator:
            # The next word is the value unless it is an option. A negative number is a value.
            text = "true"
            if rest and not re.match(r"--[A-Za-z]", rest[0]):
                text = rest.pop(0)
        parsed.append(Option(key=key, value=typed(text), where=f"--{key} {text}"))
    return parsed


def typed(text: str) -> Value:
    """Return the YAML value of ``text``. Text that is neither a scalar nor a list of scalars stays
    text.
    """
    try:
        if text:
            return value(text, "")
        return text
    except InputError:
        return text


@cache
def table(name: str) -> dict[str, Any]:
    """Return the contents of ``NAME.yaml`` of this package."""
    return cast("dict[str, Any]", read_values(Path(__file__).with_name(f"{name}.yaml")).data)


def listed(word: str, rows: Collection[str], where: str, what: str = "there is no") -> str:
    """Return ``word``. Raises InputError, whose message begins with ``what``, if ``rows`` do not
    have it.
    """
    if word not in rows:
        raise InputError(
            f"{what} {word!r}" + nearest(word, rows),
            where=where,
            hint=f"there are: {', '.join(rows)}",
        )
    return word


@cache
def keys(backend: str) -> Mapping[str, Entry]:
    """Return key of Primus → translation, for one backend."""
    rows = {**table("keys")["every"], **table("keys").get(backend, {})}
    return {
        key: Entry(**({"to": row} if isinstance(row, str) else row)) for key, row in rows.items()
    }


def recipe_of(backend: str, stem: str) -> tuple[str, Mapping[str, Scalar]]:
    """Return the recipe of Primus's model ``stem``, and the settings that the model adds to it."""
    row = table("paths")["stems"][backend][stem]
    if isinstance(row, str):
        return (row, {})
    return (row["recipe"], row["settings"])


def translate(
    backend: str,
    arguments: Sequence[Option],
    defaults: Mapping[str, Value] = MappingProxyType({}),
    precision: str = "",
) -> Translation:
    """Translate options in order, over ``defaults`` and ``precision``. A null keeps the recipe's
    own value.
    """
    done = Translation(precision=precision or None)
    entries = keys(backend)
    values = {option.key: option.value for option in arguments}
    for option in arguments:
        if option.value is None:
            continue
        patterns = (
            row
            for name, row in entries.items()
            if name.endswith("*") and fnmatchcase(option.key, name)
        )
        entry = entries.get(option.key) or next(patterns, None)
        if entry is None:
            _translate_native(backend, option, done)
        elif not entry.needs or any(values.get(key) not in (None, False) for key in entry.needs):
            _translate_listed(option, entry, done)
    done.settings = {**defaults, **done.settings}
    return done


def _translate_listed(option: Option, entry: Entry, done: Translation) -> None:
    values: list[Value] = [option.value]
    if entry.values is not None:
        # Lists, such as torchtitan's converters, are translated item by item.
        if isinstance(option.value, list) and option.value:
            items = option.value
        else:
            items = [option.value]
        words = [spell(item) for item in items]
        unknown = [word for word in words if word not in entry.values]
        if unknown:
            because = ""
            if entry.because:
                because = f"; {entry.because}"
            reason = f"{unknown[0]} has no counterpart (known: {', '.join(entry.values)}){because}"
            done.unmapped.append((option, reason))
        values = [entry.values[word] for word in words if entry.values.get(word) is not None]
    if entry.choice:
        if values:
            done.precision = str(values[-1])
        else:
            done.precision = done.precision
    elif entry.to:
        for setting in values:
            done.set(entry.to, f"{entry.prefix}{setting}" if entry.prefix else setting, option)
            for key in entry.off if setting else ():
                if key not in done.settings:
                    done.set(key, False, option)
    elif entry.because and entry.values is None:
        done.left_out.append(f"{option.key} is left out: {entry.because}")


def _translate_native(backend: str, option: Option, done: Translation) -> None:
    rules = backend_rules(backend)
    owned = backends()[backend].owned
    flat = backend == "megatron" and "." not in option.key
    if flat:
        names = [f"{section}.{option.key}" for section in _SECTIONS]
    else:
        names = [option.key]
    owner = next((name for name in names if name in owned), None)
    if owner:
        done.unmapped.append((option, f"is set by primus: use {owned[owner]}"))
    elif name := next((name for name in names if name in rules), None):
        done.set(f"{backend}.{name}", option.value, option)
    else:
        similar = [
            *keys(backend),
            *(rule.rpartition(".")[2] if backend == "megatron" else rule for rule in rules),
        ]
        done.unmapped.append((option, "no recipe has such a key" + nearest(option.key, similar)))


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
    """An experiment file: the recipe of its model, what that model adds to it, and the file's
    overrides.
    """

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
    """Whether the file has the key ``modules``, which only Primus experiments have. InputError for
    invalid YAML.
    """
    data = read_values(path).data
    return isinstance(data, dict) and "modules" in data


def read_experiment(path: Path, environment: Mapping[str, str]) -> Experiment:
    """Read an experiment file. Raises InputError with the place of what no recipe has."""
    document = read_values(path)
    file = build(_File, document)
    trainer = file.modules.pre_trainer

    def text(name: str) -> str:
        return str(_filled(getattr(trainer, name), document.where((*_PLACE, name)), environment))

    stems = table("paths")["stems"]
    model = re.sub(r"\.ya?ml$", "", text("model"))
    backend = listed(
        text("framework"), stems, document.where((*_PLACE, "framework")), "there is no framework"
    )
    place = document.where((*_PLACE, "model"))
    stem = listed(
        model.removesuffix("-fp8"), stems[backend], place, "there is no recipe for the model"
    )
    if re.sub(r"\.ya?ml$", "", config := text("config")) != "pre_trainer":
        where = document.where((*_PLACE, "config"))
        raise InputError(
            f"{config} is not Primus's own pre_trainer.yaml",
            where=where,
            hint="write what it sets under overrides",
        )
    recipe, settings = recipe_of(backend, stem)
    if trainer.overrides is None:
        overrides = ()
    else:
        overrides = _flat(document, (), trainer.overrides, environment)
    return Experiment(
        path=path,
        backend=backend,
        recipe=recipe,
        settings=settings,
        overrides=tuple(overrides),
        precision="fp8" if model.endswith("-fp8") else "bf16",
        name=str(_filled(file.exp_name or path.stem, document.where(("exp_name",)), environment)),
    )


def recipe_text(source: Experiment, done: Translation, nodes: int) -> str:
    """Return the text of the recipe file. Its settings are a case, so that the proxy keeps its own
    sizes.

    ``nodes`` is the number of nodes that the experiment was written for. Its global batch is that
    of all of them.
    """
    usual = dict(done.settings)
    exact = {}
    several = ""
    if nodes > 1:
        several = f", nodes: {nodes}"
    key = f"{source.backend}.{backends()[source.backend].keys['global_batch']}"
    if several and isinstance(batch := usual.get(key), int) and batch > 0:
        exact = {key: usual.pop(key)}
        if batch % nodes == 0:
            # A recipe's global batch is that of one node, and grows with their number.
            usual[key] = batch // nodes
    lines = [
        f"# Imported from {source.path.name} by `primus import-exp`. What the file does not set "
        "is the recipe's.",
        f"uses: [{source.recipe}.yaml]",
        f"name: {spell(source.name)}",
        f"description: {spell(f'{source.recipe} as {source.path.name} has it')}",
        f"default: {{backend: {source.backend}, mode: pretrain, precision: {done.precision}{several}}}",
    ]
    lines += ["cases:"] if usual or exact else []
    for nodes_of_case, settings in (("", usual), (several, exact)):
        if settings:
            lines.append(f"  - when: {{backend: {source.backend}, proxy: false{nodes_of_case}}}")
            lines += [f"    {name}: {spell(setting)}" for name, setting in settings.items()]
    lines += [f"# {sentence}" for sentence in done.left_out]
    lines += [
        f"# not expressible: {option.key}: {spell(option.value)}" for option, _ in done.unmapped
    ]
    return "\n".join(lines) + "\n"


def _flat(
    document: Document, key: tuple[str, ...], tree: Tree, environment: Mapping[str, str]
) -> Iterator[Option]:
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from _flat(document, (*key, str(name)), inner, environment)
        return
    where = document.where((*_PLACE, "overrides", *key))
    if not key:
        raise InputError("overrides must be a mapping of keys to values", where=where)
    if isinstance(tree, list) and any(isinstance(item, list | dict) for item in tree):
        raise InputError("a list may contain plain values only", where=where)
    items = [
        _filled(item, where, environment) for item in (tree if isinstance(tree, list) else [tree])
    ]
    setting: Value = (
        [item for item in items if not isinstance(item, list)]
        if isinstance(tree, list)
        else items[0]
    )
    # Primus reads the text "null" as null in overrides.
    yield Option(key=".".join(key), value=None if setting == "null" else setting, where=where)


def _filled(tree: Tree, where: str, environment: Mapping[str, str]) -> Value:
    """Replace ``${VAR}`` and ``${VAR:default}`` in text, and convert the result to a number or
    boolean.
    """
    if not isinstance(tree, str) or "${" not in tree:
        return tree  # type: ignore[return-value]

    def variable(match: re.Match[str]) -> str:
        text = environment.get(match[1], match[2])
        if text is None:
            raise InputError(
                f"{match[1]} is not set in the environment",
                where=where,
                hint=f"export {match[1]}=…",
            )
        return text

    text = _PLACEHOLDER.sub(variable, tree)
    if "${" in text:
        raise InputError(f"{tree!r} has an unclosed ${{", where=where)
    return typed(text)
