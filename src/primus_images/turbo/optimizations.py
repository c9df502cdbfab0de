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
    """One entry. An empty requirement accepts everything.

    ``replaces`` is what runs without it. With the backends in ``sharded``, weights must be sharded
    over at least two ranks.
    """

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
    sharded: Sequence[str] = ()

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
        if not self._runs_on(recipe.gpu):
            yield f"a GPU of {' or '.join(self.archs or self.vendors)}, not {recipe.gpu}"
        yield from self._settings_objections(recipe)
        for kind, degree in self.degrees.items():
            if recipe.degree(kind) != degree:
                yield f"{kind.upper()} = {degree}, not {recipe.degree(kind)}"
        if recipe.backend in self.sharded and _shards(recipe) < 2:
            yield "weights sharded over at least 2 ranks"

    def _runs_on(self, gpu: str) -> bool:
        if not self.vendors and not self.archs:
            return True
        if gpu == CPU:
            return False
        row = generation(gpu)
        return row.arch in self.archs or arch_of(row).vendor in self.vendors

    def _settings_objections(self, recipe: Recipe) -> Iterator[str]:
        for key, accepted in self.settings.items():
            setting = recipe.settings.get(key)
            if setting is None:
                if accepted is True:
                    yield f"{key}={spell(accepted)}, which the recipe does not set"
            elif setting.value != accepted:
                yield f"{key}={spell(accepted)}, not {spell(setting.value)}"


@cache
def optimizations() -> Mapping[str, Optimization]:
    """Return every entry of the catalogue by name. Of two that exclude each other, ``auto`` prefers
    the first.
    """
    data: Any = read_values(OPTIMIZATIONS_FILE, OPTIMIZATIONS_FILE.name).data
    return {entry["name"]: Optimization(**entry) for entry in data["optimizations"]}


def usable(recipe: Recipe) -> tuple[str, ...]:
    """Return the optimizations whose requirements ``recipe`` meets; without a GPU, none."""
    if recipe.gpu == CPU:
        return ()
    entries = optimizations().values()
    return tuple(entry.name for entry in entries if not any(entry.objections(recipe)))


def requested(recipe: Recipe) -> tuple[str, ...] | str:
    """Return the setting ``turbo``: ``auto``, ``require``, ``off``, or the names that it lists.

    Raises InputError for a name that is not in the catalogue.
    """
    setting = recipe.settings.get("turbo", Setting(value=AUTO, origin="default"))
    if setting.value in (OFF, False, "", None):
        return OFF
    if setting.value in (AUTO, REQUIRE):
        return str(setting.value)
    words = str(setting.value).split(",")
    if isinstance(setting.value, list):
        words = [str(word) for word in setting.value]
    names = [word.strip() for word in words]
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
    """Return the optimizations to test on the machine, in the catalogue's order.

    With ``auto`` and ``require``, these are all :func:`usable` ones, of which some may exclude each
    other. Raises InputError for a name that is not in the catalogue, for one that the recipe cannot
    use, and for two that exclude each other.
    """
    names = requested(recipe)
    if names == OFF:
        return ()
    if isinstance(names, str):
        return usable(recipe)
    where = recipe.settings["turbo"].origin
    for name in names:
        objections = "; ".join(optimizations()[name].objections(recipe))
        if objections:
            raise InputError(f"{name} needs {objections}", where=where)
        other = excluded(name, names)
        if other:
            raise InputError(
                f"{name} and {other} exclude each other", where=where, hint="name one of them"
            )
    return names


def excluded(name: str, others: Sequence[str]) -> str:
    """Return the first of ``others`` that cannot run beside ``name``, or an empty string."""
    catalogue = optimizations()
    for other in others:
        if other in catalogue[name].excludes or name in catalogue[other].excludes:
            return other
    return ""


def compatible(names: Sequence[str]) -> tuple[str, ...]:
    """Return ``names`` without those that an earlier one excludes."""
    taken: list[str] = []
    for name in names:
        if not excluded(name, taken):
            taken.append(name)
    return tuple(taken)


def chosen(recipe: Recipe) -> tuple[str, ...]:
    """Return the optimizations that ``recipe`` uses if all are installed and pass their self-tests.

    Raises as :func:`candidates`.
    """
    return compatible(candidates(recipe))


def reasons(recipe: Recipe) -> dict[str, tuple[bool, str]]:
    """Return for every optimization whether ``recipe`` enables it, and why.

    Raises as :func:`candidates`.
    """
    on = chosen(recipe)
    setting = requested(recipe)
    answers = {}
    for name, entry in optimizations().items():
        if name not in on:
            answers[name] = (False, _reason_against(entry, recipe, setting, on))
        elif setting == AUTO:
            answers[name] = (True, "by default, if its self-test passes")
        else:
            answers[name] = (True, "requested")
    return answers


def _reason_against(
    entry: Optimization, recipe: Recipe, setting: tuple[str, ...] | str, on: Sequence[str]
) -> str:
    objection = next(entry.objections(recipe), "")
    if objection:
        return f"needs {objection}"
    if setting == OFF:
        return "turbo is off"
    if not isinstance(setting, str):
        return "not named"
    if recipe.gpu == CPU:
        return "no GPU"
    return f"{excluded(entry.name, on)} is used instead"


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
    missing: list[str] = []
    for name in names:
        for package in optimizations()[name].packages:
            if package not in missing and not importable(package):
                missing.append(package)
    return missing


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
    positions; ``window`` 0: no window. ``deterministic``: the run computes steps, or some of them,
    by deterministic algorithms.
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
    deterministic: bool = False


def shapes_of(recipe: Recipe, *, repeated: bool = False) -> Shapes:
    """Return the sizes of ``recipe``'s micro batch on one rank.

    ``repeated``: the run computes some steps twice, and compares all bits.
    """
    model = recipe.architecture
    tensor_ranks = recipe.degree("tp")
    length = recipe.seq_len
    if model.of_images:
        length = model.dit.image_tokens + model.dit.text_tokens
    heads = max(1, model.heads // tensor_ranks)
    kv_heads = max(1, model.kv_heads // tensor_ranks)
    rotated = model.head_size
    latent = model.mla.kv_lora_rank > 0
    if latent:
        rotated = model.mla.qk_rope_head_dim
    if latent or not model.kv_heads:
        kv_heads = heads
    width = model.heads * model.head_size
    return Shapes(
        batch=recipe.local_batch,
        seq_len=length,
        tokens=recipe.local_batch * length,
        hidden=model.hidden_size or width,
        ffn=model.ffn_size or 4 * width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=model.query_size,
        v_dim=model.value_size,
        rotated=rotated,
        vocabulary=model.vocab_size or 1024,
        window=model.window,
        causal=not model.of_images,
        experts=model.moe.experts,
        top_k=model.moe.top_k,
        expert_ffn=model.moe.ffn_size,
        shards=max(1, _shards(recipe)),
        deterministic=recipe.deterministic or repeated,
    )


def _shards(recipe: Recipe) -> int:
    """Return the number of ranks that share a weight."""
    return recipe.data_parallel // recipe.degree("replicas")
