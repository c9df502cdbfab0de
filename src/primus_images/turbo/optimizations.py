"""The catalogue of optimizations for training runs: requirements, exclusions and effects.

Pure: the recipe determines which ones apply, so every machine resolves the same list. Whether their
packages are installed, and whether their kernels compute the right numbers on this GPU, is checked
on the machine that trains (:mod:`primus_images.turbo.trial`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus_images.errors import InputError, nearest
from primus_images.gpus.table import arch_of, generation
from primus_images.recipes.architecture import arguments
from primus_images.recipes.choose import CPU
from primus_images.recipes.setting import Setting
from primus_images.yamlfile import read_values, spell

if TYPE_CHECKING:
    from primus_images.recipes.recipe import Recipe

CALLS: Counter[str] = Counter()
"""Calls in this process, by the names that the catalogue's ``proof`` entries list."""

OPTIMIZATIONS_FILE = Path(__file__).with_name("optimizations.yaml")

AUTO = "auto"
REQUIRE = "require"
OFF = "off"
"""Values of the setting ``turbo`` beside names. A recipe that does not set it means ``auto``."""


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """One entry. An empty requirement accepts everything. ``replaces`` is what runs without it."""

    name: str
    title: str
    gain: str
    replaces: str
    provider: str
    proof: Sequence[str]
    backends: Sequence[str]
    precisions: Sequence[str]
    families: Sequence[str] = ()
    modes: Sequence[str] = ()
    vendors: Sequence[str] = ()
    archs: Sequence[str] = ()
    packages: Sequence[str] = ()
    excludes: Sequence[str] = ()
    settings: Mapping[str, str | bool] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    sharded: bool = False
    windowed: bool = False

    def objections(self, recipe: Recipe) -> Iterator[str]:
        """Yield the reasons why ``recipe`` cannot use it, each as the end of "NAME needs …"."""
        for requirement, value, accepted in (
            ("backend", recipe.backend, self.backends),
            ("precision", recipe.precision, self.precisions),
            ("mode", recipe.mode, self.modes),
            ("model family", recipe.architecture.family, self.families),
        ):
            if accepted and value not in accepted:
                yield f"{requirement} {' or '.join(accepted)}, not {value}"
        if recipe.gpu == CPU:
            gpu = None
        else:
            gpu = generation(recipe.gpu)
        places = {*self.vendors, *self.archs}
        if places and (gpu is None or places.isdisjoint((gpu.arch, arch_of(gpu).vendor))):
            yield f"a GPU of {' or '.join(self.archs or self.vendors)}, not {recipe.gpu}"
        for key, accepted_value in self.settings.items():
            if key in recipe.settings and recipe.settings[key].value != accepted_value:
                yield f"{key}={spell(accepted_value)}, not {spell(recipe.settings[key].value)}"
            elif key not in recipe.settings and accepted_value is True:
                yield f"{key}={spell(accepted_value)}, which the recipe does not set"
        for kind, degree in self.degrees.items():
            if recipe.degree(kind) != degree:
                yield f"{kind.upper()} = {degree}, not {recipe.degree(kind)}"
        if self.sharded and recipe.data_parallel // recipe.degree("replicas") < 2:
            yield "weights sharded over at least 2 ranks"
        if self.windowed and not 0 < recipe.architecture.window < recipe.seq_len:
            yield "a sliding window shorter than the sequence"


@cache
def optimizations() -> Mapping[str, Optimization]:
    """Return every entry of the catalogue by name. Of two that exclude each other, ``auto`` prefers
    the first.
    """
    data: Any = read_values(OPTIMIZATIONS_FILE, OPTIMIZATIONS_FILE.name).data
    return {entry["name"]: Optimization(**entry) for entry in data["optimizations"]}


def usable(recipe: Recipe) -> tuple[str, ...]:
    """Return the optimizations whose requirements ``recipe`` meets. Without a GPU there are none."""
    if recipe.gpu == CPU:
        rows = {}
    else:
        rows = optimizations()
    return tuple(name for name, entry in rows.items() if not any(entry.objections(recipe)))


def requested(recipe: Recipe) -> tuple[str, ...] | str:
    """Return the setting ``turbo``: ``auto``, ``require``, ``off``, or the names that it lists.

    Raises InputError for a name that is not in the catalogue.
    """
    setting = recipe.settings.get("turbo", Setting(value=AUTO, origin="default"))
    if setting.value in (OFF, False, "", None):
        return OFF
    if setting.value in (AUTO, REQUIRE):
        return str(setting.value)
    if isinstance(setting.value, list):
        words = setting.value
    else:
        words = str(setting.value).split(",")
    names = [str(word).strip() for word in words]
    catalogue = optimizations()
    for name in names:
        if name not in catalogue:
            raise InputError(
                f"there is no optimization {name!r}{nearest(name, catalogue)}",
                where=setting.origin,
                hint="primus show RECIPE lists them; auto, require and off cannot be combined",
            )
    return tuple(name for name in catalogue if name in names)


def candidates(recipe: Recipe) -> tuple[str, ...]:
    """Return the optimizations to test on the machine, in the catalogue's order; some may exclude
    each other.

    With ``auto`` and ``require``, these are all :func:`usable` ones. Raises InputError for a name
    that is not in the catalogue, for one that the recipe cannot use, and for two that exclude each
    other.
    """
    names = requested(recipe)
    catalogue = optimizations()
    if names == OFF:
        return ()
    if isinstance(names, str):
        return usable(recipe)
    where = recipe.settings["turbo"].origin
    for name in names:
        objections = list(catalogue[name].objections(recipe))
        if objections:
            raise InputError(f"{name} needs {'; '.join(objections)}", where=where)
        clash = [other for other in names if excluded(other, (name,))]
        if clash:
            raise InputError(
                f"{name} and {clash[0]} exclude each other", where=where, hint="name one of them"
            )
    return names


def excluded(name: str, others: Sequence[str]) -> str:
    """Return the first of ``others`` that cannot run beside ``name``, or an empty string."""
    catalogue = optimizations()
    return next(
        (o for o in others if o in catalogue[name].excludes or name in catalogue[o].excludes), ""
    )


def compatible(names: Sequence[str]) -> tuple[str, ...]:
    """Return ``names`` without those that an earlier one excludes."""
    taken: list[str] = []
    for name in names:
        if not excluded(name, taken):
            taken.append(name)
    return tuple(taken)


def chosen(recipe: Recipe) -> tuple[str, ...]:
    """Return the optimizations that ``recipe`` uses where all packages are installed and all
    self-tests pass.

    Raises as :func:`candidates`.
    """
    return compatible(candidates(recipe))


def reasons(recipe: Recipe) -> dict[str, tuple[bool, str]]:
    """Return for every optimization whether ``recipe`` enables it, and why. Raises as
    :func:`candidates`.
    """
    on = chosen(recipe)
    setting = requested(recipe)

    def why(name: str, entry: Optimization) -> str:
        if name in on:
            if setting == AUTO:
                return "by default, if its self-test passes"
            return "requested"
        objection = next(entry.objections(recipe), "")
        if objection:
            return f"needs {objection}"
        if setting == OFF:
            return "turbo is off"
        if not isinstance(setting, str):
            return "not named"
        if recipe.gpu == CPU:
            return "no GPU"
        return f"{excluded(name, on)} is used instead"

    return {name: (name in on, why(name, entry)) for name, entry in optimizations().items()}


def active(names: Sequence[str]) -> dict[str, Any]:
    """Return, for the facts of a run, which of ``names`` ran on this rank, and how often each
    function was called.
    """
    if not names:
        return {}
    catalogue = optimizations()
    ran = [name for name in names if all(CALLS[call] for call in catalogue[name].proof)]
    return {"turbo": sorted(ran), "turbo_calls": dict(sorted(CALLS.items()))}


def missing_packages(names: Sequence[str]) -> list[str]:
    """Return the packages that ``names`` need and this machine's Python does not have."""
    needed = dict.fromkeys(package for name in names for package in optimizations()[name].packages)
    return [package for package in needed if not importable(package)]


def importable(name: str) -> bool:
    """Whether this Python has the package ``name``, without importing it."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of one rank. ``tokens`` is those of a micro batch of ``batch`` sequences; ``shards`` is
    the number of ranks that share a weight; ``rotated`` is the part of a head that gets rotary
    positions; ``window`` 0: no window.
    """

    batch: int
    seq_len: int
    tokens: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    rotated: int
    vocabulary: int
    window: int
    causal: bool
    experts: int
    top_k: int
    expert_ffn: int
    shards: int


def shapes_of(recipe: Recipe) -> Shapes:
    """Return the sizes of ``recipe``'s micro batch on one rank."""
    model = recipe.architecture
    tensor_ranks = recipe.degree("tp")
    if model.of_images:
        length = model.dit.image_tokens + model.dit.text_tokens
    else:
        length = recipe.seq_len
    latent = model.mla.kv_lora_rank > 0
    heads = max(1, model.heads // tensor_ranks)
    return Shapes(
        batch=recipe.local_batch,
        seq_len=length,
        tokens=recipe.local_batch * length,
        hidden=model.hidden_size or model.heads * model.head_size,
        ffn=model.ffn_size or 4 * model.heads * model.head_size,
        heads=heads,
        kv_heads=heads if latent or not model.kv_heads else max(1, model.kv_heads // tensor_ranks),
        rotated=model.mla.qk_rope_head_dim if latent else model.head_size,
        vocabulary=model.vocab_size or 1024,
        causal=not model.of_images,
        shards=max(1, recipe.data_parallel // recipe.degree("replicas")),
        **arguments(model, OPTIMIZATIONS_FILE.with_name("shapes.yaml"), "model"),
    )
