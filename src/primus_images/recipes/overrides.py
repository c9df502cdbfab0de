"""The words ``key=value`` of a command line: choices, and settings by their long or short name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import expanduser

from primus_images.errors import InputError
from primus_images.recipes.choose import check_choice
from primus_images.recipes.schema import Backend, backend_rules, backends, model_rules, recipe_rules
from primus_images.recipes.setting import CHOICES, COMMAND_LINE, Choices, Setting, Value
from primus_images.yamlfile import value as typed_value

_ASSETS = ("corpus", "tokenizer", "chat_template")
# Sections of settings that belong to no backend.
_COMMON_SECTIONS = ("validation", "assets", "model", "ranks")
_MINUTES_OF = {"s": 1 / 60, "m": 1.0, "h": 60.0}
# YAML also reads signs, other bases and other spellings of true.
_SPELLINGS = {"nodes": "[0-9]{1,9}", "proxy": "true|false"}


@dataclass(frozen=True, kw_only=True)
class Override(Setting):
    """A setting that the user typed: ``word``, with the long name of its key.

    ``key`` is the key among the recipe's settings, with the backend's name.
    """

    word: str
    key: str


def set_twice(key: str, first: str, second: str) -> InputError:
    """Return the error for two words of the same key."""
    return InputError(
        f"{key} is set twice: {first} and {second}",
        where=COMMAND_LINE,
        hint="keep one of the two",
    )


def choices_among(choices: Choices, overrides: Sequence[str]) -> tuple[Choices, list[str]]:
    """Return the choices with those that ``overrides`` make, and the other overrides.

    Raises InputError for a choice that is made twice, or that has no such value.
    """
    words = []
    for word in overrides:
        key, _, text = word.partition("=")
        if key in CHOICES:
            chosen_before = getattr(choices, key)
            if chosen_before is not None:
                # A boolean is spelled as in YAML.
                shown = str(chosen_before).lower() if key == "proxy" else chosen_before
                raise set_twice(key, f"{key}={shown}", word)
            choices = replace(choices, **{key: _choice(key, text)})  # type: ignore[arg-type]
        elif text.startswith("~/"):
            # The shell leaves ~ as it is after =.
            words.append(f"{key}={expanduser(text)}")
        else:
            words.append(word)
    return choices, words


def _choice(key: str, text: str) -> Value:
    if key not in _SPELLINGS:
        return text
    where = f"{COMMAND_LINE}: {key}"
    value: Value = text
    if re.fullmatch(_SPELLINGS[key], text):
        value = typed_value(text, where)
    check_choice(key, Setting(value=value, origin=where))
    return value


def is_setting(key: str) -> bool:
    """Whether ``key`` is the name of a setting of any backend, long or short."""
    return key in (*_ASSETS, "keep") or key in recipe_rules() or bool(backends_with(key))


def backends_with(key: str) -> list[str]:
    """Return the names of the backends that have the setting ``key``, without their prefix."""
    return [
        name
        for name, backend in backends().items()
        if key in {*backend.keys, *backend.degrees, *backend_rules(name)}
    ]


def read_override(word: str, backend: Backend) -> Override:
    """Read a word that sets a key of the recipe or of its backend. Raises InputError."""
    key, separator, text = word.partition("=")
    if not separator or not key:
        raise InputError(
            f"{word!r} is not key=value",
            where=COMMAND_LINE,
            hint="example: training.steps=5",
        )
    minutes = _minutes(text)
    if key == "checkpoint" and minutes:
        origin = f"{COMMAND_LINE}: {word}"
        return Override(value=minutes, origin=origin, word=word, key="saving.minutes")
    key = _long_name(key, backend)
    full = key
    if _is_native(key, backend):
        full = f"{backend.name}.{key}"
    value: Value = text
    if not _is_text(full, text, backend):
        value = typed_value(text, f"{COMMAND_LINE}: {key}")
    origin = f"{COMMAND_LINE}: {word}"
    return Override(value=value, origin=origin, word=f"{key}={text}", key=full)


def _minutes(text: str) -> float:
    """Return the minutes of a time such as ``30m`` or ``2h``; 0 for other text."""
    match = re.fullmatch(r"([0-9]{1,6})([smh])", text)
    if not match:
        return 0.0
    return int(match[1]) * _MINUTES_OF[match[2]]


def _long_name(key: str, backend: Backend) -> str:
    if key in _ASSETS:
        return f"assets.{key}"
    if key == "keep":
        return "saving.keep"
    native = backend.keys.get(key) or backend.degrees.get(key)
    if native:
        return f"{backend.name}.{native}"
    return key


def _is_native(key: str, backend: Backend) -> bool:
    """Whether ``key`` is the backend's own, typed without the backend's name."""
    section, _, field = key.partition(".")
    if section == backend.name or key in recipe_rules():
        return False
    if key in backend.owned:
        # A size that the recipe's section `model` has under the backend's name for it.
        return section != "model" or field not in model_rules()
    return key in backend_rules(backend.name) or section not in _COMMON_SECTIONS


def _is_text(key: str, text: str, backend: Backend) -> bool:
    """Whether a value is taken as it is: a path may look like a number, or contain a comment."""
    if not text:
        return True
    native = key.removeprefix(f"{backend.name}.")
    rule = recipe_rules().get(key) or backend_rules(backend.name).get(native)
    if rule is None or rule.choices or text[0] in "\"'":
        return False
    return rule.types == {"str"}
