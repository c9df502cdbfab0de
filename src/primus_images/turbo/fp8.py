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
from torch import Tensor

from primus_images.turbo import fp8_kernels, kernels

_SMALLEST = 1e-12


def _scale(top: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of a tensor before the cast, computed in float64 as in torchao."""
    return (torch.finfo(dtype).max / top.double().clamp(min=_SMALLEST)).float()


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of ``x`` in FP8, their transpose, and the scale of both."""
    flat = _flat(x)
    scale = _scale(flat.abs().max(), dtype)
    values, turned = fp8_kernels.cast_both(flat, scale, dtype)
    return values, turned, scale


def _weight(weight: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight's FP8 values [out, in] and their scale: as gathered by FSDP, or cast here."""
    if hasattr(weight, "_data"):
        return weight._data, weight._scale
    scale = _scale(weight.abs().max(), dtype)
    return kernels.eight(weight, scale, dtype), scale


def _product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: torch.dtype,
    fast: bool,
) -> Tensor:
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, config: Any) -> Tensor:
        formats = _Formats(config)
        values, turned, scale = _quantized(x, formats.input)
        ctx.save_for_backward(turned, scale, weight)
        ctx.formats = formats
        out = _out(values, scale, weight, x.dtype, formats)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        turned_x, scale, weight = ctx.saved_tensors
        formats = ctx.formats
        grad = grads[0]
        values, turned, grad_scale = _quantized(grad, formats.grad)
        of_x = _of_input(values, grad_scale, weight, grad.dtype, formats)
        of_weight = _product(turned, grad_scale, turned_x, scale, grad.dtype, formats.fast_weight)
        return of_x.view(*grad.shape[:-1], of_x.shape[-1]), of_weight, None


def _out(
    values: Tensor, scale: Tensor, weight: Any, dtype: torch.dtype, formats: _Formats
) -> Tensor:
    """Return the product of a layer's FP8 input and its weight."""
    data, weight_scale = _weight(weight, formats.weight)
    return _product(values, scale, data, weight_scale, dtype, formats.fast_output)


def _of_input(
    values: Tensor, scale: Tensor, weight: Any, dtype: torch.dtype, formats: _Formats
) -> Tensor:
    """Return the gradient of a layer's input from the FP8 gradient of its output."""
    data, weight_scale = _weight(weight, formats.weight)
    return _product(values, scale, fp8_kernels.flip(data), weight_scale, dtype, formats.fast_input)


@torch._dynamo.allow_in_graph
class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        config: Any,
    ) -> Tensor:
        formats = _Formats(config)
        values, turned, scale = _quantized(x, formats.input)
        gate = _out(values, scale, gate_weight, x.dtype, formats)
        up = _out(values, scale, up_weight, x.dtype, formats)
        made_scale = _scale(fp8_kernels.swiglu_largest(gate, up), formats.input)
        made = fp8_kernels.swiglu_cast(gate, up, made_scale, formats.input)
        out = _out(made, made_scale, down_weight, x.dtype, formats)
        ctx.save_for_backward(
            turned, scale, gate, up, made_scale, gate_weight, up_weight, down_weight
        )
        ctx.formats = formats
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        turned_x, scale, gate, up, made_scale, gate_weight, up_weight, down_weight = (
            ctx.saved_tensors
        )
        formats = ctx.formats
        grad = grads[0]
        kind = grad.dtype
        fast = formats.fast_weight
        values, turned, grad_scale = _quantized(grad, formats.grad)
        of_made = _of_input(values, grad_scale, down_weight, kind, formats)
        tops = fp8_kernels.swiglu_backward_largest(gate, up, of_made)
        gate_scale = _scale(tops[0], formats.grad)
        up_scale = _scale(tops[1], formats.grad)
        of_gate, gate_turned, of_up, up_turned, made_turned = fp8_kernels.swiglu_backward(
            gate, up, of_made, gate_scale, up_scale, made_scale, formats.grad, formats.input
        )
        of_down = _product(turned, grad_scale, made_turned, made_scale, kind, fast)
        of_x = _of_input(of_gate, gate_scale, gate_weight, kind, formats)
        of_x = of_x + _of_input(of_up, up_scale, up_weight, kind, formats)
        of_gates = _product(gate_turned, gate_scale, turned_x, scale, kind, fast)
        of_ups = _product(up_turned, up_scale, turned_x, scale, kind, fast)
        return of_x.view(*grad.shape[:-1], of_x.shape[-1]), of_gates, of_ups, of_down, None


def _computed(x: Tensor) -> Tensor:
    """Return ``x`` in the type that autocast requests, as ``torch.nn.functional.linear`` does.

    With FSDP's mixed precision, ``x`` already has that type. On one rank, torchtitan uses autocast,
    and ``x`` is float32.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def linear(x: Tensor, weight: Tensor, config: Any) -> Tensor:
    """Return ``x @ weight.T`` with factors and gradients in FP8; ``config`` is torchao's, with one
    scale per tensor.
    """
    return _Linear.apply(_computed(x), weight, config)


def feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, config: Any) -> Tensor:
    """Return ``(silu(x @ gate.T) · (x @ up.T)) @ down.T``, computed in FP8 as in :func:`linear`."""
    return _FeedForward.apply(_computed(x), gate, up, down, config)


@torch._dynamo.allow_in_graph
class _Frozen(torch.autograd.Function):
    """A linear layer whose weight needs no gradient.

    Each input and each gradient is therefore needed in one layout.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        data: Tensor,
        turned: Tensor,
        scale: Tensor,
        config: Any,
    ) -> Tensor:
        formats = _Formats(config)
        ctx.save_for_backward(turned, scale)
        ctx.formats = formats
        return _by_cast(x, formats.input, data, scale, formats.fast_output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        turned, scale = ctx.saved_tensors
        formats = ctx.formats
        of_x = _by_cast(grads[0], formats.grad, turned, scale, formats.fast_input)
        return of_x, None, None, None, None


def _by_cast(x: Tensor, dtype: torch.dtype, data: Tensor, data_scale: Tensor, fast: bool) -> Tensor:
    flat = _flat(x)
    # By rows, because the compiler then finds the largest value while it writes ``flat``, not in
    # another pass.
    scale = _scale(flat.abs().amax(-1).amax(), dtype)
    values = kernels.eight(flat, scale, dtype)
    out = _product(values, scale, data, data_scale, x.dtype, fast)
    return out.view(*x.shape[:-1], out.shape[-1])


def frozen(weight: Tensor, config: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``weight`` in FP8, its transpose, and their scale, for :func:`frozen_linear`."""
    data, scale = _weight(weight.detach(), _Formats(config).weight)
    return data, data.t().contiguous(), scale


def frozen_linear(x: Tensor, weight: Sequence[Tensor], config: Any) -> Tensor:
    """Return ``x @ weight.T`` in FP8 for a ``weight`` from :func:`frozen`, without its gradient."""
    return _Frozen.apply(_computed(x), *weight, config)


def freeze(model: torch.nn.Module) -> None:
    """Cast the weights of torchao's linear layers in ``model`` that are not trained, once for all
    steps.
    """
    from torchao.float8.float8_linear import Float8Linear

    for layer in model.modules():
        if isinstance(layer, Float8Linear) and not layer.weight.requires_grad:
            data, turned, scale = frozen(layer.weight, layer.config)
            layer.register_buffer("eight", data, persistent=False)
            layer.register_buffer("eight_turned", turned, persistent=False)
            layer.register_buffer("eight_scale", scale, persistent=False)
            layer.forward = MethodType(_frozen_forward, layer)


def _frozen_forward(layer: Any, x: Tensor) -> Tensor:
    weight = (layer.eight, layer.eight_turned, layer.eight_scale)
    out = frozen_linear(x, weight, layer.config)
    if layer.bias is None:
        return out
    return out + layer.bias.to(out.dtype)
