"""Low-rank adapters and what fine-tuning builds around them."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    BF16,
    CONSTANTS,
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


@silent("model", "finetune", FINETUNE, FIRST, PARAMETERS, words=LORA)
def adapters_drawn_too_small(module: Any) -> None:
    def drawn(init: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        init(model, *args, **kwargs)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_A." in name:
                    parameter.mul_(0.5)

    wrap(module, "init", drawn)


@silent("model", "finetune", "peft.tuners.lora.layer", GRADIENTS, CONSTANTS, words=(*LORA, *BF16))
def scale_of_one_adapter(module: Any) -> None:
    """The first adapter that runs has another scale."""
    first: list[Any] = []

    def forward(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not first:
            first.append(self)
            self.scaling = {name: 1.05 * scale for name, scale in self.scaling.items()}
        return run(self, *args, **kwargs)

    wrap(module.Linear, "forward", forward)


@silent("model", "finetune", "peft.tuners.lora.layer", LOSS, GRADIENTS, CONSTANTS, words=(*LORA, *BF16))
def scale_of_adapters_two_percent(module: Any) -> None:
    def forward(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.scaling = {name: 1.02 * self.lora_alpha[name] / self.r[name] for name in self.scaling}
        return run(self, *args, **kwargs)

    wrap(module.Linear, "forward", forward)


@silent("model", "finetune", WEIGHTS, PARAMETERS, FIRST, words=(*LORA, *BF16))
def adapters_begin_with_an_effect(module: Any) -> None:
    wrap(module, "constant", lambda run, parameter, value: run(parameter, value or 1e-6))


@silent("model", "finetune", "transformers.models.llama.modeling_llama", LOSS, GRADIENTS, words=LORA)
def last_layer_runs_twice_late(module: Any) -> None:
    count = 0

    def forward(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        out = run(self, *args, **kwargs)
        return out * 1.0001 if count > 8 else out

    wrap(module.LlamaMLP, "forward", forward)


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
