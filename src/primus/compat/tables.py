"""The tables of this package, read from YAML: documented paths, renamed keys and commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, cast

from primus.errors import InputError, nearest
from primus.yamlfile import Scalar, read_values

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The translation of one old key. The comment at the top of ``keys.yaml`` explains the fields."""

    to: str | None = None
    choice: str | None = None
    values: Mapping[str, Scalar] | None = None
    prefix: str = ""
    needs: tuple[str, ...] = ()
    because: str = ""


@dataclass(frozen=True, kw_only=True)
class Documented:
    """The run that a documented path of an experiment file stands for."""

    path: str
    recipe: str
    backend: str
    precision: str
    gpu: str | None
    says: str | None
    settings: Mapping[str, Scalar] = field(default_factory=dict)


@cache
def _table(name: str) -> dict[str, Any]:
    found: Any = read_values(_HERE / f"{name}.yaml").data
    return cast(dict[str, Any], found)


def ignored_variables() -> Mapping[str, str]:
    """Return the variables of the old scripts that have no effect, with the reason."""
    found: Mapping[str, str] = _table("keys")["environment"]
    return found


def commands() -> dict[str, Any]:
    """Return the contents of ``commands.yaml``."""
    return _table("commands")


@cache
def keys(backend: str) -> Mapping[str, Entry]:
    """Return old key → translation, for one backend."""
    table = _table("keys")
    return {key: _entry(what) for key, what in {**table["every"], **table.get(backend, {})}.items()}


def _entry(what: str | dict[str, Any]) -> Entry:
    return Entry(to=what) if isinstance(what, str) else Entry(**{**what, "needs": tuple(what.get("needs", ()))})


def is_kernel(backend: str, key: str) -> bool:
    """Whether a key of the backend selects an implementation without changing what is computed."""
    return any(fnmatchcase(key, name) for name in _table("keys")["kernels"][backend])


def entry(backend: str, key: str) -> Entry | None:
    """Return the entry of ``key``, by name or by a pattern that ends in ``*``; None if there is none."""
    table = keys(backend)
    if key in table:
        return table[key]
    return next((what for name, what in table.items() if name.endswith("*") and fnmatchcase(key, name)), None)


def documented_paths() -> list[Documented]:
    """Return every documented path, in the order of the table."""
    table = _table("paths")
    found = []
    for framework, stems in table["stems"].items():
        for stem in stems:
            for folder in ("", *(f"{gpu}/" for gpu in table["gpus"])):
                for middle in ("", *(f"-{precision}" for precision in table["precisions"])):
                    path = f"examples/{framework}/configs/{folder}{stem}{middle}-pretrain.yaml"
                    found.append(documented(path))
    return found


def documented(name: str) -> Documented:
    """Return what the path ``name`` stands for. Raises InputError, with a similar name, if no document has it."""
    table = _table("paths")
    parts = PurePosixPath(name).parts
    start = next((i for i, part in enumerate(parts) if part in table["frameworks"]), None)
    match = re.fullmatch(r"(.+?)(?:-(BF16|FP8|MXFP8))?(?:-pretrain)?\.(?:ya?ml|toml)", parts[-1] if parts else "")
    if start is None or match is None:
        raise InputError(
            f"there is no file {name}, and no document names it", where=f"EXP={name}",
            hint="as in EXP=examples/megatron/configs/llama3.1_8B-pretrain.yaml, or the name of a recipe",
        )  # fmt: skip
    backend, gpu = table["frameworks"][parts[start]], None
    folders = [part for part in parts[start + 1 : -1] if part not in ("config", "configs")]
    if folders:
        gpu = table["gpus"].get(folders[0])
        if gpu is None or len(folders) > 1:
            raise _unknown("folder", "/".join(folders), table["gpus"], name)
    stem, precision = match[1], match[2]
    if stem not in table["stems"][backend]:
        raise _unknown("model", stem, table["stems"][backend], name)
    recipe, settings = _stem(backend, stem)
    whole = "/".join(parts[max(start - 1, 0) :])
    return Documented(
        path=name, recipe=recipe, backend=backend, precision=table["precisions"].get(precision, "bf16"), gpu=gpu,
        says=table["says"].get(whole), settings=settings,
    )  # fmt: skip


def _stem(backend: str, stem: str) -> tuple[str, Mapping[str, Scalar]]:
    what = _table("paths")["stems"][backend][stem]
    return (what, {}) if isinstance(what, str) else (what["recipe"], what["settings"])


def preset(backend: str, name: str, where: str) -> tuple[str, Mapping[str, Scalar]]:
    """Return the recipe of an experiment's ``model:``, and settings to add to it. InputError if there is none."""
    stems: Mapping[str, Any] = _table("paths")["stems"][backend]
    plain = re.sub(r"-fp8$", "", name)
    if plain not in stems:
        raise InputError(
            f"there is no recipe for the model {plain!r}" + nearest(plain, stems), where=where,
            hint=f"there are: {', '.join(stems)}",
        )  # fmt: skip
    return _stem(backend, plain)


def flavors() -> Mapping[str, str]:
    """Return the name of each documented model → its name and flavor in torchtitan."""
    found: Mapping[str, str] = _table("paths")["flavors"]
    return found


def _unknown(what: str, word: str, known: Mapping[str, Any], where: str) -> InputError:
    return InputError(
        f"no document has a {what} {word!r}" + nearest(word, known), where=where, hint=f"there are: {', '.join(known)}"
    )
