"""The catalogue of optimizations for training runs: requirements, exclusions and effects.

Pure: the recipe determines which ones apply, so every machine resolves the same list. Whether their packages are
installed is checked on the machine that trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.errors import InputError, nearest
from primus.gpus.table import load_table
from primus.yamlfile import read_values

if TYPE_CHECKING:
    from primus.recipes.recipe import Recipe

CALLS: Counter[str] = Counter()
"""Calls in this process, by the names that the catalogue's ``proof`` entries list."""

OPTIMIZATIONS_FILE = Path(__file__).with_name("optimizations.yaml")


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """One entry. An empty requirement accepts everything."""

    name: str
    title: str
    gain: str
    provider: str
    proof: tuple[str, ...]
    test: str
    auto: bool
    backends: tuple[str, ...]
    precisions: tuple[str, ...]
    families: tuple[str, ...] = ()
    vendors: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    settings: Mapping[str, str | bool] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    sharded: bool = False

    def objections(self, recipe: Recipe) -> Iterator[str]:
        """Yield the reasons why ``recipe`` cannot use it, each as the end of "NAME needs …"."""
        for what, value, accepted in (
            ("backend", recipe.backend, self.backends),
            ("precision", recipe.precision, self.precisions),
            ("model family", recipe.architecture.family, self.families),
        ):
            if accepted and value not in accepted:
                yield f"{what} {' or '.join(accepted)}, not {value}"
        yield from self._gpu_objections(recipe.gpu)
        for key, wanted in self.settings.items():
            if key in recipe.settings and recipe.settings[key].value != wanted:
                yield f"{key}={_text(wanted)}, not {_text(recipe.settings[key].value)}"
            elif key not in recipe.settings and wanted is True:
                yield f"{key}={_text(wanted)}, which the recipe does not set"
        for kind, degree in self.degrees.items():
            if recipe.degree(kind) != degree:
                yield f"{kind.upper()} = {degree}, not {recipe.degree(kind)}"
        if self.sharded and recipe.data_parallel // recipe.degree("replicas") < 2:
            yield "weights sharded over at least 2 ranks"

    def _gpu_objections(self, name: str) -> Iterator[str]:
        if not self.vendors and not self.archs:
            return
        found = {generation.name: generation.arch for generation in load_table().generations}.get(name)
        vendor = None if found is None else "amd" if found.startswith("gfx") else "nvidia"
        if self.vendors and vendor not in self.vendors:
            yield f"a GPU of {' or '.join(self.vendors)}, not {name}"
        if self.archs and found not in self.archs:
            yield f"a GPU of {' or '.join(self.archs)}, not {name}"


def state(one: Optimization, arch: str | None) -> str:
    """Return whether this machine can use it, as text. ``arch`` is its GPU's architecture, None without a GPU."""
    if lacking := missing_packages((one.name,)):
        return f"not usable here: {', '.join(lacking)} not installed"
    vendor = None if arch is None else "amd" if arch.startswith("gfx") else "nvidia"
    if (one.archs and arch not in one.archs) or (one.vendors and vendor not in one.vendors):
        return f"not usable here: needs a GPU of {', '.join(one.archs or one.vendors)}"
    return "usable, part of auto" if one.auto else "usable, only by name"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def optimizations() -> Mapping[str, Optimization]:
    """Return every entry of the catalogue by name."""
    data: Any = read_values(OPTIMIZATIONS_FILE, OPTIMIZATIONS_FILE.name).data
    made = {}
    for entry in data["optimizations"]:
        plain: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        made[entry["name"]] = Optimization(**plain)
    return made


def automatic(recipe: Recipe) -> tuple[str, ...]:
    """Return the optimizations that ``auto`` enables for ``recipe``, in the catalogue's order."""
    return tuple(name for name, one in optimizations().items() if one.auto and not any(one.objections(recipe)))


def chosen(recipe: Recipe) -> tuple[str, ...]:
    """Return the optimizations that ``recipe`` requests, in the catalogue's order.

    Raises InputError for a name that is not in the catalogue, for one that the recipe cannot use, and for two that
    exclude each other.
    """
    setting = recipe.settings.get("turbo")
    if setting is None or setting.value in ("off", False, "", None):
        return ()
    if setting.value == "auto":
        return automatic(recipe)
    known = optimizations()
    words = setting.value if isinstance(setting.value, list) else str(setting.value).split(",")
    asked = [str(word).strip() for word in words]
    for name in asked:
        if name not in known:
            raise InputError(
                f"there is no optimization {name!r}" + nearest(name, known),
                where=setting.origin, hint="primus turbo list shows them; auto and off cannot be combined",
            )  # fmt: skip
        one = known[name]
        if objections := list(one.objections(recipe)):
            raise InputError(f"{name} needs {'; '.join(objections)}", where=setting.origin)
        if clash := [other for other in one.excludes if other in asked]:
            raise InputError(f"{name} and {clash[0]} exclude each other", where=setting.origin, hint="name one of them")
    return tuple(name for name in known if name in asked)


def reasons(recipe: Recipe) -> dict[str, tuple[bool, str]]:
    """Return for every optimization whether ``recipe`` enables it, and why. Raises as :func:`chosen`."""
    on, setting = chosen(recipe), recipe.settings.get("turbo")
    value = setting.value if setting is not None else None
    found: dict[str, tuple[bool, str]] = {}
    for name, one in optimizations().items():
        objection = next(one.objections(recipe), "")
        if name in on:
            found[name] = True, "part of auto" if value == "auto" else "named"
        elif objection:
            found[name] = False, f"needs {objection}"
        elif value == "auto":
            found[name] = False, "not part of auto: name it"
        elif value in ("off", False, "", None):
            found[name] = False, "turbo is off" if setting is not None else "not requested"
        else:
            found[name] = False, "not named"
    return found


def active(names: Sequence[str]) -> dict[str, Any]:
    """Return, for the facts of a run, which of ``names`` ran on this rank, and how often each function was called."""
    known = optimizations()
    ran = [name for name in names if all(CALLS[call] for call in known[name].proof)]
    return {"turbo": sorted(ran), "turbo_calls": dict(sorted(CALLS.items()))}


def missing_packages(names: tuple[str, ...]) -> list[str]:
    """Return the packages that ``names`` need and this machine's Python does not have."""
    needed = dict.fromkeys(package for name in names for package in optimizations()[name].packages)
    return [package for package in needed if not importable(package)]


def importable(name: str) -> bool:
    """Whether this Python has the package ``name``, without importing it."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
