"""Verbs about recipes: list them, show one with every setting, and predict its memory, and its
speed on many nodes.

The model of speed is the share of the GPU's peak that published and measured runs reach
(``recipes/throughput.yaml``).
"""

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from itertools import chain, groupby, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import primus_images.recipes
from primus_images.cli.verb import TEXTS, answer
from primus_images.errors import InputError
from primus_images.gpus.detect import detect
from primus_images.gpus.table import generation
from primus_images.recipes.architecture import readable, size
from primus_images.recipes.choose import CPU, among, values_of
from primus_images.recipes.load import Entry, entries, folder, names
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import choices_among, resolve, runs_on
from primus_images.recipes.rules import USABLE, fits, gpu_bytes, holds, largest_batch, predict
from primus_images.recipes.rules.loop import Memory
from primus_images.recipes.setting import CHOICES, Choices
from primus_images.recipes.weights import (
    HUB,
    another_model,
    folder_of,
    nearest_recipe,
    origin_of_sizes,
    other_family,
)
from primus_images.system.host import Host
from primus_images.terminal import Screen, Styled, counted
from primus_images.training.run import machine
from primus_images.training.run.metrics import of_recipe_unit
from primus_images.turbo.optimizations import (
    OFF,
    chosen,
    optimizations,
    reasons as optimization_reasons,
    requested,
)
from primus_images.yamlfile import read_values, spell

_CHOICES = ("backend", "mode", "precision", "gpu")
_SIZES = ("world_size", "local_batch", "global_batch", "accumulation", "seq_len")
_WIDTH = 110
_TOP = "what and where"
_GIB = 2**30
# A larger micro batch is hardly faster, and a step would train on more samples than fine-tuning
# wants.
_LARGEST = 8
_MOST_NODES = 4096
_DEGREES = (1, 2, 4, 8, 16)


def short_origin(origin: str, recipe: Recipe) -> str:
    """Return ``origin`` with paths relative to the recipe's folder."""
    return origin.replace(f"{recipe.path.parent}/", "")


def turbo_names() -> Sequence[str]:
    """Return the values of ``--turbo``."""
    return ("auto", "require", "off", *optimizations())


def resolved(
    options: argparse.Namespace, *, here: bool = True, memory: float | None = None
) -> Recipe:
    """Resolve the recipe that the options ask for. Raises InputError. ``here`` and ``memory``: as
    for ``resolve``.
    """
    single = ("ranks", "steps", "seed", "turbo")
    words = [
        f"{option}={value}" for option in single if (value := getattr(options, option)) is not None
    ]
    recipe = resolve(
        options.recipe, [*options.overrides, *words], _choices(options), here=here, memory=memory
    )
    chosen(recipe)  # refuses names that are none
    return recipe


def _choices(options: argparse.Namespace) -> Choices:
    return Choices(**{choice: getattr(options, choice) for choice in CHOICES})


def names_weights(name: str) -> bool:
    """Whether ``name`` is a folder of weights, or one on the hub, and not a recipe."""
    return name.startswith(HUB) or (Path(name).is_dir() and name not in names())


def of_name(options: argparse.Namespace) -> Recipe:
    """Resolve the recipe that the options ask for, or the one that fine-tunes the weights that they
    name.
    """
    if names_weights(options.recipe):
        return of_weights(options, options.recipe)
    return resolved(options)


def of_weights(options: argparse.Namespace, name: str, **usual: str) -> Recipe:
    """Let ``options`` name the nearest recipe with the model and tokenizer of the weights ``name``;
    return it resolved.

    Unless the user sets them, mode, ranks and micro batch are those that fit, and ``usual`` are
    further settings.
    """
    folder = folder_of(name, whole=bool(usual))
    choices, options.overrides = choices_among(_choices(options), options.overrides)
    vars(options).update(asdict(choices))
    nearest = nearest_recipe(folder, options.mode)
    if options.backend not in (None, nearest.backend):
        raise InputError(
            f"--backend {options.backend} does not fine-tune",
            hint="`primus train` has all backends",
        )
    options.backend = nearest.backend
    options.recipe = nearest.recipe
    typed = {re.sub(rf"^({nearest.backend}|assets)\.|=.*", "", word) for word in options.overrides}
    if "tokenizer" not in typed and not any(
        map(list, map(folder.glob, ("tokenizer*", "vocab*", "*.model")))
    ):
        raise InputError(
            f"{folder} has no tokenizer",
            hint="copy it from the weights' source, or tokenizer=FOLDER",
        )
    usual = {"weights": str(folder), "tokenizer": str(folder)} | other_family(folder) | usual
    options.overrides = [
        *options.overrides,
        *(f"{key}={value}" for key, value in usual.items() if key not in typed),
    ]
    if options.ranks is None and "ranks" not in typed and (gpus := detect().names):
        options.ranks = len(gpus)
    if options.mode is None:
        options.mode = "full"
        batch = 0
        with suppress(InputError):  # some recipes have LoRA only
            batch = _batch(resolved(options))
        if batch:
            options.mode = "full"
        else:
            options.mode = "lora"
    recipe = resolved(options)
    batch = _batch(recipe)
    if batch and not typed & {"local_batch", "training.micro_batch_size"}:
        options.overrides = [*options.overrides, f"local_batch={batch}"]
        recipe = resolved(options)
    return recipe


def _batch(recipe: Recipe) -> int:
    memory = gpu_bytes(recipe.gpu)
    if memory is not None:
        whole = recipe.find(recipe.knows.key("global_batch"), 0)
        ranks = recipe.data_parallel
        sizes = range(1, min(largest_batch(recipe, USABLE * memory), _LARGEST) + 1)
        return max((size for size in sizes if whole < 1 or whole % (size * ranks) == 0), default=0)
    needed = predict(recipe).states * recipe.get("ranks", int)
    if needed <= (machine.host_bytes() or math.inf):
        return recipe.local_batch
    return 0


def list_recipes(options: argparse.Namespace) -> int:
    """List the recipes with their backends, modes, precisions and the GPUs that support them."""
    for name in _CHOICES:
        word = getattr(options, name)
        if word is not None:
            among(name, word, values_of(name), f"--{name} {word}")
    if not names():
        raise InputError(
            f"{folder()} has no recipes",
            hint="change to a project folder, or set PRIMUS_RECIPES to a folder of recipes",
        )
    shown = [entry for entry in (_narrowed(entry, options) for entry in entries()) if entry]
    narrowed = options.name or any(getattr(options, name) for name in _CHOICES)
    too_large: list[str] = []
    if narrowed or options.json:
        shown, too_large = _held(shown)
    if not shown and not too_large:
        raise InputError("no recipe matches these options", hint="primus list shows all recipes")
    if narrowed:
        head = ("RECIPE", "PARAMETERS", "BACKEND", "MODE", "PRECISIONS", "GPUS")
        lines = [*Screen.of().table([_row(entry) for entry in shown], head=head)]
        lines += [f"too large, whatever the batch: {way}" for way in too_large]
    else:
        rows = [
            _short_row(list(several)) for _, several in groupby(shown, lambda entry: entry.recipe)
        ]
        lines = Screen.of().table(rows, head=("RECIPE", "SIZE", "BACKENDS", "PRECISIONS"))
        lines.append("`primus list NAME` shows modes and GPUs")
    return answer(options, [{**asdict(entry), "path": str(entry.path)} for entry in shown], lines)


def show(options: argparse.Namespace) -> int:
    """Show a recipe as it would run: every setting with its source, and which optimizations are on,
    and why.
    """
    recipe = of_name(options)
    return answer(options, _document(recipe), _lines(recipe, Screen.of()))


def fit(options: argparse.Namespace) -> int:
    """Predict the memory that a recipe needs on one GPU, and the largest micro batch that fits."""
    recipe = of_name(options)
    total = gpu_bytes(recipe.gpu)
    if total is None:
        raise InputError(
            f"--gpu {CPU}: memory is predicted for GPUs only", hint="name one, as in --gpu mi300x"
        )
    memory = predict(recipe)
    available = USABLE * total
    document = {
        "recipe": recipe.name,
        **{name: getattr(recipe, name) for name in _CHOICES},
        "world_size": recipe.world_size,
        "micro_batch": recipe.local_batch,
        "max_micro_batch": largest_batch(recipe, available),
        "fits": fits(memory, available),
        "tight": memory.peak > available and fits(memory, available),
        "bytes": {name: round(value) for name, value in memory.terms.items()},
        "peak_bytes": round(memory.peak),
        "least_bytes": round(memory.least),
        "available_bytes": round(available),
        "error_band": recipe.knows.memory_error,
    }
    lines = _fit_lines(recipe, memory, document, Screen.of())
    return answer(options, document, lines, passed=bool(document["fits"]))


def _narrowed(entry: Entry, options: argparse.Namespace) -> Entry | None:
    way = (options.backend or entry.backend, options.mode or entry.mode)
    if options.name not in entry.recipe or way != (entry.backend, entry.mode):
        return None
    matching = {
        precision: gpus
        for precision, supported in entry.precisions.items()
        if options.precision in (None, precision)
        and (gpus := tuple(gpu for gpu in supported if options.gpu in (None, gpu)))
    }
    if matching:
        return replace(entry, precisions=matching)
    return None


def _held(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the entries with only the GPUs that hold them, and for each that some do not hold, its
    name and these.
    """
    held = []
    too_large = []
    for entry in entries:
        able = {
            p: tuple(gpu for gpu in gpus if runs_on(entry, p, gpu))
            for p, gpus in entry.precisions.items()
        }
        if any(able.values()):
            held.append(replace(entry, precisions={p: gpus for p, gpus in able.items() if gpus}))
        for precision, gpus in entry.precisions.items():
            small = [gpu for gpu in gpus if gpu not in able[precision]]
            if small:
                way = f"{entry.recipe} {entry.backend} {entry.mode} {precision}"
                too_large.append(f"{way} on {', '.join(small)}")
    return held, too_large


def _row(entry: Entry) -> tuple[str, ...]:
    words = [
        precision if gpus == entry.gpus else f"{precision} ({' '.join(gpus)})"
        for precision, gpus in entry.precisions.items()
    ]
    count = readable(entry.size.total)
    return entry.recipe, count, entry.backend, entry.mode, " ".join(words), " ".join(entry.gpus)


def _short_row(entries: Sequence[Entry]) -> tuple[str, ...]:
    backends = dict.fromkeys(entry.backend for entry in entries)
    precisions = dict.fromkeys(precision for entry in entries for precision in entry.precisions)
    return (
        entries[0].recipe,
        readable(entries[0].size.total),
        " ".join(backends),
        " ".join(precisions),
    )


def _command(recipe: Recipe) -> str:
    return " ".join(["primus", "train", recipe.name, *recipe.choices.words(), *recipe.overrides])


def _per_step(recipe: Recipe) -> tuple[int, str]:
    if recipe.architecture.of_images:
        return recipe.global_batch, "images"
    return recipe.global_batch * recipe.seq_len, "tokens"


def _document(recipe: Recipe) -> dict[str, object]:
    amount, what = _per_step(recipe)
    return {
        "name": recipe.name,
        "description": recipe.get("description", str),
        **{choice: recipe.settings[choice].value for choice in CHOICES},
        **{name: getattr(recipe, name) for name in _SIZES},
        f"{what}_per_step": amount,
        "parameters": asdict(size(recipe.architecture)),
        "published": list(origin_of_sizes(recipe)),
        "command": _command(recipe),
        "known_issues": [asdict(issue) for issue in Host().issues(recipe.gpu)],
        "optimizations": {
            name: {"on": on, "why": why} for name, (on, why) in optimization_reasons(recipe).items()
        },
        "settings": {
            key: {"value": s.value, "origin": short_origin(s.origin, recipe)}
            | ({"because": s.because} if s.because else {})
            for key, s in recipe.settings.items()
        },
    }


def _lines(recipe: Recipe, screen: Screen) -> Iterator[str]:
    count, (amount, what) = size(recipe.architecture), _per_step(recipe)
    if count.active == count.total:
        active = ""
    else:
        active = f", {readable(count.active)} active per token"
    ranks = counted(recipe.get("ranks", int), "rank")
    steps = counted(recipe.steps, "step")
    if "epochs" in recipe.settings:
        steps = f"{recipe.get('epochs', float):g} epochs"
    sequences = ""
    if what == "tokens":
        sequences = f"{recipe.global_batch} sequences of {recipe.seq_len} = "
    times = ""
    if recipe.accumulation > 1:
        times = f", {recipe.accumulation} times per step"
    yield from screen.wrap(f"{recipe.name}: {recipe.get('description', str)}", hanging="    ")
    for line in (
        f"{readable(count.total)} parameters{active}",
        *origin_of_sizes(recipe),
        f"{counted(recipe.get('nodes', int), 'node')} × {ranks}, {steps}",
        f"{sequences}{amount:,} {what} per step",
        f"each rank: {recipe.local_batch} at a time{times}",
    ):
        yield from screen.wrap(line, "  ", "    ")
    total = gpu_bytes(recipe.gpu)
    if total is not None and not fits(predict(recipe), USABLE * total):
        why = "too large for a GPU, whatever the batch"
        if holds(recipe):
            why = "does not fit into the memory of a GPU"
        yield screen.paint(f"  {why}, see `primus fit`", "red")
    yield screen.paint("\noptimizations", "bold")
    yield from screen.table(
        [
            (name, "on" if on else "off", Styled(why, "dim"))
            for name, (on, why) in optimization_reasons(recipe).items()
        ],
        indent="  ",
    )
    known = Host().issues(recipe.gpu)
    if known:
        yield screen.paint("\nknown issues of this image", "bold")
        yield from (line for issue in known for line in screen.wrap(str(issue), "  ", "    "))
    reasons: dict[str, list[str]] = {}
    for section, keys in _sections(recipe).items():
        yield f"\n{screen.paint(section, 'bold')}"
        rows = []
        for key in keys:
            setting = recipe.settings[key]
            rows.append(
                (
                    _rest(key),
                    spell(setting.value),
                    Styled(short_origin(setting.origin, recipe), "dim"),
                )
            )
            if setting.because:
                reasons.setdefault(setting.because, []).append(f"{key} = {spell(setting.value)}")
        yield from screen.table(rows, indent="  ")
    if reasons:
        yield screen.paint("\nmissing and contradicting sources", "bold")
    narrow = screen._replace(width=min(screen.width or _WIDTH, _WIDTH))
    for because, keys in reasons.items():
        yield from screen.wrap(", ".join(keys), "  ", "    ")
        yield from narrow.wrap(because, "    ")
    yield f"\n{_command(recipe)}"


def _sections(recipe: Recipe) -> dict[str, list[str]]:
    sections: dict[str, dict[str, list[str]]] = {
        heading: {} for heading in (_TOP, "model", "assets", recipe.backend, "validation")
    }
    for key in (
        *CHOICES,
        *(key for key in recipe.settings if key not in (*CHOICES, "name", "description")),
    ):
        head, dot, _ = key.partition(".")
        # Keys with a common first part stay together, in the order of the files.
        sections.setdefault(head if dot else _TOP, {}).setdefault(
            _rest(key).partition(".")[0], []
        ).append(key)
    return {heading: [*chain(*groups.values())] for heading, groups in sections.items() if groups}


def _rest(key: str) -> str:
    head, dot, rest = key.partition(".")
    if dot:
        return rest
    return head


def _fit_lines(
    recipe: Recipe, memory: Memory, document: Mapping[str, object], screen: Screen
) -> Iterator[str]:
    gpu = generation(recipe.gpu)
    band = recipe.knows.memory_error
    yield from screen.wrap(
        f"{recipe.name}: {readable(size(recipe.architecture).total)} parameters, "
        f"{recipe.backend} {recipe.mode} "
        f"{recipe.precision}, {recipe.world_size} × {gpu.title}, micro batch {recipe.local_batch}",
        hanging="  ",
    )
    other = another_model(recipe)
    if other:
        yield f"  {other}"
    rows = [
        (name, f"{value / _GIB:,.1f} GiB", TEXTS["memory"][name])
        for name, value in memory.terms.items()
    ]
    yield from screen.table(
        [*rows, ("peak", f"{memory.peak / _GIB:,.1f} GiB", f"± {band:.0%}")], indent="  "
    )
    there = f"{USABLE * gpu.memory.gib:,.1f} GiB, {USABLE:.0%} of the GPU's {gpu.memory.gib:,g}"
    if document["tight"]:
        yield (
            f"tight: more than {there}; the allocator must give memory back in every step, "
            "which costs speed"
        )
    else:
        yield f"fits: {there}" if document["fits"] else f"does not fit: more than {there}"
    largest = document["max_micro_batch"]
    none = "no micro batch fits"
    if document["tight"]:
        none = "no micro batch fits without that"
    yield f"largest micro batch that fits: {largest}" if largest else none


class Projection(NamedTuple):
    """What one number of nodes reaches. ``calibrated``: runs on this GPU, in this precision, are
    known.
    """

    tokens_per_second: float
    mfu: float
    calibrated: bool
    sources: str


def project(options: argparse.Namespace) -> int:
    """Predict memory, tokens per second, MFU and days of training for numbers of nodes, from
    published runs.
    """
    rows = []
    for nodes in _nodes(options.nodes):
        choices = Choices(
            backend=options.backend,
            mode=options.mode,
            precision=options.precision,
            gpu=options.gpu,
            nodes=nodes,
        )
        recipe = resolve(options.recipe, options.overrides, choices)
        total = gpu_bytes(recipe.gpu)
        if total is None or recipe.architecture.of_images or recipe.mode == "lora":
            raise InputError(
                "throughput is projected for language models with all weights trained, on a GPU",
                hint=(
                    "name a GPU, as in --gpu mi355x, and a recipe that `primus list` shows with it"
                ),
            )
        rows.append(
            _projection_row(recipe, next(_layouts(recipe, USABLE * total), None), options.tokens)
        )
    return answer(
        options,
        rows,
        _projection_lines(rows, options.tokens),
        passed=any(row["layout"] for row in rows),
    )


def projected(recipe: Recipe) -> Projection:
    """Return what ``recipe`` reaches. Raises InputError if the GPU's peak in its precision, or any
    run, is unknown.
    """
    peak = next(
        (row.tflops for row in generation(recipe.gpu).peaks if row.dtype == recipe.precision), None
    )
    kind = (
        recipe.precision,
        bool(recipe.architecture.moe.experts),
        OFF if requested(recipe) == OFF else "auto",
    )
    alike = {
        row["gpu"]: row
        for row in _throughput()["shares"]
        if (row["precision"], row["experts"], row["turbo"]) == kind
    }
    if peak is None or not alike:
        origin = recipe.settings["precision"].origin
        raise InputError(
            f"no run in {recipe.precision} is published from which {recipe.gpu} could be projected",
            where=origin,
            hint="--precision bf16",
        )
    if recipe.gpu in alike:
        rows = [alike[recipe.gpu]]
    else:
        rows = [*alike.values()]
    share = median(row["share"] for row in rows)
    share *= _throughput()["per_doubling"] ** math.log2(max(1.0, recipe.world_size / 8))
    flops = of_recipe_unit(recipe.architecture, recipe.seq_len).causal
    sources = "; ".join(dict.fromkeys(row["from"] for row in rows))
    return Projection(share * peak * 1e12 / flops, share, recipe.gpu in alike, sources)


@cache
def _throughput() -> Any:
    return read_values(Path(primus_images.recipes.__file__).with_name("throughput.yaml")).data


def _nodes(word: str) -> list[int]:
    match = re.fullmatch(r"([1-9]\d{0,3})(?:\.\.([1-9]\d{0,3}))?", word)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not first <= last <= _MOST_NODES:
        raise InputError(
            f"no number of nodes: {word!r}",
            where=f"--nodes {word}",
            hint=f"a number from 1 to {_MOST_NODES}, or a range such as 1..512",
        )
    return [*[first * 2**power for power in range(13) if first * 2**power < last], last]


def _layouts(recipe: Recipe, available: float) -> Iterator[Recipe]:
    """Yield the recipe with its own layout, then with others that share layers among more ranks,
    where it fits.
    """
    if fits(predict(recipe), available):
        yield recipe
    kinds = [kind for kind in ("tp", "pp") if kind in recipe.knows.degrees]
    for degrees in sorted(
        product(_DEGREES, repeat=len(kinds)), key=lambda each: (math.prod(each), each[1:])
    ):
        layout = [f"{kind}={degree}" for kind, degree in zip(kinds, degrees, strict=True)]
        try:
            other = resolve(str(recipe.path), recipe.overrides, recipe.choices, replacing=layout)
        except InputError:
            continue  # the ranks, the heads or the batch do not divide
        if fits(predict(other), available):
            yield other


def _projection_row(asked: Recipe, recipe: Recipe | None, tokens: int) -> dict[str, Any]:
    nodes = asked.get("nodes", int)
    ranks = asked.world_size
    if recipe is None:
        return {"nodes": nodes, "gpus": ranks, "layout": ""}
    reached = projected(recipe)
    degrees = {kind: recipe.degree(kind) for kind in ("tp", "pp", "cp", "ep")}
    return {
        "nodes": nodes,
        "gpus": ranks,
        "layout": " ".join(
            [f"dp{recipe.data_parallel}", *(f"{k}{n}" for k, n in degrees.items() if n > 1)]
        ),
        "micro_batch": recipe.local_batch,
        "global_batch": recipe.global_batch,
        "peak_bytes": round(predict(recipe).peak),
        "tokens_per_second_per_gpu": round(reached.tokens_per_second, 1),
        "mfu_causal": round(reached.mfu, 4),
        "days": round(tokens / reached.tokens_per_second / ranks / 86400, 2),
        "calibrated": reached.calibrated,
        "sources": reached.sources,
    }


def _projection_lines(rows: list[dict[str, Any]], tokens: int) -> Iterator[str]:
    head = (
        "NODES",
        "GPUS",
        "LAYOUT",
        "BATCH",
        "MEMORY",
        "TOKENS/S/GPU",
        "MFU",
        f"DAYS FOR {tokens:.3g} TOKENS",
    )
    table = []
    for row in rows:
        words = [str(row["nodes"]), str(row["gpus"]), row["layout"] or "no layout fits"]
        if row["layout"]:
            words += [str(row["micro_batch"]), f"{row['peak_bytes'] / _GIB:.1f} GiB"]
            words += [
                f"{row['tokens_per_second_per_gpu']:,.0f}",
                f"{row['mfu_causal']:.1%}",
                f"{row['days']:,.1f}",
            ]
        table.append(tuple(words + [""] * (len(head) - len(words))))
    yield from Screen.of().table(table, head=head)
    known = next((row for row in rows if row["layout"]), None)
    if known:
        of = "other GPUs, since no such run on this GPU is known"
        if known["calibrated"]:
            of = "this GPU"
        yield from Screen.of().wrap(
            f"share of the peak: the median of runs on {of} ({known['sources']})", hanging="  "
        )
