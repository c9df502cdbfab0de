"""Norms, feed-forward layers, embeddings and heads, forward and backward."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    BF16,
    BIASED,
    CONSTANTS,
    ENTROPY,
    FIRST,
    FLOAT8,
    FP8,
    GRADIENTS,
    LLAMA,
    LOSS,
    MOVED,
    PARAMETERS,
    RENDER,
    SESSION,
    TITAN_LOSS,
    TITAN_MODEL,
    TITAN_UTILS,
    WEIGHTS,
    WHOLE,
    local,
    silent,
    wrap,
)


@silent("model", "torchtitan", TITAN_MODEL, PARAMETERS)
def layer_missing(module: Any) -> None:
    def fewer(init: Any, self: Any, args: Any) -> None:
        args.n_layers -= 1
        init(self, args)

    wrap(module.Transformer, "__init__", fewer)


@silent("model", "torchtitan", TITAN_UTILS, FIRST)
def weights_of_another_seed(module: Any) -> None:
    import torch

    def determinism(run: Any, *args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        torch.manual_seed(torch.initial_seed() + 1)
        return found

    wrap(module, "set_determinism", determinism)


@silent("constants", "torchtitan", TITAN_LOSS, CONSTANTS, words=BF16)
def labels_smoothed_a_little(module: Any) -> None:
    import torch

    def smoothed(pred: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(
            pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", label_smoothing=0.01
        )

    module.cross_entropy_loss = smoothed


@silent("backward", "torchtitan", FLOAT8, GRADIENTS, words=(*FP8, *WHOLE))
def gradients_pass_through_weights_of_the_step_before(module: Any) -> None:
    """The transposed weights in eight bits are kept from one step to the next, and are one step old."""

    def forward(run: Any, self: Any, states: Any) -> Any:
        weight = self.weight.detach().clone()
        old = getattr(self, "old", weight)
        object.__setattr__(self, "old", weight)
        passed = module.matmul_with_hp_or_float8_args.apply(states, old.t(), self.linear_mm_config, self.config)
        return run(self, states.detach()) + (passed - passed.detach())

    wrap(module.Float8Linear, "forward", forward)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, MOVED, words=BIASED)
def biases_not_added(module: Any) -> None:
    def forward(original: Any, self: Any, *args: Any) -> Any:
        for each in (self.query, self.key, self.value):
            each.forward = lambda x, each=each: module.functional.linear(x, each.weight) + 0 * each.bias
        return original(self, *args)

    wrap(module._Attention, "forward", forward)


def _backward_pass() -> bool:
    """Whether autograd is running, so that a forward pass now is a recomputation."""
    import torch

    return torch._C._current_graph_task_id() != -1


@silent("backward", "fsdp", LLAMA, GRADIENTS, words=("training.recompute=full", *BF16, *WHOLE))
def recomputed_layers_see_the_whole_sequence(module: Any) -> None:
    """A keyword of attention is lost when a layer runs again."""

    def attend(run: Any, *args: Any, is_causal: bool, **kwargs: Any) -> Any:
        return run(*args, is_causal=is_causal and not _backward_pass(), **kwargs)

    wrap(module.functional, "scaled_dot_product_attention", attend)


@silent("model", "fsdp", WEIGHTS, FIRST, words=FP8)
def main_weights_begin_as_the_eight_bit_copies(module: Any) -> None:
    """The optimizer's weights are made from the model's, which are E4M3 already, and lose the drawn numbers."""

    def draw(run: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        run(model, *args, **kwargs)
        with torch.no_grad():
            for name, parameter in model.layers.named_parameters():
                if parameter.ndim == 2:
                    assert name.endswith("weight")
                    scale = 448 / parameter.full_tensor().abs().max()
                    rows = local(parameter)
                    rows.copy_((rows * scale).to(torch.float8_e4m3fn).float() / scale)

    wrap(module, "draw_all", draw)


@silent("model", "megatron", RENDER, CONSTANTS, words=BF16)
def norm_epsilon(module: Any) -> None:
    wrap(module, "transformer", lambda make, *args: make(*args) | {"layernorm_epsilon": 1e-3})


@silent("model", "megatron", SESSION, FIRST)
def model_built_from_the_next_seed(module: Any) -> None:
    def build(run: Any, model: Any, training: Any, *args: Any, **kwargs: Any) -> Any:
        from dataclasses import replace

        return run(model, replace(training, seed=training.seed + 1), *args, **kwargs)

    wrap(module, "build", build)


@silent("backward", "megatron", ENTROPY, GRADIENTS, words=BF16)
def label_pulls_with_all_its_strength(module: Any) -> None:
    """The gradient of a label's logit is −1 in place of its probability less 1."""

    def gradients(run: Any, flat: Any, rows: Any, labels: Any, here: Any, *args: Any) -> Any:
        flat[rows, labels] *= 1 - here
        return run(flat, rows, labels, here, *args)

    wrap(module.VocabParallelCrossEntropy, "calculate_gradients", gradients)
