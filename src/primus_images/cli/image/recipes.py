"""Verbs about recipes: list them, show one with every setting, and predict its memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby

from primus_images.cli.image.request import LocalRecipeOptions
from primus_images.cli.verb import TEXTS, Options, answer
from primus_images.errors import InputError
from primus_images.gpus.table import generation
from primus_images.recipes.architecture import readable, size
from primus_images.recipes.choose import CPU, among, values_of
from primus_images.recipes.load import Entry, entries, folder, names
from primus_images.recipes.published import another_model, origin_of_sizes
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import runs_on
from primus_images.recipes.rules import USABLE, fits, gpu_bytes, holds, largest_batch, predict
from primus_images.recipes.rules.loop import Memory
from primus_images.recipes.setting import CHOICES
from primus_images.system.host import Host
from primus_images.terminal import Screen, Styled, counted
from primus_images.turbo.optimizations import optimizations, reasons as optimization_reasons
from primus_images.yamlfile import spell

_CHOICES = ("backend", "mode", "precision", "gpu")
_SIZES = ("world_size", "local_batch", "global_batch", "accumulation", "seq_len")
_WIDTH = 110
_TOP = "what and where"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ListOptions(Options):
    """The options of ``list``."""

    name: str
    backend: str | None
    mode: str | None
    precision: str | None
    gpu: str | None

    @property
    def narrow(self) -> bool:
        """Whether any option narrows the list."""
        return bool(self.name or self.backend or self.mode or self.precision or self.gpu)


def short_origin(origin: str, recipe: Recipe) -> str:
    """Return ``origin`` with paths relative to the recipe's folder."""
    return origin.replace(f"{recipe.path.parent}/", "")


def turbo_names() -> Sequence[str]:
    """Return the values of ``--turbo``."""
    return ("auto", "require", "off", *optimizations())


def list_recipes(options: ListOptions) -> int:
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
    narrowed = (_narrowed(entry, options) for entry in entries())
    shown = [entry for entry in narrowed if entry]
    too_large: list[str] = []
    if options.narrow or options.json:
        shown, too_large = _held(shown)
    if not shown and not too_large:
        raise InputError("no recipe matches these options", hint="primus list shows all recipes")
    if options.narrow:
        lines = _detailed_lines(shown, too_large)
    else:
        lines = _short_lines(shown)
    document = [{**asdict(entry), "path": str(entry.path)} for entry in shown]
    return answer(options, document, lines)


def _narrowed(entry: Entry, options: ListOptions) -> Entry | None:
    if options.name not in entry.recipe:
        return None
    if options.backend not in (None, entry.backend) or options.mode not in (None, entry.mode):
        return None
    precisions = {}
    for precision, supported in entry.precisions.items():
        gpus = tuple(gpu for gpu in supported if options.gpu in (None, gpu))
        if gpus and options.precision in (None, precision):
            precisions[precision] = gpus
    if not precisions:
        return None
    return replace(entry, precisions=precisions)


def _held(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the entries with only the GPUs that hold them, and what other GPUs do not hold."""
    held = []
    too_large = []
    for entry in entries:
        precisions = {}
        for precision, gpus in entry.precisions.items():
            able = tuple(gpu for gpu in gpus if runs_on(entry, precision, gpu))
            small = [gpu for gpu in gpus if gpu not in able]
            if able:
                precisions[precision] = able
            if small:
                way = f"{entry.recipe} {entry.backend} {entry.mode} {precision}"
                too_large.append(f"{way} on {', '.join(small)}")
        if precisions:
            held.append(replace(entry, precisions=precisions))
    return held, too_large


def _detailed_lines(shown: Sequence[Entry], too_large: Sequence[str]) -> list[str]:
    head = ("RECIPE", "PARAMETERS", "BACKEND", "MODE", "PRECISIONS", "GPUS")
    lines = list(Screen.of().table([_row(entry) for entry in shown], head=head))
    return lines + [f"too large, whatever the batch: {way}" for way in too_large]


def _row(entry: Entry) -> tuple[str, ...]:
    precisions = []
    for precision, gpus in entry.precisions.items():
        if gpus == entry.gpus:
            precisions.append(precision)
        else:
            precisions.append(f"{precision} ({' '.join(gpus)})")
    return (
        entry.recipe,
        readable(entry.size.total),
        entry.backend,
        entry.mode,
        " ".join(precisions),
        " ".join(entry.gpus),
    )


def _short_lines(shown: Sequence[Entry]) -> list[str]:
    rows = []
    for recipe, group in groupby(shown, lambda entry: entry.recipe):
        ways = list(group)
        backends = dict.fromkeys(entry.backend for entry in ways)
        precisions: dict[str, None] = {}
        for entry in ways:
            precisions |= dict.fromkeys(entry.precisions)
        rows.append(
            (recipe, readable(ways[0].size.total), " ".join(backends), " ".join(precisions))
        )
    lines = list(Screen.of().table(rows, head=("RECIPE", "SIZE", "BACKENDS", "PRECISIONS")))
    return [*lines, "`primus list NAME` shows modes and GPUs"]


def show(options: LocalRecipeOptions) -> int:
    """Show a recipe as it would run: every setting with its source, and which optimizations are on,
    and why.
    """
    recipe = options.request.resolved()
    return answer(options, _document(recipe), _lines(recipe, Screen.of()))


def _command(recipe: Recipe) -> str:
    return " ".join(["primus", "train", recipe.name, *recipe.choices.words(), *recipe.overrides])


def _per_step(recipe: Recipe) -> tuple[int, str]:
    if recipe.architecture.of_images:
        return recipe.global_batch, "images"
    return recipe.global_batch * recipe.seq_len, "tokens"


def _document(recipe: Recipe) -> dict[str, object]:
    amount, unit = _per_step(recipe)
    settings = {}
    for key, setting in recipe.settings.items():
        row = {"value": setting.value, "origin": short_origin(setting.origin, recipe)}
        if setting.because:
            row["because"] = setting.because
        settings[key] = row
    reasons = optimization_reasons(recipe)
    return {
        "name": recipe.name,
        "description": recipe.get("description", str),
        **{choice: recipe.settings[choice].value for choice in CHOICES},
        **{name: getattr(recipe, name) for name in _SIZES},
        f"{unit}_per_step": amount,
        "parameters": asdict(size(recipe.architecture)),
        "published": list(origin_of_sizes(recipe)),
        "command": _command(recipe),
        "known_issues": [asdict(issue) for issue in Host().issues(recipe.gpu)],
        "optimizations": {name: {"on": on, "why": why} for name, (on, why) in reasons.items()},
        "settings": settings,
    }


def _lines(recipe: Recipe, screen: Screen) -> Iterator[str]:
    yield from _overview(recipe, screen)
    for sentence in recipe.says:
        yield from screen.wrap(sentence, "  ", "    ")
    yield screen.paint("\noptimizations", "bold")
    rows = []
    for name, (on, why) in optimization_reasons(recipe).items():
        rows.append((name, "on" if on else "off", Styled(why, "dim")))
    yield from screen.table(rows, indent="  ")
    known = Host().issues(recipe.gpu)
    if known:
        yield screen.paint("\nknown issues of this image", "bold")
    for issue in known:
        yield from screen.wrap(str(issue), "  ", "    ")
    for section, keys in _sections(recipe).items():
        yield f"\n{screen.paint(section, 'bold')}"
        yield from screen.table([_setting_row(recipe, key) for key in keys], indent="  ")
    yield from _reasons(recipe, screen)
    yield f"\n{_command(recipe)}"


def _overview(recipe: Recipe, screen: Screen) -> Iterator[str]:
    count = size(recipe.architecture)
    active = ""
    if count.active != count.total:
        active = f", {readable(count.active)} active per token"
    steps = counted(recipe.steps, "step")
    if "epochs" in recipe.settings:
        steps = f"{recipe.get('epochs', float):g} epochs"
    amount, unit = _per_step(recipe)
    sequences = ""
    if unit == "tokens":
        sequences = f"{recipe.global_batch} sequences of {recipe.seq_len} = "
    times = ""
    if recipe.accumulation > 1:
        times = f", {recipe.accumulation} times per step"
    nodes = counted(recipe.get("nodes", int), "node")
    ranks = counted(recipe.get("ranks", int), "rank")
    yield from screen.wrap(f"{recipe.name}: {recipe.get('description', str)}", hanging="    ")
    for line in (
        f"{readable(count.total)} parameters{active}",
        *origin_of_sizes(recipe),
        f"{nodes} × {ranks}, {steps}",
        f"{sequences}{amount:,} {unit} per step",
        f"each rank: {recipe.local_batch} at a time{times}",
    ):
        yield from screen.wrap(line, "  ", "    ")
    total = gpu_bytes(recipe.gpu)
    if total is not None and not fits(predict(recipe), USABLE * total):
        why = "too large for a GPU, whatever the batch"
        if holds(recipe):
            why = "does not fit into the memory of a GPU"
        yield screen.paint(f"  {why}, see `primus fit`", "red")


def _setting_row(recipe: Recipe, key: str) -> tuple[str | Styled, ...]:
    setting = recipe.settings[key]
    origin = short_origin(setting.origin, recipe)
    return _without_section(key), spell(setting.value), Styled(origin, "dim")


def _reasons(recipe: Recipe, screen: Screen) -> Iterator[str]:
    """Yield each reason that the recipe gives, with the settings that have it."""
    reasons: dict[str, list[str]] = {}
    for keys in _sections(recipe).values():
        for key in keys:
            setting = recipe.settings[key]
            if setting.because:
                reasons.setdefault(setting.because, []).append(f"{key} = {spell(setting.value)}")
    if reasons:
        yield screen.paint("\nmissing and contradicting sources", "bold")
    narrow = screen._replace(width=min(screen.width or _WIDTH, _WIDTH))
    for because, settings in reasons.items():
        yield from screen.wrap(", ".join(settings), "  ", "    ")
        yield from narrow.wrap(because, "    ")


def _sections(recipe: Recipe) -> dict[str, list[str]]:
    """Return heading → keys. Those with a common first part stay together, in the files' order."""
    headings = (_TOP, "model", "assets", recipe.backend, "validation")
    sections: dict[str, dict[str, list[str]]] = {heading: {} for heading in headings}
    for key in dict.fromkeys((*CHOICES, *recipe.settings)):
        if key in ("name", "description"):
            continue
        section, dot, _ = key.partition(".")
        groups = sections.setdefault(section if dot else _TOP, {})
        first_part = _without_section(key).partition(".")[0]
        groups.setdefault(first_part, []).append(key)
    ordered = {}
    for heading, groups in sections.items():
        if groups:
            ordered[heading] = list(chain.from_iterable(groups.values()))
    return ordered


def _without_section(key: str) -> str:
    _, dot, rest = key.partition(".")
    if dot:
        return rest
    return key


def fit(options: LocalRecipeOptions) -> int:
    """Predict the memory that a recipe needs on one GPU, and the largest micro batch that fits."""
    recipe = options.request.resolved()
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


def _fit_lines(
    recipe: Recipe, memory: Memory, document: Mapping[str, object], screen: Screen
) -> Iterator[str]:
    gpu = generation(recipe.gpu)
    model = f"{recipe.name}: {readable(size(recipe.architecture).total)} parameters"
    way = f"{recipe.backend} {recipe.mode} {recipe.precision}"
    ranks = f"{recipe.world_size} × {gpu.title}, micro batch {recipe.local_batch}"
    yield from screen.wrap(f"{model}, {way}, {ranks}", hanging="  ")
    other = another_model(recipe)
    if other:
        yield f"  {other}"
    rows = []
    for name, value in memory.terms.items():
        rows.append((name, f"{value / _GIB:,.1f} GiB", TEXTS["memory"][name]))
    error = f"± {recipe.knows.memory_error:.0%}"
    rows.append(("peak", f"{memory.peak / _GIB:,.1f} GiB", error))
    yield from screen.table(rows, indent="  ")
    there = f"{USABLE * gpu.memory.gib:,.1f} GiB, {USABLE:.0%} of the GPU's {gpu.memory.gib:,g}"
    none = "no micro batch fits"
    if document["tight"]:
        yield (
            f"tight: more than {there}; the allocator must give memory back in every step, "
            "which costs speed"
        )
        none = "no micro batch fits without that"
    elif document["fits"]:
        yield f"fits: {there}"
    else:
        yield f"does not fit: more than {there}"
    largest = document["max_micro_batch"]
    if largest:
        yield f"largest micro batch that fits: {largest}"
    else:
        yield none
