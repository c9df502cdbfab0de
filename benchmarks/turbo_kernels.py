"""Numerics and speed of the optimizations' kernels on this GPU, at the shapes of Llama 3.1 8B.

    python -m benchmarks.turbo_kernels OUT.json [CASE ...]

Each kernel is compared with FP64 (or with the exact bits that it must give), called twice to check
that it is deterministic, and timed against what it replaces. A failed case is recorded, and the
next one runs.
"""

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
from primus_images.turbo import fp8, fp8_kernels, kernels
from primus_images.turbo.kernels import linear_cross_entropy

HIDDEN, FFN, VOCABULARY, HEADS, KV_HEADS, SIZE = 4096, 14336, 128256, 32, 8, 128


def main() -> int:
    torch.manual_seed(7)
    results: list[dict[str, Any]] = []
    cases = (
        cross_entropy,
        head,
        weight_cast,
        layout,
        optimizer,
        quantize,
        swiglu,
        feed_forward,
        attention,
        attention_exact,
        products,
    )
    for case in cases:
        if sys.argv[2:] and case.__name__ not in sys.argv[2:]:
            continue
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
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "host": host(),
            "versions": versions,
            "results": results,
        }
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(result["passed"] for result in results) else 1


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ‖found − wanted‖ ÷ ‖wanted‖ in FP64."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())


def _ms(call: Callable[[], Any]) -> float:
    return round(float(triton.testing.do_bench(call, warmup=15, rep=60, return_mode="median")), 4)


def cross_entropy() -> dict[str, Any]:
    """Compare 256 rows, with ignored labels, with FP64."""
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
    places, out = (
        torch.randint(0, VOCABULARY, (8192,), device="cuda"),
        torch.empty(8192, device="cuda"),
    )
    ms = _ms(lambda: kernels.cross_entropy_(many, places, out))
    gbs = round(many.numel() * 4 / ms / 1e6)
    same = bool((first == second).all()) and bool((losses == again).all())
    return {
        "passed": off["loss"] < 1e-6 and off["gradient"] < 3e-3 and same,
        "off": off,
        "repeats": same,
        "ms": ms,
        "gb_per_s_of_one_read_and_write": gbs,
    }


def head() -> dict[str, Any]:
    """Compare output projection and loss, 2 × 8192 tokens, with FP32 in one piece."""
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
    gx, gw, total = (
        torch.empty_like(xf),
        torch.zeros_like(wf),
        torch.zeros((), device="cuda", dtype=torch.float64),
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    for start in range(0, len(xf), 2048):
        part = slice(start, start + 2048)
        logs = torch.log_softmax(xf[part] @ wf.t(), dim=1)
        to = labels.view(-1)[part, None]
        total -= logs.gather(1, to).sum().double()
        g = (
            logs.exp_()
            .scatter_add_(1, to, torch.full_like(to, -1, dtype=torch.float32))
            .div_(labels.numel())
        )
        gx[part] = g @ wf
        gw.addmm_(g.t(), xf[part])
    exact = float(total / labels.numel())
    off = {
        "loss": abs(float(loss) - exact) / exact,
        "grad_x": _off(grads[0].view(-1, HIDDEN), gx.cpu()),
        "grad_weight": _off(grads[1], gw.cpu()),
    }
    stock_off = {
        "loss": abs(float(other) - exact) / exact,
        "grad_x": _off(stock_grads[0].view(-1, HIDDEN), gx.cpu()),
        "grad_weight": _off(stock_grads[1], gw.cpu()),
    }
    return {
        "passed": off["loss"] < 1e-4 and off["grad_x"] < 1e-2 and off["grad_weight"] < 1e-2,
        "off": off,
        "stock_off": stock_off,
        "ms": ms,
        "stock_ms": stock_ms,
        "peak_gib": round(peak, 2),
        "stock_peak_gib": round(stock_peak, 2),
    }


def weight_cast() -> dict[str, Any]:
    """Compare bits with torchao's own cast, on a shard of w1 over two ranks."""
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
    """Lay out a block's gradients for two ranks, and compare bits with chunk_cat."""
    sizes = [
        (HIDDEN, HIDDEN),
        (1024, HIDDEN),
        (1024, HIDDEN),
        (HIDDEN, HIDDEN),
        (FFN, HIDDEN),
        (HIDDEN, FFN),
        (FFN, HIDDEN),
        (HIDDEN,),
        (HIDDEN,),
    ]
    grads = [torch.randn(*size, device="cuda").bfloat16() for size in sizes]
    total = sum(g.numel() for g in grads)
    out, want = (torch.full((total,), float("nan"), device="cuda") for _ in range(2))
    if not kernels.copy_in(grads, out, 2):
        return {"passed": False}
    torch.ops.fsdp.chunk_cat(grads, 0, 2, out=want.view(2, -1))
    same = bool((out == want).all())
    ms = _ms(lambda: kernels.copy_in(grads, out, 2))
    other = _ms(lambda: torch.ops.fsdp.chunk_cat(grads, 0, 2, out=want.view(2, -1)))
    return {
        "passed": same,
        "same_bits": same,
        "ms": ms,
        "chunk_cat_ms": other,
        "gb_per_s": round(total * 6 / ms / 1e6),
    }


def optimizer() -> dict[str, Any]:
    """Compare three AdamW steps with FP64 and with PyTorch's fused AdamW."""
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
        kernels.adamw_([(p, g, m, v, amax)], clip=clip, decay=0.1, step=step, **options)
        fused.grad, exact.grad = g * clip, (g * clip).double()
        stock.step()
        double.step()
    change = exact.detach() - start.double()
    off = _off(p.double() - start.double(), change)
    stock_off = _off(fused.detach().double() - start.double(), change)
    right = bool(amax == p.abs().max())
    updates: list[kernels.Update] = [(p, grads[0], m, v, amax)]
    step_ms = _ms(lambda: kernels.adamw_(updates, clip=clip, decay=0.1, step=4, **options))
    stock_ms = _ms(stock.step)
    return {
        "passed": off < max(2 * stock_off, 1e-4) and right,
        "off": off,
        "fused_adamw_off": stock_off,
        "largest_is_right": right,
        "ms": step_ms,
        "fused_adamw_ms": stock_ms,
        "gb_per_s": round(p.numel() * 28 / step_ms / 1e6),
    }


def _eight_off(found: torch.Tensor, scale: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the error relative to the same scale and cast in FP64."""
    largest = torch.finfo(found.dtype).max
    exact = (wanted * scale.double()).clamp(-largest, largest)
    return _off(found.float(), exact.float().to(found.dtype).float())


def _tiles(
    name: str, tried: list[tuple[int, int, int]], call: Callable[[], Any]
) -> dict[str, float]:
    """Return the milliseconds of ``call`` for each tile of the kernel ``name``, and keep the best
    one.
    """
    timed = {}
    for tile in tried:
        fp8_kernels.TILES[name] = tile
        timed["x".join(map(str, tile))] = _ms(call)
    best = min(timed, key=lambda key: timed[key])
    fp8_kernels.TILES[name] = tuple(map(int, best.split("x")))  # type: ignore[assignment]
    return timed


def quantize() -> dict[str, Any]:
    """Cast activations to FP8 in both layouts and transpose a weight, bit for bit as PyTorch."""
    x = torch.randn(16384, HIDDEN, device="cuda").bfloat16()
    x[5, 7] = float("nan")
    scale = torch.tensor(448.0 / 3, device="cuda")
    rows, columns = fp8_kernels.cast_both([x], [scale], torch.float8_e4m3fn)
    want = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    same = bool((rows.view(torch.uint8) == want).all()) and bool(
        (columns.view(torch.uint8) == want.t()).all()
    )
    odd = torch.randn(100, 72, device="cuda").bfloat16()  # not a multiple of a tile
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        rows, columns = fp8_kernels.cast_both([odd], [scale], kind)
        largest = torch.finfo(kind).max
        odd_want = (odd.float() * scale).clamp(-largest, largest).to(kind).view(torch.uint8)
        same &= bool(
            (rows.view(torch.uint8) == odd_want).all()
            and (columns.view(torch.uint8) == odd_want.t()).all()
        )
    w = torch.randn(FFN, HIDDEN, device="cuda").to(torch.float8_e4m3fn)
    same &= bool((fp8_kernels.flip(w).view(torch.uint8) == w.view(torch.uint8).t()).all())
    tried = [
        (128, 128, 8),
        (128, 128, 4),
        (64, 128, 8),
        (64, 128, 4),
        (128, 64, 8),
        (128, 64, 4),
        (64, 64, 4),
    ]
    timed = _tiles(
        "cast_both", tried, lambda: fp8_kernels.cast_both([x], [scale], torch.float8_e4m3fn)
    )
    flips = _tiles("flip", [*tried, (256, 128, 8), (128, 256, 8)], lambda: fp8_kernels.flip(w))
    return {
        "passed": same,
        "same_bits": same,
        "cast_both_ms": timed,
        "flip_ms": flips,
        "cast_both_gb_per_s": round(x.numel() * 4 / min(timed.values()) / 1e6),
        "flip_gb_per_s": round(w.numel() * 2 / min(flips.values()) / 1e6),
    }


def swiglu() -> dict[str, Any]:
    """Compare SiLU, product, their gradients and the casts with FP64."""
    gate, up, grad = (torch.randn(16384, FFN, device="cuda").bfloat16() for _ in range(3))
    part = slice(0, 512)
    a, b, d = (t[part].double() for t in (gate, up, grad))
    sigmoid = a.sigmoid()
    made, of_gate, of_up = (
        a * sigmoid * b,
        d * b * (sigmoid + a * sigmoid * (1 - sigmoid)),
        d * a * sigmoid,
    )
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    largest = fp8_kernels.swiglu_largest(gate[part], up[part])
    tops = fp8_kernels.swiglu_backward_largest(gate[part], up[part], grad[part])
    off = {
        "largest": abs(float(largest / made.abs().max()) - 1),
        "largest_gradients": max(
            abs(float(t / w.abs().max()) - 1) for t, w in zip(tops, (of_gate, of_up), strict=True)
        ),
    }
    scales = [
        torch.finfo(kind).max / top for kind, top in ((e5, tops[0]), (e5, tops[1]), (e4, largest))
    ]
    eight = fp8_kernels.swiglu_cast(gate[part], up[part], scales[2], e4)
    found = fp8_kernels.swiglu_backward(gate[part], up[part], grad[part], *scales, e5, e4)
    off["product"] = _eight_off(eight, scales[2], made)
    for name, values, scale, want in (
        ("gate", found[0], scales[0], of_gate),
        ("gate_turned", found[1].t(), scales[0], of_gate),
        ("up", found[2], scales[1], of_up),
        ("up_turned", found[3].t(), scales[1], of_up),
        ("product_turned", found[4].t(), scales[2], made),
    ):
        off[name] = _eight_off(values, scale, want)
    off["not_finite"] = float(sum(int((~t.float().isfinite()).sum()) for t in found))
    gate[3, 5] = float("nan")
    nan = bool(fp8_kernels.swiglu_largest(gate, up).isnan()) and bool(
        fp8_kernels.swiglu_backward_largest(gate, up, grad).isnan().all()
    )
    gate[3, 5] = 0.0
    count = gate.numel()
    sizes = [(1, n, w) for n in (2048, 4096, 8192) for w in (4, 8)]
    ms: dict[str, Any] = {
        "largest": _ms(lambda: fp8_kernels.swiglu_largest(gate, up)),
        "backward_largest": _ms(lambda: fp8_kernels.swiglu_backward_largest(gate, up, grad)),
        "cast": _tiles(
            "swiglu_cast", sizes, lambda: fp8_kernels.swiglu_cast(gate, up, scales[2], e4)
        ),
        "backward": _tiles(
            "swiglu_backward",
            [
                (64, 128, 8),
                (128, 64, 8),
                (128, 128, 8),
                (128, 128, 16),
                (64, 64, 4),
                (64, 64, 8),
                (32, 128, 4),
                (128, 32, 4),
            ],
            lambda: fp8_kernels.swiglu_backward(gate, up, grad, *scales, e5, e4),
        ),
    }
    speed = {"largest": 4, "backward_largest": 6, "cast": 5, "backward": 11}
    best = {name: min(t.values()) if isinstance(t, dict) else t for name, t in ms.items()}
    # A value on the boundary between two FP8 numbers may round to either.
    return {
        "passed": max(off.values()) < 2e-3 and nan,
        "off": off,
        "nan_is_kept": nan,
        "ms": ms,
        "gb_per_s": {name: round(count * size / best[name] / 1e6) for name, size in speed.items()},
    }


def feed_forward() -> dict[str, Any]:
    """Time a feed-forward block of 2 × 8192 tokens with its norm, forward and backward: torchao
    compiled, and ours.
    """
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig()
    x = torch.randn(2, 8192, HIDDEN, device="cuda").bfloat16().requires_grad_()
    layers = [
        torch.nn.Linear(i, o, bias=False, device="cuda", dtype=torch.bfloat16)
        for i, o in ((HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN))
    ]
    eight = [Float8Linear.from_float(layer, config) for layer in layers]
    weights = [layer.weight for layer in layers]
    grad = (torch.randn(2, 8192, HIDDEN, device="cuda") * 1e-4).bfloat16()
    norm = torch.nn.RMSNorm(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def stock(x: torch.Tensor) -> torch.Tensor:
        y = norm(x)
        return x + eight[2](torch.nn.functional.silu(eight[0](y)) * eight[1](y))

    def ours(x: torch.Tensor) -> torch.Tensor:
        return x + fp8.feed_forward(norm(x), weights[0], weights[1], weights[2], config)

    def exact(x: torch.Tensor) -> torch.Tensor:
        y = norm(x)
        return x + layers[2](torch.nn.functional.silu(layers[0](y)) * layers[1](y))

    inputs = (x, *weights)
    found: dict[str, Any] = {"off_bf16": {}, "ms": {}}
    wanted = [t.float() for t in torch.autograd.grad(exact(x), inputs, grad)]
    for name, function in (("torchao", torch.compile(stock)), ("ours", torch.compile(ours))):

        def step(function: Any = function) -> Any:
            return torch.autograd.grad(function(x), inputs, grad)

        found["off_bf16"][name] = [_off(a, b) for a, b in zip(step(), wanted, strict=True)]
        found["ms"][name] = _ms(step)
    found["passed"] = all(
        a < 1.1 * b
        for a, b in zip(found["off_bf16"]["ours"], found["off_bf16"]["torchao"], strict=True)
    )
    return found


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
    """Compare Flash Attention 4 and cuDNN with FP64, 1 × 2048 tokens."""
    from primus_images.turbo.attention import flash_attention_4

    inputs = _heads(1, 2048)
    grad = torch.randn(1, 2048, HEADS, SIZE, device="cuda").bfloat16()

    def run(function: Any, given: list[torch.Tensor], out_grad: torch.Tensor) -> list[torch.Tensor]:
        out = function(*given)
        return [out.detach(), *torch.autograd.grad(out, given, out_grad)]

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
        hidden = torch.ones(2048, 2048, device="cuda", dtype=torch.bool).triu(1)
        return torch.einsum(
            "bhqk,bkhd->bqhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v
        )

    wanted = run(exact, [t.detach().double().requires_grad_() for t in inputs], grad.double())
    names = ("out", "dq", "dk", "dv")
    first = run(flash_attention_4, inputs, grad)
    off = {n: _off(a, b) for n, a, b in zip(names, first, wanted, strict=True)}
    cudnn = {
        n: _off(a, b) for n, a, b in zip(names, run(_cudnn, inputs, grad), wanted, strict=True)
    }
    again = run(flash_attention_4, inputs, grad)
    same = {n: bool((a == b).all()) for n, a, b in zip(names, first, again, strict=True)}
    return {
        "passed": all(o < 1e-2 for o in off.values()),
        "off": off,
        "cudnn_off": cudnn,
        "repeats": same,
    }


def attention() -> dict[str, Any]:
    """Time attention of 2 × 8192 tokens: Flash Attention 4, and cuDNN with grouped heads."""
    from primus_images.turbo.attention import flash_attention_4

    inputs, grad = _heads(2, 8192), torch.randn(2, 8192, HEADS, SIZE, device="cuda").bfloat16()
    flops = 4 * 2 * 8192 * 8192 * HEADS * SIZE / 2
    found: dict[str, Any] = {"passed": True}
    for name, function in (("flash_attention_4", flash_attention_4), ("cudnn", _cudnn)):
        out = function(*inputs)
        forward = _ms(partial(function, *inputs))
        backward = _ms(partial(torch.autograd.grad, out, inputs, grad, retain_graph=True))
        found[name] = {
            "forward_ms": forward,
            "backward_ms": backward,
            "forward_tflops": round(flops / forward / 1e9),
            "backward_tflops": round(2.5 * flops / backward / 1e9),
        }
    found["off_cudnn"] = _off(flash_attention_4(*inputs), _cudnn(*inputs))
    found["passed"] = found["off_cudnn"] < 1e-2
    return found


def products() -> dict[str, Any]:
    """Compare BF16 and FP8 (tensorwise) products of the model's five shapes with FP64, over 64
    rows.
    """
    found: dict[str, Any] = {"passed": True, "off": {}}
    for out, into in ((HIDDEN, HIDDEN), (1024, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)):
        x, w = (
            torch.randn(16384, into, device="cuda").bfloat16(),
            (torch.randn(out, into, device="cuda") * 0.02).bfloat16(),
        )
        exact = x[:64].double() @ w.double().t()
        sx, sw = (448.0 / t.abs().max().float() for t in (x, w))
        x8, w8 = (
            (t.float() * s).clamp(-448, 448).to(torch.float8_e4m3fn) for t, s in ((x, sx), (w, sw))
        )
        eight = torch._scaled_mm(
            x8,
            w8.t(),
            scale_a=(1 / sx),
            scale_b=(1 / sw),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        rounded = (x8[:64].double() / sx.double()) @ (w8.double() / sw.double()).t()
        off = {
            "bf16": _off((x @ w.t())[:64], exact),
            "fp8": _off(eight[:64], exact),
            "fp8_from_its_rounded_inputs": _off(eight[:64], rounded),
        }
        found["off"][f"{out}x{into}"] = off
        found["passed"] &= (
            off["bf16"] < 5e-3 and off["fp8"] < 6e-2 and off["fp8_from_its_rounded_inputs"] < 5e-3
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
