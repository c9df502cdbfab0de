"""The self-test of every optimization on this machine's GPU: `python -m
primus_images.turbo.selftest SHAPES NAME…`.

Each is called with random tensors of the run's sizes, forward and backward, and compared with
float64 and with plain PyTorch (:mod:`primus_images.turbo.compared`). The process prints one line of
JSON after each, in the given order, so the first name without a line is that of a kernel that ended
the process. Memory is filled with NaN before each test, so that a value that a kernel does not
write is seen.
"""

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from primus_images.turbo import (
    adapters,
    attention,
    experts,
    fp8,
    fp8_kernels,
    kernels,
    primus_turbo,
    sharded,
)
from primus_images.turbo.compared import (
    SCALE_FP8,
    Compared,
    Maker,
    Rows,
    formats,
    leaves_of,
    plain_linear,
    three_ways,
)
from primus_images.turbo.optimizations import Shapes

_LONGEST = 8192
"""Tokens of a sequence at most, and sequences of attention: :data:`_MOST`. Longer runs are tested with these."""
_MOST = 2
_SEED = 20261126
_IGNORED = -100


def linear_cross_entropy(shapes: Shapes, make: Maker) -> Rows:
    """Two chunks of tokens, the second one partial, some of them without a label."""
    tokens = min(shapes.tokens, kernels.CHUNK + 256)
    states = make.normal(tokens, shapes.hidden)
    weight = make.normal(shapes.vocabulary, shapes.hidden, scale=shapes.hidden**-0.5)
    labels = make.whole(shapes.vocabulary, tokens)
    labels[::7] = _IGNORED

    def whole(x: torch.Tensor, w: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        logits = x[part] @ w.t()
        if logits.dtype != torch.float64:
            logits = logits.float()
        return cross_entropy(logits, labels[part], reduction="sum")

    def in_parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        # In float64, the logits of all tokens do not fit into every GPU's memory.
        parts = [slice(start, start + 1024) for start in range(0, tokens, 1024)]
        return torch.stack(
            [checkpoint(whole, x, w, part, use_reentrant=False) for part in parts]
        ).sum()

    yield from three_ways(
        ("loss", "gradient of states", "gradient of weights"),
        lambda x, w: kernels.linear_cross_entropy(x, w, labels),
        whole,
        in_parts,
        states,
        weight,
        make=make,
    )


def fp8_weight_cast(shapes: Shapes, make: Maker) -> Rows:
    """A rank's share of the largest weight; some values saturate."""
    dtype = formats().cast_config_weight.target_dtype
    top = torch.finfo(dtype).max
    weight = make.normal(
        shapes.ffn // shapes.shards or 1, shapes.hidden, scale=0.02, dtype=torch.float32
    )
    scale = torch.tensor(top / 0.05, device=make.device)
    expected = (weight * scale).clamp(-top, top).to(dtype)
    yield Compared(
        label="the cast weight", out=kernels.cast_fp8(weight, scale, dtype), plain=expected
    )


def _casts(parts: list[torch.Tensor], dtype: torch.dtype) -> Rows:
    """Compare the bits of the casts that layers consist of: a wrong tile hardly shows in a sum over
    all tokens.
    """
    top = torch.finfo(dtype).max
    scales = [top / (part.abs().max().float() * (1 + number)) for number, part in enumerate(parts)]
    rows, columns = fp8_kernels.cast_both(parts, scales, dtype)
    eight = [
        (part.float() * scale).clamp(-top, top).to(dtype)
        for part, scale in zip(parts, scales, strict=True)
    ]
    expected = torch.cat([part.view(torch.uint8) for part in eight], dim=1)
    yield Compared(label="cast", out=rows.view(torch.uint8), plain=expected)
    yield Compared(
        label="transposed cast", out=columns.view(torch.uint8), plain=expected.t().contiguous()
    )
    yield Compared(
        label="transposed copy",
        out=fp8_kernels.flip(rows).view(torch.uint8),
        plain=expected.t().contiguous(),
    )
    largest = torch.stack([fp8_kernels.largest(part) for part in parts])
    yield Compared(
        label="largest value",
        out=largest,
        plain=torch.stack([part.abs().max().float() for part in parts]),
    )


def _layer(ours: Callable[..., torch.Tensor], shapes: Shapes, make: Maker) -> Rows:
    """Compare the layer after attention, which ``ours`` computes from an input and a weight, with
    torchao's.
    """
    config = formats()
    yield from three_ways(
        ("output", "gradient of the input", "gradient of the weight"),
        ours,
        lambda x, w: plain_linear(x, w, config),
        lambda x, w: x @ w.t(),
        make.normal(shapes.tokens, shapes.hidden),
        make.normal(shapes.hidden, shapes.hidden, scale=0.02),
        make=make,
        factor=SCALE_FP8,
    )


def fp8_linear(shapes: Shapes, make: Maker) -> Rows:
    """The layer after attention."""
    config = formats()
    for form in (config.cast_config_input, config.cast_config_grad_output):
        yield from _casts([make.normal(shapes.tokens, shapes.hidden)], form.target_dtype)
    yield from _layer(lambda x, w: fp8.linear(x, w, config), shapes, make)


def frozen_weights(shapes: Shapes, make: Maker) -> Rows:
    """A frozen layer after attention in FP8. In BF16, the products are PyTorch's own."""
    config = formats()
    weight = make.normal(shapes.hidden, shapes.hidden, scale=0.02)
    eights = fp8.frozen(weight, config)
    yield from three_ways(
        ("output", "gradient of the input"),
        lambda x: fp8.frozen_linear(x, eights, config),
        lambda x: plain_linear(x, weight, config),
        lambda x: x @ weight.to(x.dtype).t(),
        make.normal(shapes.tokens, shapes.hidden),
        make=make,
        factor=SCALE_FP8,
    )


def adapter_products(shapes: Shapes, make: Maker) -> Rows:
    """Queries, keys and values with adapters of rank 16. In FP8, the frozen products are those of
    frozen-weights.
    """
    rank = 16
    factor = 2.0
    inner = shapes.hidden**-0.5
    outs = (shapes.heads * shapes.head_dim, *[shapes.kv_heads * shapes.head_dim] * 2)
    weights = [make.normal(rows, shapes.hidden, scale=inner) for rows in outs]
    firsts = [make.normal(rank, shapes.hidden, scale=inner) for _ in outs]
    seconds = [make.normal(rows, rank, scale=rank**-0.5) for rows in outs]

    def apart(x: torch.Tensor, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = zip(weights, matrices[:3], matrices[3:], strict=True)
        return tuple(x @ w.to(x.dtype).t() + x @ a.t() @ b.t() * factor for w, a, b in pairs)

    def together(x: torch.Tensor, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = list(zip(matrices[:3], matrices[3:], strict=True))
        return adapters.adapted(x, pairs, [(weight,) for weight in weights], factor)

    names = ("queries", "keys", "values")
    labels = [
        f"gradient of the {which} matrix of {name}"
        for which in ("first", "second")
        for name in names
    ]
    yield from three_ways(
        (*names, "gradient of the input", *labels),
        together,
        apart,
        apart,
        make.normal(shapes.tokens, shapes.hidden),
        *firsts,
        *seconds,
        make=make,
    )


def fp8_projections(shapes: Shapes, make: Maker) -> Rows:
    """Queries, keys and values, with weights of different size."""
    config = formats()
    narrow = shapes.kv_heads * shapes.head_dim
    weights = [
        make.normal(rows, shapes.hidden, scale=scale)
        for rows, scale in ((shapes.heads * shapes.head_dim, 0.02), (narrow, 0.05), (narrow, 0.01))
    ]
    gradients = [make.normal(shapes.tokens, len(weight)) for weight in weights]
    yield from _casts(gradients, config.cast_config_grad_output.target_dtype)
    labels = ("queries", "keys", "values", "gradient of the input")
    yield from three_ways(
        (*labels, *(f"gradient of the weight of {name}" for name in labels[:3])),
        lambda x, *w: fp8.projections(x, w, config),
        lambda x, *w: tuple(plain_linear(x, each, config) for each in w),
        lambda x, *w: tuple(x @ each.t() for each in w),
        make.normal(shapes.tokens, shapes.hidden),
        *weights,
        make=make,
        factor=SCALE_FP8,
    )


def _swiglu(tokens: int, width: int, config: Any, make: Maker) -> Rows:
    gate, up, grad = (make.normal(tokens, width, dtype=torch.bfloat16) for _ in range(3))
    wide = config.cast_config_input.target_dtype
    narrow = config.cast_config_grad_output.target_dtype
    results = []
    for dtype in (torch.float32, torch.float64):
        a, b = leaves_of(gate, up, dtype=dtype)
        product = silu(a) * b
        results.append((product.detach(), *torch.autograd.grad(product, (a, b), grad.to(dtype))))
    tops = [exact.abs().max() for exact in results[1]]
    scales = [
        (torch.finfo(dtype).max / top / 2).float()
        for top, dtype in zip(tops, (wide, narrow, narrow), strict=True)
    ]
    forward = fp8_kernels.swiglu_cast(gate, up, scales[0], wide)
    of_gate, gate_flipped, of_up, up_flipped, made_flipped = fp8_kernels.swiglu_backward(
        gate, up, grad, scales[1], scales[2], scales[0], narrow, wide
    )
    pairs = (
        ("product", forward, made_flipped),
        ("gradient of the gate", of_gate, gate_flipped),
        ("gradient of the input", of_up, up_flipped),
    )
    for (label, rows, columns), plain, exact, scale in zip(pairs, *results, scales, strict=True):
        rounded = (plain * scale).to(rows.dtype).float()
        best = exact * scale.double()
        yield Compared(label=label, out=rows.float(), plain=rounded, exact=best, factor=SCALE_FP8)
        turned = Compared(
            label=f"{label}, transposed", out=columns.float(), plain=rounded.t(), exact=best.t()
        )
        yield replace(turned, factor=SCALE_FP8)
    largest = torch.stack(
        [fp8_kernels.swiglu_largest(gate, up), *fp8_kernels.swiglu_backward_largest(gate, up, grad)]
    )
    yield Compared(
        label="largest values",
        out=largest,
        plain=torch.stack(tops).float(),
        exact=torch.stack(tops),
        floor=1e-2,
    )


def fp8_feed_forward(shapes: Shapes, make: Maker) -> Rows:
    """The SwiGLU block."""
    config = formats()
    tokens = min(shapes.tokens, _LONGEST)
    inner = {"scale": shapes.hidden**-0.5}
    yield from _swiglu(tokens, shapes.ffn, config, make)
    weights = (
        make.normal(shapes.ffn, shapes.hidden, **inner),
        make.normal(shapes.ffn, shapes.hidden, **inner),
        make.normal(shapes.hidden, shapes.ffn, scale=shapes.ffn**-0.5),
    )

    def block(product: Any) -> Any:
        return lambda x, gate, up, down: product(silu(product(x, gate)) * product(x, up), down)

    yield from three_ways(
        (
            "output",
            "gradient of the input",
            *(f"gradient of the {name} weight" for name in ("gate", "up", "down")),
        ),
        lambda x, gate, up, down: fp8.feed_forward(x, gate, up, down, config),
        block(lambda x, w: plain_linear(x, w, config)),
        block(lambda x, w: x @ w.t()),
        make.normal(tokens, shapes.hidden),
        *weights,
        make=make,
        factor=SCALE_FP8,
    )


def reduce_scatter_copy_in(shapes: Shapes, make: Maker) -> Rows:
    """The gradients of one block, from BF16 to float32."""
    ranks = shapes.shards
    narrow = shapes.kv_heads * shapes.head_dim
    wide = shapes.heads * shapes.head_dim
    sizes = [
        (wide, shapes.hidden),
        (narrow, shapes.hidden),
        (shapes.hidden, wide),
        (shapes.ffn, shapes.hidden),
        (shapes.hidden, shapes.ffn),
        (shapes.hidden,),
    ]
    gradients = [make.normal(*size) for size in sizes if size[0] % ranks == 0]
    out = torch.full(
        (ranks, sum(g.numel() for g in gradients) // ranks), float("nan"), device=make.device
    )
    copied = kernels.copy_in(gradients, out, ranks)
    expected = torch.cat([g.reshape(ranks, -1).float() for g in gradients], dim=1)
    yield Compared(label="the gradients", out=out if copied else out.new_zeros(0), plain=expected)


def peer_copies(shapes: Shapes, make: Maker) -> Rows:
    """A gather and a reduction of one weight, by each rank from the memory of the others."""
    ranks = shapes.shards
    count = shapes.ffn * shapes.hidden // shapes.shards
    present = 0
    if make.device == "cuda":
        present = torch.cuda.device_count()
    devices = [f"cuda:{rank % present}" if present else "cpu" for rank in range(ranks)]
    for one, other in itertools.permutations(range(min(present, ranks)), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            raise RuntimeError(f"GPU {one} cannot read the memory of GPU {other}")
    parts = [make.normal(ranks * count) for _ in range(ranks)]
    memory = sharded.Buffers([part.to(device) for part, device in zip(parts, devices, strict=True)])
    for rank, device in enumerate(devices):
        total = torch.full((count,), float("nan"), device=device)
        sharded.reduce(memory, total, parts[0].dtype, rank, ranks)
        shares = [part[rank * count : (rank + 1) * count] for part in parts]
        plain, exact = (
            torch.stack([share.to(wide) for share in shares]).sum(0)
            for wide in (torch.float32, torch.float64)
        )
        yield Compared(
            label="the sum of gradients", out=total.to(make.device), plain=plain, exact=exact
        )
    expected = torch.cat(
        [part[rank * count : (rank + 1) * count] for rank, part in enumerate(parts)]
    )
    for rank in range(ranks):
        whole = memory.buffers[rank]
        gathered = torch.full_like(whole, float("nan"))
        gathered[rank * count : (rank + 1) * count] = whole[rank * count : (rank + 1) * count]
        sharded.gather(memory, [gathered.view(ranks, -1)], [0], 2 * count, rank)
        yield Compared(label="the gathered weight", out=gathered.to(make.device), plain=expected)


def fused_adamw(shapes: Shapes, make: Maker) -> Rows:
    """The third step of a rank's share of the largest weight and of a norm's, with gradients scaled
    by 0.37.
    """
    wide = torch.float32
    clip = torch.tensor(0.37, device=make.device)
    lr = 3e-4
    decay = 0.1
    betas = (0.9, 0.95)
    eps = 1e-8
    step = 3
    starts: list[tuple[torch.Tensor, ...]] = []
    for sizes in (
        (shapes.ffn // shapes.shards or 1, shapes.hidden),
        (shapes.hidden // shapes.shards or 1,),
    ):
        weight, gradient, first, second = (
            make.normal(*sizes, scale=s, dtype=wide) for s in (0.02, 1e-3, 1e-3, 1e-3)
        )
        starts.append((weight, gradient, first, second.square()))
    largest = torch.zeros(2, device=make.device)
    updates: list[kernels.Update] = [
        (weight.clone(), gradient, first.clone(), second.clone(), top)
        for (weight, gradient, first, second), top in zip(starts, largest, strict=True)
    ]
    kernels.adamw_(updates, clip=clip, lr=lr, decay=decay, betas=betas, eps=eps, step=step)

    def by_torch(
        dtype: torch.dtype,
        start: torch.Tensor,
        gradient: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        before = start.to(dtype)
        weight = torch.nn.Parameter(before.clone())
        optimizer = torch.optim.AdamW(
            [weight], lr=lr, betas=betas, eps=eps, weight_decay=decay, foreach=False
        )
        state = {"exp_avg": first.to(dtype, copy=True), "exp_avg_sq": second.to(dtype, copy=True)}
        optimizer.state[weight] = state | {"step": torch.tensor(step - 1.0)}
        if dtype == wide:
            weight.grad = (gradient * clip).to(dtype)
        else:
            weight.grad = gradient.to(dtype) * clip.to(dtype)
        optimizer.step()
        return weight.detach() - before, state["exp_avg"], state["exp_avg_sq"]

    labels = ("update", "first moment", "second moment")
    for start, (p, _, m, v, _), top in zip(starts, updates, largest, strict=True):
        ours = (p - start[0], m, v)
        for label, out, plain, exact in zip(
            labels, ours, by_torch(wide, *start), by_torch(torch.float64, *start), strict=True
        ):
            # A weight's last bit is a thousandth of its update.
            yield Compared(label=label, out=out, plain=plain, exact=exact, floor=1e-3)
        yield Compared(label="largest weight", out=top.view(1), plain=p.abs().max().view(1))


def real_rope(shapes: Shapes, make: Maker) -> Rows:
    """Queries of a few heads over the whole sequence."""
    length = min(shapes.seq_len, _LONGEST)
    size = shapes.rotated
    angles = torch.arange(length, device=make.device)[:, None] * 500000.0 ** (
        -torch.arange(0, size, 2, device=make.device).double() / size
    )
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def by_complex(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            wide = x.double()
        else:
            wide = x.float()
        pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn.to(pairs.dtype)).flatten(-2).type_as(x)

    narrow = torch.view_as_real(turn.to(torch.complex64))
    yield from three_ways(
        ("rotated", "gradient"),
        lambda x: attention.rotate(x, narrow),
        by_complex,
        by_complex,
        make.normal(1, length, 4, size),
        make=make,
    )


def expert_routing(shapes: Shapes, make: Maker) -> Rows:
    """Tokens to experts and back. Each expert multiplies by a number of its own, so that a wrong
    one is seen.
    """
    tokens = min(shapes.tokens, _LONGEST)
    count = shapes.experts
    selected = (
        torch.rand(tokens, count, generator=make.generator, device=make.device)
        .topk(shapes.top_k)
        .indices
    )
    counts = torch.bincount(selected.flatten(), minlength=count)
    ways = experts.routes(selected, counts)
    factors = 1 + torch.arange(count, device=make.device) / count
    of_row = torch.repeat_interleave(factors, ways.counts.long())
    of_row = torch.cat((of_row, of_row.new_ones(len(ways.choices) - len(of_row))))[:, None]

    def ours(x: torch.Tensor, weights: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return experts.combine(
            (experts.dispatch(x, ways) * of_row).to(x.dtype), weights.float(), ways, base
        )

    def plain(x: torch.Tensor, weights: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            wide = torch.float64
        else:
            wide = torch.float32
        rows = (x[:, None] * factors[selected][:, :, None].to(wide)).to(x.dtype).to(wide)
        return ((rows * weights.to(wide)[:, :, None]).sum(1) + base.to(wide)).to(x.dtype)

    # Rows of padding must be zero in both directions, or they add NaN to the gradients of the
    # experts' weights.
    x = make.normal(tokens, shapes.hidden)
    weights = make.normal(tokens, shapes.top_k, dtype=torch.float32)
    routed = (ways.choices >= 0)[:, None]
    places = ways.choices.clamp(min=0).long()
    expected = torch.where(routed, x[places // shapes.top_k], 0)
    yield Compared(label="rows of the experts", out=experts.dispatch(x, ways), plain=expected)
    rows = make.normal(len(places), shapes.hidden).requires_grad_()
    grad = make.normal(tokens, shapes.hidden)
    (of_rows,) = torch.autograd.grad(experts.combine(rows, weights, ways, None), rows, grad)
    exact = (
        grad.double()[places // shapes.top_k] * weights.double().flatten()[places][:, None] * routed
    )
    yield Compared(
        label="gradient of the experts' rows", out=of_rows, plain=exact.to(grad.dtype), exact=exact
    )
    yield from three_ways(
        (
            "output",
            "gradient of the tokens",
            "gradient of the weights",
            "gradient of the shared part",
        ),
        ours,
        plain,
        plain,
        x,
        weights,
        make.normal(tokens, shapes.hidden),
        make=make,
    )


def _attention(attend: Any, shapes: Shapes, make: Maker) -> Rows:
    """Attention of the run: its heads, window and mask."""
    batch = min(shapes.batch, _MOST)
    length = min(shapes.seq_len, _LONGEST)
    window = 0
    if 0 < shapes.window < length:
        window = shapes.window
    seen = torch.ones(length, length, dtype=torch.bool, device=make.device)
    if shapes.causal:
        seen = seen.tril().triu(1 - (window or length))

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = (part.transpose(1, 2) for part in (q, k, v))
        if window:
            mask = {"attn_mask": seen}
        else:
            mask = {"is_causal": shapes.causal}
        return scaled_dot_product_attention(
            *parts, enable_gqa=shapes.heads != shapes.kv_heads, **mask
        ).transpose(1, 2)

    def one_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        return torch.softmax(scores, dim=-1) @ v

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # In float64, the scores of all heads do not fit into memory.
        group = shapes.heads // shapes.kv_heads
        heads = [
            (q[:, :, n], k[:, :, n // group], v[:, :, n // group]) for n in range(shapes.heads)
        ]
        return torch.stack(
            [checkpoint(one_head, *head, use_reentrant=False) for head in heads], dim=2
        )

    sizes = (
        (shapes.heads, shapes.head_dim),
        (shapes.kv_heads, shapes.head_dim),
        (shapes.kv_heads, shapes.v_dim),
    )
    yield from three_ways(
        ("output", "gradient of queries", "gradient of keys", "gradient of values"),
        lambda q, k, v: attend(q, k, v, window=window),
        plain,
        exact,
        *(make.normal(batch, length, heads, size) for heads, size in sizes),
        make=make,
    )


def flash_attention_4(shapes: Shapes, make: Maker) -> Rows:
    """Flash Attention 4."""
    yield from _attention(partial(attention.flash_attention_4, causal=shapes.causal), shapes, make)


def flex_attention(shapes: Shapes, make: Maker) -> Rows:
    """Attention within a sliding window, compiled as in a run."""
    mask = attention.window_mask(
        min(shapes.seq_len, _LONGEST), shapes.window, torch.device(make.device)
    )
    if make.device != "cpu":
        attend = torch.compile(attention.windowed_attention)
    else:
        attend = attention.windowed_attention
    yield from _attention(lambda q, k, v, window: attend(q, k, v, mask), shapes, make)


def turbo_fp8_linear(shapes: Shapes, make: Maker) -> Rows:
    """One of Primus Turbo's linear layers."""

    def converted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        model = torch.nn.Sequential(
            torch.nn.Linear(*w.shape[::-1], bias=False, device=w.device, dtype=w.dtype)
        )
        primus_turbo.convert_linears(model, ())
        out: torch.Tensor = torch.func.functional_call(model, {"0.weight": w}, (x,))
        return out

    yield from _layer(converted, shapes, make)


def _experts(run: Any, shapes: Shapes, make: Maker) -> Rows:
    """The SwiGLU experts of one layer, one of them without tokens."""
    tokens = min(shapes.tokens, _LONGEST)
    count = shapes.experts
    inner = shapes.expert_ffn
    chosen = make.whole(max(1, count - 1), tokens)
    counts = torch.bincount(chosen, minlength=count)
    weights = [
        make.normal(count, *sizes, scale=sizes[1] ** -0.5)
        for sizes in ((inner, shapes.hidden), (shapes.hidden, inner), (inner, shapes.hidden))
    ]

    def loop(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        parts = x.split(counts.tolist())
        return torch.cat(
            [
                (silu(part @ w1[i].t()) * (part @ w3[i].t())) @ w2[i].t()
                for i, part in enumerate(parts)
            ]
        )

    yield from three_ways(
        ("output", "gradient of the tokens", *(f"gradient of w{i}" for i in (1, 2, 3))),
        lambda x, w1, w2, w3: run(w1, w2, w3, x, counts),
        loop,
        loop,
        make.normal(tokens, shapes.hidden),
        *weights,
        make=make,
    )


TESTS: Mapping[str, Callable[[Shapes, Maker], Rows]] = {
    "linear-cross-entropy": linear_cross_entropy,
    "fp8-weight-cast": fp8_weight_cast,
    "fp8-linear": fp8_linear,
    "fp8-projections": fp8_projections,
    "fp8-feed-forward": fp8_feed_forward,
    "turbo-fp8-linear": turbo_fp8_linear,
    "frozen-weights": frozen_weights,
    "adapter-products": adapter_products,
    "fused-adamw": fused_adamw,
    "reduce-scatter-copy-in": reduce_scatter_copy_in,
    "peer-copies": peer_copies,
    "real-rope": real_rope,
    "expert-routing": expert_routing,
    "expert-products": partial(_experts, experts.grouped_experts),
    "turbo-grouped-gemm": partial(_experts, primus_turbo.grouped_experts),
    "turbo-attention": partial(_attention, primus_turbo.attention),
    "flash-attention-4": flash_attention_4,
    "flash-attention-2": partial(_attention, attention.flash_attention_2),
    "flex-attention": flex_attention,
}
"""Optimization → its test."""


def fault(name: str, shapes: Shapes, *, device: str = "cuda", seed: int = _SEED) -> str:
    """Test one optimization. Returns what is wrong, or an empty string."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.full((2**30,), float("nan"), device=device)
    try:
        for compared in TESTS[name](shapes, Maker(device, seed)):
            reason = compared.fault()
            if reason:
                return f"{compared.label} {reason}"
    except (Exception, SystemExit) as error:
        return (
            f"{type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        )
    return ""


def main() -> int:
    """Test the named optimizations and print a line of JSON after each."""
    shapes = Shapes(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in sys.argv[2:]:
        print(json.dumps({"name": name, "fault": fault(name, shapes)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
