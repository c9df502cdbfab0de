"""Defaults of Primus's presets: from the data in ``presets/``, or from the files of a checkout of Primus.

Keys are dotted and values plain. How a preset file inherits from another one differs between versions of Primus. In
v25.7, the files of ``bases`` and ``includes`` supply keys that the file does not set. Later versions merge the files of
``extends`` in order, so that later ones override earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from primus.compat.document import plain
from primus.errors import InputError, nearest
from primus.recipes.setting import Value
from primus.yamlfile import read_values

Flat = dict[str, Value]
Kind = Literal["modules", "models"]
FRAMEWORKS = ("megatron", "torchtitan")
_DATA = Path(__file__).parent / "presets"
_KINDS = {"modules": "preset", "models": "model"}


@dataclass(frozen=True, kw_only=True)
class Presets:
    """The presets of one version for one framework. ``source`` is its name in messages, such as "Primus v25.10"."""

    source: str
    framework: str
    files: Mapping[str, Mapping[str, Flat]]
    folder: Path | None = field(default=None, repr=False)

    def layer(self, kind: Kind, name: str, where: str) -> Flat:
        """Return all keys of a file of ``modules`` or ``models``, with inherited ones.

        Raises InputError, with the most similar name, if the version does not have the file.
        """
        stem = name.removesuffix(".yaml").removesuffix(".yml")
        found = self.find(kind, stem)
        if found is None:
            known = self.names(kind)
            raise InputError(
                f"{self.source} has no {_KINDS[kind]} {stem!r} for {self.framework}" + nearest(stem, known),
                where=where, hint=f"there are: {', '.join(known)}",
            )  # fmt: skip
        return found

    def find(self, kind: Kind, stem: str) -> Flat | None:
        """Return the same keys, or None if the version does not have the file."""
        if self.folder is None:
            return self.files[kind].get(stem)
        path = self.folder / "configs" / kind / self.framework / f"{stem}.yaml"
        return _file(path, self.folder, ()) if path.is_file() else None

    def names(self, kind: Kind) -> list[str]:
        """The names of all files of a kind."""
        if self.folder is None:
            return list(self.files[kind])
        root = self.folder / "configs" / kind / self.framework
        return sorted(path.relative_to(root).as_posix().removesuffix(".yaml") for path in root.rglob("*.yaml"))


def known_versions() -> list[str]:
    """Return the versions in the data, oldest first."""
    return [str(one["version"]) for one in _table("megatron")]


def presets(framework: str, version: str | None = None) -> Presets:
    """Return the presets of a documented version (None: the newest) or of the folder of a Primus checkout.

    Raises InputError for any other ``version``.
    """
    known = known_versions()
    if version is None:
        version = known[-1]
    if version in known:
        return Presets(source=f"Primus {version}", framework=framework, files=_documented(framework, version))
    folder = Path(version)
    if (folder / "primus" / "configs").is_dir():
        return Presets(source=f"Primus in {version}", framework=framework, files={}, folder=folder / "primus")
    raise InputError(
        f"there is no version {version!r} of Primus here" + nearest(version, known), where="--primus",
        hint=f"there are: {', '.join(known)}; or pass the folder of a Primus checkout",
    )  # fmt: skip


@cache
def neutral(framework: str) -> Mapping[str, Value]:
    """Return Primus's default of each key: from the preset and the models' base, of the newest version that has it."""
    found: Flat = {}
    for one in _table(framework):
        found |= one["modules"].get("pre_trainer", {}).get("set", {})
        found |= one["base"]["set"]
    return found


def checkout_of(path: Path) -> Path | None:
    """Return the Primus checkout that contains a file, or None."""
    return next((above for above in path.absolute().parents if (above / "primus/configs/modules").is_dir()), None)


def put(into: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. It replaces all keys below it, and any value at a prefix of its name."""
    for old in [old for old in into if old.startswith(f"{key}.") or key.startswith(f"{old}.")]:
        del into[old]
    into.pop(key, None)
    into[key] = value


@cache
def _table(framework: str) -> list[dict[str, Any]]:
    found: Any = read_values(_DATA / f"{framework}.yaml").data
    return cast(list[dict[str, Any]], found)


@cache
def _documented(framework: str, version: str) -> Mapping[str, Mapping[str, Flat]]:
    """Apply the data up to ``version``. Modules and the models' base accumulate changes; a model overrides the base."""
    modules: dict[str, Flat] = {}
    base: Flat = {}
    models: dict[str, Flat] = {}
    for one in _table(framework):
        for name, change in one["modules"].items():
            modules[name] = _changed(modules.get(name, {}), change)
        base = _changed(base, one["base"])
        models.update(one["models"])
        for name in one.get("gone", ()):
            del models[name]
        if one["version"] == version:
            break
    whole = {}
    for name, own in models.items():
        whole[name] = dict(base)
        for key, value in own.items():
            put(whole[name], key, value)
    return {"modules": modules, "models": whole}


def _changed(before: Flat, change: Mapping[str, Any]) -> Flat:
    gone, now = set(change.get("gone", ())), cast(Flat, change["set"])
    return {key: value for key, value in before.items() if key not in gone} | now


def _file(path: Path, folder: Path, above: tuple[Path, ...]) -> Flat:
    """Return the keys of a preset file of a checkout, with inherited ones."""
    if path in above:
        raise InputError(f"{path.name} extends itself", where=str(path))
    own = {key: one.value for key, one in plain(path).items()}
    # Only the newer reader supports `extends`. It treats `bases` and `includes` as ordinary keys.
    newer = (folder / "core/config/yaml_loader.py").is_file()
    merged: Flat = {}
    for word in ("extends",) if newer else ("bases", "includes"):
        for name in _names(own.pop(word, None)):
            below = _file(path.parent / name, folder, (*above, path))
            for key, value in below.items():
                if newer or key not in merged:
                    put(merged, key, value)
    for key, value in own.items():
        put(merged, key, value)
    return merged


def _names(value: Value) -> list[str]:
    return [str(name) for name in (value if isinstance(value, list) else [] if value is None else [value])]
