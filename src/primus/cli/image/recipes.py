"""Verbs about recipes: list them, show one with every setting, and predict its memory."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain, groupby

from primus.cli.image.common import resolved, short_origin
from primus.cli.verb import answer
from primus.errors import InputError
from primus.gpus.table import generation
from primus.recipes.architecture import readable, size
from primus.recipes.choose import CPU, among, values_of
from primus.recipes.load import Entry, entries, folder, names, no_recipes
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import runs_on
from primus.recipes.rules import USABLE, fits, gpu_bytes, holds, largest_batch, predict
from primus.recipes.rules.loop import Memory
from primus.recipes.setting import CHOICES
from primus.recipes.weights import another_model, origin_of_sizes
from primus.system.host import Host
from primus.terminal import Screen, Styled, counted
from primus.turbo.optimizations import reasons as optimization_reasons
from primus.yamlfile import spell

_CHOICES = ("backend", "mode", "precision", "gpu")
_WIDTH = 110
_TOP = "what and where"
_GIB = 2**30
_WHAT = {
    "weights": "the rank's part of the weights",
    "gradients": "the rank's part of the gradients",
    "optimizer": "the rank's part of the optimizer states",
    "unsharded": "layers at work: their whole weights and gradients",
    "activations": "kept from the forward for the backward pass",
    "loss": "logits and their gradients",
    "reused": "gradients' memory that activations and logits use before",
}


def list_recipes(options: argparse.Namespace) -> int:
    """List the recipes with their backends, modes, precisions and the GPUs that support them.

    Every recipe also has a proxy: a small model that uses the same code. --proxy trains it, also on a CPU.
    """
    for name in _CHOICES:
        if (word := getattr(options, name)) is not None:
            among(name, word, values_of(name), f"--{name} {word}")
    if not names():
        raise no_recipes(folder())
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
        rows = [_short_row(list(several)) for _, several in groupby(shown, lambda entry: entry.recipe)]
        lines = Screen.of().table(rows, head=("RECIPE", "SIZE", "BACKENDS", "PRECISIONS"))
        lines.append("`primus list NAME` shows modes and GPUs")
    return answer(options, [{**asdict(entry), "path": str(entry.path)} for entry in shown], lines)


def show(options: argparse.Namespace) -> int:
    """Show a recipe as it would run: every setting with its source, and which optimizations are on, and why.

    Nothing is started and no GPU is needed: --gpu names the GPU to resolve the recipe for.
    """
    recipe = resolved(options)
    return answer(options, _document(recipe), _lines(recipe, Screen.of()))


def fit(options: argparse.Namespace) -> int:
    """Predict the memory that a recipe needs on one GPU, and the largest micro batch that fits.

    Nothing is started and no GPU is needed: --gpu names the GPU to predict for.
    Exit code 0: it fits, or is tight; 1: it does not fit; 2: invalid input.
    """
    recipe = resolved(options)
    total = gpu_bytes(recipe.gpu)
    if total is None:
        raise InputError(f"--gpu {CPU}: memory is predicted for GPUs only", hint="name one, as in --gpu mi300x")
    memory, available = predict(recipe), USABLE * total
    largest = largest_batch(recipe, available)
    document = _fit_document(recipe, memory, available, largest)
    lines = _fit_lines(recipe, memory, available, largest, Screen.of())
    return answer(options, document, lines, passed=fits(memory, available))


def _narrowed(entry: Entry, options: argparse.Namespace) -> Entry | None:
    if options.name not in entry.recipe or options.backend not in (None, entry.backend):
        return None
    if options.mode not in (None, entry.mode):
        return None
    matching = {
        precision: gpus
        for precision, supported in entry.precisions.items()
        if options.precision in (None, precision)
        and (gpus := tuple(gpu for gpu in supported if options.gpu in (None, gpu)))
    }
    return replace(entry, precisions=matching) if matching else None


def _held(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the entries with only the GPUs that hold them, and for each that some do not hold, its name and these."""
    held, too_large = [], []
    for entry in entries:
        able = {p: tuple(gpu for gpu in gpus if runs_on(entry, p, gpu)) for p, gpus in entry.precisions.items()}
        if any(able.values()):
            held.append(replace(entry, precisions={p: gpus for p, gpus in able.items() if gpus}))
        for precision, gpus in entry.precisions.items():
            if small := [gpu for gpu in gpus if gpu not in able[precision]]:
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
    return entries[0].recipe, readable(entries[0].size.total), " ".join(backends), " ".join(precisions)


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
        "world_size": recipe.world_size,
        "local_batch": recipe.local_batch,
        "global_batch": recipe.global_batch,
        "accumulation": recipe.accumulation,
        "seq_len": recipe.seq_len,
        f"{what}_per_step": amount,
        "parameters": asdict(size(recipe.architecture)),
        "published": list(origin_of_sizes(recipe)),
        "command": _command(recipe),
        "known_issues": [asdict(issue) for issue in Host().issues(recipe.gpu)],
        "optimizations": {name: {"on": on, "why": why} for name, (on, why) in optimization_reasons(recipe).items()},
        "settings": {
            key: {"value": s.value, "origin": short_origin(s.origin, recipe)}
            | ({"because": s.because} if s.because else {})
            for key, s in recipe.settings.items()
        },
    }


def _lines(recipe: Recipe, screen: Screen) -> Iterator[str]:
    count, (amount, what) = size(recipe.architecture), _per_step(recipe)
    active = "" if count.active == count.total else f", {readable(count.active)} active per token"
    yield f"{recipe.name}: {recipe.get('description', str)}"
    yield f"  {readable(count.total)} parameters{active}"
    yield from (f"  {line}" for line in origin_of_sizes(recipe))
    ranks, steps = counted(recipe.get("ranks", int), "rank"), counted(recipe.steps, "step")
    if "epochs" in recipe.settings:
        steps = f"{recipe.get('epochs', float):g} epochs"
    yield f"  {counted(recipe.get('nodes', int), 'node')} × {ranks}, {steps}"
    sequences = f"{recipe.global_batch} sequences of {recipe.seq_len} = " if what == "tokens" else ""
    yield f"  {sequences}{amount:,} {what} per step"
    times = f", {recipe.accumulation} times per step" if recipe.accumulation > 1 else ""
    yield f"  each rank: {recipe.local_batch} at a time{times}"
    if (total := gpu_bytes(recipe.gpu)) is not None and not fits(predict(recipe), USABLE * total):
        why = "does not fit into the memory of a GPU" if holds(recipe) else "too large for a GPU, whatever the batch"
        yield screen.paint(f"  {why}, see `primus fit`", "red")
    yield screen.paint("\noptimizations", "bold")
    yield from screen.table(
        [(name, "on" if on else "off", Styled(why, "dim")) for name, (on, why) in optimization_reasons(recipe).items()],
        indent="  ",
    )
    if known := Host().issues(recipe.gpu):
        yield screen.paint("\nknown issues of this image", "bold")
        yield from (line for issue in known for line in screen.wrap(str(issue), "  ", "    "))
    reasons: dict[str, list[str]] = {}
    for section, keys in _sections(recipe).items():
        yield f"\n{screen.paint(section, 'bold')}"
        rows = []
        for key in keys:
            setting = recipe.settings[key]
            rows.append((_rest(key), spell(setting.value), Styled(short_origin(setting.origin, recipe), "dim")))
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
    for key in (*CHOICES, *(key for key in recipe.settings if key not in (*CHOICES, "name", "description"))):
        head, dot, _ = key.partition(".")
        # Keys with a common first part stay together, in the order of the files.
        sections.setdefault(head if dot else _TOP, {}).setdefault(_rest(key).partition(".")[0], []).append(key)
    return {heading: [*chain(*groups.values())] for heading, groups in sections.items() if groups}


def _rest(key: str) -> str:
    head, dot, rest = key.partition(".")
    return rest if dot else head


def _fit_document(recipe: Recipe, memory: Memory, available: float, largest: int) -> dict[str, object]:
    return {
        "recipe": recipe.name,
        **{name: getattr(recipe, name) for name in _CHOICES},
        "world_size": recipe.world_size,
        "micro_batch": recipe.local_batch,
        "max_micro_batch": largest,
        "fits": fits(memory, available),
        "tight": memory.peak > available and fits(memory, available),
        "bytes": {name: round(value) for name, value in memory.terms.items()},
        "peak_bytes": round(memory.peak),
        "least_bytes": round(memory.least),
        "available_bytes": round(available),
        "error_band": recipe.knows.memory_error,
    }


def _fit_lines(recipe: Recipe, memory: Memory, available: float, largest: int, screen: Screen) -> Iterator[str]:
    gpu, band = generation(recipe.gpu), recipe.knows.memory_error
    yield (
        f"{recipe.name}: {readable(size(recipe.architecture).total)} parameters, {recipe.backend} {recipe.mode} "
        f"{recipe.precision}, {recipe.world_size} × {gpu.title}, micro batch {recipe.local_batch}"
    )
    if other := another_model(recipe):
        yield f"  {other}"
    rows = [(name, f"{value / _GIB:,.1f} GiB", _WHAT[name]) for name, value in memory.terms.items()]
    yield from screen.table([*rows, ("peak", f"{memory.peak / _GIB:,.1f} GiB", f"± {band:.0%}")], indent="  ")
    there = f"{available / _GIB:,.1f} GiB, {USABLE:.0%} of the GPU's {gpu.memory.gib:,g}"
    if memory.peak <= available:
        yield f"fits: {there}"
    elif fits(memory, available):
        yield f"tight: more than {there}; the allocator must give memory back in every step, which costs speed"
    else:
        yield f"does not fit: more than {there}"
    yield f"largest micro batch that fits: {largest}" if largest else "no micro batch fits"
