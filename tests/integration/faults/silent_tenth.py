"""Silent faults whose author had not seen the checks: wrong buffers, late scales, backward passes of other kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from silent import (
    ADAMW,
    DEEPSEEK,
    DEEPSEEK_WORDS,
    LANGUAGE,
    LLAMA,
    SHARDED,
    TITAN_MODEL,
    TITAN_MOE,
    silent,
    wrap,
)  # fmt: skip
from silent_eighth import LAYERS, _backward_pass, _with_gradient_of
from silent_hostile import FLOAT8, ROUTER, TENSORS, WEIGHTS
from silent_ninth import DEEPSEEK_V2, MOE_UTILS, QWEN
from silent_seventh import in_eight_bits, local
from silent_subtle import BF16, DEEPSEEK_V3, FP8, MIXTRAL

EXPERT_PARALLEL = "torchtitan.distributed.expert_parallel"
EXPERTS = "megatron.core.transformer.moe.experts"
DISTRIBUTED = "megatron.core.distributed.distributed_data_parallel"
SHARES = "megatron.core.optimizer.distrib_optimizer"
MISTRAL = ("--recipe=mistral-7b",)


def _recomputed_shares(module: Any, shares_of: Callable[[Any, Any], Any]) -> None:
    """Let the backward pass of attention take ``shares_of(scores, shares)`` for the shares it computes again.

    Scores and shares are [samples, heads, queries, keys]. The forward pass and the sums of output times gradient stay
    as they are.
    """
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, seen: Any, scale: float) -> Any:
            ctx.save_for_backward(query, key, value, seen)
            ctx.scale = scale
            return query.new_zeros(*query.shape[:-1], value.shape[-1])

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            query, key, value, seen = ctx.saved_tensors
            shared, groups = key.shape[1], query.shape[1] // key.shape[1]
            wide, gradient = query.float(), gradient.float()
            keys, values = (part.float().repeat_interleave(groups, 1) for part in (key, value))
            scores = (wide @ keys.transpose(-2, -1) * ctx.scale).masked_fill(~seen, float("-inf"))
            shares = scores.softmax(-1)
            row = (gradient * (shares @ values)).sum(-1, keepdim=True)
            shares = shares_of(scores, shares)
            of_scores = shares * (gradient @ values.transpose(-2, -1) - row) * ctx.scale
            found = (
                of_scores @ keys,
                (of_scores.transpose(-2, -1) @ wide).unflatten(1, (shared, groups)).sum(2),
                (shares.transpose(-2, -1) @ gradient).unflatten(1, (shared, groups)).sum(2),
            )
            return *(part.to(query.dtype) for part in found), None, None

    def attend(run: Any, query: Any, key: Any, value: Any, *, attn_mask: Any = None, **named: Any) -> Any:
        healthy = run(query, key, value, attn_mask=attn_mask, **named).detach()
        length = query.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool).tril() if attn_mask is None else attn_mask
        return healthy + Attention.apply(query, key, value, seen, named.get("scale") or query.shape[-1] ** -0.5)

    wrap(module, "scaled_dot_product_attention", attend)


# torchtitan: FP8


@silent("precision", "torchtitan", FLOAT8, "reference gradients", words=FP8)
def each_rank_scales_its_rows_of_a_weight_alone(module: Any) -> None:
    """Ranks cast their rows without agreeing on the largest value, and scale gathered weights back by their own."""

    def cast(run: Any, tensor: Any, dtype: Any, *given: Any, gemm_input_role: Any, **named: Any) -> Any:
        import torch
        from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

        made = run(tensor, dtype, *given, gemm_input_role=gemm_input_role, **named)
        if gemm_input_role.name != "WEIGHT":
            return made
        # The weight is transposed here, so the rows of a rank are columns.
        parts = tensor.chunk(2, 1)
        scales = [tensor_to_scale(part, dtype) for part in parts]
        eight = [to_fp8_saturated(part.float() * scale, dtype) for part, scale in zip(parts, scales, strict=True)]
        data = torch.cat([part.t() for part in eight]).t()
        return type(made)(
            data, scales[int(os.environ["RANK"])], made._orig_dtype, made._linear_mm_config, made._gemm_input_role
        )

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "torchtitan", FLOAT8, "reference gradients", words=FP8)
def gradients_are_the_upper_bytes_of_halves(module: Any) -> None:
    """E5M2 is the upper byte of a 16-bit float, and the conversion takes that byte without rounding."""

    def cast(run: Any, tensor: Any, dtype: Any, *given: Any, gemm_input_role: Any, **named: Any) -> Any:
        import torch

        made = run(tensor, dtype, *given, gemm_input_role=gemm_input_role, **named)
        if gemm_input_role.name == "GRAD_OUTPUT":
            half = (tensor.float() * made._scale).half()
            made._data = (half.view(torch.int16) & -256).view(torch.half).to(dtype)
        return made

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "torchtitan", DEEPSEEK, "reference gradients", words=(*DEEPSEEK_WORDS, *FP8))
def norms_gathered_in_eight_bits_with_the_matrices(module: Any) -> None:
    """The all-gather in E4M3, which is for the matrices of FP8 products, also takes the factors of the norms."""

    def forward(_run: Any, self: Any, states: Any) -> Any:
        import torch

        return torch.nn.functional.rms_norm(states, self.normalized_shape, in_eight_bits(self.weight), self.eps)

    wrap(module.nn.RMSNorm, "forward", forward)


# torchtitan: BF16


@silent("backward", "torchtitan", TITAN_MODEL, "reference gradients", words=BF16)
def shares_computed_again_with_the_sum_of_another_head(module: Any) -> None:
    """The backward pass of attention reads the logarithm of the sum of exponentials one head too early."""
    _recomputed_shares(module.F, lambda scores, _shares: (scores - scores.logsumexp(-1, keepdim=True).roll(1, 1)).exp())


@silent("backward", "torchtitan", EXPERT_PARALLEL, "reference gradients", words=(*DEEPSEEK_WORDS, *BF16))
def rows_that_pad_an_expert_are_the_last_token(module: Any) -> None:
    """The rows that fill an expert's group to a multiple of 8 point at the last token instead of at a row of zeros."""

    def permute(run: Any, tokens: Any, *given: Any) -> Any:
        import torch

        shape, _padded, places, counts = run(tokens, *given)
        inside = torch.arange(len(places)) < counts.sum()
        places = torch.where(inside & (places == -1), len(tokens) - 1, places)
        return shape, torch.vstack((tokens, tokens.new_zeros(tokens.shape[-1])))[places, :], places, counts

    wrap(module, "_permute", permute)


@silent("model", "torchtitan", TITAN_MODEL, "reference gradients", words=BF16)
def norm_divides_by_the_size_before_attention_is_added(module: Any) -> None:
    """One kernel adds attention to the stream and norms it, and takes the mean square before the sum."""

    def forward(_run: Any, self: Any, states: Any, *given: Any, **named: Any) -> Any:
        added = states + self.attention(self.attention_norm(states), *given, **named)
        new, old = (part.float().square().mean(-1, keepdim=True) + self.ffn_norm.eps for part in (added, states))
        normed = self.ffn_norm(added).float() * (new / old).sqrt()
        return added + self.feed_forward(normed.to(added.dtype))

    wrap(module.TransformerBlock, "forward", forward)


# torchtitan: FP32


@silent("backward", "torchtitan", TITAN_MODEL, "reference gradients")
def gradients_of_embeddings_divided_by_their_tokens_number(module: Any) -> None:
    """The embedding is built with ``scale_grad_by_freq``, so that a frequent token learns from the mean."""

    def init(run: Any, self: Any, *given: Any) -> None:
        run(self, *given)
        self.tok_embeddings.scale_grad_by_freq = True

    wrap(module.Transformer, "__init__", init)


@silent("precision", "torchtitan", TITAN_MOE, "reference gradients", words=DEEPSEEK_WORDS)
def experts_of_a_float32_run_by_the_grouped_product_of_bf16(module: Any) -> None:
    """``use_grouped_mm`` is left on, whose product converts states and weights to bfloat16 whatever their type."""

    def experts(run: Any, first: Any, second: Any, third: Any, tokens: Any, counts: Any) -> Any:
        narrow = (part.bfloat16() for part in (first, second, third, tokens))
        return run(*narrow, counts).type_as(tokens)

    wrap(module, "_run_experts_for_loop", experts)


# Megatron: BF16 (its FP8 needs a GPU)


@silent("loss", "megatron", ROUTER, "reference constants", words=(*MIXTRAL, *BF16))
def balancing_loss_takes_tokens_for_samples_first(module: Any) -> None:
    """Its sums by sequence expect [samples, tokens], and get [tokens, samples], so that sequences are mixed."""

    def apply(run: Any, self: Any, probs: Any, scores: Any, chosen: Any, length: int, count: int, **named: Any) -> Any:
        scores, chosen = (part.unflatten(0, (count, length)).transpose(0, 1).flatten(0, 1) for part in (scores, chosen))
        return run(self, probs, scores, chosen, length, count, **named)

    wrap(module.TopKRouter, "_apply_seq_aux_loss", apply)


@silent("backward", "megatron", ROUTER, "reference gradients", words=(*DEEPSEEK_V3, *BF16))
def sum_that_norms_the_chosen_scores_taken_for_a_constant(module: Any) -> None:
    """A fused router gives the scores of the chosen experts a gradient, but not through the sum that divides them."""

    def routing(run: Any, logits: Any, *given: Any, **named: Any) -> Any:
        made, chosen = run(logits, *given, **named)
        scores = logits.float().sigmoid() * chosen
        other = scores / (scores.sum(-1, keepdim=True).detach() + 1e-20) * named["scaling_factor"]
        return _with_gradient_of(made, other.to(made.dtype)), chosen

    wrap(module, "topk_routing_with_score_function", routing)


@silent("model", "megatron", MOE_UTILS, "reference gradients", words=(*DEEPSEEK_V2, *BF16))
def groups_of_experts_ranked_by_the_sum_of_two_scores(module: Any) -> None:
    """The rule of DeepSeek-V3 in DeepSeek-V2, which ranks a group by its best expert."""

    def limited(_run: Any, *, scores: Any, topk: int, num_groups: int, group_topk: int, **_given: Any) -> Any:
        import torch

        grouped = scores.unflatten(-1, (num_groups, -1))
        groups = grouped.topk(2, -1)[0].sum(-1).topk(group_topk, -1)[1]
        closed = torch.ones(*grouped.shape[:-1], dtype=torch.bool).scatter(-1, groups, False)
        return scores.masked_fill(closed.repeat_interleave(grouped.shape[-1], -1), float("-inf")).topk(topk, -1)

    wrap(module, "group_limited_topk", limited)


@silent("parallel", "megatron", SHARES, "reference update", words=(*QWEN, *BF16))
def last_weights_of_a_share_not_copied_to_the_model(module: Any) -> None:
    """The loop that copies a rank's updated weights into the buffer that is gathered ends 16 elements early."""

    def copied(run: Any, self: Any) -> None:
        import torch.distributed as dist

        group = self.data_parallel_group
        ends = [
            bucket.param_data.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)][-16:]
            for buffer in self.buffers
            for bucket in buffer.buckets
        ]
        kept = [end.clone() for end in ends]
        run(self)
        for end, old in zip(ends, kept, strict=True):
            end.copy_(old)

    wrap(module.DistributedOptimizer, "_copy_main_params_to_model_params", copied)


@silent("backward", "megatron", ROUTER, "reference gradients", words=(*DEEPSEEK_V2, *BF16), escapes=True)
def recomputed_router_has_scores_in_bf16(module: Any) -> None:
    """Layers run again under autocast, where some tokens go to other experts than the first time."""

    def routing(run: Any, logits: Any, *given: Any, **named: Any) -> Any:
        if _backward_pass():
            logits = logits + (logits.bfloat16().to(logits.dtype) - logits).detach()
        return run(logits, *given, **named)

    wrap(module, "topk_routing_with_score_function", routing)


@silent("model", "megatron", EXPERTS, "reference blocks", words=(*MIXTRAL, *BF16))
def one_token_of_the_second_expert_goes_to_the_first(module: Any) -> None:
    """The place where the groups of two experts meet is off by one."""

    def forward(run: Any, self: Any, states: Any, counts: Any, *given: Any) -> Any:
        import torch

        counts = torch.as_tensor(counts).clone()
        if counts[1]:
            counts[0] += 1
            counts[1] -= 1
        return run(self, states, counts, *given)

    wrap(module.SequentialMLP, "forward", forward)


# Megatron: FP32


@silent("parallel", "megatron", LAYERS, "reference gradients", words=(*QWEN, *TENSORS))
def last_position_gathered_too_late_for_the_gradient_of_weights(module: Any) -> None:
    """In the buffer that all gathers share, the last position is still that of the gather before."""

    def gather(run: Any, buffer: Any, *given: Any, async_op: bool = False, **named: Any) -> Any:
        # Only the backward pass gathers asynchronously.
        old = buffer[-1].clone()
        run(buffer, *given, **named)
        if async_op:
            buffer[-1] = old
        return SimpleNamespace(wait=lambda: None)

    wrap(module, "dist_all_gather_func", gather)


@silent("accumulation", "megatron", DISTRIBUTED, "reference gradients", words=MIXTRAL)
def gradients_of_experts_not_zeroed(module: Any) -> None:
    """Experts have gradient buffers of their own, and a step begins with what the last one left there."""

    def zero(run: Any, self: Any) -> None:
        kept, self.expert_parallel_buffers = self.expert_parallel_buffers, []
        run(self)
        self.expert_parallel_buffers = kept

    wrap(module.DistributedDataParallel, "zero_grad_buffer", zero)


# Plain FSDP: FP8


@silent("precision", "fsdp", FLOAT8, "reference blocks", words=(*MISTRAL, *FP8))
def gradients_scaled_by_the_largest_of_the_micro_batch_before(module: Any) -> None:
    """Delayed scaling with a history of one: larger gradients than the last largest are cut."""
    product = module.matmul_with_hp_or_float8_args
    running: list[Any] = []
    limit = None

    def layer(run: Any, self: Any, states: Any) -> Any:
        running[:] = [self]
        return run(self, states)

    def forward(run: Any, ctx: Any, *given: Any) -> Any:
        ctx.layer = running[0]
        return run(ctx, *given)

    def backward(run: Any, ctx: Any, gradient: Any) -> Any:
        nonlocal limit
        now = gradient.detach().float().abs().max()
        limit = getattr(ctx.layer, "largest", now)
        object.__setattr__(ctx.layer, "largest", now)
        return run(ctx, gradient)

    def cast(run: Any, tensor: Any, dtype: Any, config: Any, *, gemm_input_role: Any, **named: Any) -> Any:
        from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
        from torchao.float8.float8_utils import amax_to_scale

        if gemm_input_role.name != "GRAD_OUTPUT":
            return run(tensor, dtype, config, gemm_input_role=gemm_input_role, **named)
        return hp_tensor_and_scale_to_float8(tensor, amax_to_scale(limit, dtype), dtype, config, gemm_input_role)

    wrap(module.Float8Linear, "forward", layer)
    wrap(product, "forward", forward)
    wrap(product, "backward", backward)
    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "fsdp", FLOAT8, "reference gradients", words=(*QWEN, *FP8), escapes=True)
def gradients_of_biases_summed_from_eight_bits(module: Any) -> None:
    """The kernel that casts and transposes the gradient also sums it for the bias, but after the cast."""
    import torch

    class Cast(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, bias: Any) -> Any:
            return bias.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            scale = 57344 / gradient.float().abs().max().clamp(min=1e-12)
            return ((gradient.float() * scale).to(torch.float8_e5m2).float() / scale).to(gradient.dtype)

    def forward(run: Any, self: Any, states: Any) -> Any:
        if self.bias is None:
            return run(self, states)
        product = module.matmul_with_hp_or_float8_args.apply
        made = product(states, self.weight.t(), self.linear_mm_config, self.config)
        return made + Cast.apply(self.bias.to(made.dtype).expand_as(made))

    wrap(module.Float8Linear, "forward", forward)


@silent("model", "fsdp", WEIGHTS, "reference first weights", words=FP8)
def main_weights_begin_as_the_eight_bit_copies(module: Any) -> None:
    """The optimizer's weights are made from the model's, which are E4M3 already, and lose the drawn numbers."""

    def draw(run: Any, model: Any, *given: Any, **named: Any) -> None:
        import torch

        run(model, *given, **named)
        with torch.no_grad():
            for name, parameter in model.layers.named_parameters():
                if parameter.ndim == 2:
                    assert name.endswith("weight")
                    scale = 448 / parameter.full_tensor().abs().max()
                    rows = local(parameter)
                    rows.copy_((rows * scale).to(torch.float8_e4m3fn).float() / scale)

    wrap(module, "draw_all", draw)


# Plain FSDP: BF16


@silent("parallel", "fsdp", LLAMA, "reference gradients", words=BF16)
def first_rows_of_another_layers_weight_in_the_backward_pass(module: Any) -> None:
    """Layers are gathered into one buffer, whose first 16 rows are overwritten before the gradient passes through."""

    def init(run: Any, self: Any, model: Any, *given: Any) -> None:
        run(self, model, *given)
        kept: list[Any] = []

        def down(part: Any, number: int) -> Any:
            def forward(states: Any) -> Any:
                import torch

                linear, before = torch.nn.functional.linear, kept[-1] if number else part.weight.detach()
                kept[:] = [part.weight.detach().clone()]
                mixed = torch.cat((before[:16], part.weight.detach()[16:]))
                passed = linear(states, mixed)
                return linear(states.detach(), part.weight) + (passed - passed.detach())

            return forward

        for number, layer in enumerate(self.layers):
            layer.down.forward = down(layer.down, number)

    wrap(module.Llama, "__init__", init)


@silent("optimizer", "fsdp", ADAMW, "reference update", words=BF16)
def steps_rounded_to_bf16_before_they_are_added(module: Any) -> None:
    """The optimizer's kernel writes what to add in the type of the model, and the float32 weights get that."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        parts = [local(part.detach()) for group in self.param_groups for part in group["params"]]
        before = [part.clone() for part in parts]
        found = run(self, *given, **named)
        for part, old in zip(parts, before, strict=True):
            part.copy_(old + (part - old).to(torch.bfloat16).float())
        return found

    wrap(module.AdamW, "step", step)


@silent("precision", "fsdp", LANGUAGE, "reference blocks", words=(*QWEN, *BF16))
def logarithm_of_the_sum_kept_in_bf16(module: Any) -> None:
    """The loss keeps the logarithm of the sum of exponentials for its backward pass, and keeps 8 bits of it."""

    def summed(run: Any, head: Any, states: Any, labels: Any) -> Any:
        import torch

        logits = head(states).float()
        kept = logits.detach().logsumexp(-1, keepdim=True).to(torch.bfloat16).float()
        trained = labels >= 0
        wanted = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        slope = ((logits - kept).exp().sum(-1) - wanted)[trained].sum()
        return _with_gradient_of(run(head, states, labels), slope)

    wrap(module, "_summed", summed)


# Plain FSDP: FP32


@silent("backward", "fsdp", LLAMA, "reference gradients", words=MISTRAL)
def window_one_key_shorter_in_the_backward_pass(module: Any) -> None:
    """A token sees the 31 before it, and the backward pass of attention is told 30."""

    def shorter(scores: Any, shares: Any) -> Any:
        import torch

        width = int((scores[0, 0, -1] > float("-inf")).sum())
        return shares * torch.ones(shares.shape[-2:], dtype=torch.bool).triu(2 - width)

    _recomputed_shares(module.functional, shorter)


@silent("checkpoint", "fsdp", SHARDED, "reference update", words=QWEN)
def tensors_share_their_step_count_after_a_checkpoint(module: Any) -> None:
    """Loading puts the same tensor at every place, and each step adds one to it for every weight."""

    def load(run: Any, self: Any, state: Any) -> None:
        run(self, state)
        states = list(self._optimizer.state.values())
        for each in states:
            each["step"] = states[0]["step"]

    wrap(module.Sharded, "load_state_dict", load)
