"""Two CSV formats of other tools: madengine's, and that of ``pytorch_benchmark_report.sh``."""

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from primus_images.gpus.table import Generation, arch_of, by_product_name
from primus_images.report.run import Run
from primus_images.yamlfile import read_values

COLUMNS: Any = read_values(Path(__file__).with_name("columns.yaml")).data


def perf_row(run: Run) -> dict[str, str]:
    """Return the row of a run: its throughput, and whether every check passed.

    Columns without a value are empty.
    """
    metric, value = _throughput(run)
    status = "FAILURE"
    if run.passed and value is not None:
        status = "SUCCESS"
    arch = ""
    gpu = _gpu(run)
    if gpu:
        arch = arch_of(gpu).arch
    return _row(
        "perf",
        run,
        metric=metric,
        performance=_number(value),
        per_node=run.ranks // run.nodes,
        status=status,
        arguments=" ".join(run.arguments),
        image={"manifest": "", "ref": "", **run.image},
        arch=arch,
    )


def _gpu(run: Run) -> Generation | None:
    if run.product:
        return by_product_name(run.product)
    return None


def _row(sheet: str, run: Run, **values: object) -> dict[str, str]:
    return {name: form.format(run=run, **values) for name, form in COLUMNS[sheet].items()}


def benchmark_rows(
    run: Run, *, model: str | None = None, mode: str | None = None
) -> list[dict[str, str]]:
    """Return one row per metric with the names of MAD's script.

    The metrics are throughput, TFLOP/s (non-causal count) and GiB. ``model`` and ``mode`` replace
    the recipe's names if the user's command called them differently. A missing figure is an empty
    field. If a check failed, all figures are empty, because readers of the file take a number for
    success.
    """
    metric, speed = _throughput(run)
    tflops = "TFLOPS_per_gpu"
    if metric == _IMAGES:
        tflops = "TFLOPS_per_GPU"
    figures = {
        metric: speed,
        tflops: run.summary.tflops_non_causal,
        "GPU_memory_usage": run.summary.memory_gib,
    }
    device = run.product or "CPU"
    gpu = _gpu(run)
    if gpu:
        device = gpu.name.upper()
    rows = []
    for name, value in figures.items():
        performance = ""
        if run.passed:
            performance = _number(value)
        row = _row(
            "benchmark",
            run,
            model=model or run.recipe,
            mode=mode or run.mode,
            precision=run.precision.upper(),
            metric=name,
            performance=performance,
            device=device,
        )
        rows.append(row)
    return rows


_TOKENS = "tok_per_s_per_gpu"
_IMAGES = "FPS_per_GPU"


def _throughput(run: Run) -> tuple[str, float | None]:
    images = run.summary.images_per_second
    if images is not None:
        return (_IMAGES, images)
    return (_TOKENS, run.summary.tokens_per_second)


def _number(value: float | None) -> str:
    """Format with six digits: madengine reads no thousands separator, exponent or ``nan``."""
    if value is None:
        return ""
    return f"{float(f'{value:.6g}'):.10f}".rstrip("0").rstrip(".")


def text_of(sheet: str, rows: Iterable[Mapping[str, str]], *, header: bool = True) -> str:
    """Return the rows of the sheet "perf" or "benchmark" as CSV, to append without a header."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS[sheet], lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
