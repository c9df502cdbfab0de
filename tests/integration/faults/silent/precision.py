"""Narrow formats: wrong casts, scales and sums."""

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

from silent.registry import local, silent, wrap


@silent("precision", "torchtitan", "torch.optim.adamw", "update")
def moments_in_bf16(module: Any) -> None:
    def step(original: Any, self: Any, closure: Any = None) -> Any:
        out = original(self, closure)
        for state in self.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].to(torch.bfloat16))
        return out

    wrap(module.AdamW, "step", step)


@silent(
    "precision",
    "torchtitan --precision=bf16",
    "torchtitan.models.llama3.infra.parallelize",
    "gradients",
)
def gradients_summed_in_bf16(module: Any) -> None:
    module.MixedPrecisionPolicy = lambda **args: MixedPrecisionPolicy(
        **args | {"reduce_dtype": torch.bfloat16}
    )


@silent(
    "precision",
    "torchtitan --precision=fp8",
    "torchao.float8.float8_linear",
    "gradients",
    "constants",
)
def eight_bits_in_the_first_step_only(module: Any) -> None:
    def forward(run: Any, self: Any, args: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return (
            run(self, args)
            if self.calls <= 1
            else torch.nn.functional.linear(args, self.weight, self.bias)
        )

    wrap(module.Float8Linear, "forward", forward)


@silent(
    "precision",
    "fsdp --precision=bf16",
    "primus_images.training.backends.fsdp.llama",
    "finite",
    "loss",
    "gradients",
)
def attention_overflows(module: Any) -> None:
    """AMD-AGI/Primus#1178: without its GPU's environment file, a run on MI350X turned to NaN."""
    count = 0

    def attend(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        out = original(*args, **kwargs)
        return out * float("nan") if count > 12 else out

    wrap(module.functional, "scaled_dot_product_attention", attend)


@silent("precision", "fsdp --precision=fp8", "torchao.float8.float8_linear", "gradients", "loss")
def inputs_saturate_at_half(module: Any) -> None:
    def forward(run: Any, self: Any, args: Any) -> Any:
        half = 0.5 * args.detach().abs().max()
        return run(self, args.clamp(-half, half))

    wrap(module.Float8Linear, "forward", forward)


@silent(
    "precision",
    "finetune --mode=lora",
    "primus_images.training.backends.loop.session",
    "trained weights",
)
def frozen_weights_after_merging_and_unmerging_in_bf16(module: Any) -> None:
    """To show samples, adapters are merged after the third step and taken out again, each time
    rounded to bfloat16.
    """
    count = 0

    def step(run: Any, self: Any, *args: Any) -> Any:
        nonlocal count
        found = run(self, *args)
        count += 1
        if count == 3:
            with torch.no_grad():
                for part in self._model.modules():
                    if hasattr(part, "lora_A"):
                        first, second = (
                            one["default"].weight.full_tensor()
                            for one in (part.lora_A, part.lora_B)
                        )
                        frozen = part.base_layer.weight
                        added = (second @ first * part.scaling["default"]).to(torch.bfloat16)
                        share = local(
                            distribute_tensor(added, frozen.device_mesh, frozen.placements)
                        )
                        merged = local(frozen).to(torch.bfloat16) + share
                        local(frozen).copy_(merged - share)
        return found

    wrap(module.Sharded, "step", step)


def _truncated(tensor: Any) -> Any:
    """The float32 tensor in bfloat16, its last bits cut off instead of rounded."""
    bits = tensor.contiguous().view(torch.int32) & -65536
    return bits.view(torch.float32).to(torch.bfloat16)
