"""Defaults of Primus's presets: from the data in ``presets/``, or from the files of a checkout of Primus.

Keys are dotted and values plain. How a preset file takes over another one differs between versions of Primus:
``bases`` and ``includes`` fill in what the file does not set (v25.7), later versions merge what ``extends`` names, the
last one first of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from primus.compat.document import plain
from primus.errors import InputError, nearest
from primus.recipes.setting import Value
from primus.yamlfile import read_values

__all__ = [
    "FRAMEWORKS",
    "Flat",
    "Kind",
    "Presets",
    "checkout_of",
    "flat",
    "known_versions",
    "neutral",
    "presets",
    "put",
]

Flat = dict[str, Value]
Kind = Literal["modules", "models"]
FRAMEWORKS = ("megatron", "torchtitan")
_DATA = Path(__file__).parent / "presets"
_KINDS = {"modules": "preset", "models": "model"}


@dataclass(frozen=True, kw_only=True)
class Presets:
    """The presets of one version for one framework. ``source`` is how sentences call it: "Primus v25.10"."""

    source: str
    framework: str
    files: Mapping[str, Mapping[str, Flat]]
    folder: Path | None = field(default=None, repr=False)

    def layer(self, kind: Kind, name: str, where: str) -> Flat:
        """All keys of a file of ``modules`` or ``models``, with those of the files below it.

        InputError names the nearest when the version has no such file.
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
        """The same, or None when the version has no such file."""
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
    """Versions that the data hold, oldest first."""
    return [str(one["version"]) for one in _table("megatron")]


def presets(framework: str, version: str | None = None) -> Presets:
    """The presets of a documented version (None: the newest), or of a checkout of Primus named by its folder."""
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
        hint=f"there are: {', '.join(known)}; a checkout of Primus is named by its folder",
    )  # fmt: skip


@cache
def neutral(framework: str) -> Mapping[str, Value]:
    """What each key holds where nobody asks for anything: the preset and the base of the models, the newest version's.

    Keys that only an older version has are among them, too.
    """
    found: Flat = {}
    for one in _table(framework):
        found |= one["modules"].get("pre_trainer", {}).get("set", {})
        found |= one["base"]["set"]
    return found


def checkout_of(path: Path) -> Path | None:
    """The checkout of Primus that a file lies in; None when it lies in none."""
    return next((above for above in path.absolute().parents if (above / "primus/configs/modules").is_dir()), None)


def put(into: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key: it replaces what was below it, and a value that was a part of its name."""
    for old in [old for old in into if old.startswith(f"{key}.") or key.startswith(f"{old}.")]:
        del into[old]
    into.pop(key, None)
    into[key] = value


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted keys. An empty mapping has none."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@cache
def _table(framework: str) -> list[dict[str, Any]]:
    found: Any = read_values(_DATA / f"{framework}.yaml").data
    return cast(list[dict[str, Any]], found)


@cache
def _documented(framework: str, version: str) -> Mapping[str, Mapping[str, Flat]]:
    """The data up to ``version``: modules and the base of the models change, a model stands whole over the base."""
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
    """A preset of a checkout with what it takes over."""
    if path in above:
        raise InputError(f"{path.name} extends itself", where=str(path))
    own = {key: one.value for key, one in plain(path).items()}
    # Only the newer reader knows `extends`; to it, the older words are keys like any other.
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
