"""Narrow formats: wrong casts, scales and sums."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    ADAMW,
    BF16,
    CONSTANTS,
    FLOAT8,
    FLUX,
    FP8,
    GRADIENTS,
    LLAMA,
    LOOP_SESSION,
    LORA,
    LOSS,
    MOVED,
    NAN,
    SESSION,
    TITAN_MODEL,
    TRANSFORMER,
    UPDATE,
    local,
    silent,
    wrap,
)


@silent("precision", "torchtitan", ADAMW, UPDATE)
def moments_in_bf16(module: Any) -> None:
    import torch

    def step(original: Any, self: Any, closure: Any = None) -> Any:
        out = original(self, closure)
        for state in self.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].to(torch.bfloat16))
        return out

    wrap(module.AdamW, "step", step)


@silent("precision", "torchtitan", "torchtitan.models.llama3.infra.parallelize", GRADIENTS, words=BF16)
def gradients_summed_in_bf16(module: Any) -> None:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    module.MixedPrecisionPolicy = lambda **args: MixedPrecisionPolicy(**args | {"reduce_dtype": torch.bfloat16})


@silent("precision", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def embeddings_rounded(module: Any) -> None:
    import torch

    def forward(run: Any, self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, x.to(torch.bfloat16).to(x.dtype), *args, **kwargs)

    wrap(module.TransformerBlock, "forward", forward)


@silent("precision", "torchtitan", FLOAT8, GRADIENTS, CONSTANTS, words=FP8)
def eight_bits_in_the_first_step_only(module: Any) -> None:
    def forward(run: Any, self: Any, args: Any) -> Any:
        import torch

        self.calls = getattr(self, "calls", 0) + 1
        return run(self, args) if self.calls <= 1 else torch.nn.functional.linear(args, self.weight, self.bias)

    wrap(module.Float8Linear, "forward", forward)


@silent("precision", "fsdp", LOOP_SESSION, LOSS, GRADIENTS)
def computed_in_bf16(module: Any) -> None:
    import torch

    original = module.MixedPrecisionPolicy
    module.MixedPrecisionPolicy = lambda **args: original(**args | {"param_dtype": torch.bfloat16})


@silent("precision", "fsdp", LOOP_SESSION, UPDATE, words=BF16)
def master_weights_in_bf16(module: Any) -> None:
    def shard(original: Any, model: Any, blocks: Any, args: Any, process: Any, **kwargs: Any) -> Any:
        from dataclasses import replace

        training = replace(args.training, master_dtype="bfloat16")
        return original(model, blocks, replace(args, training=training), process, **kwargs)

    import importlib

    wrap(module, "shard", shard)
    importlib.import_module("primus.training.fsdp.entry").shard = module.shard


@silent("precision", "fsdp", LLAMA, NAN, LOSS, GRADIENTS, words=BF16)
def attention_overflows(module: Any) -> None:
    """AMD-AGI/Primus#1178: without its GPU's environment file, a run on MI350X turned to NaN."""
    count = 0

    def attend(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        out = original(*args, **kwargs)
        return out * float("nan") if count > 12 else out

    wrap(module.functional, "scaled_dot_product_attention", attend)


@silent("precision", "fsdp", FLOAT8, GRADIENTS, LOSS, words=FP8)
def inputs_saturate_at_half(module: Any) -> None:
    def forward(run: Any, self: Any, args: Any) -> Any:
        half = 0.5 * args.detach().abs().max()
        return run(self, args.clamp(-half, half))

    wrap(module.Float8Linear, "forward", forward)


@silent("precision", "finetune", "peft.tuners.lora.layer", LOSS, GRADIENTS, words=(*LORA, *BF16))
def base_weights_in_four_bits(module: Any) -> None:
    """The frozen weights are computed with as QLoRA has them."""

    def forward(run: Any, self: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        weight = self.base_layer.weight.detach().float()
        step = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
        lost = ((weight / step).round() * step - weight).to(states.dtype)
        return run(self, states, *args, **kwargs) + torch.nn.functional.linear(states, lost)

    wrap(module.Linear, "forward", forward)


@silent("precision", "finetune", LOOP_SESSION, MOVED, words=LORA)
def frozen_weights_after_merging_and_unmerging_in_bf16(module: Any) -> None:
    """To show samples, adapters are merged after the third step and taken out again, each time rounded to bfloat16."""
    count = 0

    def step(run: Any, self: Any, *args: Any) -> Any:
        nonlocal count
        import torch
        from torch.distributed.tensor import distribute_tensor

        found = run(self, *args)
        count += 1
        if count == 3:
            with torch.no_grad():
                for part in self._model.modules():
                    if hasattr(part, "lora_A"):
                        first, second = (one["default"].weight.full_tensor() for one in (part.lora_A, part.lora_B))
                        frozen = part.base_layer.weight
                        added = (second @ first * part.scaling["default"]).to(torch.bfloat16)
                        share = local(distribute_tensor(added, frozen.device_mesh, frozen.placements))
                        merged = local(frozen).to(torch.bfloat16) + share
                        local(frozen).copy_(merged - share)
        return found

    wrap(module.Sharded, "step", step)


def _truncated(tensor: Any) -> Any:
    """The float32 tensor in bfloat16, its last bits cut off instead of rounded."""
    import torch

    bits = tensor.contiguous().view(torch.int32) & -65536
    return bits.view(torch.float32).to(torch.bfloat16)


@silent("precision", "megatron", SESSION, UPDATE, words=BF16)
def computing_weights_truncated(module: Any) -> None:
    """The optimizer's float32 weights are cut to bfloat16 instead of rounded."""

    def step(run: Any, self: Any, lr: float) -> Any:
        import torch

        norm = run(self, lr)
        own = self._updates().weights()
        with torch.no_grad():
            for part in self.model_parts:
                for parameter in part.parameters():
                    if parameter.dtype == torch.bfloat16:
                        parameter.copy_(_truncated(own[parameter].float()))
        return norm

    wrap(module.MegatronSession, "step", step)


@silent("precision", "flux", TRANSFORMER, LOSS, GRADIENTS, words=FLUX)
def noisy_images_in_bf16(module: Any) -> None:
    def forward(run: Any, self: Any, *, hidden_states: Any, **kwargs: Any) -> Any:
        import torch

        return run(self, hidden_states=hidden_states.to(torch.bfloat16).to(hidden_states.dtype), **kwargs)

    wrap(module.FluxTransformer2DModel, "forward", forward)
