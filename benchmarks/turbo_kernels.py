"""Numerics and speed of the optimizations' kernels on this GPU, at the shapes of Llama 3.1 8B.

    python -m benchmarks.turbo_kernels OUT.json

Each kernel is compared with FP64 (or with the exact bits that it must give), called twice to see that it repeats
itself, and timed against what it replaces. A case that fails is written down and the next one runs.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu import host
from primus.turbo import kernels
from primus.turbo.loss import linear_cross_entropy

HIDDEN, FFN, VOCABULARY, HEADS, KV_HEADS, SIZE = 4096, 14336, 128256, 32, 8, 128


def main() -> int:
    torch.manual_seed(7)
    results: list[dict[str, Any]] = []
    for case in (cross_entropy, head, weight_cast, layout, optimizer, attention, attention_exact, products):
        at = time.monotonic()
        try:
            found = case()
        except Exception as error:  # noqa: BLE001 - the next case must run
            traceback.print_exc()
            found = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        found = {"case": case.__name__, **found, "seconds": round(time.monotonic() - at, 1)}
        results.append(found)
        print(json.dumps(found), flush=True)
        torch.cuda.empty_cache()
        versions = {n: metadata.version(n) for n in ("torch", "triton")}
        document = {"date": time.strftime("%Y-%m-%d"), "host": host(), "versions": versions, "results": results}
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(result["passed"] for result in results) else 1


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found − wanted‖ ÷ ‖wanted‖ in FP64."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())


def _ms(call: Callable[[], Any]) -> float:
    return round(float(triton.testing.do_bench(call, warmup=15, rep=60, return_mode="median")), 4)


def cross_entropy() -> dict[str, Any]:
    """256 rows against FP64, with ignored labels."""
    logits = (torch.randn(256, VOCABULARY, device="cuda") * 4).bfloat16()
    labels = torch.randint(0, VOCABULARY, (256,), device="cuda")
    labels[::7] = -100
    exact = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact, labels, reduction="none", ignore_index=-100)
    loss.sum().backward()
    losses, first = torch.full((256,), float("nan"), device="cuda"), logits.clone()
    kernels.cross_entropy_(first, labels, losses)
    again, second = torch.empty_like(losses), logits.clone()
    kernels.cross_entropy_(second, labels, again)
    off = {"loss": _off(losses, loss.detach()), "gradient": _off(first, exact.grad)}
    many = torch.randn(8192, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    places, out = torch.randint(0, VOCABULARY, (8192,), device="cuda"), torch.empty(8192, device="cuda")
    ms = _ms(lambda: kernels.cross_entropy_(many, places, out))
    gbs = round(many.numel() * 4 / ms / 1e6)
    same = bool((first == second).all()) and bool((losses == again).all())
    return {"passed": off["loss"] < 1e-6 and off["gradient"] < 3e-3 and same, "off": off, "repeats": same, "ms": ms,
            "gb_per_s_of_one_read_and_write": gbs}  # fmt: skip


def head() -> dict[str, Any]:
    """Output projection and loss, 2 × 8192 tokens, against FP32 in one piece."""
    x = (torch.randn(2, 8192, HIDDEN, device="cuda") * 1.0).bfloat16().requires_grad_()
    w = (torch.randn(VOCABULARY, HIDDEN, device="cuda") * 0.02).bfloat16().requires_grad_()
    labels = torch.randint(0, VOCABULARY, (2, 8192), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def ours() -> torch.Tensor:
        x.grad = w.grad = None
        loss = linear_cross_entropy(x, w, labels) / labels.numel()
        loss.backward()
        return loss.detach()

    loss = ours()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    grads = (x.grad.float().cpu(), w.grad.float().cpu())
    stock_loss = torch.compile(
        lambda pred, to: torch.nn.functional.cross_entropy(
            pred.flatten(0, 1).float(), to.flatten(0, 1), reduction="sum"
        )
    )

    def stock() -> torch.Tensor:
        x.grad = w.grad = None
        loss = stock_loss(x @ w.t(), labels) / labels.numel()
        loss.backward()
        return loss.detach()

    other = stock()
    torch.cuda.reset_peak_memory_stats()
    stock()
    stock_peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    stock_grads = (x.grad.float().cpu(), w.grad.float().cpu())
    ms, stock_ms = _ms(ours), _ms(stock)
    x.grad = w.grad = None
    # FP32 in chunks, gradients summed in FP32.
    xf, wf = x.detach().float().view(-1, HIDDEN), w.detach().float()
    gx, gw, total = torch.empty_like(xf), torch.zeros_like(wf), torch.zeros((), device="cuda", dtype=torch.float64)
    torch.backends.cuda.matmul.allow_tf32 = False
    for start in range(0, len(xf), 2048):
        part = slice(start, start + 2048)
        logs = torch.log_softmax(xf[part] @ wf.t(), dim=1)
        to = labels.view(-1)[part, None]
        total -= logs.gather(1, to).sum().double()
        g = logs.exp_().scatter_add_(1, to, torch.full_like(to, -1, dtype=torch.float32)).div_(labels.numel())
        gx[part] = g @ wf
        gw.addmm_(g.t(), xf[part])
    exact = float(total / labels.numel())
    off = {"loss": abs(float(loss) - exact) / exact, "grad_x": _off(grads[0].view(-1, HIDDEN), gx.cpu()),
           "grad_weight": _off(grads[1], gw.cpu())}  # fmt: skip
    stock_off = {"loss": abs(float(other) - exact) / exact, "grad_x": _off(stock_grads[0].view(-1, HIDDEN), gx.cpu()),
                 "grad_weight": _off(stock_grads[1], gw.cpu())}  # fmt: skip
    return {"passed": off["loss"] < 1e-4 and off["grad_x"] < 1e-2 and off["grad_weight"] < 1e-2, "off": off,
            "stock_off": stock_off, "ms": ms, "stock_ms": stock_ms, "peak_gib": round(peak, 2),
            "stock_peak_gib": round(stock_peak, 2)}  # fmt: skip


def weight_cast() -> dict[str, Any]:
    """The bits of torchao's own cast, on a shard of w1 over two ranks."""
    from torchao.float8.float8_utils import to_fp8_saturated

    w = torch.randn(FFN // 2, HIDDEN, device="cuda") * 0.02
    scale = torch.tensor(448.0 / 0.05, device="cuda")  # some values saturate
    want = to_fp8_saturated(w * scale, torch.float8_e4m3fn)
    found = kernels.cast_fp8(w, scale, torch.float8_e4m3fn)
    same = bool((found.view(torch.uint8) == want.view(torch.uint8)).all())
    ms = _ms(lambda: kernels.cast_fp8(w, scale, torch.float8_e4m3fn))
    other = _ms(lambda: to_fp8_saturated(w * scale, torch.float8_e4m3fn))
    return {
        "passed": same,
        "same_bits": same,
        "ms": ms,
        "torchao_ms": other,
        "gb_per_s": round(w.numel() * 5 / ms / 1e6),
    }


def layout() -> dict[str, Any]:
    """A block's gradients laid out for two ranks, bit for bit what chunk_cat gives."""
    sizes = [(HIDDEN, HIDDEN), (1024, HIDDEN), (1024, HIDDEN), (HIDDEN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN),
             (FFN, HIDDEN), (HIDDEN,), (HIDDEN,)]  # fmt: skip
    grads = [torch.randn(*size, device="cuda").bfloat16() for size in sizes]
    total = sum(g.numel() for g in grads)
    out, want = (torch.full((total,), float("nan"), device="cuda") for _ in range(2))
    if not kernels.copy_in(grads, out, 2):
        return {"passed": False}
    torch.ops.fsdp.chunk_cat(grads, 0, 2, out=want.view(2, -1))
    same = bool((out == want).all())
    ms = _ms(lambda: kernels.copy_in(grads, out, 2))
    other = _ms(lambda: torch.ops.fsdp.chunk_cat(grads, 0, 2, out=want.view(2, -1)))
    return {"passed": same, "same_bits": same, "ms": ms, "chunk_cat_ms": other, "gb_per_s": round(total * 6 / ms / 1e6)}


def optimizer() -> dict[str, Any]:
    """Three AdamW steps against FP64 and beside PyTorch's fused AdamW."""
    shape = (FFN // 2, HIDDEN)
    start, grads = (
        torch.randn(shape, device="cuda") * 0.02,
        [torch.randn(shape, device="cuda") * 1e-3 for _ in range(3)],
    )
    clip = torch.tensor(0.37, device="cuda")
    options: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8}
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    amax = torch.zeros((), device="cuda")
    fused, exact = (torch.nn.Parameter(t) for t in (start.clone(), start.double()))
    stock = torch.optim.AdamW([fused], fused=True, weight_decay=0.1, **options)
    double = torch.optim.AdamW([exact], foreach=False, weight_decay=0.1, **options)
    for step, g in enumerate(grads, start=1):
        amax.zero_()
        kernels.adamw_(p, g, m, v, clip=clip, amax=amax, decay=0.1, step=step, **options)
        fused.grad, exact.grad = g * clip, (g * clip).double()
        stock.step()
        double.step()
    change = exact.detach() - start.double()
    off = _off(p.double() - start.double(), change)
    stock_off = _off(fused.detach().double() - start.double(), change)
    right = bool(amax == p.abs().max())
    step_ms = _ms(lambda: kernels.adamw_(p, grads[0], m, v, clip=clip, amax=amax, decay=0.1, step=4, **options))
    stock_ms = _ms(stock.step)
    return {"passed": off < max(2 * stock_off, 1e-4) and right, "off": off, "fused_adamw_off": stock_off,
            "largest_is_right": right, "ms": step_ms, "fused_adamw_ms": stock_ms,
            "gb_per_s": round(p.numel() * 28 / step_ms / 1e6)}  # fmt: skip


def _heads(batch: int, length: int) -> list[torch.Tensor]:
    return [
        torch.randn(batch, length, heads, SIZE, device="cuda").bfloat16().requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        made = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
    return made.transpose(1, 2)


def attention_exact() -> dict[str, Any]:
    """Flash Attention 4 and cuDNN against FP64, 1 × 2048 tokens."""
    from primus.turbo.attention import flash_attention_4

    inputs = _heads(1, 2048)
    grad = torch.randn(1, 2048, HEADS, SIZE, device="cuda").bfloat16()

    def run(function: Any, given: list[torch.Tensor], out_grad: torch.Tensor) -> list[torch.Tensor]:
        out = function(*given)
        return [out.detach(), *torch.autograd.grad(out, given, out_grad)]

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
        hidden = torch.ones(2048, 2048, device="cuda", dtype=torch.bool).triu(1)
        return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)

    wanted = run(exact, [t.detach().double().requires_grad_() for t in inputs], grad.double())
    names = ("out", "dq", "dk", "dv")
    first = run(flash_attention_4, inputs, grad)
    off = {n: _off(a, b) for n, a, b in zip(names, first, wanted, strict=True)}
    cudnn = {n: _off(a, b) for n, a, b in zip(names, run(_cudnn, inputs, grad), wanted, strict=True)}
    again = run(flash_attention_4, inputs, grad)
    same = {n: bool((a == b).all()) for n, a, b in zip(names, first, again, strict=True)}
    return {"passed": all(o < 1e-2 for o in off.values()), "off": off, "cudnn_off": cudnn, "repeats": same}


def attention() -> dict[str, Any]:
    """Speed at 2 × 8192 tokens: Flash Attention 4, cuDNN with grouped heads given as such."""
    from primus.turbo.attention import flash_attention_4

    inputs, grad = _heads(2, 8192), torch.randn(2, 8192, HEADS, SIZE, device="cuda").bfloat16()
    flops = 4 * 2 * 8192 * 8192 * HEADS * SIZE / 2
    found: dict[str, Any] = {"passed": True}
    for name, function in (("flash_attention_4", flash_attention_4), ("cudnn", _cudnn)):
        out = function(*inputs)
        forward = _ms(partial(function, *inputs))
        backward = _ms(partial(torch.autograd.grad, out, inputs, grad, retain_graph=True))
        found[name] = {"forward_ms": forward, "backward_ms": backward, "forward_tflops": round(flops / forward / 1e9),
                       "backward_tflops": round(2.5 * flops / backward / 1e9)}  # fmt: skip
    found["off_cudnn"] = _off(flash_attention_4(*inputs), _cudnn(*inputs))
    found["passed"] = found["off_cudnn"] < 1e-2
    return found


def products() -> dict[str, Any]:
    """BF16 and FP8 (tensorwise) products of the model's five shapes against FP64, over 64 rows."""
    found: dict[str, Any] = {"passed": True, "off": {}}
    for out, into in ((HIDDEN, HIDDEN), (1024, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)):
        x, w = (
            torch.randn(16384, into, device="cuda").bfloat16(),
            (torch.randn(out, into, device="cuda") * 0.02).bfloat16(),
        )
        exact = x[:64].double() @ w.double().t()
        sx, sw = (448.0 / t.abs().max().float() for t in (x, w))
        x8, w8 = ((t.float() * s).clamp(-448, 448).to(torch.float8_e4m3fn) for t, s in ((x, sx), (w, sw)))
        eight = torch._scaled_mm(
            x8, w8.t(), scale_a=(1 / sx), scale_b=(1 / sw), out_dtype=torch.bfloat16, use_fast_accum=True
        )
        rounded = (x8[:64].double() / sx.double()) @ (w8.double() / sw.double()).t()
        off = {"bf16": _off((x @ w.t())[:64], exact), "fp8": _off(eight[:64], exact),
               "fp8_from_its_rounded_inputs": _off(eight[:64], rounded)}  # fmt: skip
        found["off"][f"{out}x{into}"] = off
        found["passed"] &= off["bf16"] < 5e-3 and off["fp8"] < 6e-2 and off["fp8_from_its_rounded_inputs"] < 5e-3
    return found


if __name__ == "__main__":
    sys.exit(main())
