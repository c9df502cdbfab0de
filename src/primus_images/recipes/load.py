"""Finding recipe files, and reading each to a flat table of settings with their places."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from primus_images.errors import InputError, nearest
from primus_images.files import stems
from primus_images.gpus.table import load_table, words_for
from primus_images.recipes.architecture import Architecture, Size, architecture, size
from primus_images.recipes.choose import (
    MULTI,
    check_choice,
    check_condition,
    computes,
    items_of,
    supported,
)
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import Setting, Settings
from primus_images.yamlfile import Document, Key, Scalar, Tree, parse_values, read_text, section

_IN_IMAGE = Path("/opt/primus/recipes")


def folder() -> Path:
    """Return the folder of recipes: ``PRIMUS_RECIPES``, else that of this checkout or image.

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
    """Return the sorted names of the recipes in ``among`` (default: :func:`folder`)."""
    return stems(among or folder())


def is_path(name: str) -> bool:
    """Whether a recipe given as ``name`` is meant as the path of its file."""
    return name.endswith((".yaml", ".yml")) or "/" in name


def find(name: str, among: Path | None = None) -> Path:
    """Return the file of a recipe, given by path, or by name in ``among``.

    Raises InputError, with the available recipes, for a name without a file.
    """
    if is_path(name):
        return Path(name)
    among = among or folder()
    recipes = names(among)
    if not recipes:
        raise InputError(
            f"{among} has no recipes",
            hint="change to a project folder, or set PRIMUS_RECIPES to a folder of recipes",
        )
    if name not in recipes:
        raise InputError(
            f"there is no recipe {name!r}{nearest(name, recipes)}",
            hint=f"recipes in {among}: {', '.join(recipes)}",
        )
    return among / f"{name}.yaml"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings that apply if every choice in ``when`` has one of the listed values."""

    when: Mapping[str, tuple[str, ...]]
    settings: Settings

    def holds(self, facts: Mapping[str, str]) -> bool:
        """Whether ``facts`` (choice → value, and the sequence length) meet every condition."""
        return all(
            _is_met(choice, values, facts.get(choice, "")) for choice, values in self.when.items()
        )


def _is_met(choice: str, values: Sequence[str], fact: str) -> bool:
    if choice == "nodes" and fact != "1" and MULTI in values:
        return True
    if choice == "gpu":
        # A GPU also answers to its architecture and its vendor.
        return not words_for(fact).isdisjoint(values)
    return fact in values


@dataclass(frozen=True, kw_only=True)
class Source:
    """What recipe files say: settings that always apply, cases in order, and the files read.

    ``says`` are sentences for the user about how an experiment file was read.
    """

    settings: Settings
    cases: Sequence[Case]
    files: tuple[Path, ...] = ()
    says: tuple[str, ...] = ()


def read(path: Path) -> Source:
    """Read a recipe file after the files in its ``uses``, each of them once.

    Raises InputError with the place.
    """
    return read_all([path])


def read_all(paths: Sequence[Path]) -> Source:
    """Read recipe files in order, each after the files in its ``uses``, and each file once."""
    settings: dict[str, Setting] = {}
    cases: list[Case] = []
    files: dict[str, Path] = {}  # by its real path

    def collect(path: Path, *using: str) -> None:
        source, uses = parse(read_text(path), str(path))
        files[using[-1]] = path
        for name in uses:
            used = beside(path, str(name.value))
            real = os.path.realpath(used)
            if real in using:
                raise InputError(f"{used.name} uses itself", where=name.origin)
            if used.is_dir() or not (used.exists() or used.is_symlink()):
                raise InputError(
                    f"there is no file {name.value!r}, which `uses` names", where=name.origin
                )
            if real not in files:
                collect(used, *using, real)
        settings.update(source.settings)
        cases.extend(source.cases)

    for path in paths:
        real = os.path.realpath(path)
        if real not in files:
            collect(path, real)
    return Source(settings=settings, cases=cases, files=tuple(files.values()))


def beside(path: Path, name: str) -> Path:
    """Return the file ``name`` next to the recipe at ``path``, or else among primus's own."""
    near = path.parent / name
    own = folder() / name
    if own.exists() and not near.exists():
        return own
    return near


@lru_cache(maxsize=256)  # listing all recipes reads the same shared files many times
def parse(text: str, file: str) -> tuple[Source, list[Setting]]:
    """Parse recipe text, which ``file`` names in origins. Returns it with the files that it uses.

    Raises InputError for duplicate keys, and for anything but mappings, plain values and lists of
    plain values.
    """
    document = parse_values(text, file)
    if not isinstance(document.data, dict):
        raise InputError("a recipe must be a mapping of keys to values", where=document.origin())
    settings = _settings(document, (), document.data, ("cases", "uses"))
    uses = []
    for index, name in enumerate(_items(document, "uses")):
        origin = document.origin(("uses", index))
        if not isinstance(name, str):
            raise InputError(f"uses must name files, not {name!r}", where=origin)
        uses.append(Setting(value=name, origin=origin))
    cases = [_case(document, index, item) for index, item in enumerate(_items(document, "cases"))]
    for key, setting in settings.items():
        if key.startswith("default."):
            check_choice(key.removeprefix("default."), setting)
    return Source(settings=settings, cases=cases), uses


def _items(document: Document, key: str) -> list[Tree]:
    items = document.data.get(key, [])
    if not isinstance(items, list):
        raise InputError(f"{key} must be a list", where=document.origin((key,)))
    return items


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
        check_condition(choice, setting)
    settings = _settings(document, place, data, ("when", "because"))
    if "nodes" in settings:
        check_choice("nodes", settings["nodes"])
        if "nodes" in when:
            raise InputError(
                "a case for a number of nodes cannot set nodes", where=settings["nodes"].origin
            )
    return Case(
        when={choice: words(setting) for choice, setting in when.items()},
        settings={key: replace(setting, because=because) for key, setting in settings.items()},
    )


def words(setting: Setting) -> tuple[str, ...]:
    """Return a choice's value, or each of its values, as conditions of cases compare it."""
    return tuple(map(_word, items_of(setting)))


def _word(item: Scalar) -> str:
    if isinstance(item, bool):
        return str(item).lower()
    return str(item)


def _settings(
    document: Document, place: Key, data: Mapping[str, Tree], others: Sequence[str] = ()
) -> dict[str, Setting]:
    """Return the settings in ``data`` by dotted names, without the keys ``others``.

    ``a.b: 1`` and ``a: {b: 1}`` are the same key.
    """
    settings: dict[str, Setting] = {}
    mine = {key: value for key, value in data.items() if key not in others}
    for leaf, value in _leaves(place, mine):
        key = ".".join(map(str, leaf[len(place) :]))
        if key in settings:
            raise InputError(
                f"duplicate key {key!r}",
                where=document.where(leaf),
                hint=f"it is also set at {settings[key].origin}",
            )
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, list | dict):
                raise InputError(
                    f"{key} must hold plain values only", where=document.origin((*leaf, index))
                )
        settings[key] = Setting(value=value, origin=document.origin(leaf))  # type: ignore[arg-type]
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
        able: set[str] = set()
        for names in self.precisions.values():
            able.update(names)
        return tuple(gpu for gpu in gpus() if gpu in able)


def gpus() -> tuple[str, ...]:
    """Return every GPU that a recipe can be resolved for, in the order of the table."""
    return tuple(generation.name for generation in load_table().generations)


def entries() -> Iterator[Entry]:
    """Yield all entries, sorted by recipe. Raises InputError for a file that cannot be read."""
    for name in names():
        path = find(name)
        settings = read(path).settings
        for key in ("model.family", "description"):
            if key not in settings:
                raise InputError(f"{key} is missing", where=f"{path}:1:1")
        sizes = section(settings, "model")
        model = architecture({key: setting.value for key, setting in sizes.items()})
        for (backend, mode), precisions in supported(settings).items():
            on_cpu = backends()[backend].cpu
            yield Entry(
                recipe=name,
                path=path,
                description=str(settings["description"].value),
                architecture=model,
                size=size(model),
                backend=backend,
                mode=mode,
                precisions={word: _able(word, backend) for word in precisions},
                proxy=tuple(word for word in on_cpu if word == "fp32" or word in precisions),
                only_proxy="default.proxy" in settings and settings["default.proxy"].value is True,
            )


def _able(precision: str, backend: str) -> tuple[str, ...]:
    return tuple(gpu for gpu in gpus() if computes(gpu, precision, backend))


def check(folder: Path) -> None:
    """Raise InputError, with the place, for a recipe in ``folder`` that does not load."""
    for name in names(folder):
        supported(read(folder / f"{name}.yaml").settings)
