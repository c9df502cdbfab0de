"""Show a recipe as it would run: every setting with its source, and which optimizations are on, and why.

RECIPE is the name of a recipe or the path of its file. key=value arguments override settings, as for train.
Nothing is started and no GPU is needed: --gpu names the GPU to resolve the recipe for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace

from primus.cli.image.common import add_choices, add_recipe, resolved, short_origin
from primus.recipes.architecture import readable, size
from primus.recipes.recipe import Recipe
from primus.recipes.rules import USABLE, fits, gpu_bytes, predict
from primus.recipes.setting import CHOICES, Setting
from primus.terminal import Screen, Styled, counted
from primus.turbo.optimizations import reasons as optimization_reasons

EXAMPLE = "primus show llama3.1-8b --gpu mi355x --precision fp8"
_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_recipe(parser)
    add_choices(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print the resolved recipe. Returns 0; raises InputError."""
    recipe = resolved(options)
    if options.json:
        print(json.dumps(_document(recipe), indent=2, ensure_ascii=False))
    else:
        print("\n".join(_lines(recipe, Screen.of())))
    return 0


def _command(recipe: Recipe) -> str:
    return " ".join(["primus", "train", recipe.name, *recipe.choices.words(), *recipe.overrides])


def _per_step(recipe: Recipe) -> tuple[int, str]:
    if recipe.architecture.family == "flux":
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
        "command": _command(recipe),
        "optimizations": {name: {"on": on, "why": why} for name, (on, why) in optimization_reasons(recipe).items()},
        "settings": {
            key: {"value": s.value, "origin": short_origin(s.origin, recipe)}
            | ({"because": s.because} if s.because else {})
            for key, s in recipe.settings.items()
        },
    }


def _lines(recipe: Recipe, screen: Screen) -> Iterator[str]:
    count, (amount, what) = size(recipe.architecture), _per_step(recipe)
    nodes = recipe.get("nodes", int)
    active = "" if count.active == count.total else f", {readable(count.active)} active per token"
    yield f"{recipe.name}: {recipe.get('description', str)}"
    yield f"  {readable(count.total)} parameters{active}"
    ranks, steps = counted(recipe.get("ranks", int), "rank"), counted(recipe.steps, "step")
    yield f"  {counted(nodes, 'node')} × {ranks}, {steps}"
    if what == "tokens":
        yield f"  {recipe.global_batch} sequences of {recipe.seq_len} = {amount:,} tokens per step"
    else:
        yield f"  {amount:,} {what} per step"
    yield (
        f"  each rank: {recipe.local_batch} at a time"
        + (f", {recipe.accumulation} times per step" if recipe.accumulation > 1 else "")
    )
    if (total := gpu_bytes(recipe.gpu)) is not None and not fits(predict(recipe), USABLE * total):
        yield screen.paint("  does not fit into the memory of a GPU, see `primus fit`", "red")
    yield screen.paint("\noptimizations", "bold")
    yield from screen.table(
        [(name, "on" if on else "off", Styled(why, "dim")) for name, (on, why) in optimization_reasons(recipe).items()],
        indent="  ",
    )
    reasons: dict[str, list[str]] = {}
    for section, keys in _sections(recipe).items():
        yield f"\n{screen.paint(section, 'bold')}"
        settings = {key: recipe.settings[key] for key in keys}
        yield from screen.table(
            [
                (_rest(key), _plain(setting), Styled(short_origin(setting.origin, recipe), "dim"))
                for key, setting in settings.items()
            ],
            indent="  ",
        )
        for key, setting in settings.items():
            if setting.because:
                reasons.setdefault(setting.because, []).append(f"{key} = {_plain(setting)}")
    if reasons:
        yield screen.paint("\nmissing and contradicting sources", "bold")
    narrow = replace(screen, width=min(screen.width or _WIDTH, _WIDTH))
    for because, keys in reasons.items():
        yield from screen.wrap(", ".join(keys), "  ", "    ")
        yield from narrow.wrap(because, "    ")
    yield f"\n{_command(recipe)}"


_TOP = "what and where"


def _sections(recipe: Recipe) -> dict[str, list[str]]:
    """Return heading → keys: the choices first, then model, assets, the backend, validation and the rest."""
    order = [_TOP, "model", "assets", recipe.backend, "validation"]
    sections: dict[str, list[str]] = {heading: [] for heading in order}
    for key in (*CHOICES, *(key for key in recipe.settings if key not in (*CHOICES, "name", "description"))):
        head, dot, _ = key.partition(".")
        sections.setdefault(head if dot else _TOP, []).append(key)
    for keys in sections.values():
        # Keys with a common first part stay together, in the order of the files.
        places = {_rest(key).partition(".")[0]: number for number, key in reversed(list(enumerate(keys)))}
        keys.sort(key=lambda key: places[_rest(key).partition(".")[0]])
    return {heading: keys for heading, keys in sections.items() if keys}


def _rest(key: str) -> str:
    head, dot, rest = key.partition(".")
    return rest if dot else head


def _plain(setting: Setting) -> str:
    value = setting.value
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)
