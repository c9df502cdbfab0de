"""Two CSV formats of other tools: madengine's perf.csv, and that of
``pytorch_benchmark_report.sh``.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from primus_images.gpus.table import arch_of, by_product_name
from primus_images.report.run import Run
from primus_images.yamlfile import read_values

COLUMNS: Any = read_values(Path(__file__).with_name("columns.yaml")).data


def perf_row(run: Run) -> dict[str, str]:
    """Return the row of a run: its throughput, and whether every check passed. Columns without a
    value are empty.
    """
    metric, value = _throughput(run)
    gpu = None
    if run.product:
        gpu = by_product_name(run.product)
    return _row(
        "perf",
        run,
        metric=metric,
        performance=_number(value),
        per_node=run.ranks // run.nodes,
        status="SUCCESS" if run.passed and value is not None else "FAILURE",
        arguments=" ".join(run.arguments),
        image={"manifest": "", "ref": "", **run.image},
        arch=arch_of(gpu).arch if gpu else "",
    )


def _row(sheet: str, run: Run, **values: object) -> dict[str, str]:
    return {name: form.format(run=run, **values) for name, form in COLUMNS[sheet].items()}


def benchmark_rows(
    run: Run, *, model: str | None = None, mode: str | None = None
) -> list[dict[str, str]]:
    """Return one row per metric with the names of MAD's script: throughput, TFLOP/s (non-causal
    count) and GiB.

    ``model`` and ``mode`` replace the recipe's names if the user's command called them differently.
    A missing figure is an empty field. If a check failed, all figures are empty, because readers of
    the file take a number for success.
    """
    metric, speed = _throughput(run)
    gpu = None
    if run.product:
        gpu = by_product_name(run.product)
    figures = {
        metric: speed,
        "TFLOPS_per_GPU" if metric == _IMAGES else "TFLOPS_per_gpu": run.summary.tflops_non_causal,
        "GPU_memory_usage": run.summary.memory_gib,
    }
    return [
        _row(
            "benchmark",
            run,
            model=model or run.recipe,
            mode=mode or run.mode,
            precision=run.precision.upper(),
            metric=name,
            performance=_number(value if run.passed else None),
            device=gpu.name.upper() if gpu else run.product or "CPU",
        )
        for name, value in figures.items()
    ]


_TOKENS = "tok_per_s_per_gpu"
_IMAGES = "FPS_per_GPU"


def _throughput(run: Run) -> tuple[str, float | None]:
    images = run.summary.images_per_second
    if images is not None:
        return (_IMAGES, images)
    return (_TOKENS, run.summary.tokens_per_second)


def _number(value: float | None) -> str:
    """Format with six digits and no thousands separator or exponent: madengine reads neither
    ``1,444`` nor ``nan``.
    """
    if value is None:
        return ""
    return f"{float(f'{value:.6g}'):.10f}".rstrip("0").rstrip(".")


def text_of(sheet: str, rows: Iterable[Mapping[str, str]], *, header: bool = True) -> str:
    """Return the rows of the sheet "perf" or "benchmark" as CSV. Leave out the header to append
    them to a file.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS[sheet], lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
