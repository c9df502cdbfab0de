"""The optimizations of training runs: list and test them."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from primus.cli.image.common import choices, resolved
from primus.cli.verb import JSON, answer, option, verb
from primus.errors import HostError, InputError
from primus.gpus.detect import detect
from primus.gpus.table import generation
from primus.recipes.choose import CPU
from primus.terminal import Screen
from primus.turbo.optimizations import Optimization, optimizations
from primus.turbo.trial import decide
from primus.yamlfile import spell

_EXAMPLE = "primus turbo test llama3.1-8b --precision fp8"


@verb(
    option("action", choices=("list", "test"), help="what to do"),
    option("recipe", nargs="?", metavar="RECIPE", help="test: the recipe whose sizes to use"),
    option("overrides", nargs="*", metavar="key=value", help="settings to override"),
    *choices(),
    JSON,
    example=_EXAMPLE,
)
def turbo(options: argparse.Namespace) -> int:
    """List the optimizations of training runs, or run their self-tests on this machine's GPU.

    `list` shows every optimization, what it needs and replaces, and whether this machine can use it.
    `test RECIPE` compares those that the recipe uses with float64 and plain PyTorch, at the recipe's sizes. A training
    run does the same before it starts, and uses only those that pass. Exit code 1: one failed; 3: there is no GPU.
    """
    return _list(options) if options.action == "list" else _test(options)


def _list(options: argparse.Namespace) -> int:
    if options.recipe:
        raise InputError("`primus turbo list` takes no recipe", hint="primus show RECIPE says what a recipe uses")
    name = options.gpu or detect().generation
    gpu = generation(name) if name and name != CPU else None
    rows = [(entry, entry.state(gpu)) for entry in optimizations().values()]
    document = {"optimizations": [asdict(entry) | {"state": text} for entry, text in rows]}
    answer(options, document, _lines(rows, Screen.of()))
    return 0


def _lines(rows: Sequence[tuple[Optimization, str]], screen: Screen) -> Iterator[str]:
    yield from screen.wrap("Optimizations of a training run (primus train RECIPE --turbo auto|require|off|NAME,…)")
    for entry, text in rows:
        yield ""
        yield from screen.wrap(f"{entry.name}  ({entry.provider}; {text})", hanging="    ")
        for line in (entry.title, entry.gain, f"replaces: {entry.replaces}", f"needs: {_needs(entry)}"):
            yield from screen.wrap(line, "    ")


def _needs(entry: Optimization) -> str:
    names = {
        "backend": entry.backends, "precision": entry.precisions, "family": entry.families,
        "GPU": entry.archs or entry.vendors, "packages": entry.packages,
    }  # fmt: skip
    parts = [f"{name} {', '.join(allowed)}" for name, allowed in names.items() if allowed]
    parts += [f"{key}={spell(value)}" for key, value in entry.settings.items()]
    parts += [f"{kind.upper()} {degree}" for kind, degree in entry.degrees.items()]
    parts += ["weights sharded over ranks"] * entry.sharded
    parts += ["a sliding window"] * entry.windowed
    return "; ".join(parts)


def _test(options: argparse.Namespace) -> int:
    if not options.recipe:
        raise InputError("no recipe is given", hint=_EXAMPLE)
    recipe = resolved(options)
    if recipe.gpu == CPU or not detect().names or detect().obstacle:
        raise HostError("there is no GPU on this machine to test optimizations on")
    with tempfile.TemporaryDirectory() as folder:
        trial = decide(recipe, Path(folder), os.environ)
    lines = [
        f"{'✗' if name in trial.off else '✓'} {name}: {trial.off.get(name, f'as plain PyTorch, {seconds} s')}"
        for name, seconds in trial.tested.items()
    ]
    lines += [f"– {name}: {trial.off[name]}" for name in trial.off.keys() - trial.tested.keys()]
    answer(options, asdict(trial), lines)
    return 1 if any(name in trial.tested for name in trial.off if "self-test" in trial.off[name]) else 0
