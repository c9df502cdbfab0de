"""The ceiling of a training step of Llama 3.1 8B: its matrix products and its attention alone, on
one GPU.

    python -m benchmarks.ceiling OUT.json [--batch 2] [--layers 32]

Times every product of a layer and of the output layer (output, gradient of the input, gradient of
the weight) in BF16 and in FP8, and Flash Attention 4 forward and backward, each alone and on random
data. A step of nothing else would give ``tokens_per_second``. A run's tokens/s/GPU divided by it is
the fraction of the ceiling.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu import host
from primus_images.turbo.attention import flash_attention_4

SEQ_LEN, HIDDEN, FFN, VOCABULARY, HEADS, KV_HEADS, SIZE = 8192, 4096, 14336, 128256, 32, 8, 128
LINEARS = {
    "wq": (HIDDEN, HIDDEN),
    "wk": (HIDDEN, KV_HEADS * SIZE),
    "wv": (HIDDEN, KV_HEADS * SIZE),
    "wo": (HIDDEN, HIDDEN),
    "w1": (HIDDEN, FFN),
    "w3": (HIDDEN, FFN),
    "w2": (FFN, HIDDEN),
}
"""A layer's linear layers: inputs, outputs."""


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Return the seconds of one call, the mean of ``repeats`` after three that do not count."""
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / repeats


def product(rows: int, inner: int, columns: int, *, fp8: bool) -> float:
    """Return the seconds of one product [rows, inner] × [inner, columns]."""
    a, b = (
        torch.randn(size, inner, device="cuda", dtype=torch.bfloat16) for size in (rows, columns)
    )
    if not fp8:
        return seconds(lambda: a @ b.t())
    one = torch.ones((), device="cuda")
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    return seconds(
        lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    )


def linear(tokens: int, inputs: int, outputs: int, *, fp8: bool) -> float:
    """Return the seconds of a linear layer's three products."""
    shapes = ((tokens, inputs, outputs), (tokens, outputs, inputs), (outputs, tokens, inputs))
    return sum(product(*shape, fp8=fp8) for shape in shapes)


def attention(batch: int) -> float:
    """Return the seconds of one causal attention, forward and backward."""
    q, k, v = (
        torch.randn(
            batch, SEQ_LEN, heads, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    out = flash_attention_4(q, k, v, window=0, causal=True)
    grad = torch.randn_like(out)
    forward = seconds(lambda: flash_attention_4(q, k, v, window=0, causal=True))
    return forward + seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=2, help="sequences of 8192 tokens")
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    tokens = options.batch * SEQ_LEN
    head, attend = linear(tokens, HIDDEN, VOCABULARY, fp8=False), attention(options.batch)
    rows = []
    for precision in ("bf16", "fp8"):
        linears = sum(linear(tokens, *sizes, fp8=precision == "fp8") for sizes in LINEARS.values())
        step = options.layers * (linears + attend) + head
        parts = {"linears": linears, "attention": attend, "head": head, "step": step}
        rows.append(
            {
                "precision": precision,
                "batch": options.batch,
                "layers": options.layers,
                "tokens_per_second": tokens / step,
                "milliseconds": {name: 1e3 * part for name, part in parts.items()},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "host": host(),
        "torch": torch.__version__,
        "results": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
