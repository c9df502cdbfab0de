"""Silent faults whose author had not seen the checks either: ends of kernels, lost terms, wrong ports, stale copies."""

from __future__ import annotations

import os
from typing import Any

from silent import (
    ADAMW,
    DEEPSEEK,
    DEEPSEEK_WORDS,
    LLAMA,
    TITAN_LOSS,
    TITAN_MODEL,
    TITAN_TRAIN,
    silent,
    wrap,
)  # fmt: skip
from silent_eighth import END, _attend, _backward_pass, _summed, _with_gradient_of, built
from silent_hostile import FLOAT8, LORA, ROUTER, TRANSFORMER
from silent_seventh import DISPATCHER, ENTROPY, NORMS, local
from silent_subtle import BF16, DEEPSEEK_V3, FINETUNE, FP8, MIXTRAL
from silent_unseen import FLUX
from silent_wide import SPLIT

MOE_UTILS = "megatron.core.transformer.moe.moe_utils"
YARN = "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding"
QWEN = ("--recipe=qwen2.5-7b",)
DEEPSEEK_V2 = ("--recipe=deepseek-v2",)
# The tokens of a FLUX proxy: those of its text come first.
TEXT = 8


# Megatron


@silent("backward", "megatron", ENTROPY, "reference gradients", words=BF16)
def label_pulls_with_all_its_strength(module: Any) -> None:
    """The gradient of a label's logit is −1 in place of its probability less 1."""

    def gradients(run: Any, flat: Any, rows: Any, labels: Any, here: Any, *given: Any) -> Any:
        flat[rows, labels] *= 1 - here
        return run(flat, rows, labels, here, *given)

    wrap(module.VocabParallelCrossEntropy, "calculate_gradients", gradients)


@silent("loss", "megatron", ROUTER, "reference gradients", words=(*MIXTRAL, *BF16))
def experts_balanced_by_the_weights_of_the_chosen_ones(module: Any) -> None:
    """The balancing loss takes the weights of a token's two experts, where the scores of all four are meant."""

    def scored(run: Any, *given: Any, **named: Any) -> Any:
        chosen, scores = run(*given, **named)
        kept = scores * chosen
        return chosen, kept / kept.sum(-1, keepdim=True)

    wrap(module, "compute_routing_scores_for_aux_loss", scored)


@silent("backward", "megatron", ROUTER, "reference gradients", words=(*MIXTRAL, *BF16))
def router_passes_no_gradient_down(module: Any) -> None:
    """The backward pass of the router's own product returns the gradient of its weights alone."""
    wrap(module.TopKRouter, "gating", lambda run, self, states: run(self, states.detach()))


@silent("precision", "megatron", DISPATCHER, "reference constants", words=(*MIXTRAL, *BF16))
def weights_of_tokens_from_another_rank_in_eight_bits(module: Any) -> None:
    """What a rank sends to the experts of another is compressed, and with the tokens' states also their weights."""

    def dispatch(run: Any, self: Any, tokens: Any, weights: Any) -> Any:
        import torch

        tokens, weights = run(self, tokens, weights)
        parts, mine = weights.split([int(count) for count in self.output_splits]), int(os.environ["RANK"])
        narrow = [_with_gradient_of(part.to(torch.float8_e4m3fn).to(part.dtype), part) for part in parts]
        return tokens, torch.cat([parts[rank] if rank == mine else narrow[rank] for rank in range(len(parts))])

    wrap(module.MoEAlltoAllTokenDispatcher, "token_dispatch", dispatch)


@silent("model", "megatron", MOE_UTILS, "reference gradients", words=(*DEEPSEEK_V3, *BF16))
def groups_of_experts_ranked_without_their_bias(module: Any) -> None:
    """The bias that balances the experts counts in the choice within the groups, but not in that of the groups."""
    import megatron.core.transformer.moe.router as router

    bias: list[Any] = []

    def routing(run: Any, *given: Any, expert_bias: Any = None, **named: Any) -> Any:
        bias[:] = [expert_bias]
        return run(*given, expert_bias=expert_bias, **named)

    def limited(_run: Any, *, scores: Any, topk: int, num_groups: int, group_topk: int, **_given: Any) -> Any:
        import torch

        grouped = (scores - bias[0]).unflatten(-1, (num_groups, -1))
        groups = grouped.topk(topk // group_topk, -1)[0].sum(-1).topk(group_topk, -1)[1]
        closed = torch.ones(*grouped.shape[:-1], dtype=torch.bool).scatter(-1, groups, False)
        return scores.masked_fill(closed.repeat_interleave(grouped.shape[-1], -1), float("-inf")).topk(topk, 1)

    wrap(router, "topk_routing_with_score_function", routing)
    wrap(module, "group_limited_topk", limited)


@silent("model", "megatron", YARN, "reference gradients", words=(*DEEPSEEK_V2, *BF16))
def ramp_of_yarn_not_rounded_to_whole_elements(module: Any) -> None:
    """Of eight frequencies, the ramp from kept to stretched ones goes from 2.6 to 5.6 in place of from 2 to 6."""
    wrap(module, "_yarn_find_correction_range", lambda run, *given: run(*given[:5], False))


# torchtitan


@silent("backward", "torchtitan", TITAN_MODEL, "reference gradients", words=BF16)
def last_element_of_a_head_left_out_of_the_softmax_rows(module: Any) -> None:
    """In the last head, the sums of output times gradient that the softmax's gradient needs leave out one element."""

    def cut(products: Any) -> Any:
        kept = products.clone()
        kept[:, -1, :, -1] = 0
        return _summed(kept)

    _attend(module.F, correction=cut)


@silent("loss", "torchtitan", TITAN_LOSS, "reference gradients", words=BF16)
def last_eight_tokens_not_in_the_denominator(module: Any) -> None:
    """The loop over blocks of the vocabulary ends early, so that its last tokens are never pushed down."""

    def loss(run: Any, pred: Any, labels: Any) -> Any:
        logits = pred.flatten(0, 1).float()
        less = logits[:, :-8].logsumexp(-1) - logits.logsumexp(-1)
        return run(pred, labels) + (less * (labels.flatten() >= 0)).sum()

    wrap(module, "cross_entropy_loss", loss)


@silent("accumulation", "torchtitan", TITAN_TRAIN, "reference gradients", words=(*DEEPSEEK_WORDS, *SPLIT, *BF16))
def last_expert_of_a_rank_keeps_the_last_micro_batch(module: Any) -> None:
    """For the last group, the grouped product that makes gradients of second matrices stores where it should add."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        for name, parameter in self.model_parts[0].named_parameters():
            if name.endswith(".experts.w2") and parameter.grad is not None:
                local(parameter.grad)[-1].zero_()
        return run(self, *given, **named)

    wrap(module.Trainer, "forward_backward_step", step)


@silent("model", "torchtitan", TITAN_TRAIN, "reference first weights")
def shares_of_a_matrix_begin_as_equals(module: Any) -> None:
    """Every rank draws the same numbers for its share. It was so on CPUs until this author saw it."""

    def init(run: Any, self: Any, *given: Any) -> None:
        from torch import nn

        for name in ("normal_", "trunc_normal_"):
            wrap(nn.init, name, lambda draw, tensor, *more, **named: draw(local(tensor), *more, **named))
        run(self, *given)

    wrap(module.Trainer, "__init__", init)


@silent("model", "torchtitan", DEEPSEEK, "reference gradients", words=(*DEEPSEEK_WORDS, *BF16))
def latent_vector_normed_with_the_rotary_key(module: Any) -> None:
    """The mean square that scales the latent vector is taken before the rotary key is split off, over both."""

    def init(run: Any, self: Any, args: Any) -> None:
        run(self, args)
        kept: list[Any] = []

        def keep(_part: Any, _given: Any, made: Any) -> None:
            kept[:] = [made]

        def scaled(part: Any, given: Any, made: Any) -> Any:
            own, both = (one.float().square().mean(-1, keepdim=True) + part.eps for one in (given[0], kept[0]))
            return (made.float() * (own / both).sqrt()).to(made.dtype)

        self.wkv_a.register_forward_hook(keep)
        self.kv_norm.register_forward_hook(scaled)

    wrap(module.Attention, "__init__", init)


# Plain FSDP


@silent("backward", "fsdp", LLAMA, "reference gradients", words=BF16)
def last_quarter_left_out_of_the_backward_sum_of_norms(module: Any) -> None:
    """The sum over the width in the gradient of RMSNorm ends a block of 32 early; the output is right."""
    import torch

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, states: Any, weight: Any, eps: float) -> Any:
            wide = states.float()
            root = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
            ctx.save_for_backward(wide, weight, root)
            return (wide * root * weight.float()).to(states.dtype)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            wide, weight, root = ctx.saved_tensors
            normed, scaled = wide * root, gradient.float() * weight.float()
            row = (normed * scaled)[..., :-32].sum(-1, keepdim=True) / wide.shape[-1]
            of_weight = (gradient.float() * normed).flatten(0, -2).sum(0)
            return (root * (scaled - normed * row)).to(gradient.dtype), of_weight.to(weight.dtype), None

    def forward(run: Any, self: Any, states: Any) -> Any:
        return _with_gradient_of(run(self, states), Norm.apply(states, self.weight, self.eps))

    wrap(module.nn.RMSNorm, "forward", forward)


@silent("optimizer", "fsdp", ADAMW, "reference update", words=BF16)
def weights_decay_only_where_they_shrink_anyway(module: Any) -> None:
    """Cautious weight decay, which the user did not ask for: none where the step makes a weight larger."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        before = {part: local(part.detach()).clone() for group in self.param_groups for part in group["params"]}
        found = run(self, *given, **named)
        with torch.no_grad():
            for group in self.param_groups:
                for part in group["params"]:
                    weight, moment = before[part], local(self.state[part]["exp_avg"])
                    local(part).add_(weight * (moment * weight < 0), alpha=group["lr"] * group["weight_decay"])
        return found

    wrap(module.AdamW, "step", step)


@silent("backward", "fsdp", LLAMA, "reference gradients", words=(*QWEN, *BF16))
def last_sample_overwrites_the_gradients_of_biases(module: Any) -> None:
    """Each sample of a micro-batch stores its gradient of the biases where it should add it."""

    def biased(part: Any) -> Any:
        def forward(states: Any) -> Any:
            last = states.new_zeros(len(states), 1, 1)
            last[-1] = 1
            made = module.functional.linear(states, part.weight, part.bias.detach())
            return made + last * (part.bias - part.bias.detach())

        return forward

    def init(run: Any, self: Any, *given: Any) -> None:
        run(self, *given)
        for part in (self.query, self.key, self.value):
            part.forward = biased(part)

    wrap(module._Attention, "__init__", init)


# Fine-tuning


@silent("backward", "finetune", FINETUNE, "reference gradients", words=BF16)
def embedding_of_the_end_mark_taken_for_that_of_padding(module: Any) -> None:
    """The mark that ends a document also pads, and so its embedding gets no gradient."""

    built(module, lambda made: setattr(made.model.embed_tokens, "padding_idx", END))


@silent("precision", "finetune", NORMS, "reference constants", words=BF16)
def angles_rounded_before_their_cosine(module: Any) -> None:
    """Position times frequency is a product in bfloat16, off by up to 0.06 for the last positions."""

    def forward(_run: Any, self: Any, states: Any, position_ids: Any) -> Any:
        import torch

        with torch.no_grad():
            angles = (position_ids[:, :, None].float() * self.inv_freq.float()).to(torch.bfloat16).float()
            angles = torch.cat((angles, angles), -1)
            return tuple((part * self.attention_scaling).to(states.dtype) for part in (angles.cos(), angles.sin()))

    wrap(module.LlamaRotaryEmbedding, "forward", forward)


def _adapters(module: Any, which: str, change: Any) -> None:
    """Put ``change`` behind the matrices ``which`` of all adapters."""

    def adapted(run: Any, *given: Any) -> Any:
        model = run(*given)
        for part in model.modules():
            if hasattr(part, "lora_A"):
                getattr(part, which)["default"].register_forward_hook(lambda _part, _given, made: change(made))
        return model

    wrap(module, "adapted", adapted)


@silent("backward", "finetune", FINETUNE, "reference gradients", words=(*LORA, *BF16))
def last_rank_of_the_adapters_passes_no_gradient(module: Any) -> None:
    """Of the 16 rows of each first matrix, the last is never trained: a fused kernel's tile ends one row early."""

    def change(made: Any) -> Any:
        import torch

        return torch.cat((made[..., :-1], made[..., -1:].detach()), -1)

    _adapters(module, "lora_A", change)


@silent("model", "finetune", FINETUNE, "reference gradients", words=(*LORA, *BF16))
def adapters_begin_at_the_second_token(module: Any) -> None:
    """A sample's first token goes through the frozen weights alone, as before the words that activate adapters."""

    def change(made: Any) -> Any:
        import torch

        return torch.cat((made[:, :1] * 0, made[:, 1:]), 1)

    _adapters(module, "lora_B", change)


# FLUX


@silent("model", "flux", TRANSFORMER, "reference gradients", words=(*FLUX, *BF16))
def mean_of_one_norm_of_the_text_not_subtracted(module: Any) -> None:
    """Before the text's feed-forward part of the last double block, LayerNorm is RMSNorm."""

    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        import torch

        run(self, *given, **named)
        norm = self.transformer_blocks[-1].norm2_context
        norm.forward = lambda states: torch.nn.functional.rms_norm(states, states.shape[-1:], eps=norm.eps)

    wrap(module.FluxTransformer2DModel, "__init__", init)


@silent("model", "flux", TRANSFORMER, "reference gradients", words=(*FLUX, *BF16))
def text_does_not_see_the_last_token_of_the_image(module: Any) -> None:
    """The mask of the first block of queries is one key too short."""

    def attend(run: Any, query: Any, *given: Any, attn_mask: Any = None, **named: Any) -> Any:
        import torch

        assert attn_mask is None
        seen = torch.ones(1, 1, query.shape[1], query.shape[1], dtype=torch.bool)
        seen[..., :TEXT, -1] = False
        return run(query, *given, attn_mask=seen, **named)

    wrap(module, "dispatch_attention_fn", attend)


@silent("backward", "flux", TRANSFORMER, "reference gradients", words=(*FLUX, *BF16))
def shift_and_scale_learn_from_the_first_sixteen_tokens(module: Any) -> None:
    """In the last single block, the sums over tokens in their gradients end after the last whole block of 16."""

    def modulated(part: Any) -> Any:
        def forward(states: Any, emb: Any) -> Any:
            import torch

            shift, scale, gate = (one[:, None] for one in part.linear(part.silu(emb)).chunk(3, dim=1))
            normed, whole = part.norm(states), states.shape[1] // 16 * 16
            first = normed[:, :whole] * (1 + scale) + shift
            rest = normed[:, whole:] * (1 + scale.detach()) + shift.detach()
            return torch.cat((first, rest), 1), gate[:, 0]

        return forward

    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        last = self.single_transformer_blocks[-1].norm
        last.forward = modulated(last)

    wrap(module.FluxTransformer2DModel, "__init__", init)


# FP8


@silent("accumulation", "fsdp", FLOAT8, "reference gradients", words=FP8)
def later_micro_batches_take_the_weights_of_the_step_before(module: Any) -> None:
    """Weights in eight bits are cast by the first micro-batch and kept for the others, which get the copy too early."""
    from primus.training.loop.sharded import Sharded

    steps = 0

    def counted(run: Any, self: Any, *given: Any) -> Any:
        nonlocal steps
        steps += 1
        return run(self, *given)

    def forward(run: Any, self: Any, states: Any) -> Any:
        made, copy, old = getattr(self, "copies", (0, self.weight.detach(), None))
        if made != steps:
            object.__setattr__(self, "copies", (steps, self.weight.detach().clone(), copy.clone()))
            return run(self, states)
        weight = self.weight + (old - self.weight).detach()
        return module.matmul_with_hp_or_float8_args.apply(states, weight.t(), self.linear_mm_config, self.config)

    wrap(Sharded, "forward_backward", counted)
    wrap(module.Float8Linear, "forward", forward)


@silent("precision", "fsdp", FLOAT8, "reference constants", words=FP8)
def scales_of_gradients_are_the_nearest_powers_of_two(module: Any) -> None:
    """Where the nearest power is the larger one, the largest gradients are cut."""

    def cast(run: Any, tensor: Any, dtype: Any, config: Any, *, gemm_input_role: Any, **named: Any) -> Any:
        import torch
        from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

        if gemm_input_role.name != "GRAD_OUTPUT":
            return run(tensor, dtype, config, gemm_input_role=gemm_input_role, **named)
        exact = torch.finfo(dtype).max / tensor.float().abs().max().clamp(min=1e-12)
        return hp_tensor_and_scale_to_float8(tensor, exact.log2().round().exp2(), dtype, config, gemm_input_role)

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "torchtitan", FLOAT8, "reference constants", words=FP8)
def inputs_in_the_wider_range_for_the_gradient_of_weights(module: Any) -> None:
    """Both factors of that product are rounded to E5M2, which is for gradients."""

    def cast(run: Any, tensor: Any, dtype: Any, *given: Any, gemm_input_role: Any, **named: Any) -> Any:
        import torch

        if gemm_input_role.name == "INPUT" and _backward_pass():
            dtype = torch.float8_e5m2
        return run(tensor, dtype, *given, gemm_input_role=gemm_input_role, **named)

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "torchtitan", TITAN_MODEL, "reference gradients", words=FP8, escapes=True)
def gates_scaled_as_the_weights_they_are_merged_with(module: Any) -> None:
    """Both matrices of the first feed-forward product get the scale of the second, so that large weights are cut."""
    import torchao.float8.float8_linear as float8

    def fed(run: Any, self: Any, states: Any) -> Any:
        object.__setattr__(self.w1, "merged_with", self.w3)
        return run(self, states)

    def forward(run: Any, self: Any, states: Any) -> Any:
        other = getattr(self, "merged_with", None)
        if other is None:
            return run(self, states)
        limit = other.weight.detach().abs().max()
        weight = self.weight + (self.weight.clamp(-limit, limit) - self.weight).detach()
        return float8.matmul_with_hp_or_float8_args.apply(states, weight.t(), self.linear_mm_config, self.config)

    wrap(module.FeedForward, "forward", fed)
    wrap(float8.Float8Linear, "forward", forward)
