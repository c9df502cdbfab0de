"""Routers and experts."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    BF16,
    CONSTANTS,
    DEEPSEEK_V3,
    DEEPSEEK_WORDS,
    GRADIENTS,
    LOSS,
    MIXTRAL,
    MIXTRAL_BF16,
    OPTIMIZER,
    RENDER,
    ROUTER,
    TITAN_MOE,
    UPDATE,
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


@silent("model", "megatron", RENDER, UPDATE, words=DEEPSEEK_V3)
def router_bias_still(module: Any) -> None:
    wrap(module, "transformer", lambda make, *args: make(*args) | {"moe_router_bias_update_rate": 0.0})


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
