"""From the throughput of a run to FLOP/s and the share of the GPU's peak. An unknown peak is not guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from primus.gpus.generation import Dtype
from primus.gpus.table import UnknownPeak, by_product_name, mfu, peak
from primus.recipes.recipe import Recipe
from primus.training.flops import Flops, of_recipe_unit


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a run, and its device.

    ``flops`` are those of one token (of one image with ``per_image``); None if the number of weights that LoRA
    trained is unknown. ``gpu`` is torch's name of the GPU, ``units`` its compute units or SMs, and ``device``
    torch's device type; None if the run wrote no facts.
    """

    flops: Flops | None
    per_image: bool
    precision: str
    device: str | None = None
    gpu: str | None = None
    units: int | None = None


@dataclass(frozen=True, kw_only=True)
class Mfu:
    """Model FLOP/s utilization (0.5 is half) in both conventions, relative to ``peak_tflops``, dense, in ``dtype``."""

    causal: float
    non_causal: float
    peak_tflops: float
    dtype: str
    gpu: str
    source: str


def work(recipe: Recipe, facts: Mapping[str, Any]) -> Work:
    """Return the work of ``recipe``. The device and the number of LoRA's weights come from the run's own ``facts``."""
    trained = facts.get("trainable_parameters") if recipe.mode == "lora" else None
    known = recipe.mode != "lora" or trained is not None
    return Work(
        flops=of_recipe_unit(recipe.architecture, recipe.seq_len, adapters=trained) if known else None,
        per_image=recipe.architecture.family == "flux",
        precision=recipe.precision,
        device=facts.get("device"),
        gpu=facts.get("gpu"),
        units=facts.get("gpu_units"),
    )


def mfu_of(done: Work, tflops: Flops) -> Mfu:
    """Return the utilization of ``tflops`` TFLOP/s. Raises UnknownPeak, with a sentence to print, if there is none."""
    if done.device == "cpu":
        raise UnknownPeak("no MFU: the run was on a CPU")
    if done.gpu is None:
        raise UnknownPeak("no MFU: the run did not report its GPU")
    if done.precision not in get_args(Dtype):
        raise UnknownPeak(f"no MFU: the table of GPUs holds no {done.precision.upper()} peak")
    dtype = cast("Dtype", done.precision)
    shares = [mfu(rate, done.gpu, dtype) for rate in (tflops.causal, tflops.non_causal)]
    known = by_product_name(done.gpu)
    published = peak(known, dtype) if known else None
    if known is None or published is None or published.tflops is None:
        raise UnknownPeak(f"no MFU: the peak of {done.gpu!r} is not known")
    if done.units != known.compute_units:
        raise UnknownPeak(f"no MFU: {done.units} of the {known.compute_units} compute units of {known.title}")
    return Mfu(
        causal=shares[0],
        non_causal=shares[1],
        peak_tflops=published.tflops,
        dtype=dtype,
        gpu=known.title,
        source=published.source,
    )
