"""Low-rank adapters and what fine-tuning builds around them."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    BF16,
    FINETUNE,
    FIRST,
    GRADIENTS,
    LORA,
    LOSS,
    PARAMETERS,
    WEIGHTS,
    WHOLE,
    silent,
    wrap,
)


@silent("model", "finetune", FINETUNE, LOSS, GRADIENTS, words=LORA)
def adapter_scaled_twice(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        from dataclasses import replace

        return original(model, replace(lora, alpha=2 * lora.alpha))

    wrap(module, "adapted", adapted)


@silent("model", "finetune", WEIGHTS, PARAMETERS, FIRST, words=(*LORA, *BF16))
def adapters_begin_with_an_effect(module: Any) -> None:
    wrap(module, "constant", lambda run, parameter, value: run(parameter, value or 1e-6))


@silent("backward", "finetune", FINETUNE, GRADIENTS, words=(*LORA, *BF16, *WHOLE))
def adapters_pass_no_gradient_down(module: Any) -> None:
    """What lies below a layer gets the gradient through its frozen weights alone."""

    def adapted(run: Any, *args: Any) -> Any:
        model = run(*args)
        for part in model.modules():
            if hasattr(part, "lora_A"):
                first = part.lora_A["default"]
                first.forward = lambda states, forward=first.forward: forward(states.detach())
        return model

    wrap(module, "adapted", adapted)
