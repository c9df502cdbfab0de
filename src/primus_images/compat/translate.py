"""Keys and options of Primus → settings of a recipe, by the table ``keys.yaml``.

What it does not know is refused.

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
        if not self.unmapped:
            return
        (first, reason), *others = self.unmapped
        message = f"{first.key}: {reason}"
        for option, why in others:
            message += f"\n{option.where}: {option.key}: {why}"
        raise InputError(message, where=first.where, hint=ALLOW_UNMAPPED)

    def placed(self, error: InputError) -> InputError:
        """Return ``error``, which is about a setting, with Primus's key and its place instead."""
        key, _, _ = str(error.where).removeprefix("command line: ").partition("=")
        if key not in self.sources:
            return error
        option = self.sources[key]
        return InputError(f"{option.key}: {error.message}", where=option.where, hint=error.hint)


def options(words: Sequence[str]) -> list[Option]:
    """Parse ``--key value``, ``--key=value`` and ``--key`` (true).

    Raises InputError for a word that belongs to no option.
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
    """Return the YAML value of ``text``, or the text if it is no scalar or list of scalars."""
    if not text:
        return text
    try:
        return value(text, "")
    except InputError:
        return text


@cache
def table(name: str) -> dict[str, Any]:
    """Return the contents of ``NAME.yaml`` of this package."""
    return cast("dict[str, Any]", read_values(Path(__file__).with_name(f"{name}.yaml")).data)


def listed(word: str, rows: Collection[str], where: str, lacking: str = "there is no") -> str:
    """Return ``word``. Raises InputError, which begins with ``lacking``, if no row has it."""
    if word not in rows:
        raise InputError(
            f"{lacking} {word!r}{nearest(word, rows)}",
            where=where,
            hint=f"there are: {', '.join(rows)}",
        )
    return word


@cache
def keys(backend: str) -> Mapping[str, Entry]:
    """Return key of Primus → translation, for one backend."""
    entries = {}
    for key, row in {**table("keys")["every"], **table("keys").get(backend, {})}.items():
        if isinstance(row, str):
            entries[key] = Entry(to=row)
        else:
            entries[key] = Entry(**row)
    return entries


def _entry(backend: str, key: str) -> Entry | None:
    """Return the translation of ``key``, whose name in the table may be a pattern."""
    entries = keys(backend)
    if key in entries:
        return entries[key]
    for pattern, entry in entries.items():
        if pattern.endswith("*") and fnmatchcase(key, pattern):
            return entry
    return None


def recipe_of(backend: str, stem: str) -> tuple[str, Mapping[str, Scalar]]:
    """Return the recipe of Primus's model ``stem``, and the settings that the model adds to it."""
    row = table("paths")["stems"][backend][stem]
    if isinstance(row, str):
        return row, {}
    return row["recipe"], row["settings"]


def translate(
    backend: str,
    arguments: Sequence[Option],
    defaults: Mapping[str, Value] = MappingProxyType({}),
    precision: str = "",
) -> Translation:
    """Translate options in order, over ``defaults`` and ``precision``.

    A null keeps the recipe's own value.
    """
    done = Translation(precision=precision or None)
    enabled = {option.key for option in arguments if option.value not in (None, False)}
    for option in arguments:
        if option.value is None:
            continue
        entry = _entry(backend, option.key)
        if entry is None:
            _translate_native(backend, option, done)
        elif not entry.needs or not enabled.isdisjoint(entry.needs):
            _translate_listed(option, entry, done)
    done.settings = {**defaults, **done.settings}
    return done


def _translate_listed(option: Option, entry: Entry, done: Translation) -> None:
    values: list[Value] = [option.value]
    if entry.values is not None:
        values = _translated_values(option, entry, done)
    elif entry.because and not entry.to and not entry.choice:
        done.left_out.append(f"{option.key} is left out: {entry.because}")
    if entry.choice and values:
        done.precision = str(values[-1])
    if not entry.to:
        return
    for setting in values:
        done.set(entry.to, f"{entry.prefix}{setting}" if entry.prefix else setting, option)
        for key in entry.off if setting else ():
            if key not in done.settings:
                done.set(key, False, option)


def _translated_values(option: Option, entry: Entry, done: Translation) -> list[Value]:
    """Translate lists, such as torchtitan's converters, item by item."""
    items = [option.value]
    if isinstance(option.value, list) and option.value:
        items = list(option.value)
    known = entry.values or {}
    words = [spell(item) for item in items]
    unknown = [word for word in words if word not in known]
    if unknown:
        reason = f"{unknown[0]} has no counterpart (known: {', '.join(known)})"
        if entry.because:
            reason += f"; {entry.because}"
        done.unmapped.append((option, reason))
    return [known[word] for word in words if known.get(word) is not None]


def _translate_native(backend: str, option: Option, done: Translation) -> None:
    rules = backend_rules(backend)
    owned = backends()[backend].owned
    names = [option.key]
    if backend == "megatron" and "." not in option.key:
        names = [f"{section}.{option.key}" for section in _SECTIONS]
    for name in names:
        if name in owned:
            done.unmapped.append((option, f"is set by primus: use {owned[name]}"))
            return
    for name in names:
        if name in rules:
            done.set(f"{backend}.{name}", option.value, option)
            return
    similar = list(rules)
    if backend == "megatron":
        similar = [rule.rpartition(".")[2] for rule in rules]
    near = nearest(option.key, [*keys(backend), *similar])
    done.unmapped.append((option, f"no recipe has such a key{near}"))


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
    """An experiment file: its recipe, what its model adds to that, and the file's overrides."""

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
    """Whether the file has the key ``modules``, which only Primus experiments have.

    Raises InputError for invalid YAML.
    """
    data = read_values(path).data
    return isinstance(data, dict) and "modules" in data


def read_experiment(path: Path, environment: Mapping[str, str]) -> Experiment:
    """Read an experiment file. Raises InputError with the place of what no recipe has."""
    document = read_values(path)
    file = build(_File, document)
    trainer = file.modules.pre_trainer

    def text(name: str) -> str:
        return str(_filled(getattr(trainer, name), place(name), environment))

    def place(name: str) -> str:
        return document.where((*_PLACE, name))

    stems = table("paths")["stems"]
    backend = listed(text("framework"), stems, place("framework"), "there is no framework")
    model = _without_suffix(text("model"))
    stem = listed(
        model.removesuffix("-fp8"),
        stems[backend],
        place("model"),
        "there is no recipe for the model",
    )
    config = text("config")
    if _without_suffix(config) != "pre_trainer":
        raise InputError(
            f"{config} is not Primus's own pre_trainer.yaml",
            where=place("config"),
            hint="write what it sets under overrides",
        )
    recipe, settings = recipe_of(backend, stem)
    overrides: Iterator[Option] = iter(())
    if trainer.overrides is not None:
        overrides = _flat(document, (), trainer.overrides, environment)
    name = _filled(file.exp_name or path.stem, document.where(("exp_name",)), environment)
    return Experiment(
        path=path,
        name=str(name),
        backend=backend,
        recipe=recipe,
        settings=settings,
        overrides=tuple(overrides),
        precision="fp8" if model.endswith("-fp8") else "bf16",
    )


def _without_suffix(name: str) -> str:
    return re.sub(r"\.ya?ml$", "", name)


def recipe_text(source: Experiment, done: Translation, nodes: int) -> str:
    """Return the text of the recipe file.

    Its settings are a case, so that the proxy keeps its own sizes. ``nodes`` is the number of nodes
    that the experiment was written for. Its global batch is that of all of them.
    """
    usual = dict(done.settings)
    exact: dict[str, Value] = {}
    several = ""
    if nodes > 1:
        several = f", nodes: {nodes}"
    key = backends()[source.backend].key("global_batch")
    batch = usual.get(key)
    if several and isinstance(batch, int) and batch > 0:
        exact[key] = usual.pop(key)
        if batch % nodes == 0:
            # A recipe's global batch is that of one node, and grows with their number.
            usual[key] = batch // nodes
    name = source.path.name
    description = spell(f"{source.recipe} as {name} has it")
    default = f"backend: {source.backend}, mode: pretrain, precision: {done.precision}{several}"
    lines = [
        f"# Imported from {name} by `primus import-exp`. What the file does not set is the "
        "recipe's.",
        f"uses: [{source.recipe}.yaml]",
        f"name: {spell(source.name)}",
        f"description: {description}",
        f"default: {{{default}}}",
    ]
    if usual or exact:
        lines.append("cases:")
    lines += _case(source, usual, "")
    lines += _case(source, exact, several)
    lines += [f"# {sentence}" for sentence in done.left_out]
    for option, _ in done.unmapped:
        lines.append(f"# not expressible: {option.key}: {spell(option.value)}")
    return "\n".join(lines) + "\n"


def _case(source: Experiment, settings: Mapping[str, Value], several: str) -> list[str]:
    if not settings:
        return []
    when = f"  - when: {{backend: {source.backend}, proxy: false{several}}}"
    return [when, *(f"    {key}: {spell(value)}" for key, value in settings.items())]


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
    yield Option(key=".".join(key), value=_leaf(tree, where, environment), where=where)


def _leaf(tree: Tree, where: str, environment: Mapping[str, str]) -> Value:
    if isinstance(tree, list):
        if any(isinstance(item, list | dict) for item in tree):
            raise InputError("a list may contain plain values only", where=where)
        return [cast(Scalar, _filled(item, where, environment)) for item in tree]
    value = _filled(tree, where, environment)
    if value == "null":
        # Primus reads the text "null" as null in overrides.
        return None
    return value


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
