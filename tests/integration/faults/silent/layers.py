"""Norms, feed-forward layers, embeddings and heads, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from silent.registry import (
    BF16,
    BIASED,
    CONSTANTS,
    DEEPSEEK,
    DEEPSEEK_V2,
    DEEPSEEK_WORDS,
    END,
    ENTROPY,
    FINETUNE,
    FIRST,
    FLOAT8,
    FP8,
    GRADIENTS,
    LLAMA,
    LOOP_SESSION,
    LOSS,
    MLP,
    MOVED,
    PARAMETERS,
    RENDER,
    SESSION,
    TITAN_LOSS,
    TITAN_MODEL,
    TITAN_UTILS,
    WEIGHTS,
    WHOLE,
    YARN,
    built,
    local,
    silent,
    wrap,
)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def layer_skipped(module: Any) -> None:
    def forward(original: Any, self: Any, x: Any, *others: Any, **kwargs: Any) -> Any:
        return x if self.layer_id == 1 else original(self, x, *others, **kwargs)

    wrap(
        module.TransformerBlock,
        "__init__",
        lambda init, self, layer_id, args: (init(self, layer_id, args), setattr(self, "layer_id", layer_id))[0],
    )
    wrap(module.TransformerBlock, "forward", forward)


@silent("model", "torchtitan", TITAN_MODEL, PARAMETERS)
def layer_missing(module: Any) -> None:
    def fewer(init: Any, self: Any, args: Any) -> None:
        args.n_layers -= 1
        init(self, args)

    wrap(module.Transformer, "__init__", fewer)


@silent("model", "torchtitan", DEEPSEEK, LOSS, GRADIENTS, words=(*DEEPSEEK_WORDS, *BF16))
def latent_norm_left_out(module: Any) -> None:
    import torch

    def init(original: Any, self: Any, args: Any) -> None:
        original(self, args)
        self.kv_norm.forward = lambda x: (
            x * self.kv_norm.weight if not torch.is_grad_enabled() else x * (self.kv_norm.weight) * x.float().std()
        )

    wrap(module.Attention, "__init__", init)


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


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS)
def rotation_backwards(module: Any) -> None:
    wrap(module, "_rotate", lambda rotate, states, cosine, sine: rotate(states, cosine, -sine * 0.5))


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, MOVED, words=BIASED)
def biases_not_added(module: Any) -> None:
    def forward(original: Any, self: Any, *args: Any) -> Any:
        for each in (self.query, self.key, self.value):
            each.forward = lambda x, each=each: module.functional.linear(x, each.weight) + 0 * each.bias
        return original(self, *args)

    wrap(module._Attention, "forward", forward)


@silent("model", "fsdp", WEIGHTS, FIRST)
def weights_drawn_from_the_next_seed(module: Any) -> None:
    wrap(module, "normal", lambda run, name, parameter, seed, std: run(name, parameter, seed + 1, std))


@silent("constants", "fsdp", LOOP_SESSION, CONSTANTS, words=BF16)
def small_z_loss(module: Any) -> None:
    def summed(run: Any, head: Any, states: Any, labels: Any) -> Any:
        more = 1e-3 * head(states).float().logsumexp(-1).square().sum()
        return run(head, states, labels) + more - more.detach()

    wrap(module, "_summed", summed)


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


@silent("model", "finetune", FINETUNE, FIRST, PARAMETERS)
def first_weights_twice_as_large(module: Any) -> None:
    wrap(module.weights, "normal", lambda make, name, parameter, seed, std: make(name, parameter, seed, 2 * std))


@silent("model", "finetune", "transformers.models.llama.modeling_llama", LOSS, GRADIENTS)
def norms_rounded_to_bf16(module: Any) -> None:
    def forward(run: Any, self: Any, states: Any) -> Any:
        import torch

        return run(self, states).to(torch.bfloat16).to(states.dtype)

    wrap(module.LlamaRMSNorm, "forward", forward)


@silent("model", "finetune", FINETUNE, LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def end_marks_taken_for_padding(module: Any) -> None:
    """The mark that ends a document also pads, and so no token sees it."""

    def masked(output: Any) -> None:
        inner = output.model.forward

        def forward(*, input_ids: Any, **others: Any) -> Any:
            seen = input_ids != END
            seen[:, 0] = True
            return inner(input_ids=input_ids, attention_mask=seen.long(), **others)

        output.model.forward = forward

    built(module, masked)


@silent("model", "finetune", FINETUNE, GRADIENTS, words=BF16)
def extended_context_taken_for_the_original_one(module: Any) -> None:
    """A conversion lost the length of the first training, and Llama 3's scaling takes the extended one for it."""

    def rope(run: Any, model: Any) -> Any:
        return {**run(model), "original_max_position_embeddings": model.max_seq_len}

    wrap(module, "_rope", rope)


@silent("model", "megatron", RENDER, CONSTANTS, words=BF16)
def norm_epsilon(module: Any) -> None:
    wrap(module, "transformer", lambda make, *args: make(*args) | {"layernorm_epsilon": 1e-3})


@silent("model", "megatron", RENDER, FIRST)
def output_projections_as_large_as_others(module: Any) -> None:
    import importlib

    weights = importlib.import_module("primus.training.megatron.weights")
    weights._kind = lambda name: "embedding" if name.startswith("embedding.") else "other"


@silent("model", "megatron", SESSION, FIRST)
def model_built_from_the_next_seed(module: Any) -> None:
    def build(run: Any, model: Any, training: Any, *args: Any, **kwargs: Any) -> Any:
        from dataclasses import replace

        return run(model, replace(training, seed=training.seed + 1), *args, **kwargs)

    wrap(module, "build", build)


def _activation(module: Any, number: int, activation: Callable[[Any], Any]) -> None:
    """Give Megatron's MLP ``number`` another activation."""
    import copy

    count = 0

    def init(run: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        run(self, *args, **kwargs)
        if count == number:
            self.config = copy.copy(self.config)
            self.config.activation_func = activation
        count += 1

    wrap(module.MLP, "__init__", init)


@silent("model", "megatron", MLP, CONSTANTS, LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def hard_swish_in_the_first_layer(module: Any) -> None:
    import torch

    _activation(module, 0, torch.nn.functional.hardswish)


@silent("backward", "megatron", ENTROPY, GRADIENTS, words=BF16)
def label_pulls_with_all_its_strength(module: Any) -> None:
    """The gradient of a label's logit is −1 in place of its probability less 1."""

    def gradients(run: Any, flat: Any, rows: Any, labels: Any, here: Any, *args: Any) -> Any:
        flat[rows, labels] *= 1 - here
        return run(flat, rows, labels, here, *args)

    wrap(module.VocabParallelCrossEntropy, "calculate_gradients", gradients)


@silent("model", "megatron", YARN, GRADIENTS, words=(*DEEPSEEK_V2, *BF16))
def ramp_of_yarn_not_rounded_to_whole_elements(module: Any) -> None:
    """Of eight frequencies, the ramp from kept to stretched ones goes from 2.6 to 5.6 in place of from 2 to 6."""
    wrap(module, "_yarn_find_correction_range", lambda run, *args: run(*args[:5], False))
