"""Checks of the choices in a recipe file: backend, mode, precision, gpu, nodes and proxy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from primus.errors import InputError, nearest
from primus.gpus.names import generation_names
from primus.recipes.backends import backends
from primus.recipes.setting import CHOICES, Setting
from primus.yamlfile import Scalar

CPU = "cpu"
PRECISIONS = ("fp32", "bf16", "fp8", "mxfp8")
MULTI = "multi"


def supported(settings: Mapping[str, Setting]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return (backend, mode) → precisions from the recipe's section ``supports``, in its order."""
    cells: dict[tuple[str, str], tuple[str, ...]] = {}
    for key, setting in settings.items():
        if key.startswith("supports."):
            _, backend, mode = (*key.split("."), "", "")[:3]
            value = setting.value if isinstance(setting.value, list) else [setting.value]
            among("backend", backend, list(backends()), setting.origin)
            among("mode", mode, list(backends()[backend].modes), setting.origin)
            for word in value:
                among("precision", str(word), list(PRECISIONS), setting.origin)
            if not value:
                raise InputError(f"{key} names no precision", where=setting.origin)
            cells[backend, mode] = tuple(map(str, value))
    return cells


def among(what: str, word: str, offered: list[str], where: str) -> None:
    """Raise InputError, with the most similar name, if ``word`` is not in ``offered``."""
    if word not in offered:
        raise InputError(
            f"there is no {what} {word!r} here" + nearest(word.lower(), offered),
            where=where, hint=f"there are: {', '.join(offered)}",
        )  # fmt: skip


def check_choice(choice: str, where: str) -> None:
    """Raise InputError, with the most similar name, if ``choice`` is not the name of a choice."""
    if choice not in CHOICES:
        raise InputError(
            f"there is no choice {choice!r}" + nearest(choice, CHOICES),
            where=where, hint=f"choices: {', '.join(CHOICES)}",
        )  # fmt: skip


def check_word(choice: str, setting: Setting, *, several: bool) -> None:
    """Raise InputError if a word of ``setting`` is not a value of ``choice``.

    ``several`` is for the condition of a case, which may be a list.
    """
    if isinstance(setting.value, list) and not several:
        raise InputError(f"{choice} must be one word", where=setting.origin)
    for word in setting.value if isinstance(setting.value, list) else [setting.value]:
        _check(choice, word, setting.origin, several=several)


def _check(choice: str, word: Scalar, where: str, *, several: bool) -> None:
    if choice == "proxy":
        if not isinstance(word, bool):
            raise InputError(f"proxy must be true or false, not {word!r}", where=where)
    elif choice == "nodes":
        if (not isinstance(word, int) or isinstance(word, bool) or word < 1) and not (several and word == MULTI):
            words = f"a whole number of at least 1{f' or {MULTI}' if several else ''}"
            raise InputError(f"nodes must be {words}, not {word!r}", where=where)
    elif str(word) not in (known := _known(choice)):
        among(choice, str(word), known, where)


@cache
def _known(choice: str) -> list[str]:
    if choice == "gpu":
        return [CPU, *generation_names()]
    if choice == "precision":
        return list(PRECISIONS)
    return list(
        dict.fromkeys(mode for b in backends().values() for mode in b.modes) if choice == "mode" else backends()
    )
