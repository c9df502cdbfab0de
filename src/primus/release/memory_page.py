"""docs/benchmarks/h200-memory.md: predicted memory compared with measurements and published batch sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from primus.recipes.memory import USABLE, gpu_bytes, largest_batch, predict
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.release.markdown import table

_SOURCE = "benchmarks/results/h200-memory.json"
_GIB = 2**30
_HEAD = ("recipe", "backend", "precision", "settings", "measured GiB", "predicted GiB", "error", "source")


def memory_page(result: Mapping[str, Any]) -> str:
    """Return the page. Measured figures come from ``result``; predictions are computed from the current recipes."""
    published = result["published"]
    cells = list(_cells(published["cells"]))
    within = sum(abs(_error(row)) <= 0.05 for row in result["rows"])
    near = sum(abs(fits - batch) <= 1 for *_, batch, fits in cells)
    return "\n".join(
        [
            f"<!-- Generated from {_SOURCE} by `nox -s docs`; do not edit. -->",
            "# Predicted and measured memory",
            "",
            f"{result['what']} *predicted* is the prediction of `primus fit` for the same settings. Settings that are "
            "not in this table, such as pipeline stages or other GPUs, use the same formulas and were not measured.",
            "",
            f"{within} of {len(result['rows'])} predictions are within ± 5 %, and all are within ± "
            f"{max(abs(_error(row)) for row in result['rows']):.1%}. Terms are counted from the model's sizes. The "
            "factors that no counting gives were fitted; for FP8, to the runs with 8192 tokens per sequence on two "
            "and more GPUs and to the one with 2048. The formula for one GPU was derived from the allocator's record "
            "of five of the runs of Llama 3.1 8B with eight layers in [memory-1xh200.json]"
            "(../../benchmarks/results/memory-1xh200.json). The other runs were not used.",
            "",
            *table(_HEAD, map(_row, result["rows"])),
            "",
            "## Published batches",
            "",
            f"{published['source']}. {near} of {len(cells)} predictions differ by at most one. If more fits than is "
            "published, speed may have determined the published batch. If less fits, the allocator must release memory "
            f"in every step with the published batch: `primus fit` uses at most {USABLE:.0%} of a GPU's memory.",
            "",
            *table(("recipe", "precision", "GPU", "published micro batch", "largest that `primus fit` allows"), cells),
            "",
        ]
    )


def _predicted(row: Mapping[str, Any]) -> float:
    choices = Choices(backend=row["backend"], mode=row["mode"], precision=row["precision"], gpu="h200")
    return predict(resolve(row["recipe"], row["words"], choices)).peak / _GIB


def _error(row: Mapping[str, Any]) -> float:
    return _predicted(row) / float(row["measured_gib"]) - 1


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    predicted, measured = _predicted(row), row["measured_gib"]
    backend = f"{row['backend']} {row['mode']}" if row["mode"] != "pretrain" else row["backend"]
    return (
        row["recipe"], backend, row["precision"], ", ".join(f"`{word}`" for word in row["words"]),
        f"{measured:.1f}", f"{predicted:.1f}", f"{_error(row):+.1%}", row["source"],
    )  # fmt: skip


def _cells(cells: list[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, int, int]]:
    for cell in cells:
        recipe = resolve(
            cell["recipe"], [], Choices(backend="torchtitan", precision=cell["precision"], gpu=cell["gpu"])
        )
        there = gpu_bytes(cell["gpu"]) or 0.0
        yield cell["recipe"], cell["precision"], cell["gpu"], cell["micro_batch"], largest_batch(recipe, USABLE * there)
