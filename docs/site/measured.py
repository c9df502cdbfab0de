"""Throughput that somebody measured: AMD's in its documents, and ours in benchmarks/results."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from docs.site.published import outcomes
from primus_images.cli.verb import parser_of
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.run.metrics import of_recipe_unit

# RECIPE[/BACKEND/MODE]:PRECISION:… of the results *-turbo.json, or
# RECIPE:BACKEND:MODE:PRECISION:… of
# benchmarks/gpu.py.
_CELL = re.compile(
    r"(?P<recipe>[\w.-]+)[:/](?:(?P<backend>[a-z]+)[:/](?P<mode>[a-z]+):)?(?P<precision>fp8|bf16|mxfp8)\b"
)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Tokens (FLUX: images) per second of one GPU. ``published`` is the figure of the document,
    ``batch`` per GPU.
    """

    recipe: str
    backend: str
    mode: str
    precision: str
    gpu: str
    gpus: int
    seq_len: int | None
    batch: int | None
    rate: float
    by: str
    published: float | None = None
    link: str = ""


def rates(root: Path) -> tuple[Rate, ...]:
    """Return all, AMD's first. Of several runs of ours with the same choices, the fastest."""
    best: dict[tuple[object, ...], Rate] = {}
    for one in _ours(root):
        key = (one.recipe, one.backend, one.mode, one.precision, one.gpu, one.gpus, one.seq_len)
        if key not in best or one.rate > best[key].rate:
            best[key] = one
    return (*_published(), *best.values())


def _published() -> Iterator[Rate]:
    for outcome in outcomes():
        cell, recipe = outcome.cell, outcome.recipe
        if (figure := cell.measured.get(outcome.gpu)) is None:
            continue
        rate = figure
        if cell.seq_len:
            # The document's program counts Mistral's attention in a window of 1,024 tokens, and 1.9
            # % too much in FP8.
            model = recipe.architecture
            counted = replace(model, window=1024) if model.window else model
            rate = figure * 1e12 / of_recipe_unit(counted, cell.seq_len).non_causal
            rate *= 0.981 if cell.precision == "fp8" else 1
        yield Rate(
            recipe=cell.recipe,
            backend=cell.backend,
            mode=cell.mode,
            precision=cell.precision,
            gpu=outcome.gpu,
            gpus=recipe.world_size,
            seq_len=cell.seq_len,
            batch=cell.batch,
            rate=rate,
            published=figure,
            by="AMD, document v25.2",
        )


def _ours(root: Path) -> Iterator[Rate]:
    for path in sorted((root / "benchmarks/results").glob("*[24]xh200*.json")):
        document = json.loads(path.read_text("utf-8"))
        if "--proxy" in document.get("command", ""):
            continue
        for row in document.get("results", ()):
            cell = " ".join(str(row.get(key, "")) for key in ("cell", "variant", "name", "command"))
            figure = _figure(row)
            # Models with fewer layers and other libraries' own trainers have other throughput.
            if (
                figure is None
                or not row.get("passed")
                or re.search(r"\bbare\b|layers|ranks=", cell)
            ):
                continue
            if row.get("variant") == "default":
                found = _of_command(row["command"])
            else:
                found = match.groupdict() if (match := _CELL.match(cell.strip())) else {}
            if not found:
                continue
            flux = found["recipe"].startswith("flux")
            seq_len = int(row.get("seq_len") or found["seq_len"])
            yield Rate(
                recipe=found["recipe"],
                precision=found["precision"],
                gpu="h200",
                gpus=row.get("ranks") or document.get("ranks") or 1,
                rate=figure / seq_len if flux else figure,
                backend=found["backend"] or ("flux" if flux else "torchtitan"),
                mode=found["mode"] or "pretrain",
                seq_len=None if flux else seq_len,
                batch=row.get("local_batch"),
                by=f"this project, {document['date']}",
                link=f"benchmarks/results/{path.name}",
            )


def _of_command(command: str) -> dict[str, Any]:
    """Return the choices of a `primus train` command, with what its recipe gives for the rest."""
    options = parser_of("train").parse_args(shlex.split(command)[2:])
    if not all("=" in word for word in options.overrides):
        return {}
    choices = Choices(
        backend=options.backend, mode=options.mode, precision=options.precision, gpu=options.gpu
    )
    recipe = resolve(options.recipe, [*options.overrides, f"ranks={options.ranks}"], choices)
    names = ("backend", "mode", "precision", "seq_len")
    return {"recipe": recipe.name, **{name: getattr(recipe, name) for name in names}}


def _figure(row: dict[str, Any]) -> float | None:
    figure = row.get("tokens_per_second") or row.get("summary", {}).get("tokens_per_second")
    return figure if isinstance(figure, float) else None
