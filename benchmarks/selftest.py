"""Faults planted into kernels that the self-test must name, and healthy kernels that it must not
refuse.

    python -m benchmarks.selftest OUT.json RECIPE [key=value ...] --precision fp8 --healthy 20

Run it on a machine with the GPU. `tests/unit/turbo/test_selftest.py` plants the same faults on a
CPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from primus_images.turbo import selftest


def _scaled(tensor: torch.Tensor) -> None:
    """All values are 2 % too large; in FP8, whose steps are larger, 13 %."""
    factor = 1.02 if tensor.dtype.itemsize > 1 else 1.13
    tensor.copy_((tensor.float() * factor).to(tensor.dtype))


def _row(tensor: torch.Tensor) -> None:
    """One row holds the values of its neighbor."""
    rows = tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(-1, 1)
    rows[len(rows) // 2] = rows[len(rows) // 2 - 1].clone()


def _nan(tensor: torch.Tensor) -> None:
    """The last block of 64 values is NaN."""
    flat = tensor.view(-1)
    flat[-64:] = torch.full_like(flat[-64:], float("nan"), dtype=torch.float32).to(tensor.dtype)


def _tile(tensor: torch.Tensor) -> None:
    """A tile of 64 × 64 values is not written, and holds zeros of an earlier use of the memory."""
    rows = tensor.view(-1, tensor.shape[-1])
    height, width = (max(1, min(64, size // 2)) for size in rows.shape)
    rows[:height, :width] = torch.zeros_like(rows[:height, :width], dtype=torch.float32).to(
        tensor.dtype
    )


KINDS: dict[str, Callable[[torch.Tensor], None]] = {
    "scaled": _scaled,
    "row": _row,
    "nan": _nan,
    "tile": _tile,
}


@dataclass(frozen=True)
class Place:
    """A function that a kernel's result passes through. ``result`` is the index of the tensor to
    damage: of the returned ones, or of the positional arguments if ``argument``.
    """

    optimization: str
    module: str
    function: str
    result: int = 0
    argument: bool = False


PLACES = (
    Place(
        "linear-cross-entropy", "primus_images.turbo.kernels", "cross_entropy_", 0, argument=True
    ),
    Place(
        "linear-cross-entropy", "primus_images.turbo.kernels", "cross_entropy_", 2, argument=True
    ),
    Place("fp8-weight-cast", "primus_images.turbo.kernels", "cast_fp8"),
    Place("fp8-linear", "primus_images.turbo.fp8_kernels", "cast_both", 0),
    Place("fp8-linear", "primus_images.turbo.fp8_kernels", "cast_both", 1),
    Place("fp8-linear", "primus_images.turbo.fp8_kernels", "flip"),
    Place("fp8-feed-forward", "primus_images.turbo.fp8_kernels", "swiglu_cast"),
    *(
        Place("fp8-feed-forward", "primus_images.turbo.fp8_kernels", "swiglu_backward", index)
        for index in range(5)
    ),
    Place("reduce-scatter-copy-in", "primus_images.turbo.kernels", "copy_in", 1, argument=True),
    Place("peer-copies", "primus_images.turbo.sharded", "sum_of_ranks", 1, argument=True),
    Place("peer-copies", "primus_images.turbo.sharded", "reduce", 1, argument=True),
    Place("real-rope", "primus_images.turbo.attention", "rotate"),
    Place("expert-routing", "primus_images.turbo.experts", "_gathered"),
    Place("expert-routing", "primus_images.turbo.experts", "_summed"),
    Place("expert-routing", "primus_images.turbo.experts", "_weighted_back", 0),
    Place("expert-products", "primus_images.turbo.experts", "_expert_rows"),
    Place("expert-products", "primus_images.turbo.experts", "_expert_weights"),
    *(
        Place("flash-attention-4", "flash_attn.cute.interface", "_flash_attn_bwd", index)
        for index in range(3)
    ),
    Place("flash-attention-4", "flash_attn.cute.interface", "_flash_attn_fwd"),
    Place("packed-attention-4", "primus_images.turbo.packed", "packed_attention"),
    Place("packed-attention", "primus_images.turbo.packed", "packed_attention"),
)


@contextmanager
def planted(place: Place, damage: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Damage what ``place`` computes while the context is open."""
    module = import_module(place.module)
    original = getattr(module, place.function)

    @wraps(original)  # with its attributes: Flash Attention keeps its compiled kernels there
    def faulty(*words: Any, **options: Any) -> Any:
        out = original(*words, **options)
        results = words if place.argument else out if isinstance(out, tuple) else (out,)
        with torch.no_grad():
            damage(results[place.result])
        return out

    setattr(module, place.function, faulty)
    try:
        yield
    finally:
        setattr(module, place.function, original)


def main() -> int:
    from benchmarks.gpu import host
    from primus_images.recipes.resolve import resolve
    from primus_images.recipes.setting import Choices
    from primus_images.turbo.optimizations import candidates, shapes_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("recipes", nargs="+", help="RECIPE:BACKEND:PRECISION[:key=value]…")
    parser.add_argument("--healthy", type=int, default=3)
    parser.add_argument(
        "--until", type=float, default=300, help="seconds after which nothing new begins"
    )
    parser.add_argument("--gpu", default="h200")
    options = parser.parse_args()
    began, rows = time.monotonic(), []
    for text in options.recipes:
        name, backend, precision, *words = text.split(":")
        recipe = resolve(
            name, words, Choices(backend=backend, precision=precision, gpu=options.gpu)
        )
        shapes = shapes_of(recipe)
        for optimization in candidates(recipe):
            row: dict[str, Any] = {
                "recipe": text,
                "optimization": optimization,
                "healthy": [],
                "faults": {},
            }
            rows.append(row)
            for seed in range(options.healthy):
                at = time.monotonic()
                reason = selftest.fault(optimization, shapes, seed=seed)
                row["healthy"].append({"fault": reason, "seconds": round(time.monotonic() - at, 2)})
            for place in PLACES:
                if place.optimization != optimization or time.monotonic() - began > options.until:
                    continue
                for kind, damage in KINDS.items():
                    try:
                        with planted(place, damage):
                            reason = selftest.fault(optimization, shapes)
                    except Exception as error:  # noqa: BLE001 - the fault cannot be planted here
                        reason = f"not planted: {error}"
                    row["faults"][f"{place.function}.{place.result}.{kind}"] = reason
            print(json.dumps(row), flush=True)
            document = {
                "what": (
                    "The self-test: planted faults, and healthy kernels with other random numbers."
                ),
                "date": time.strftime("%Y-%m-%d"),
                "host": host(),
                "versions": {p: version(p) for p in ("torch", "triton", "torchao")},
                "rows": rows,
            }
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
