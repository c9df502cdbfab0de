"""The self-test of every optimization on this machine's GPU.

``python -m primus_images.turbo.selftest SHAPES NAME…`` calls each with random tensors of the run's
sizes, forward and backward, and compares it with float64 and with plain PyTorch
(:mod:`primus_images.turbo.compared`). The process prints one line of JSON after each, in the given
order, so the first name without a line is that of a kernel that ended the process. Memory is filled
with NaN before each test, so that a value that a kernel does not write is seen.
"""

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from primus_images.turbo import (
    attention,
    experts,
    fp8,
    fp8_kernels,
    kernels,
    packed,
    primus_turbo,
    sharded,
)
from primus_images.turbo.compared import (
    SCALE_FP8,
    Compared,
    Maker,
    Rows,
    Ways,
    formats,
    leaves_of,
    plain_linear,
    three_ways,
)
from primus_images.turbo.optimizations import Shapes

# Longer runs, and larger batches, are tested with these.
_LONGEST = 8192
_MOST_SEQUENCES = 2
_SEED = 20261126
_IGNORED = -100
_LOSS_CHUNK = 1024
_PROJECTIONS = ("queries", "keys", "values")


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which plain PyTorch sums up numbers of ``dtype``."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def linear_cross_entropy(shapes: Shapes, make: Maker) -> Rows:
    """Two chunks of tokens, the second one partial, some of them without a label."""
    tokens = min(shapes.tokens, kernels.CHUNK + 256)
    states = make.normal(tokens, shapes.hidden)
    weight = make.weight(shapes.vocabulary, shapes.hidden)
    labels = make.whole(shapes.vocabulary, tokens)
    labels[::7] = _IGNORED

    def loss(x: Tensor, w: Tensor, targets: Tensor = labels) -> Tensor:
        logits = _product(x, w)
        return cross_entropy(logits.to(_wide(logits.dtype)), targets, reduction="sum")

    def in_parts(x: Tensor, w: Tensor) -> Tensor:
        # In float64, the logits of all tokens do not fit into every GPU's memory.
        losses = [
            checkpoint(loss, part, w, targets, use_reentrant=False)
            for part, targets in zip(x.split(_LOSS_CHUNK), labels.split(_LOSS_CHUNK), strict=True)
        ]
        return torch.stack(losses).sum()

    def fused(x: Tensor, w: Tensor) -> Tensor:
        return kernels.linear_cross_entropy(x, w, labels)

    names = ("loss", "gradient of states", "gradient of weights")
    yield from three_ways(names, Ways(fused, loss, in_parts), (states, weight), make)


# -- FP8 -------------------------------------------------------------------------------------------


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-top, top).to(dtype)


def fp8_weight_cast(shapes: Shapes, make: Maker) -> Rows:
    """A rank's share of the largest weight; some values saturate."""
    dtype = formats().cast_config_weight.target_dtype
    rows = shapes.ffn // shapes.shards or 1
    weight = make.normal(rows, shapes.hidden, scale=0.02, dtype=torch.float32)
    scale = torch.tensor(torch.finfo(dtype).max / 0.05, device=make.device)
    out = kernels.cast_fp8(weight, scale, dtype)
    yield Compared(label="the cast weight", out=out, plain=_cast(weight, scale, dtype))


def _casts(x: Tensor, dtype: torch.dtype) -> Rows:
    """Compare the bits of the casts that layers consist of.

    A wrong tile hardly shows in a sum over all tokens.
    """
    scale = torch.finfo(dtype).max / x.abs().max().float()
    rows, columns = fp8_kernels.cast_both(x, scale, dtype)
    expected = _cast(x, scale, dtype).view(torch.uint8)
    yield Compared(label="cast", out=rows, plain=expected)
    yield Compared(label="transposed cast", out=columns, plain=expected.t())
    yield Compared(label="transposed copy", out=fp8_kernels.flip(rows), plain=expected.t())


def _fp8_layer(ours: Callable[..., Tensor], shapes: Shapes, make: Maker) -> Rows:
    """Compare the layer after attention, which ``ours`` computes, with torchao's."""
    ways = Ways(ours, partial(plain_linear, config=formats()), _product)
    x = make.normal(shapes.tokens, shapes.hidden)
    weight = make.normal(shapes.hidden, shapes.hidden, scale=0.02)
    names = ("output", "gradient of the input", "gradient of the weight")
    yield from three_ways(names, ways, (x, weight), make, SCALE_FP8)


def fp8_linear(shapes: Shapes, make: Maker) -> Rows:
    """The layer after attention."""
    config = formats()
    for form in (config.cast_config_input, config.cast_config_grad_output):
        yield from _casts(make.normal(shapes.tokens, shapes.hidden), form.target_dtype)
    yield from _fp8_layer(partial(fp8.linear, config=config), shapes, make)


def turbo_fp8_linear(shapes: Shapes, make: Maker) -> Rows:
    """One of Primus Turbo's linear layers."""

    def converted(x: Tensor, weight: Tensor) -> Tensor:
        out_features, in_features = weight.shape
        layer = torch.nn.Linear(
            in_features, out_features, bias=False, device=weight.device, dtype=weight.dtype
        )
        model = torch.nn.Sequential(layer)
        primus_turbo.convert_linears(model, ())
        out: Tensor = torch.func.functional_call(model, {"0.weight": weight}, (x,))
        return out

    yield from _fp8_layer(converted, shapes, make)


def frozen_weights(shapes: Shapes, make: Maker) -> Rows:
    """A frozen layer after attention in FP8. In BF16, the products are PyTorch's own."""
    config = formats()
    weight = make.normal(shapes.hidden, shapes.hidden, scale=0.02)
    frozen = fp8.frozen(weight, config)
    ways = Ways(
        ours=lambda x: fp8.frozen_linear(x, frozen, config),
        plain=lambda x: plain_linear(x, weight, config),
        exact=lambda x: _product(x, weight.double()),
    )
    inputs = (make.normal(shapes.tokens, shapes.hidden),)
    yield from three_ways(("output", "gradient of the input"), ways, inputs, make, SCALE_FP8)


def _swiglu_and_gradients(
    inputs: Sequence[Tensor], grad: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return the product of SiLU of the gate, and the gradients of gate and input, in ``dtype``."""
    gate, up = leaves_of(inputs, dtype)
    product = silu(gate) * up
    return [product.detach(), *torch.autograd.grad(product, (gate, up), grad.to(dtype))]


def _swiglu(tokens: int, width: int, make: Maker) -> Rows:
    """Compare the kernels of SiLU and product, forward and backward, and their casts to FP8."""
    config = formats()
    kind = config.cast_config_input.target_dtype
    grad_kind = config.cast_config_grad_output.target_dtype
    gate = make.normal(tokens, width)
    up = make.normal(tokens, width)
    grad = make.normal(tokens, width)
    plain = _swiglu_and_gradients((gate, up), grad, torch.float32)
    exact = _swiglu_and_gradients((gate, up), grad, torch.float64)
    largest = torch.stack([tensor.abs().max() for tensor in exact])
    # Values take half of the range of their type.
    scales = [
        (torch.finfo(dtype).max / top / 2).float()
        for dtype, top in zip((kind, grad_kind, grad_kind), largest, strict=True)
    ]
    product = fp8_kernels.swiglu_cast(gate, up, scales[0], kind)
    of_gate, gate_turned, of_up, up_turned, product_turned = fp8_kernels.swiglu_backward(
        gate, up, grad, scales[1], scales[2], scales[0], grad_kind, kind
    )
    casts = (
        ("product", product, product_turned),
        ("gradient of the gate", of_gate, gate_turned),
        ("gradient of the input", of_up, up_turned),
    )
    for (label, rows, columns), usual, best, scale in zip(casts, plain, exact, scales, strict=True):
        rounded = (usual * scale).to(rows.dtype).float()
        scaled = best * scale.double()
        yield Compared(label=label, out=rows.float(), plain=rounded, exact=scaled, factor=SCALE_FP8)
        yield Compared(
            label=f"{label}, transposed",
            out=columns.float(),
            plain=rounded.t(),
            exact=scaled.t(),
            factor=SCALE_FP8,
        )
    of_product = fp8_kernels.swiglu_largest(gate, up)
    of_gradients = fp8_kernels.swiglu_backward_largest(gate, up, grad)
    yield Compared(
        label="largest values",
        out=torch.stack([of_product, *of_gradients]),
        plain=largest.float(),
        exact=largest,
        floor=1e-2,
    )


def fp8_feed_forward(shapes: Shapes, make: Maker) -> Rows:
    """The SwiGLU block."""
    config = formats()
    tokens = min(shapes.tokens, _LONGEST)
    yield from _swiglu(tokens, shapes.ffn, make)
    gate = make.weight(shapes.ffn, shapes.hidden)
    up = make.weight(shapes.ffn, shapes.hidden)
    down = make.weight(shapes.hidden, shapes.ffn)

    def block(product: Callable[..., Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        gate, up, down = weights
        return product(silu(product(x, gate)) * product(x, up), down)

    ways = Ways(
        ours=partial(fp8.feed_forward, config=config),
        plain=partial(block, partial(plain_linear, config=config)),
        exact=partial(block, _product),
    )
    names = ["output", "gradient of the input"]
    names += [f"gradient of the {name} weight" for name in ("gate", "up", "down")]
    x = make.normal(tokens, shapes.hidden)
    yield from three_ways(names, ways, (x, gate, up, down), make, SCALE_FP8)


# -- shards ----------------------------------------------------------------------------------------


def reduce_scatter_copy_in(shapes: Shapes, make: Maker) -> Rows:
    """The gradients of one block, from BF16 to float32."""
    ranks = shapes.shards
    hidden = shapes.hidden
    queries = shapes.heads * shapes.head_dim
    keys = shapes.kv_heads * shapes.head_dim
    sizes: list[tuple[int, ...]] = [(queries, hidden), (keys, hidden), (hidden, queries)]
    sizes += [(shapes.ffn, hidden), (hidden, shapes.ffn), (hidden,)]
    gradients = [make.normal(*size) for size in sizes if size[0] % ranks == 0]
    expected = torch.cat([grad.reshape(ranks, -1).float() for grad in gradients], dim=1)
    out = torch.full_like(expected, float("nan"))
    if not kernels.copy_in(gradients, out, ranks):
        raise RuntimeError("it refuses the gradients")
    yield Compared(label="the gradients", out=out, plain=expected)


def peer_copies(shapes: Shapes, make: Maker) -> Rows:
    """A gather and a reduction of one weight, by each rank from the memory of the others."""
    ranks = shapes.shards
    count = shapes.ffn * shapes.hidden // ranks
    devices = _devices(ranks, make)
    parts = [make.normal(ranks, count) for _ in range(ranks)]
    memory = sharded.Buffers(
        [part.flatten().to(device) for part, device in zip(parts, devices, strict=True)]
    )
    for rank, device in enumerate(devices):
        total = torch.full((count,), float("nan"), device=device)
        sharded.reduce(memory, total, torch.bfloat16, rank, ranks)
        shares = torch.stack([part[rank] for part in parts])
        yield Compared(
            label="the sum of gradients",
            out=total.to(make.device),
            plain=shares.float().sum(0),
            exact=shares.double().sum(0),
        )
    expected = torch.stack([part[rank] for rank, part in enumerate(parts)])
    for rank, buffer in enumerate(memory.buffers):
        gathered = torch.full_like(buffer, float("nan")).view(ranks, count)
        gathered[rank] = buffer.view(ranks, count)[rank]
        sharded.gather(memory, [gathered], [0], count * buffer.itemsize, rank)
        yield Compared(label="the gathered weight", out=gathered.to(make.device), plain=expected)


def _devices(ranks: int, make: Maker) -> list[str]:
    """Return the device of each rank. Raises RuntimeError if two GPUs cannot share memory."""
    if make.device != "cuda":
        return [make.device] * ranks
    present = torch.cuda.device_count()
    for reader, owner in itertools.permutations(range(min(present, ranks)), 2):
        if not torch.cuda.can_device_access_peer(reader, owner):
            raise RuntimeError(f"GPU {reader} cannot read the memory of GPU {owner}")
    return [f"cuda:{rank % present}" for rank in range(ranks)]


# -- experts ---------------------------------------------------------------------------------------


def expert_routing(shapes: Shapes, make: Maker) -> Rows:
    """Tokens to experts and back, by the rows of the experts and as a whole."""
    tokens = min(shapes.tokens, _LONGEST)
    chances = torch.rand(tokens, shapes.experts, generator=make.generator, device=make.device)
    selected = chances.topk(shapes.top_k).indices
    counts = torch.bincount(selected.flatten(), minlength=shapes.experts)
    routing = experts.routes(selected, counts)
    x = make.normal(tokens, shapes.hidden)
    weights = make.normal(tokens, shapes.top_k, dtype=torch.float32)
    yield from _rows_of_experts(x, weights, routing, make)
    yield from _routed(selected, x, weights, routing, make)


def _rows_of_experts(x: Tensor, weights: Tensor, routing: experts.Routes, make: Maker) -> Rows:
    """Compare the rows of padding, too.

    They must be zero in both directions, or they add NaN to the gradients of the experts' weights.
    """
    routed = (routing.choices >= 0)[:, None]
    choices = routing.choices.clamp(min=0).long()
    token = choices // weights.shape[1]
    expected = torch.where(routed, x[token], 0)
    yield Compared(label="rows of the experts", out=experts.dispatch(x, routing), plain=expected)
    rows = make.normal(len(choices), x.shape[1]).requires_grad_()
    grad = make.normal(*x.shape)
    combined = experts.combine(rows, weights, routing, None)
    (of_rows,) = torch.autograd.grad(combined, rows, grad)
    exact = grad.double()[token] * weights.double().flatten()[choices][:, None] * routed
    yield Compared(
        label="gradient of the experts' rows", out=of_rows, plain=exact.to(grad.dtype), exact=exact
    )


def _routed(
    selected: Tensor,
    x: Tensor,
    weights: Tensor,
    routing: experts.Routes,
    make: Maker,
) -> Rows:
    """Each expert multiplies by a number of its own, so that a wrong one is seen."""
    count = len(routing.counts)
    factors = 1 + torch.arange(count, device=make.device) / count
    of_rows = factors.new_ones(len(routing.choices), 1)
    of_experts = torch.repeat_interleave(factors, routing.counts.long())
    of_rows[: len(of_experts), 0] = of_experts

    def ours(x: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
        rows = (experts.dispatch(x, routing) * of_rows).to(x.dtype)
        return experts.combine(rows, weights.float(), routing, shared)

    def plain(x: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
        wide = _wide(x.dtype)
        rows = (x[:, None] * factors[selected][:, :, None].to(wide)).to(x.dtype).to(wide)
        mixed = (rows * weights.to(wide)[:, :, None]).sum(1)
        return (mixed + shared.to(wide)).to(x.dtype)

    names = ["output"]
    names += [f"gradient of the {name}" for name in ("tokens", "weights", "shared part")]
    inputs = (x, weights, make.normal(*x.shape))
    yield from three_ways(names, Ways(ours, plain, plain), inputs, make)


def _experts(run: Callable[..., Tensor], shapes: Shapes, make: Maker) -> Rows:
    """The SwiGLU experts of one layer, one of them without tokens."""
    tokens = min(shapes.tokens, _LONGEST)
    count = shapes.experts
    chosen = make.whole(max(1, count - 1), tokens)
    counts = torch.bincount(chosen, minlength=count)
    sizes = [(shapes.expert_ffn, shapes.hidden), (shapes.hidden, shapes.expert_ffn)]
    weights = [
        make.normal(count, rows, columns, scale=columns**-0.5)
        for rows, columns in (*sizes, sizes[0])
    ]

    def loop(x: Tensor, *weights: Tensor) -> Tensor:
        parts = []
        for part, w1, w2, w3 in zip(x.split(counts.tolist()), *weights, strict=True):
            hidden = silu(_product(part, w1)) * _product(part, w3)
            parts.append(_product(hidden, w2))
        return torch.cat(parts)

    def ours(x: Tensor, *weights: Tensor) -> Tensor:
        return run(*weights, x, counts)

    names = ["output"]
    names += [f"gradient of {name}" for name in ("the tokens", "w1", "w2", "w3")]
    inputs = (make.normal(tokens, shapes.hidden), *weights)
    yield from three_ways(names, Ways(ours, loop, loop), inputs, make)


# -- attention -------------------------------------------------------------------------------------


def real_rope(shapes: Shapes, make: Maker) -> Rows:
    """Queries of a few heads over the whole sequence."""
    length = min(shapes.seq_len, _LONGEST)
    size = shapes.rotated
    angles = make.normal(length, 1, size // 2, scale=3.0, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)
    narrow = torch.view_as_real(turn.to(torch.complex64))

    def by_complex(x: Tensor) -> Tensor:
        wide = x.to(_wide(x.dtype))
        pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn.to(pairs.dtype)).flatten(-2).type_as(x)

    ways = Ways(lambda x: attention.rotate(x, narrow), by_complex, by_complex)
    inputs = (make.normal(1, length, 4, size),)
    yield from three_ways(("rotated", "gradient"), ways, inputs, make)


def _attention(
    attend: Callable[..., Tensor],
    shapes: Shapes,
    make: Maker,
    *,
    documents: Tensor | None = None,
    **options: Any,
) -> Rows:
    """Attention of the run: its heads, window and mask.

    ``documents`` [tokens] are the numbers of packed documents, which do not see each other.
    ``options`` are passed to ``attend``.
    """
    batch = min(shapes.batch, _MOST_SEQUENCES)
    length = min(shapes.seq_len, _LONGEST)
    group = shapes.heads // shapes.kv_heads
    seen = torch.ones(length, length, dtype=torch.bool, device=make.device)
    if shapes.causal:
        seen = seen.tril()
    masked: dict[str, Any] = {"is_causal": shapes.causal}
    if _window(shapes):
        seen = seen.triu(1 - _window(shapes))
        masked = {"attn_mask": seen}
    if documents is not None:
        seen = seen & (documents[:, None] == documents)
        masked = {"attn_mask": seen}

    def plain(*tensors: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
        out = scaled_dot_product_attention(q, k, v, enable_gqa=group > 1, **masked)
        return out.transpose(1, 2)

    def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        return torch.softmax(scores, dim=-1) @ v

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # In float64, the scores of all heads do not fit into memory.
        outs = []
        for head in range(shapes.heads):
            shared = head // group
            tensors = (q[:, :, head], k[:, :, shared], v[:, :, shared])
            outs.append(checkpoint(one_head, *tensors, use_reentrant=False))
        return torch.stack(outs, dim=2)

    inputs = (
        make.normal(batch, length, shapes.heads, shapes.head_dim),
        make.normal(batch, length, shapes.kv_heads, shapes.head_dim),
        make.normal(batch, length, shapes.kv_heads, shapes.v_dim),
    )
    names = ["output"]
    names += [f"gradient of {name}" for name in _PROJECTIONS]
    yield from three_ways(names, Ways(partial(attend, **options), plain, exact), inputs, make)


def _window(shapes: Shapes) -> int:
    if shapes.window < min(shapes.seq_len, _LONGEST):
        return shapes.window
    return 0


def _without_mask(attend: Callable[..., Tensor], shapes: Shapes, make: Maker) -> Rows:
    yield from _attention(attend, shapes, make, window=_window(shapes))


def flash_attention_4(shapes: Shapes, make: Maker) -> Rows:
    """Flash Attention 4."""
    options = {"window": _window(shapes), "causal": shapes.causal}
    yield from _attention(attention.flash_attention_4, shapes, make, **options)


def _packed_attention(version: int, shapes: Shapes, make: Maker) -> Rows:
    """Four documents in each sample: a single token, two of usual lengths, and what is left."""
    length = min(shapes.seq_len, _LONGEST)
    ends = torch.tensor([1, length // 3, length // 3 + 100, length], device=make.device)
    ends = ends.clamp(max=length)
    documents = torch.searchsorted(ends, torch.arange(length, device=make.device), right=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bounds = packed.bounds_of(ends.int().expand(len(q), -1), length)
        queries, keys, values = (part.flatten(0, 1) for part in (q, k, v))
        out = packed.packed_attention(
            queries, keys, values, bounds, length, version=version, window=_window(shapes)
        )
        return out.view_as(q)

    yield from _attention(attend, shapes, make, documents=documents)


TESTS: Mapping[str, Callable[[Shapes, Maker], Rows]] = {
    "linear-cross-entropy": linear_cross_entropy,
    "fp8-weight-cast": fp8_weight_cast,
    "fp8-linear": fp8_linear,
    "fp8-feed-forward": fp8_feed_forward,
    "turbo-fp8-linear": turbo_fp8_linear,
    "frozen-weights": frozen_weights,
    "reduce-scatter-copy-in": reduce_scatter_copy_in,
    "peer-copies": peer_copies,
    "real-rope": real_rope,
    "expert-routing": expert_routing,
    "expert-products": partial(_experts, experts.grouped_experts),
    "turbo-grouped-gemm": partial(_experts, primus_turbo.grouped_experts),
    "turbo-attention": partial(_without_mask, primus_turbo.attention),
    "flash-attention-4": flash_attention_4,
    "flash-attention-2": partial(_without_mask, attention.flash_attention_2),
    "packed-attention-4": partial(_packed_attention, packed.FLASH_4),
    "packed-attention": partial(_packed_attention, packed.OF_PYTORCH),
}
"""Optimization → its test."""


def fault(name: str, shapes: Shapes, *, device: str = "cuda", seed: int = _SEED) -> str:
    """Test one optimization. Returns what is wrong, or an empty string."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.full((2**30,), float("nan"), device=device)
    try:
        maker = Maker(device, seed, deterministic=shapes.deterministic)
        for compared in TESTS[name](shapes, maker):
            reason = compared.fault()
            if reason:
                return f"{compared.label} {reason}"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a kernel raises is its fault
        lines = str(error).strip().splitlines() or ["no message"]
        return f"{type(error).__name__}: {lines[0]}"
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
