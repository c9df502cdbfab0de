"""The page of measured throughput: each figure of AMD's v25.2 document beside what is measured
here.
"""

from pathlib import Path

from docs.site.measured import Rate, rates
from primus_images.gpus.table import generation
from primus_images.release.diff import table


def performance(root: Path) -> str:
    """Return the page."""
    every = rates(root)
    published, ours = (
        [r for r in every if r.published is not None],
        [r for r in every if r.published is None],
    )
    head = (
        "model",
        "precision",
        "GPU",
        "batch × tokens",
        "published",
        "per GPU",
        "measured here",
        "ratio",
    )
    rows = [_beside(one, ours) for one in published]
    also = [
        (
            f"`{r.recipe}`",
            f"{r.backend} {r.mode}",
            r.precision,
            f"{r.gpus} × {generation(r.gpu).title}",
            _size(r),
            _rate(r),
            f"[{r.by.removeprefix('this project, ')}](../{r.link})",
        )
        for r in sorted(
            ours, key=lambda r: (r.recipe, r.backend, r.mode, r.precision, r.gpus, r.seq_len or 0)
        )
    ]
    return "\n".join(
        [
            "# Throughput",
            "",
            f"## The {len(published)} figures of the v25.2 document",
            "",
            "AMD measured them on eight GPUs, in TFLOP/s per GPU (FLUX: images/s). Tokens per "
            "second follow from them; "
            "those in FP8 are 1.9 % lower, because the program of the document counts 1.9 % too "
            "many FLOPs. Nothing has been "
            "measured on an AMD GPU here. The last columns show the fastest run of this project "
            "on H200s with the "
            "same model and precision, and with the same length of sequences and backend if there "
            "is one. There is no ratio for another length.",
            "",
            *table(head, rows),
            "",
            "## All measurements of this project",
            "",
            "The fastest run of each kind, in tokens (FLUX: images) per second and GPU, "
            "full-size models only. Some "
            "results do not have the batch. The link has all runs with versions and commands.",
            "",
            *table(
                (
                    "recipe",
                    "backend, mode",
                    "precision",
                    "GPUs",
                    "batch × tokens",
                    "per GPU",
                    "data",
                ),
                also,
            ),
            "",
        ]
    )


def _beside(one: Rate, ours: list[Rate]) -> tuple[str, ...]:
    same = [
        r
        for r in ours
        if (r.recipe, r.precision) == (one.recipe, one.precision)
        and (r.mode == one.mode or not one.seq_len)
    ]
    # The same length of sequences first, then the same backend, then the fastest.
    near = max(
        same,
        key=lambda r: (r.seq_len == one.seq_len, r.backend == one.backend, r.rate),
        default=None,
    )
    here = (
        "not measured"
        if near is None
        else (
            f"{_rate(near)} ({near.gpus} × {generation(near.gpu).title}, "
            f"{near.backend}{_size(near, ', ')})"
        )
    )
    ratio = "–" if near is None or near.seq_len != one.seq_len else f"{near.rate / one.rate:.2f}"
    unit = "TFLOP/s" if one.seq_len else "images/s"
    return (
        f"`{one.recipe}`",
        one.precision,
        generation(one.gpu).title,
        _size(one),
        f"{one.published:g} {unit}",
        _rate(one),
        here,
        ratio,
    )


def _size(one: Rate, before: str = "") -> str:
    if one.batch is None:  # some results do not say it
        return f"{before}{one.seq_len} tokens" if one.seq_len else ""
    return before + (f"{one.batch} × {one.seq_len}" if one.seq_len else f"{one.batch} images")


def _rate(one: Rate) -> str:
    return f"{one.rate:,.0f} tokens/s" if one.seq_len else f"{one.rate:.2f} images/s"
