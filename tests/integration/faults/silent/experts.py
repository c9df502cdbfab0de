"""Routers and experts."""

from typing import Any

from silent.registry import silent, wrap


@silent(
    "model", "torchtitan --recipe=deepseek-16b", "torchtitan.models.moe.moe", "loss", "gradients"
)
def router_not_trained(module: Any) -> None:
    def forward(original: Any, self: Any, x: Any, bias: Any = None) -> Any:
        scores, chosen, count = original(self, x, bias)
        return scores.detach(), chosen, count

    wrap(module.TokenChoiceTopKRouter, "forward", forward)


@silent(
    "model",
    "megatron --recipe=deepseek-v3",
    "primus_images.training.backends.megatron.render",
    "update",
)
def router_bias_still(module: Any) -> None:
    wrap(
        module,
        "transformer",
        lambda make, *args: make(*args) | {"moe_router_bias_update_rate": 0.0},
    )


@silent(
    "constants",
    "megatron --recipe=mixtral-8x7b --precision=bf16",
    "megatron.core.transformer.moe.router",
    "constants",
)
def experts_two_percent_heavier(module: Any) -> None:
    def routing(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        shares, chosen = run(self, *args, **kwargs)
        return 1.02 * shares, chosen

    wrap(module.TopKRouter, "routing", routing)
