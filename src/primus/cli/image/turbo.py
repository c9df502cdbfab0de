"""List the optimizations that `primus train --turbo` accepts, and whether this machine supports them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from primus.cli.image.common import offered
from primus.gpus.detect import detect
from primus.gpus.table import generation
from primus.terminal import Screen
from primus.turbo.optimizations import Optimization, optimizations, state

EXAMPLE = "primus turbo list --gpu mi300x"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=("list",), help="what to do")
    gpu = parser.add_argument("--gpu", metavar="NAME", help="target whose GPU to use (default: this machine's)")
    gpu.completer = lambda **_: offered("gpu")  # type: ignore[attr-defined]
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print the list. Returns 0. Raises InputError for an unknown GPU."""
    arch = _arch(options)
    rows = [(optimization, state(optimization, arch)) for optimization in optimizations().values()]
    if options.json:
        document = {"optimizations": [asdict(optimization) | {"state": usable} for optimization, usable in rows]}
        print(json.dumps(document, ensure_ascii=False))
        return 0
    screen = Screen.of()
    lines = [*screen.wrap("Optimizations of a training run (primus train RECIPE --turbo auto|off|NAME,…)"), ""]
    for optimization, usable in rows:
        lines += screen.wrap(f"{optimization.name}  ({optimization.provider}; {usable})", hanging="    ")
        needs = f"needs: {_needs(optimization)}"
        for text in (optimization.title, optimization.gain, needs, f"tested by: {optimization.test}"):
            lines += screen.wrap(text, "    ")
    print("\n".join(lines))
    return 0


def _needs(optimization: Optimization) -> str:
    """The requirements of an optimization as one line."""
    parts = [f"backend {', '.join(optimization.backends)}", f"precision {', '.join(optimization.precisions)}"]
    for title, names in (
        ("family", optimization.families),
        ("GPU", optimization.archs or optimization.vendors),
        ("packages", optimization.packages),
    ):
        parts += [f"{title} {', '.join(names)}"] * bool(names)
    for key, value in optimization.settings.items():
        parts.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    parts += [f"{kind.upper()} {degree}" for kind, degree in optimization.degrees.items()]
    parts += ["weights sharded over ranks"] * optimization.sharded
    return "; ".join(parts)


def _arch(options: argparse.Namespace) -> str | None:
    """Return the architecture of --gpu, or of this machine's GPU; None if there is neither."""
    name = options.gpu or detect().generation
    return generation(name).arch if name else None
