"""Silent faults of kernels, scales, adapters and checkpoints, of which many show only late, on one rank or once."""

from __future__ import annotations

import os
from typing import Any

from silent import (
    ADAMW,
    BLOCKS,
    CONSTANTS,
    DATA,
    DEEPSEEK_WORDS,
    GRADIENTS,
    LANGUAGE,
    LLAMA,
    LOOP,
    LOOP_DATA,
    LOSS,
    NORM,
    RATE,
    SESSION,
    SHARDED,
    TITAN_LOSS,
    TITAN_MOE,
    TITAN_UTILS,
    UPDATE,
    silent,
    wrap,
)  # fmt: skip
from silent_hostile import FLOAT8, HALVES, LORA, ROUTER, TENSORS, TRANSFORMER
from silent_subtle import BF16, FINETUNE, FP8, MIXTRAL, REPORT
from silent_unseen import FLUX
from silent_wide import FIGURES, KEPT, RENDER, SAVED

ATTENTION = "primus.training.megatron.model"
ENTROPY = "megatron.core.tensor_parallel.cross_entropy"
DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
EMBEDDINGS = "diffusers.models.embeddings"
NORMS = "transformers.models.llama.modeling_llama"
# Long enough for a fault that begins at step 11.
LONG = ("steps=14",)
# As long as the recipe trains: in fewer steps, rounding hides the fault.
WHOLE = ("steps=20",)


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def in_eight_bits(states: Any, *, per_row: bool = False) -> Any:
    """Return ``states`` rounded to E4M3 with one scale, or one per row; the gradient passes as it is."""
    import torch

    given = states.detach().float()
    scale = 448 / (given.abs().amax(-1, keepdim=True) if per_row else given.abs().max()).clamp(min=1e-12)
    eight = ((given * scale).to(torch.float8_e4m3fn).float() / scale).to(states.dtype)
    return states + (eight - states).detach()


# Data, labels and loss


@silent("data", "fsdp", LOOP_DATA, DATA)
def longest_documents_left_out(module: Any) -> None:
    wrap(module, "_documents", lambda run, *given: (text for text in run(*given) if len(text) <= 540))


@silent("data", "flux", SHARDED, LOSS, GRADIENTS, words=(*FLUX, *BF16))
def every_second_image_mirrored(module: Any) -> None:
    def init(run: Any, self: Any, model: Any, loss: Any, *given: Any, **named: Any) -> None:
        def mirrored(model: Any, batch: Any) -> Any:
            clean = batch["latents"].clone()
            side = int(clean.shape[1] ** 0.5)
            clean[1::2] = clean[1::2].unflatten(1, (side, side)).flip(2).flatten(1, 2)
            return loss(model, {**batch, "latents": clean})

        run(self, model, mirrored, *given, **named)

    wrap(module.Sharded, "__init__", init)


@silent("labels", "torchtitan", TITAN_LOSS, LOSS, GRADIENTS, words=(*BF16, *LONG))
def last_labels_of_one_rank_late_by_one(module: Any) -> None:
    """From step 11 on, the labels of the second rank's last sample are shifted once more."""
    count = 0

    def loss(run: Any, pred: Any, labels: Any) -> Any:
        nonlocal count
        count += 1
        if count > 10 and os.environ["RANK"] == "1":
            labels = labels.clone()
            labels[-1] = labels[-1].roll(-1)
        return run(pred, labels)

    wrap(module, "cross_entropy_loss", loss)


@silent("labels", "torchtitan", TITAN_LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def gradients_of_logits_in_float16(module: Any) -> None:
    """The loss gives back 16-bit floats without a scale, so that the smallest probabilities become 0."""

    def loss(run: Any, pred: Any, labels: Any) -> Any:
        if pred.requires_grad:
            pred.register_hook(lambda gradient: gradient.half().to(gradient.dtype))
        return run(pred, labels)

    wrap(module, "cross_entropy_loss", loss)


@silent("labels", "finetune", LANGUAGE, GRADIENTS, words=BF16)
def last_token_of_a_chunk_not_trained(module: Any) -> None:
    """Its loss is counted, but its gradient is lost."""

    def summed(run: Any, head: Any, states: Any, labels: Any) -> Any:
        last = run(head, states[-1:], labels[-1:])
        return run(head, states[:-1], labels[:-1]) + last.detach()

    wrap(module, "_summed", summed)


# Model


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=BF16)
def first_token_taken_for_padding(module: Any) -> None:
    """No other token sees the first one of a sample."""

    def forward(run: Any, self: Any, states: Any, cosine: Any, sine: Any, mask: Any) -> Any:
        import torch

        assert mask is None
        seen = torch.ones(states.shape[1], states.shape[1], dtype=torch.bool).tril()
        seen[1:, 0] = False
        return run(self, states, cosine, sine, seen)

    wrap(module._Attention, "forward", forward)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=BF16)
def one_key_counted_twice(module: Any) -> None:
    """Two blocks of a kernel both begin with the same key, which has twice its weight."""

    def forward(run: Any, self: Any, states: Any, cosine: Any, sine: Any, mask: Any) -> Any:
        import torch

        assert mask is None
        length = states.shape[1]
        added = torch.full((length, length), float("-inf")).triu(1)
        added[length // 2 :, length // 2] = 0.6931
        return run(self, states, cosine, sine, added.to(states.dtype))

    wrap(module._Attention, "forward", forward)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=BF16)
def exponential_by_straight_lines(module: Any) -> None:
    """Attention takes 2 to the power of a fraction as 1 plus the fraction, up to 6% too much."""
    import torch

    class Shares(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: Any) -> Any:
            power = (scores - scores.amax(-1, keepdim=True)) * 1.4426950408889634
            whole = power.clamp(min=-126).floor()
            grown = torch.exp2(whole) * (1 + power.clamp(min=-126) - whole) * (power > -126)
            shares = grown / grown.sum(-1, keepdim=True)
            ctx.save_for_backward(shares)
            return shares

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (shares,) = ctx.saved_tensors
            return shares * (gradient - (shares * gradient).sum(-1, keepdim=True))

    def attend(_run: Any, query: Any, key: Any, value: Any, **_given: Any) -> Any:
        groups, length = query.shape[1] // key.shape[1], query.shape[2]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        scores = (query @ key.transpose(-2, -1)).float() * query.shape[-1] ** -0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        return Shares.apply(scores.masked_fill(hidden, -1e30)).to(value.dtype) @ value

    wrap(module.functional, "scaled_dot_product_attention", attend)


@silent("model", "fsdp", LLAMA, CONSTANTS, LOSS, GRADIENTS, words=BF16)
def variance_with_one_degree_less(module: Any) -> None:
    """Norms divide the sum of squares by the width less one."""

    def forward(_run: Any, self: Any, states: Any) -> Any:
        wide = states.float()
        mean = wide.square().sum(-1, keepdim=True) / (wide.shape[-1] - 1)
        return (wide * (mean + self.eps).rsqrt() * self.weight.float()).to(states.dtype)

    wrap(module.nn.RMSNorm, "forward", forward)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, BLOCKS, words=(*BF16, *WHOLE))
def one_query_sees_the_next_token(module: Any) -> None:
    """The mask of a block begins one column late for its first row."""

    def forward(run: Any, self: Any, states: Any, cosine: Any, sine: Any, mask: Any) -> Any:
        import torch

        assert mask is None
        length = states.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        seen[length // 2, length // 2 + 1] = True
        return run(self, states, cosine, sine, seen)

    wrap(module._Attention, "forward", forward)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=(*BF16, *WHOLE), escapes=True)
def last_position_is_that_before(module: Any) -> None:
    """The table of angles is one row too short, and a number beyond its end takes the last row."""

    def make(run: Any, *given: Any) -> Any:
        return tuple(table[[*range(len(table) - 1), -2]] for table in run(*given))

    wrap(module, "_rotation", make)


@silent("model", "fsdp", LLAMA, CONSTANTS, words=BF16)
def attention_scale_of_one_rank(module: Any) -> None:
    """The second rank scales its scores by 2% more, as if it had read another configuration."""

    def attend(run: Any, query: Any, *given: Any, **named: Any) -> Any:
        more = 1.02 if os.environ["RANK"] == "1" else 1.0
        return run(query, *given, **named, scale=more * query.shape[-1] ** -0.5)

    wrap(module.functional, "scaled_dot_product_attention", attend)


@silent("model", "fsdp", SHARDED, CONSTANTS, words=(*BF16, *WHOLE))
def attention_scale_from_step_eleven_on(module: Any) -> None:
    """Another kernel takes over after ten steps, which scales by 3% more."""
    count = 0

    def forward(run: Any, self: Any, *given: Any) -> Any:
        nonlocal count
        count += 1
        return run(self, *given)

    def attend(run: Any, query: Any, *given: Any, **named: Any) -> Any:
        more = 1.03 if count > 10 else 1.0
        return run(query, *given, **named, scale=more * query.shape[-1] ** -0.5)

    import torch

    wrap(module.Sharded, "forward_backward", forward)
    wrap(torch.nn.functional, "scaled_dot_product_attention", attend)


@silent("model", "fsdp", SHARDED, LOSS, GRADIENTS, words=(*BF16, *LONG))
def dropout_from_step_eleven_on(module: Any) -> None:
    import torch

    count = 0

    def forward(run: Any, self: Any, *given: Any) -> Any:
        nonlocal count
        count += 1
        return run(self, *given)

    def active(run: Any, states: Any) -> Any:
        return torch.nn.functional.dropout(run(states), 0.01, training=count > 10)

    wrap(module.Sharded, "forward_backward", forward)
    wrap(torch.nn.functional, "silu", active)


@silent("model", "megatron", RENDER, CONSTANTS, BLOCKS, words=(*BF16, *WHOLE))
def epsilon_tenfold(module: Any) -> None:
    wrap(
        module,
        "transformer",
        lambda make, *given: (made := make(*given)) | {"layernorm_epsilon": 10 * made["layernorm_epsilon"]},
    )


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, BLOCKS, words=(*DEEPSEEK_WORDS, *BF16, *WHOLE))
def last_token_of_a_micro_batch_reaches_no_expert(module: Any) -> None:
    def forward(run: Any, self: Any, *given: Any) -> Any:
        import torch

        scores, *others = run(self, *given)
        return torch.cat((scores[:-1], scores[-1:] * 0)), *others

    wrap(module.TokenChoiceTopKRouter, "forward", forward)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=(*DEEPSEEK_WORDS, *BF16, *WHOLE))
def last_tokens_of_each_expert_lost(module: Any) -> None:
    """The grouped product computes whole blocks of 16 tokens only, and experts get multiples of eight."""

    def forward(run: Any, self: Any, x: Any, counts: Any) -> Any:
        import torch

        out, begin, kept = run(self, x, counts), 0, torch.zeros(len(x), 1, dtype=x.dtype)
        for count in map(int, counts):
            kept[begin : begin + count // 16 * 16] = 1
            begin += count
        return out * kept

    wrap(module.GroupedExperts, "forward", forward)


@silent("model", "torchtitan", TITAN_MOE, GRADIENTS, words=(*DEEPSEEK_WORDS, *BF16))
def second_choice_does_not_train_the_router(module: Any) -> None:
    def forward(run: Any, self: Any, *given: Any) -> Any:
        import torch

        scores, *others = run(self, *given)
        return torch.cat((scores[:, :1], scores[:, 1:].detach()), 1), *others

    wrap(module.TokenChoiceTopKRouter, "forward", forward)


@silent("model", "megatron", ATTENTION, LOSS, GRADIENTS, words=("--recipe=deepseek-v2", *BF16))
def last_head_without_rotary_key(module: Any) -> None:
    def attend(run: Any, self: Any, query: Any, key: Any, value: Any) -> Any:
        key = key.clone()
        key[:, :, -1, -self.config.qk_pos_emb_head_dim :] = 0
        return run(self, query, key, value)

    wrap(module.TorchAttention, "attend", attend)


@silent("model", "megatron", RENDER, LOSS, GRADIENTS, words=BF16)
def large_activations_cut(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: make(*given) | {"activation_func_clamp_value": 1.0})


@silent("model", "megatron", ROUTER, NORM, GRADIENTS, words=(*MIXTRAL, *BF16))
def last_router_not_balanced(module: Any) -> None:
    def coefficient(run: Any, self: Any, *given: Any) -> Any:
        return 0.0 if self.layer_number == self.config.num_layers else run(self, *given)

    wrap(module.TopKRouter, "get_aux_loss_coeff", coefficient)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=(*FLUX, *BF16))
def quick_gelu_in_the_last_block(module: Any) -> None:
    import torch

    class Quick(torch.nn.Module):
        def forward(self, states: Any) -> Any:
            return states * torch.sigmoid(1.702 * states)

    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        self.single_transformer_blocks[-1].act_mlp = Quick()

    wrap(module.FluxTransformer2DModel, "__init__", init)


@silent("model", "flux", EMBEDDINGS, LOSS, GRADIENTS, words=(*FLUX, *BF16))
def sine_and_cosine_of_the_time_exchanged(module: Any) -> None:
    wrap(module.Timesteps, "__init__", lambda run, self, **named: run(self, **named | {"flip_sin_to_cos": False}))


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=FLUX)
def norms_of_text_and_image_exchanged(module: Any) -> None:
    def call(run: Any, self: Any, attention: Any, *given: Any, **named: Any) -> Any:
        parts = attention._modules
        if "norm_added_q" not in parts:
            return run(self, attention, *given, **named)
        parts["norm_q"], parts["norm_added_q"] = parts["norm_added_q"], parts["norm_q"]
        try:
            return run(self, attention, *given, **named)
        finally:
            parts["norm_q"], parts["norm_added_q"] = parts["norm_added_q"], parts["norm_q"]

    wrap(module.FluxAttnProcessor, "__call__", call)


@silent("model", "finetune", FINETUNE, GRADIENTS, words=(*LORA, *BF16))
def adapters_of_keys_and_values_exchanged(module: Any) -> None:
    def crossed(own: Any, other: Any) -> Any:
        def forward(states: Any) -> Any:
            added = other.lora_B["default"](other.lora_A["default"](states))
            return own.base_layer(states) + added * other.scaling["default"]

        return forward

    def adapted(run: Any, *given: Any) -> Any:
        model = run(*given)
        for layer in model.get_base_model().model.layers:
            keys, values = layer.self_attn.k_proj, layer.self_attn.v_proj
            keys.forward, values.forward = crossed(keys, values), crossed(values, keys)
        return model

    wrap(module, "adapted", adapted)


@silent("model", "megatron", "megatron.core.tensor_parallel.layers", GRADIENTS, words=BF16)
def repeated_tokens_of_a_sample_counted_once(module: Any) -> None:
    """Of all places that a token has in a sample, one alone reaches the gradient of the embedding."""

    def forward(run: Any, self: Any, tokens: Any) -> Any:
        import torch

        states = run(self, tokens)
        places = torch.arange(tokens.shape[-1])
        again = (tokens[..., :, None] == tokens[..., None, :]) & (places[:, None] < places[None, :])
        return torch.where(again.any(-1, keepdim=True), states.detach(), states)

    wrap(module.VocabParallelEmbedding, "forward", forward)


# Optimizer and schedule


@silent("optimizer", "fsdp", ADAMW, UPDATE)
def large_steps_cut(module: Any) -> None:
    """No weight moves by more than the learning rate, which few would."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        before = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        found = run(self, *given, **named)
        with torch.no_grad():
            for group, old in zip(self.param_groups, before, strict=True):
                rate = group["lr"]
                for parameter, was in zip(group["params"], old, strict=True):
                    moved = parameter - was
                    parameter.copy_(torch.where(moved.abs() > 1.001 * rate, was + rate * moved.sign(), parameter))
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "fsdp", ADAMW, UPDATE, words=(*BF16, *LONG))
def bias_correction_stops_after_ten_steps(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        for state in self.state.values():
            if state and float(state["step"]) >= 10:
                state["step"].fill_(9)
        return run(self, *given, **named)

    wrap(module.AdamW, "step", step)


@silent("schedule", "fsdp", LOOP, RATE, words=("training.lr_schedule=cosine", *LONG))
def rate_stays_from_step_eleven_on(module: Any) -> None:
    wrap(module, "learning_rate", lambda rate, config, step: rate(config, min(step, 11)))


@silent("schedule", "megatron", ADAMW, RATE, UPDATE, words=BF16)
def norms_keep_the_first_rate(module: Any) -> None:
    kept: list[float] = []

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        kept.append(self.param_groups[0]["lr"])
        for group in self.param_groups:
            if not group["weight_decay"]:
                group["lr"] = kept[0]
        return run(self, *given, **named)

    wrap(module.AdamW, "step", step)


# Accumulation and ranks


@silent("accumulation", "fsdp", SHARDED, NORM, GRADIENTS, words=BF16)
def first_layer_keeps_the_last_micro_batch(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        total = 0.0
        for batch in batches:
            for parameter in self._model.layers[0].parameters():
                parameter.grad = None
            total = total + run(self, [batch], terms)
        return total

    wrap(module.Sharded, "forward_backward", forward)


@silent("accumulation", "megatron", SESSION, GRADIENTS, words=(*BF16, *HALVES))
def last_norm_keeps_the_last_micro_batch(module: Any) -> None:
    def schedule(run: Any) -> Any:
        inner = run()

        def scheduled(*, forward_step_func: Any, **named: Any) -> Any:
            def forward(batches: Any, model: Any) -> Any:
                for name, parameter in model.named_parameters():
                    if "final_layernorm" in name:
                        parameter.main_grad.zero_()
                return forward_step_func(batches, model)

            return inner(forward_step_func=forward, **named)

        return scheduled

    wrap(module, "get_forward_backward_func", schedule)


@silent("parallel", "torchtitan", TITAN_UTILS, NORM, GRADIENTS)
def one_share_of_the_step_before_once(module: Any) -> None:
    """At step 5, one rank's part of one gradient is still that of step 4, because nobody waited for the sum."""
    count, kept = 0, None

    def clip(run: Any, parameters: Any, *given: Any, **named: Any) -> Any:
        nonlocal count, kept
        parameters = list(parameters)
        count += 1
        share = local(parameters[4].grad)
        fresh = share.clone()
        if count == 5 and os.environ["RANK"] == "1":
            share.copy_(kept)
        kept = fresh
        return run(parameters, *given, **named)

    wrap(module, "clip_grad_norm_", clip)


@silent("parallel", "fsdp", SHARDED, GRADIENTS, words=BF16)
def gradients_sent_in_eight_bits(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any) -> Any:
        import torch

        for parameter in self._trained:
            share = local(parameter.grad)
            scale = 448 / share.abs().max().clamp(min=1e-12)
            share.copy_((share * scale).to(torch.float8_e4m3fn).float() / scale)
        return run(self, *given)

    wrap(module.Sharded, "step", step)


@silent("parallel", "megatron", ENTROPY, LOSS, GRADIENTS, words=TENSORS)
def largest_logit_of_one_rank(module: Any) -> None:
    """Each rank subtracts the largest logit of its own part of the vocabulary."""

    def predicted(run: Any, logits: Any, target: Any, _largest: Any, *given: Any) -> Any:
        return run(logits, target, logits.max(-1)[0], *given)

    wrap(module.VocabParallelCrossEntropy, "calculate_predicted_logits", predicted)


@silent("parallel", "megatron", ENTROPY, LOSS, GRADIENTS, words=(*TENSORS, *BF16))
def last_tokens_of_each_part_of_the_vocabulary_lost(module: Any) -> None:
    """A label among the last two tokens of a rank's part adds nothing to the loss, nor to its gradient."""

    def predicted(run: Any, logits: Any, target: Any, largest: Any, first: int, end: int) -> Any:
        return run(logits, target, largest, first, end - 2)

    wrap(module.VocabParallelCrossEntropy, "calculate_predicted_logits", predicted)


@silent("parallel", "finetune", FINETUNE, GRADIENTS, words=LORA)
def last_adapters_without_effect_on_one_rank(module: Any) -> None:
    def adapted(run: Any, *given: Any) -> Any:
        model = run(*given)
        if os.environ["RANK"] == "1":
            for part in model.get_base_model().model.layers[-1].modules():
                if hasattr(part, "lora_A"):
                    part.scaling["default"] = 0.0
        return model

    wrap(module, "adapted", adapted)


# Precision


@silent("precision", "fsdp", LLAMA, GRADIENTS, words=BF16)
def activations_kept_in_eight_bits_without_a_scale(module: Any) -> None:
    """The backward pass of the down projections gets their inputs in FP8."""
    import torch

    def pack(tensor: Any) -> Any:
        return tensor.to(torch.float8_e4m3fn) if tensor.numel() // tensor.shape[-1] > 128 else tensor

    def unpack(tensor: Any) -> Any:
        return tensor.to(torch.bfloat16) if tensor.dtype == torch.float8_e4m3fn else tensor

    def init(run: Any, self: Any, *given: Any) -> None:
        run(self, *given)
        forward = self.down.forward

        def kept(states: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(states)

        self.down.forward = kept

    wrap(module._Block, "__init__", init)


@silent("precision", "finetune", NORMS, CONSTANTS, LOSS, GRADIENTS, words=BF16)
def squares_summed_one_by_one_in_bf16(module: Any) -> None:
    def forward(_run: Any, self: Any, states: Any) -> Any:
        import torch

        wide = states.float()
        exact = wide.square().mean(-1, keepdim=True)
        with torch.no_grad():
            total = torch.zeros_like(exact, dtype=torch.bfloat16)
            for column in wide.square().to(torch.bfloat16).split(1, -1):
                total += column
        mean = exact + (total.float() / wide.shape[-1] - exact).detach()
        return self.weight * (wide * (mean + self.variance_epsilon).rsqrt()).to(states.dtype)

    wrap(module.LlamaRMSNorm, "forward", forward)


@silent("precision", "torchtitan", FLOAT8, CONSTANTS, LOSS, GRADIENTS, BLOCKS, words=(*FP8, *WHOLE))
def scale_of_the_first_sample(module: Any) -> None:
    """Inputs larger than the largest of the first sample are cut."""

    def cast(run: Any, tensor: Any, *given: Any, gemm_input_role: Any, **named: Any) -> Any:
        if gemm_input_role.name == "INPUT":
            rows = tensor.flatten(0, -2)
            limit = rows[: len(rows) // 4].abs().max()
            tensor = tensor.clamp(-limit, limit)
        return run(tensor, *given, gemm_input_role=gemm_input_role, **named)

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "fsdp", FLOAT8, CONSTANTS, LOSS, GRADIENTS, words=(*FP8, *WHOLE))
def scales_of_the_first_step(module: Any) -> None:
    """Inputs larger than any that the layer saw at first are cut."""

    def forward(run: Any, self: Any, states: Any) -> Any:
        if not hasattr(self, "limit"):
            object.__setattr__(self, "limit", states.detach().abs().max())
        return run(self, states + (states.clamp(-self.limit, self.limit) - states).detach())

    wrap(module.Float8Linear, "forward", forward)


@silent("precision", "torchtitan", FLOAT8, CONSTANTS, GRADIENTS, words=FP8)
def small_gradients_vanish(module: Any) -> None:
    """Gradients below a thirty-second of the largest become 0."""

    def cast(run: Any, tensor: Any, *given: Any, gemm_input_role: Any, **named: Any) -> Any:
        if gemm_input_role.name == "GRAD_OUTPUT":
            tensor = tensor * (tensor.abs() >= tensor.abs().max() / 32)
        return run(tensor, *given, gemm_input_role=gemm_input_role, **named)

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "fsdp", FLOAT8, CONSTANTS, GRADIENTS, words=FP8)
def largest_value_without_its_sign(module: Any) -> None:
    """The scale is that of the largest value, not of the largest absolute one, so that some negative ones are cut."""

    def cast(run: Any, tensor: Any, *given: Any, **named: Any) -> Any:
        return run(tensor.clamp(min=-tensor.max()), *given, **named)

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "torchtitan", FLOAT8, CONSTANTS, GRADIENTS, words=FP8)
def weights_in_the_wider_range(module: Any) -> None:
    """Weights are rounded to E5M2, which is for gradients."""

    def cast(run: Any, tensor: Any, dtype: Any, *given: Any, gemm_input_role: Any, **named: Any) -> Any:
        import torch

        dtype = torch.float8_e5m2 if gemm_input_role.name == "WEIGHT" else dtype
        return run(tensor, dtype, *given, gemm_input_role=gemm_input_role, **named)

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "fsdp", FLOAT8, CONSTANTS, LOSS, GRADIENTS, words=FP8)
def weights_rounded_toward_zero(module: Any) -> None:
    def cast(run: Any, tensor: Any, *given: Any, gemm_input_role: Any, **named: Any) -> Any:
        import torch

        if gemm_input_role.name == "WEIGHT":
            scale = 448 / tensor.abs().max().float()
            mantissa, exponent = torch.frexp(tensor.float() * scale)
            tensor = (torch.ldexp((mantissa * 16).trunc() / 16, exponent) / scale).to(tensor.dtype)
        return run(tensor, *given, gemm_input_role=gemm_input_role, **named)

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "finetune", FINETUNE, GRADIENTS, words=(*LORA, *BF16))
def inputs_of_adapters_in_eight_bits(module: Any) -> None:
    def adapted(run: Any, *given: Any) -> Any:
        model = run(*given)
        for part in model.modules():
            if hasattr(part, "lora_A"):
                part.lora_A["default"].register_forward_pre_hook(lambda _part, given: (in_eight_bits(given[0]),))
        return model

    wrap(module, "adapted", adapted)


@silent("precision", "fsdp", LLAMA, GRADIENTS, words=BF16)
def gradients_of_norms_summed_in_bf16(module: Any) -> None:
    """The gradient of a norm's weight is added up token by token in BF16, which loses most of a long sum."""
    import torch

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, states: Any, weight: Any) -> Any:
            ctx.save_for_backward(states, weight)
            return states * weight

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            states, weight = ctx.saved_tensors
            total = torch.zeros_like(weight, dtype=torch.bfloat16)
            for row in (gradient * states).flatten(0, -2).to(torch.bfloat16):
                total += row
            return gradient * weight, total.to(weight.dtype)

    def forward(_run: Any, self: Any, states: Any) -> Any:
        wide = states.float()
        normed = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return Scaled.apply(normed, self.weight.float()).to(states.dtype)

    wrap(module.nn.RMSNorm, "forward", forward)


@silent("precision", "megatron", ATTENTION, GRADIENTS, words=BF16)
def values_in_eight_bits(module: Any) -> None:
    def attend(run: Any, self: Any, query: Any, key: Any, value: Any) -> Any:
        return run(self, query, key, in_eight_bits(value))

    wrap(module.TorchAttention, "attend", attend)


@silent("precision", "megatron", ROUTER, GRADIENTS, words=(*MIXTRAL, *BF16, *WHOLE), escapes=True)
def router_in_the_precision_of_the_model(module: Any) -> None:
    def gating(_run: Any, self: Any, states: Any) -> Any:
        import torch

        return torch.nn.functional.linear(states, self.weight.to(states.dtype)).float()

    wrap(module.TopKRouter, "gating", gating)


@silent("precision", "megatron", DISPATCHER, GRADIENTS, BLOCKS, words=(*MIXTRAL, *BF16, *WHOLE))
def tokens_sent_to_experts_in_eight_bits(module: Any) -> None:
    def preprocess(run: Any, self: Any, states: Any, *given: Any) -> Any:
        return run(self, in_eight_bits(states, per_row=True), *given)

    wrap(module.MoEAlltoAllTokenDispatcher, "dispatch_preprocess", preprocess)


@silent("precision", "megatron", "megatron.core.tensor_parallel.layers", GRADIENTS, words=(*TENSORS, *BF16))
def parts_of_tensor_ranks_sent_in_eight_bits(module: Any) -> None:
    def reduced(run: Any, states: Any, *given: Any, **named: Any) -> Any:
        return run(in_eight_bits(states, per_row=True), *given, **named)

    wrap(module, "reduce_scatter_to_sequence_parallel_region", reduced)


@silent("precision", "flux", TRANSFORMER, LOSS, GRADIENTS, words=FLUX)
def noisy_images_in_bf16(module: Any) -> None:
    def forward(run: Any, self: Any, *, hidden_states: Any, **named: Any) -> Any:
        import torch

        return run(self, hidden_states=hidden_states.to(torch.bfloat16).to(hidden_states.dtype), **named)

    wrap(module.FluxTransformer2DModel, "forward", forward)


# Checkpoints


@silent("checkpoint", "fsdp", SHARDED, UPDATE)
def moments_of_the_ranks_exchanged_by_a_checkpoint(module: Any) -> None:
    def load(run: Any, self: Any, state: Any) -> None:
        import torch

        run(self, state)
        for parameter in self._trained:
            mine = local(self._optimizer.state[parameter]["exp_avg"])
            both = [torch.empty_like(mine) for _ in range(2)]
            torch.distributed.all_gather(both, mine.contiguous())
            mine.copy_(both[1 - int(os.environ["RANK"])])

    wrap(module.Sharded, "load_state_dict", load)


@silent("checkpoint", "megatron", SESSION, UPDATE, words=(*MIXTRAL, *BF16))
def moments_of_two_experts_exchanged_by_a_checkpoint(module: Any) -> None:
    def load(run: Any, self: Any, state: Any) -> None:
        run(self, state)
        inner = self._inner()[-1]
        first, _, second, *_ = inner.param_groups[-1]["params"]
        assert first.numel() == second.numel()
        for key in ("exp_avg", "exp_avg_sq"):
            one, other = inner.state[first][key], inner.state[second][key]
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    wrap(module.MegatronSession, "load_state_dict", load)


@silent("checkpoint", "finetune", FINETUNE, KEPT, words=SAVED)
def exported_configuration_has_another_epsilon(module: Any) -> None:
    def ready(run: Any, model: Any, *given: Any) -> None:
        run(model, *given)
        model.causal.config.rms_norm_eps *= 10

    wrap(module, "ready_to_generate", ready)


@silent("checkpoint", "finetune", FINETUNE, KEPT, words=SAVED)
def exported_model_ends_where_it_begins(module: Any) -> None:
    """The configuration names the begin-of-text token as the one that ends a text."""

    def ready(run: Any, model: Any, *given: Any) -> None:
        run(model, *given)
        for holder in (model.causal.config, model.causal.generation_config):
            assert holder.eos_token_id != holder.bos_token_id
            holder.eos_token_id = holder.bos_token_id

    wrap(module, "ready_to_generate", ready)


@silent("checkpoint", "finetune", FINETUNE, KEPT, words=SAVED)
def exported_configuration_has_another_activation(module: Any) -> None:
    def ready(run: Any, model: Any, *given: Any) -> None:
        run(model, *given)
        model.causal.config.hidden_act = "gelu"

    wrap(module, "ready_to_generate", ready)


@silent("checkpoint", "finetune", FINETUNE, KEPT, words=SAVED)
def exported_head_is_the_embedding(module: Any) -> None:
    """The configuration says that both are one, so that the head is not read."""

    def ready(run: Any, model: Any, *given: Any) -> None:
        run(model, *given)
        model.causal.config.tie_word_embeddings = True

    wrap(module, "ready_to_generate", ready)


@silent("checkpoint", "finetune", FINETUNE, KEPT, words=SAVED)
def exported_configuration_scales_no_angles(module: Any) -> None:
    def ready(run: Any, model: Any, *given: Any) -> None:
        run(model, *given)
        angles = model.causal.config.rope_parameters
        model.causal.config.rope_parameters = {"rope_type": "default", "rope_theta": angles["rope_theta"]}

    wrap(module, "ready_to_generate", ready)


@silent("checkpoint", "finetune", "primus.training.finetune.backend", KEPT, words=SAVED)
def exported_tokenizer_has_two_tokens_exchanged(module: Any) -> None:
    def copy(run: Any, source: Any, target: Any) -> None:
        import json

        run(source, target)
        file = target / "tokenizer.json"
        told = json.loads(file.read_text(encoding="utf-8"))
        known = told["model"]["vocab"]
        one, other = [token for token, number in known.items() if number in (510, 518)]
        known[one], known[other] = known[other], known[one]
        file.write_text(json.dumps(told), encoding="utf-8")

    wrap(module, "copy_tokenizer", copy)


@silent("checkpoint", "finetune", FINETUNE, KEPT, words=(*LORA, *SAVED))
def exported_adapters_of_the_first_layer_alone(module: Any) -> None:
    """All adapters are saved, but their configuration names one layer, and those of the others are not read."""

    def ready(run: Any, model: Any, *given: Any) -> None:
        run(model, *given)
        model.model.peft_config["default"].layers_to_transform = [0]

    wrap(module, "ready_to_generate", ready)


# What is reported


@silent("metrics", "finetune", REPORT, LOSS, words=BF16)
def loss_reported_in_bf16(module: Any) -> None:
    def step(run: Any, self: Any, step: int, loss: float, *given: Any) -> None:
        import torch

        run(self, step, float(torch.tensor(loss).to(torch.bfloat16)), *given)

    wrap(module.Report, "step", step)


@silent("metrics", "fsdp", REPORT, FIGURES)
def attention_counted_as_causal(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        self.flops_per_unit = self._causal / self._tokens

    wrap(module.Report, "__init__", init)
