"""Finding recipe files and reading each to a flat table of settings with their places; the entries
of all recipes.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import cast

from primus_images.errors import InputError, nearest
from primus_images.files import stems
from primus_images.gpus.table import load_table, words_for
from primus_images.recipes.architecture import Architecture, Size, architecture, size
from primus_images.recipes.choose import check_choice, computes, supported
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import Setting, Value
from primus_images.yamlfile import Document, Key, Tree, parse_values, read_text, section

_IN_IMAGE = Path("/opt/primus/recipes")


def folder() -> Path:
    """Return the folder of recipes: ``PRIMUS_RECIPES``, that of this source checkout, or that of
    the image.

    If the package is installed as a copy outside an image, the folder is that of the project in the
    current folder or the nearest parent.
    """
    variable = os.environ.get("PRIMUS_RECIPES")
    if variable:
        return Path(variable)
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file() and (checkout / "recipes").is_dir():
        return checkout / "recipes"
    if not _IN_IMAGE.is_dir():
        here = Path.cwd()
        for project in (here, *here.parents):
            if (project / "versions.yaml").is_file() and (project / "recipes").is_dir():
                return project / "recipes"
    return _IN_IMAGE


def names(among: Path | None = None) -> list[str]:
    """Return the sorted names of the recipes in ``among`` (default: :func:`folder`), without
    editors' hidden files.
    """
    return stems(among or folder())


def is_path(name: str) -> bool:
    """Whether a recipe given as ``name`` is meant as the path of its file."""
    return name.endswith((".yaml", ".yml")) or "/" in name


def find(name: str, among: Path | None = None) -> Path:
    """Return the file of a recipe, given by path, or by name in ``among`` (default:
    :func:`folder`).

    Raises InputError, with the available recipes, for a name without a file.
    """
    if is_path(name):
        return Path(name)
    among = among or folder()
    path = among / f"{name}.yaml"
    recipes = names(among)
    if name not in recipes:
        if not recipes:
            raise InputError(
                f"{among} has no recipes",
                hint="change to a project folder, or set PRIMUS_RECIPES to a folder of recipes",
            )
        recipes_text = ", ".join(recipes)
        raise InputError(
            f"there is no recipe {name!r}{nearest(name, recipes)}",
            hint=f"recipes in {among}: {recipes_text}",
        )
    return path


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings that apply if every choice in ``when``, and the sequence length, has one of the
    listed values.
    """

    when: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, Setting]

    def holds(self, chosen: Mapping[str, str]) -> bool:
        """Whether ``chosen`` (choice → value) meets every condition.

        ``nodes: multi`` matches any number above one, and ``gpu`` also its architecture and vendor.
        """
        return all(
            chosen.get(choice) in values
            or (choice == "nodes" and "multi" in values and chosen["nodes"] != "1")
            or (choice == "gpu" and not words_for(chosen["gpu"]).isdisjoint(values))
            for choice, values in self.when.items()
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """The contents of a recipe file: the settings that always apply, the cases in order, and the
    files read.
    """

    settings: dict[str, Setting]
    cases: list[Case]
    files: tuple[Path, ...] = ()


def read(path: Path) -> Source:
    """Read a recipe file after the files in its ``uses``, each of them once. Raises InputError with
    the place.
    """
    settings: dict[str, Setting] = {}
    cases: list[Case] = []
    files: dict[str, Path] = {}  # by its real path

    def collect(path: Path, *line: str) -> None:
        source, uses = parse(read_text(path), str(path))
        files[line[-1]] = path
        for name in uses:
            used = beside(path, str(name.value))
            real = os.path.realpath(used)
            if real in line:
                raise InputError(f"{used.name} uses itself", where=name.origin)
            if real in files:
                continue
            if used.is_dir() or not (used.exists() or used.is_symlink()):
                raise InputError(
                    f"there is no file {name.value!r}, which `uses` names", where=name.origin
                )
            collect(used, *line, real)
        settings.update(source.settings)
        cases.extend(source.cases)

    collect(path, os.path.realpath(path))
    return Source(settings=settings, cases=cases, files=tuple(files.values()))


def beside(path: Path, name: str) -> Path:
    """Return the file that the recipe at ``path`` calls ``name``: next to it, or else among
    primus's own recipes.
    """
    near = path.parent / name
    if near.exists() or not (folder() / name).exists():
        return near
    return folder() / name


@lru_cache(maxsize=256)  # listing all recipes reads the same shared files many times
def parse(text: str, file: str) -> tuple[Source, list[Setting]]:
    """Parse recipe text. Returns settings under dotted keys, and the files it uses. ``file`` names
    it in origins.

    Raises InputError for duplicate keys, and for anything but mappings, plain values and lists of
    plain values.
    """
    document = parse_values(text, file)
    if not isinstance(document.data, dict):
        raise InputError("a recipe must be a mapping of keys to values", where=document.origin())
    settings = _settings(document, (), document.data, ("cases", "uses"))
    uses = []
    for index, item in enumerate(_items(document, "uses")):
        origin = document.origin(("uses", index))
        if not isinstance(item, str):
            raise InputError(f"uses must name files, not {item!r}", where=origin)
        uses.append(Setting(value=item, origin=origin))
    cases = [_case(document, index, item) for index, item in enumerate(_items(document, "cases"))]
    for key, setting in settings.items():
        if key.startswith("default."):
            check_choice(key.removeprefix("default."), setting)
    return Source(settings=settings, cases=cases), uses


def _items(document: Document, key: str) -> list[Tree]:
    if isinstance(document.data, dict):
        value = document.data.get(key, [])
    else:
        value = []
    if not isinstance(value, list):
        raise InputError(f"{key} must be a list", where=document.origin((key,)))
    return value


def _case(document: Document, index: int, data: Tree) -> Case:
    place: Key = ("cases", index)
    if not isinstance(data, dict):
        raise InputError(
            "a case must be a mapping with 'when' and settings", where=document.origin(place)
        )
    conditions = data.get("when")
    if not isinstance(conditions, dict) or not conditions:
        raise InputError(
            "a case needs 'when': the choices it applies to",
            where=document.origin((*place, "when")),
        )
    because = data.get("because", "")
    if not isinstance(because, str):
        raise InputError(
            f"because must be text, not {because!r}", where=document.origin((*place, "because"))
        )
    when = _settings(document, (*place, "when"), conditions)
    for choice, setting in when.items():
        check_choice(choice, setting, condition=True)
    settings = _settings(document, place, data, ("when", "because"))
    if "nodes" in settings:
        check_choice("nodes", settings["nodes"])
        if "nodes" in when:
            raise InputError(
                "a case for a number of nodes cannot set nodes", where=settings["nodes"].origin
            )
    return Case(
        when={choice: words(setting.value) for choice, setting in when.items()},
        settings={key: replace(setting, because=because) for key, setting in settings.items()},
    )


def words(value: Value) -> tuple[str, ...]:
    """Return a choice's value, or each of its values, as conditions of cases compare it."""
    if isinstance(value, list):
        items = value
    else:
        items = [value]
    return tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in items)


def _settings(
    document: Document, place: Key, data: Mapping[str, Tree], other: Sequence[str] = ()
) -> dict[str, Setting]:
    """Return the settings in ``data`` by dotted names; ``a.b: 1`` and ``a: {b: 1}`` are the same
    key.
    """
    settings: dict[str, Setting] = {}
    for at, value in _leaves(
        place, {key: value for key, value in data.items() if key not in other}
    ):
        key = ".".join(map(str, at[len(place) :]))
        if key in settings:
            origin = settings[key].origin
            raise InputError(
                f"duplicate key {key!r}",
                where=document.where(at),
                hint=f"it is also set at {origin}",
            )
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, list | dict):
                raise InputError(
                    f"{key} must hold plain values only", where=document.origin((*at, index))
                )
        settings[key] = Setting(value=cast(Value, value), origin=document.origin(at))
    return settings


def _leaves(place: Key, data: Tree) -> Iterator[tuple[Key, Tree]]:
    if isinstance(data, dict):
        for word, value in data.items():
            yield from _leaves((*place, word), value)
    else:
        yield place, data


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One recipe with one backend in one mode.

    ``precisions``: precision of the full model → GPUs that support it. ``proxy``: precisions of the
    proxy on a CPU. ``only_proxy``: there is no full model.
    """

    recipe: str
    path: Path
    description: str
    architecture: Architecture
    size: Size
    backend: str
    mode: str
    precisions: Mapping[str, tuple[str, ...]]
    proxy: tuple[str, ...]
    only_proxy: bool

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPUs that support at least one of the precisions."""
        able = {gpu for some in self.precisions.values() for gpu in some}
        return tuple(gpu for gpu in gpus() if gpu in able)


def gpus() -> tuple[str, ...]:
    """Return every GPU that a recipe can be resolved for, in the order of the table."""
    return tuple(generation.name for generation in load_table().generations)


def entries() -> Iterator[Entry]:
    """Yield all entries, sorted by recipe. Raises InputError for a recipe file that cannot be read."""
    for name in names():
        path = find(name)
        settings = read(path).settings
        for key in ("model.family", "description"):
            if key not in settings:
                raise InputError(f"{key} is missing", where=f"{path}:1:1")
        model = architecture(
            {key: setting.value for key, setting in section(settings, "model").items()}
        )
        for (backend, mode), precisions in supported(settings).items():
            yield Entry(
                recipe=name,
                path=path,
                description=str(settings["description"].value),
                architecture=model,
                size=size(model),
                backend=backend,
                mode=mode,
                precisions={
                    p: tuple(gpu for gpu in gpus() if computes(gpu, p, backend)) for p in precisions
                },
                only_proxy="default.proxy" in settings and settings["default.proxy"].value is True,
                proxy=tuple(p for p in backends()[backend].cpu if p == "fp32" or p in precisions),
            )


def check(folder: Path) -> None:
    """Raise InputError, with the place, for a recipe in ``folder`` that does not load."""
    for name in names(folder):
        supported(read(folder / f"{name}.yaml").settings)
