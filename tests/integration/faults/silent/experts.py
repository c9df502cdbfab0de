"""Routers and experts."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    BF16,
    BLOCKS,
    CONSTANTS,
    DEEPSEEK_V3,
    DEEPSEEK_WORDS,
    EXPERTS,
    GRADIENTS,
    LOSS,
    MIXTRAL,
    MIXTRAL_BF16,
    OPTIMIZER,
    RENDER,
    ROUTER,
    TITAN_MOE,
    UPDATE,
    WHOLE,
    silent,
    wrap,
)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def router_not_trained(module: Any) -> None:
    def forward(original: Any, self: Any, x: Any, bias: Any = None) -> Any:
        scores, chosen, count = original(self, x, bias)
        return scores.detach(), chosen, count

    wrap(module.TokenChoiceTopKRouter, "forward", forward)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def shared_expert_left_out(module: Any) -> None:
    wrap(module.MoE, "forward", lambda run, self, x: run(self, x) - 0.5 * self.shared_experts(x))


@silent("model", "torchtitan", OPTIMIZER, UPDATE, words=DEEPSEEK_WORDS)
def router_bias_never_moved(module: Any) -> None:
    module.build_optimizers_with_moe_load_balancing = lambda parts, config, dims, manager=None: module.build_optimizers(
        parts, config, dims, manager
    )


@silent("backward", "torchtitan", TITAN_MOE, GRADIENTS, words=(*DEEPSEEK_WORDS, *BF16, *WHOLE))
def shared_experts_pass_no_gradient_down(module: Any) -> None:
    def init(run: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        run(self, *args, **kwargs)
        self.shared_experts.register_forward_pre_hook(lambda _part, args: (args[0].detach(),))

    wrap(module.MoE, "__init__", init)


@silent("model", "megatron", RENDER, UPDATE, words=DEEPSEEK_V3)
def router_bias_still(module: Any) -> None:
    wrap(module, "transformer", lambda make, *args: make(*args) | {"moe_router_bias_update_rate": 0.0})


@silent("model", "megatron", RENDER, LOSS, GRADIENTS, words=MIXTRAL)
def jitter_in_the_router(module: Any) -> None:
    wrap(module, "transformer", lambda make, *args: make(*args) | {"moe_input_jitter_eps": 1e-3})


@silent("constants", "megatron", ROUTER, CONSTANTS, words=MIXTRAL_BF16)
def experts_two_percent_heavier(module: Any) -> None:
    def routing(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        shares, chosen = run(self, *args, **kwargs)
        return 1.02 * shares, chosen

    wrap(module.TopKRouter, "routing", routing)


@silent("backward", "megatron", ROUTER, GRADIENTS, words=(*MIXTRAL, *BF16))
def router_passes_no_gradient_down(module: Any) -> None:
    """The backward pass of the router's own product returns the gradient of its weights alone."""
    wrap(module.TopKRouter, "gating", lambda run, self, states: run(self, states.detach()))


@silent("model", "megatron", EXPERTS, BLOCKS, words=(*MIXTRAL, *BF16))
def one_token_of_the_second_expert_goes_to_the_first(module: Any) -> None:
    """The place where the groups of two experts meet is off by one."""

    def forward(run: Any, self: Any, states: Any, counts: Any, *args: Any) -> Any:
        import torch

        counts = torch.as_tensor(counts).clone()
        if counts[1]:
            counts[0] += 1
            counts[1] -= 1
        return run(self, states, counts, *args)

    wrap(module.SequentialMLP, "forward", forward)
