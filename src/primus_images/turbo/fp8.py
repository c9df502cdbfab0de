"""Linear layers and the feed-forward block in FP8 with one scale per tensor, with fused
quantization.

A product on the tensor cores needs both factors with the summed dimension contiguous. Each
activation and each gradient is therefore needed in two layouts: one for the next product, one for
the weight's gradient. Scales are those of torchao's tensorwise recipe, from the largest value of
the tensor itself.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch

from primus_images.turbo import fp8_kernels, kernels

_SMALLEST = 1e-12


def _scale(top: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the factor of a tensor before the cast, computed in float64 as in torchao."""
    return (torch.finfo(dtype).max / top.double().clamp(min=_SMALLEST)).float()


def _quantized(
    x: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = _scale(x.abs().max(), dtype)
    return *fp8_kernels.cast_both([x], [scale], dtype), scale


def _weight(weight: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight's FP8 values [out, in] and their scale: as gathered by FSDP, or cast here."""
    if hasattr(weight, "_data"):
        return weight._data, weight._scale
    scale = _scale(weight.abs().max(), dtype)
    return kernels.eight(weight, scale, dtype), scale


def _product(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """Return ``a @ b.T`` of scaled FP8 factors, both with the summed dimension contiguous."""
    if not a.is_cuda:
        return ((a.float() @ b.float().t()) / (a_scale * b_scale)).to(out)
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=a_scale.reciprocal(),
        scale_b=b_scale.reciprocal(),
        out_dtype=out,
        use_fast_accum=fast,
    )


class _Formats:
    def __init__(self, config: Any) -> None:
        self.input = config.cast_config_input.target_dtype
        self.weight = config.cast_config_weight.target_dtype
        self.grad = config.cast_config_grad_output.target_dtype
        self.fast_output = config.gemm_config_output.use_fast_accum
        self.fast_input = config.gemm_config_grad_input.use_fast_accum
        self.fast_weight = config.gemm_config_grad_weight.use_fast_accum


@torch._dynamo.allow_in_graph
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, config: Any) -> torch.Tensor:
        formats = _Formats(config)
        values, flipped, scale = _quantized(x.reshape(-1, x.shape[-1]), formats.input)
        data, weight_scale = _weight(weight, formats.weight)
        ctx.save_for_backward(flipped, scale, weight)
        ctx.formats = formats
        out = _product(values, scale, data, weight_scale, x.dtype, formats.fast_output)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flipped, scale, weight = ctx.saved_tensors
        formats = ctx.formats
        grad = grads[0]
        data, weight_scale = _weight(weight, formats.weight)
        values, turned, grad_scale = _quantized(grad.reshape(-1, grad.shape[-1]), formats.grad)
        of_x = _product(
            values, grad_scale, fp8_kernels.flip(data), weight_scale, grad.dtype, formats.fast_input
        )
        of_weight = _product(turned, grad_scale, flipped, scale, grad.dtype, formats.fast_weight)
        return of_x.view(*grad.shape[:-1], of_x.shape[-1]), of_weight, None


@torch._dynamo.allow_in_graph
class _Projections(torch.autograd.Function):
    """Several layers with the same input as one product in each direction. Each layer keeps its own
    scales.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, config: Any, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        formats = _Formats(config)
        values, flipped, scale = _quantized(x.reshape(-1, x.shape[-1]), formats.input)
        data, scales = _stacked(weights, formats.weight)
        ctx.save_for_backward(flipped, scale, *weights)
        ctx.formats = formats
        out = _product(values, scale, data, scales[0], x.dtype, formats.fast_output)
        parts = out.split([weight.shape[0] for weight in weights], dim=1)
        return tuple(
            _times(part, None if part is parts[0] else scales[0] / factor).view(
                *x.shape[:-1], part.shape[1]
            )
            for part, factor in zip(parts, scales, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flipped, scale, *weights = ctx.saved_tensors
        formats = ctx.formats
        kind = grads[0].dtype
        like = grads[0].shape[:-1]
        data, scales = _stacked(weights, formats.weight)
        # One product sums up the gradients of x from all layers, so scale of gradient · scale of
        # weight must be equal for all. Use the smallest product for which a gradient fills its
        # range. The others lose no precision, only range.
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        limits = [
            _scale(fp8_kernels.largest(grad), formats.grad) * factor
            for grad, factor in zip(flat, scales, strict=True)
        ]
        common = torch.stack(limits).amin()
        grad_scales = [common / factor for factor in scales]
        values, turned = fp8_kernels.cast_both(flat, grad_scales, formats.grad)
        of_x = _product(
            values,
            common,
            fp8_kernels.flip(data),
            torch.ones_like(common),
            kind,
            formats.fast_input,
        )
        of_weights = _product(turned, grad_scales[0], flipped, scale, kind, formats.fast_weight)
        parts = of_weights.split([weight.shape[0] for weight in weights])
        results = (
            _times(part, None if part is parts[0] else grad_scales[0] / factor)
            for part, factor in zip(parts, grad_scales, strict=True)
        )
        return of_x.view(*like, of_x.shape[-1]), None, *results


def _stacked(weights: Sequence[Any], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    pairs = [_weight(weight, dtype) for weight in weights]
    data = torch.cat([data.view(torch.uint8) for data, _ in pairs]).view(pairs[0][0].dtype)
    return data, [scale for _, scale in pairs]


def _times(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    if factor is None:
        return x
    return (x.float() * factor).to(x.dtype)


@torch._dynamo.allow_in_graph
class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        config: Any,
    ) -> torch.Tensor:
        formats = _Formats(config)
        values, flipped, scale = _quantized(x.reshape(-1, x.shape[-1]), formats.input)
        gate, up = (
            _product(values, scale, *_weight(weight, formats.weight), x.dtype, formats.fast_output)
            for weight in (gate_weight, up_weight)
        )
        made_scale = _scale(fp8_kernels.swiglu_largest(gate, up), formats.input)
        hidden = fp8_kernels.swiglu_cast(gate, up, made_scale, formats.input)
        out = _product(
            hidden, made_scale, *_weight(down_weight, formats.weight), x.dtype, formats.fast_output
        )
        ctx.save_for_backward(
            flipped, scale, gate, up, made_scale, gate_weight, up_weight, down_weight
        )
        ctx.formats = formats
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flipped, scale, gate, up, made_scale, gate_weight, up_weight, down_weight = (
            ctx.saved_tensors
        )
        formats = ctx.formats
        grad = grads[0]
        kind = grad.dtype
        values, turned, grad_scale = _quantized(grad.reshape(-1, grad.shape[-1]), formats.grad)
        data, weight_scale = _weight(down_weight, formats.weight)
        of_made = _product(
            values, grad_scale, fp8_kernels.flip(data), weight_scale, kind, formats.fast_input
        )
        tops = fp8_kernels.swiglu_backward_largest(gate, up, of_made)
        gate_scale = _scale(tops[0], formats.grad)
        up_scale = _scale(tops[1], formats.grad)
        of_gate, of_gate_flipped, of_up, of_up_flipped, made_flipped = fp8_kernels.swiglu_backward(
            gate, up, of_made, gate_scale, up_scale, made_scale, formats.grad, formats.input
        )
        of_down = _product(turned, grad_scale, made_flipped, made_scale, kind, formats.fast_weight)
        data, weight_scale = _weight(gate_weight, formats.weight)
        of_x = _product(
            of_gate, gate_scale, fp8_kernels.flip(data), weight_scale, kind, formats.fast_input
        )
        data, weight_scale = _weight(up_weight, formats.weight)
        of_x = of_x + _product(
            of_up, up_scale, fp8_kernels.flip(data), weight_scale, kind, formats.fast_input
        )
        of_gates = _product(of_gate_flipped, gate_scale, flipped, scale, kind, formats.fast_weight)
        of_ups = _product(of_up_flipped, up_scale, flipped, scale, kind, formats.fast_weight)
        return of_x.view(*grad.shape[:-1], of_x.shape[-1]), of_gates, of_ups, of_down, None


def _computed(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the type that autocast requests, as ``torch.nn.functional.linear`` does.

    With FSDP's mixed precision, ``x`` already has that type. On one rank, torchtitan uses autocast,
    and ``x`` is float32.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def linear(x: torch.Tensor, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Return ``x @ weight.T`` with factors and gradients in FP8; ``config`` is torchao's, with one
    scale per tensor.
    """
    return _Linear.apply(_computed(x), weight, config)


def projections(
    x: torch.Tensor, weights: Sequence[torch.Tensor], config: Any
) -> tuple[torch.Tensor, ...]:
    """Return ``x @ weight.T`` for each weight, with factors and gradients in FP8; ``config`` is
    torchao's.
    """
    return _Projections.apply(_computed(x), config, *weights)


def feed_forward(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, config: Any
) -> torch.Tensor:
    """Return ``(silu(x @ gate.T) · (x @ up.T)) @ down.T``, computed in FP8 as in :func:`linear`."""
    return _FeedForward.apply(_computed(x), gate, up, down, config)


@torch._dynamo.allow_in_graph
class _Frozen(torch.autograd.Function):
    """A linear layer whose weight needs no gradient, so that each input and each gradient is needed
    in one layout.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        data: torch.Tensor,
        flipped: torch.Tensor,
        scale: torch.Tensor,
        config: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(data, flipped, scale)
        ctx.config = config
        return frozen_product(x, (data, flipped, scale), config)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return frozen_gradient(grads[0], ctx.saved_tensors, ctx.config), None, None, None, None


def frozen_product(x: torch.Tensor, weight: Sequence[torch.Tensor], config: Any) -> torch.Tensor:
    """Return ``x @ weight.T`` in FP8, for a ``weight`` from :func:`frozen`, without a gradient."""
    data, _, scale = weight
    return _by_cast(x, _Formats(config).input, data, scale, _Formats(config).fast_output)


def frozen_gradient(
    grad: torch.Tensor, weight: Sequence[torch.Tensor], config: Any
) -> torch.Tensor:
    """Return the gradient ``grad @ weight`` of the input of :func:`frozen_product`."""
    _, flipped, scale = weight
    return _by_cast(grad, _Formats(config).grad, flipped, scale, _Formats(config).fast_input)


def _by_cast(
    x: torch.Tensor, dtype: torch.dtype, data: torch.Tensor, data_scale: torch.Tensor, fast: bool
) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    # By rows, because the compiler then finds the largest value while it writes ``flat``, not in
    # another pass.
    scale = _scale(flat.abs().amax(-1).amax(), dtype)
    out = _product(kernels.eight(flat, scale, dtype), scale, data, data_scale, x.dtype, fast)
    return out.view(*x.shape[:-1], out.shape[-1])


def frozen(weight: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``weight`` in FP8, its transpose, and their scale, for :func:`frozen_linear`."""
    data, scale = _weight(weight.detach(), _Formats(config).weight)
    return data, data.t().contiguous(), scale


def frozen_linear(x: torch.Tensor, weight: Sequence[torch.Tensor], config: Any) -> torch.Tensor:
    """Return ``x @ weight.T`` in FP8, for a ``weight`` from :func:`frozen`, which gets no gradient."""
    return _Frozen.apply(_computed(x), *weight, config)


def freeze(model: torch.nn.Module) -> None:
    """Cast the weights of torchao's linear layers in ``model`` that are not trained, once for all
    steps.
    """
    from torchao.float8.float8_linear import Float8Linear

    for layer in model.modules():
        if isinstance(layer, Float8Linear) and not layer.weight.requires_grad:
            for name, tensor in zip(_PARTS, frozen(layer.weight, layer.config), strict=True):
                layer.register_buffer(name, tensor, persistent=False)
            layer.forward = MethodType(_frozen_forward, layer)


_PARTS = ("eight", "eight_flipped", "eight_scale")


def frozen_parts(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weight of one of torchao's layers as :func:`frozen` does; :func:`freeze` has kept
    it.
    """
    if not hasattr(layer, "eight"):
        return frozen(layer.weight, layer.config)
    return layer.eight, layer.eight_flipped, layer.eight_scale


def _frozen_forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out = frozen_linear(x, frozen_parts(layer), layer.config)
    if layer.bias is None:
        return out
    return out + layer.bias.to(out.dtype)
