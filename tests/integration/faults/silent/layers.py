"""Norms, feed-forward layers, embeddings and heads, forward and backward."""

from dataclasses import replace
from typing import Any

import torch

from silent.registry import silent, wrap


@silent("model", "torchtitan", "torchtitan.models.llama3.model.model", "parameters")
def layer_missing(module: Any) -> None:
    def fewer(init: Any, self: Any, args: Any) -> None:
        args.n_layers -= 1
        init(self, args)

    wrap(module.Transformer, "__init__", fewer)


@silent("model", "torchtitan", "torchtitan.distributed.utils", "first weights")
def weights_of_another_seed(module: Any) -> None:
    def determinism(run: Any, *args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        torch.manual_seed(torch.initial_seed() + 1)
        return found

    wrap(module, "set_determinism", determinism)


@silent(
    "model",
    "fsdp --recipe=qwen2.5-7b",
    "primus_images.training.backends.fsdp.llama",
    "loss",
    "gradients",
    "trained weights",
)
def biases_not_added(module: Any) -> None:
    def forward(original: Any, self: Any, *args: Any) -> Any:
        for each in (self.query, self.key, self.value):
            each.forward = lambda x, each=each: (
                module.functional.linear(x, each.weight) + 0 * each.bias
            )
        return original(self, *args)

    wrap(module._Attention, "forward", forward)


def _backward_pass() -> bool:
    """Whether autograd is running, so that a forward pass now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


@silent(
    "backward",
    "fsdp training.recompute=full --precision=bf16 steps=20",
    "primus_images.training.backends.fsdp.llama",
    "gradients",
)
def recomputed_layers_see_the_whole_sequence(module: Any) -> None:
    """A keyword of attention is lost when a layer runs again."""

    def attend(run: Any, *args: Any, is_causal: bool, **kwargs: Any) -> Any:
        return run(*args, is_causal=is_causal and not _backward_pass(), **kwargs)

    wrap(module.functional, "scaled_dot_product_attention", attend)


@silent(
    "model",
    "finetune --mode=lora steps=4",
    "primus_images.training.backends.finetune.models",
    "loss",
    "gradients",
)
def adapter_scaled_twice(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        return original(model, replace(lora, alpha=2 * lora.alpha))

    wrap(module, "adapted", adapted)


@silent(
    "model",
    "finetune --mode=lora --precision=bf16",
    "primus_images.training.backends.loop.weights",
    "parameters",
    "first weights",
)
def adapters_begin_with_an_effect(module: Any) -> None:
    wrap(module, "constant", lambda run, parameter, value: run(parameter, value or 1e-6))
