"""Reading Primus's experiment files, and merging them with the presets that they name, as Primus does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from primus.compat.document import at, filled, flatten, mapping
from primus.compat.presets import FRAMEWORKS, Kind, Presets, checkout_of, known_versions, presets, put
from primus.compat.words import Given
from primus.errors import InputError, nearest
from primus.yamlfile import Values, read_values

_HEAD = ("work_group", "user_name", "exp_name", "workspace")
_TRAINER = ("framework", "config", "model", "overrides")
_BASES = ("extends", "bases", "includes")


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Every key that Primus would train with: those of the preset and of the model, overridden by those of the file.

    ``model`` is Primus's name of the model, and ``model_place`` the place of that name in the file. ``source`` is the
    version of Primus whose presets were used. ``absent`` are keys of the file that these presets do not have.
    ``repeated`` are duplicate keys of the file, whose last value Primus uses.
    """

    path: Path
    name: str
    framework: str
    model: str
    model_place: str
    source: str
    keys: Mapping[str, Given]
    absent: tuple[str, ...]
    repeated: tuple[str, ...]


def is_experiment(path: Path) -> bool:
    """Whether the file has the key ``modules``, which only Primus experiments have. InputError for invalid YAML."""
    data = read_values(path, keep_last=True).data
    return isinstance(data, dict) and "modules" in data


def merge(path: Path, environment: Mapping[str, str], *, version: str | None = None) -> Merged:
    """Read an experiment file and merge it with its presets. Raises InputError with the place of the error.

    ``version`` is one of the documented versions of Primus, or the folder of a checkout. The default is the checkout
    that contains the file or, if there is none, the newest version that has all of the file's keys.
    """
    document = read_values(path, keep_last=True)
    data = mapping(document, ())
    modules = mapping(document, ("modules",))
    for key in data:
        if key not in (*_HEAD, "modules"):
            raise _no_key(document, (key,), [*_HEAD, "modules"])
    for key in modules:
        if key != "pre_trainer":
            raise _no_key(document, ("modules", key), ["pre_trainer"])
    trainer = mapping(document, ("modules", "pre_trainer"))
    for key in trainer:
        if key not in _TRAINER:
            raise _no_key(document, ("modules", "pre_trainer", key), _TRAINER)
    place = ("modules", "pre_trainer")
    framework = _text(document, (*place, "framework"), environment)
    if framework not in FRAMEWORKS:
        raise InputError(
            f"there is no framework {framework!r}" + nearest(framework, FRAMEWORKS),
            where=document.where((*place, "framework")), hint=f"there are: {', '.join(FRAMEWORKS)}",
        )  # fmt: skip
    model = _text(document, (*place, "model"), environment)
    config = _text(document, (*place, "config"), environment) if "config" in trainer else "pre_trainer.yaml"
    overrides: dict[str, Given] = {}
    if trainer.get("overrides") is not None:
        flatten(document, (*place, "overrides"), len(place) + 1, environment, overrides)
    wheres = document.where((*place, "config")), document.where((*place, "model"))
    tried = []
    for one in _candidates(framework, path, version, model):
        way = _Merge(presets=one, near=path.parent, environment=environment)
        tried.append((one, *way.merged(config, model, wheres, overrides)))
        if not tried[-1][3]:
            break
    used, keys, stem, absent = tried[0] if tried[-1][3] else tried[-1]
    return Merged(
        path=path, name=_text(document, ("exp_name",), environment) if "exp_name" in data else path.stem,
        framework=framework, model=stem, model_place=wheres[1], source=used.source, keys=keys, absent=absent,
        repeated=document.repeated,
    )  # fmt: skip


def _candidates(framework: str, path: Path, version: str | None, model: str) -> list[Presets]:
    """Return the presets to try, the most likely first."""
    if version is not None:
        return [presets(framework, version)]
    checkout = checkout_of(path)
    if checkout is not None:
        return [presets(framework, str(checkout))]
    found = [presets(framework, one) for one in reversed(known_versions())]
    own = (path.parent / model).is_file()
    return [one for one in found if own or one.find("models", _stem(model)) is not None] or found[:1]


def _stem(name: str) -> str:
    return name.removesuffix(".yaml").removesuffix(".yml")


@dataclass(frozen=True, kw_only=True)
class _Merge:
    """Primus's merge of preset, model and overrides. Files beside the experiment take precedence over Primus's own."""

    presets: Presets
    near: Path
    environment: Mapping[str, str]

    def merged(
        self, config: str, model: str, wheres: tuple[str, str], overrides: Mapping[str, Given]
    ) -> tuple[dict[str, Given], str, tuple[str, ...]]:
        """Return every key, Primus's name of the model, and the overridden keys that neither preset nor model has."""
        merged, _ = self.layer("modules", config, wheres[0])
        above, stem = self.layer("models", model, wheres[1])
        twice = next((key for key in above if key in merged), None)
        if twice is not None:
            raise InputError(f"{twice} is set by the preset and by the model, which Primus refuses", where=wheres[1])
        merged.update(above)
        absent = tuple(key for key in overrides if not _has(merged, key))
        for key, one in overrides.items():
            # Primus reads the text "null" as null in overrides, and nowhere else.
            put(merged, key, replace(one, value=None) if one.value == "null" else one)
        return merged, stem, absent

    def layer(self, kind: Kind, name: str, where: str) -> tuple[dict[str, Given], str]:
        """Return the keys of a preset file with those of its bases, and the name of the lowest base from Primus."""
        path = self.near / name
        if not path.is_file():
            return self._primus(kind, name, where), _stem(Path(name).name)
        merged, base = self._own(kind, path, ())
        if base is None:
            # A file that extends nothing overrides the preset of the same name.
            found = self.presets.find(kind, _stem(path.name))
            below = self._primus(kind, path.name if found or kind == "models" else "pre_trainer.yaml", where)
            for key, one in merged.items():
                put(below, key, one)
            merged, base = below, _stem(path.name)
        return merged, base

    def _primus(self, kind: Kind, name: str, where: str) -> dict[str, Given]:
        place = f"{self.presets.source}, {Path(name).name}"
        keys = self.presets.layer(kind, name, where)
        return {key: Given(key=key, value=value, where=place, layer=kind) for key, value in keys.items()}

    def _own(self, kind: Kind, path: Path, above: tuple[Path, ...]) -> tuple[dict[str, Given], str | None]:
        if path in above:
            raise InputError(f"{path.name} extends itself", where=str(path))
        document = read_values(path)
        data = mapping(document, ())
        merged: dict[str, Given] = {}
        base: str | None = None
        for word in _BASES:
            value = data.get(word)
            if value is None:
                continue
            for index, name in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(name, str):
                    raise InputError(f"{word} must name files", where=document.where((word, index)))
                near = path.parent / name
                if near.is_file():
                    below, found = self._own(kind, near, (*above, path))
                else:
                    below, found = self._primus(kind, name, document.where((word, index))), _stem(Path(name).name)
                base = found or base
                for key, one in below.items():
                    put(merged, key, one)
        own: dict[str, Given] = {}
        for key in data:
            if key not in _BASES:
                flatten(document, (key,), 0, self.environment, own)
        for key, one in own.items():
            put(merged, key, one)
        return merged, base


def _has(merged: Iterable[str], key: str) -> bool:
    return any(one == key or one.startswith(f"{key}.") for one in merged)


def _text(document: Values, key: tuple[str | int, ...], environment: Mapping[str, str]) -> str:
    value = at(document, key)
    if not isinstance(value, str):
        raise InputError(f"{'.'.join(map(str, key))} is missing", where=document.where(key))
    return filled(value, document.where(key), environment)


def _no_key(document: Values, key: tuple[str | int, ...], known: Sequence[str]) -> InputError:
    word = str(key[-1])
    return InputError(
        f"there is no key {word!r} here" + nearest(word, known), where=document.where(key),
        hint=f"there are: {', '.join(known)}",
    )  # fmt: skip
