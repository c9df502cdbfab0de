"""List the recipes with their backends, modes, precisions and the GPUs that support them.

Every recipe also has a proxy: a small model that uses the same code. --proxy trains it, also on a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from primus.cli.image.common import add_named, complete_recipe
from primus.errors import InputError
from primus.recipes.architecture import readable
from primus.recipes.catalogue import Entry, entries
from primus.recipes.choose import among, values_of
from primus.recipes.load import folder, names, no_recipes
from primus.terminal import Screen

EXAMPLE = "primus list llama --gpu mi355x --precision fp8"
_CHOICES = ("backend", "mode", "precision", "gpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    name = parser.add_argument(
        "name", metavar="NAME", nargs="?", default="", help="only recipes whose names contain this"
    )
    name.completer = complete_recipe  # type: ignore[attr-defined]
    for choice in _CHOICES:
        add_named(parser, choice, f"only with this {'GPU' if choice == 'gpu' else choice}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print the table. Returns 0. Raises InputError if no recipe matches."""
    for choice in _CHOICES:
        if (word := getattr(options, choice)) is not None:
            among(choice, word, values_of(choice), f"--{choice} {word}")
    if not names():
        raise no_recipes(folder())
    shown = [entry for entry in (_narrowed(entry, options) for entry in entries()) if entry]
    if not shown:
        raise InputError("no recipe matches these options", hint="primus list shows all recipes")
    if options.json:
        print(json.dumps([_document(entry) for entry in shown], indent=2))
        return 0
    head = ("RECIPE", "PARAMETERS", "BACKEND", "MODE", "PRECISIONS", "GPUS")
    print("\n".join(Screen.of().table([_row(entry) for entry in shown], head=head)))
    return 0


def _narrowed(entry: Entry, options: argparse.Namespace) -> Entry | None:
    """Return the part of ``entry`` that matches the options, or None."""
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


def _row(entry: Entry) -> Sequence[str]:
    everywhere = entry.gpus
    words = [
        precision if some == everywhere else f"{precision} ({' '.join(some)})"
        for precision, some in entry.precisions.items()
    ]
    return (
        entry.recipe, readable(entry.size.total), entry.backend, entry.mode, " ".join(words), " ".join(everywhere),
    )  # fmt: skip


def _document(entry: Entry) -> dict[str, object]:
    return {**asdict(entry), "path": str(entry.path)}
