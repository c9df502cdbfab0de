"""Enables the catalogue's optimizations in torchtitan 0.2.2, and reports which of them ran.

Nothing here is imported unless a job requests an optimization.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from primus_images.patch import replace
from primus_images.turbo import fp8, primus_turbo, sharded
from primus_images.turbo.attention import Attention, flash_attention_4, rotate
from primus_images.turbo.experts import combine, dispatch, grouped_experts, routes
from primus_images.turbo.kernels import LossHead, cast_fp8
from primus_images.turbo.optimizations import CALLS


def patch(names: Sequence[str]) -> None:
    """Patch libraries in this process. Call it before torchtitan creates its process group."""
    for name in names:
        if name in _PATCHES:
            _PATCHES[name]()


def _turbo_fp8_linear() -> None:
    from torchtitan.protocols import model_converter

    class Converter:
        def __init__(self, job_config: Any, parallel_dims: Any) -> None:
            self._filtered = job_config.quantize.linear.float8.filter_fqns

        def convert(self, model: torch.nn.Module) -> None:
            primus_turbo.convert_linears(model, self._filtered)

        def post_optimizer_hook(self, model: Any) -> None:
            """Do nothing: no scales are computed in advance."""

    model_converter._registry_model_converter_cls["quantize.linear.float8"] = Converter


def _turbo_grouped_gemm() -> None:
    from torchtitan.models.moe import moe

    def _run_experts_grouped_mm_dynamic(*args: Any) -> torch.Tensor:
        return primus_turbo.grouped_experts(*args)

    # torchtitan compiles the function unless its name shows that it is compiled already. Primus
    # Turbo's kernels must not be traced (torchtitan.models.llama4.infra.parallelize.apply_compile).
    _run_experts_grouped_mm_dynamic.__qualname__ = "_run_experts_grouped_mm_dynamic"
    # torchtitan uses the loop over experts if PyTorch has no grouped product.
    for name in ("_run_experts_grouped_mm", "_run_experts_for_loop"):
        replace(
            moe, name, _run_experts_grouped_mm_dynamic, takes="w1, w2, w3, x, num_tokens_per_expert"
        )


def _expert_products() -> None:
    from torchtitan.models.moe import moe

    replace(
        moe,
        "_run_experts_grouped_mm",
        grouped_experts,
        takes="w1, w2, w3, x, num_tokens_per_expert",
    )


def _expert_routing() -> None:
    """Copy each token once to the padded rows of its experts.

    The gradient of that copy is a sum of rows.
    """
    from torchtitan.models.moe import moe

    def experts_forward(
        self: Any, x: torch.Tensor, num_tokens_per_expert: torch.Tensor
    ) -> torch.Tensor:
        weights = [getattr(layer, "_local_tensor", layer) for layer in (self.w1, self.w2, self.w3)]
        # Looked up now, because torchtitan compiles the function after this change.
        run = moe._run_experts_for_loop
        if self.use_grouped_mm:
            run = moe._run_experts_grouped_mm
        return run(*weights, x, num_tokens_per_expert)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.score_before_experts:
            raise RuntimeError(
                "expert-routing supports only models that weight the experts' results"
            )
        tokens = x.view(-1, x.shape[-1])
        scores, selected, counts = self.router(tokens, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        ways = routes(selected, counts)
        rows = self.experts(dispatch(tokens, ways), ways.counts)
        shared = None
        if self.shared_experts is not None:
            shared = self.shared_experts(tokens)
        return combine(rows, scores.float(), ways, shared).view(x.shape)

    replace(moe.GroupedExperts, "forward", experts_forward, takes="self, x, num_tokens_per_expert")
    replace(moe.MoE, "forward", forward, takes="self, x")


def _real_rope() -> None:
    """Rotate without complex numbers, for which the compiler generates one kernel per operation."""
    from torchtitan.models.deepseek_v3.model import model as deepseek
    from torchtitan.models.llama3.model import model

    def turn(
        broadcast: Any, x: torch.Tensor, freqs_cis: torch.Tensor, positions: Any
    ) -> torch.Tensor:
        # Neighbors in a head are the real and the imaginary part.
        pairs = x.float().unflatten(-1, (-1, 2))
        return torch.view_as_real(broadcast(freqs_cis, pairs[..., 0], positions))

    def both(
        xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor, positions: Any = None
    ) -> Any:
        turned = turn(model.reshape_for_broadcast, xq, freqs_cis, positions)
        return rotate(xq, turned), rotate(xk, turned)

    def one(x: torch.Tensor, freqs_cis: torch.Tensor, positions: Any = None) -> torch.Tensor:
        return rotate(x, turn(deepseek.reshape_for_broadcast, x, freqs_cis, positions))

    replace(model, "apply_rotary_emb", both, takes="xq, xk, freqs_cis, positions")
    # DeepSeek's queries and keys are rotated in separate calls.
    replace(deepseek, "apply_rotary_emb", one, takes="x, freqs_cis, positions")
    CALLS["rotated"] += 1


def _fp8_weight_cast() -> None:
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

    def fsdp_pre_all_gather(self: Any, mesh: Any) -> Any:
        scale = self._precomputed_scale
        if scale is None:  # not computed before the first optimizer step
            return original(self, mesh)
        return (cast_fp8(self._tensor, scale, self._dtype),), (scale,)

    original = replace(Weight, "fsdp_pre_all_gather", fsdp_pre_all_gather, takes="self, mesh")


def _fp8_linear() -> None:
    from torchao.float8.float8_linear import Float8Linear

    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        out = fp8.linear(states, self.weight, self.config)
        if self.bias is None:
            return out
        return out + self.bias.to(out.dtype)

    replace(Float8Linear, "forward", forward, takes="self, input")


def _fp8_feed_forward() -> None:
    from torchtitan.models.llama3.model.model import FeedForward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return fp8.feed_forward(x, self.w1.weight, self.w3.weight, self.w2.weight, self.w1.config)

    replace(FeedForward, "forward", forward, takes="self, x")


_PATCHES: Mapping[str, Callable[[], object]] = {
    "turbo-fp8-linear": _turbo_fp8_linear,
    "turbo-grouped-gemm": _turbo_grouped_gemm,
    "expert-products": _expert_products,
    "expert-routing": _expert_routing,
    "real-rope": _real_rope,
    "fp8-weight-cast": _fp8_weight_cast,
    "fp8-linear": _fp8_linear,
    "fp8-feed-forward": _fp8_feed_forward,
    "reduce-scatter-copy-in": sharded.lay_out_gradients,
}


_ATTENTION = {
    "flash-attention-4": flash_attention_4,
    "turbo-attention": primus_turbo.attention,
}


def changed_spec(spec: Any, names: Sequence[str]) -> Any:
    """Return a torchtitan train spec whose model has the requested layers."""
    fused = "linear-cross-entropy" in names

    def parallelize(model: Any, *args: Any, **kwargs: Any) -> Any:
        if fused:
            model.output.__class__ = LossHead
        for name, attend in _ATTENTION.items():
            if name in names:
                for layer in model.layers.values():
                    layer.attention.inner_attention = Attention(attend)
        return spec.parallelize_fn(model, *args, **kwargs)

    def build_loss(*args: Any, **kwargs: Any) -> Any:
        whole = spec.build_loss_fn(*args, **kwargs)

        def loss(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            # The head has already computed the sum; validation still passes logits.
            if pred.dim() == 0:
                return pred
            return whole(pred, labels)

        return loss

    changes: dict[str, Any] = {"parallelize_fn": parallelize}
    if fused:
        changes["build_loss_fn"] = build_loss
    return dataclasses.replace(spec, **changes)


def changed_trainer(trainer: type, names: Sequence[str]) -> type:
    """Return ``trainer`` with the requested head and collectives."""

    class TurboTrainer(trainer):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if "peer-copies" in names:
                kept = config.parallelism.fsdp_reshard_after_forward == "never"
                sharded.attach(self.model_parts, kept=kept)

        def post_dataloading_process(self, input_dict: Any, labels: torch.Tensor) -> Any:
            out = super().post_dataloading_process(input_dict, labels)
            if "linear-cross-entropy" in names:
                self.model_parts[0].output.labels = out[1]
            return out

    return TurboTrainer
