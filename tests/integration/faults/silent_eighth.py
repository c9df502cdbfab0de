"""Silent faults whose author had not seen the checks: kernels, backward passes, stale state, narrow sums."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from silent import (
    ADAMW,
    BLOCKS,
    CLOCK,
    CONSTANTS,
    DATA,
    DEEPSEEK,
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
    TITAN_MODEL,
    TITAN_MOE,
    TITAN_TRAIN,
    UPDATE,
    silent,
    wrap,
)  # fmt: skip
from silent_hostile import FLOAT8, LORA, TENSORS, TRANSFORMER
from silent_seventh import ATTENTION, DISPATCHER, EMBEDDINGS, WHOLE, in_eight_bits, local
from silent_subtle import BF16, FINETUNE, FP8, MIXTRAL, REPORT
from silent_unseen import FLUX, LATENTS
from silent_wide import KEPT, SAVED

MLP = "megatron.core.transformer.mlp"
LAYERS = "megatron.core.tensor_parallel.layers"
BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
PIPELINE = "megatron.core.pipeline_parallel.p2p_communication"
# The token of the recipes' tokenizer that ends a document.
END = 1


def _same(tensor: Any) -> Any:
    return tensor


def _summed(products: Any) -> Any:
    return products.sum(-1, keepdim=True)


def built(module: Any, change: Callable[[Any], None]) -> None:
    """Call ``change`` with each language model that fine-tuning builds."""

    def build(run: Any, *given: Any, **named: Any) -> Any:
        made = run(*given, **named)
        change(made)
        return made

    wrap(module, "causal_model", build)


def _backward_pass() -> bool:
    """Whether autograd is running, so that a forward pass now is a recomputation."""
    import torch

    return torch._C._current_graph_task_id() != -1


def _with_gradient_of(value: Any, other: Any) -> Any:
    """Return ``value`` to the last bit, with the gradient of ``other``."""
    return value.detach() + (other - other.detach())


def _attend(
    module: Any,
    *,
    correction: Callable[[Any], Any] = _summed,
    of_queries: Callable[[Any], Any] = _same,
    of_values: Callable[[Any], Any] = _same,
) -> None:
    """Compute the gradients of causal attention with a function around one part; the forward pass stays as it is.

    ``correction`` returns the sums that each row of the softmax's gradient subtracts, from the products of outputs and
    their gradients ([samples, heads, queries, size]). ``of_queries`` changes the gradient of the scores for the queries
    alone, ``of_values`` the shares for the values alone (both [samples, heads, queries, keys]).
    """
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, scale: float) -> Any:
            ctx.save_for_backward(query, key, value)
            ctx.scale = scale
            return query.new_zeros(*query.shape[:-1], value.shape[-1])

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            query, key, value = (part.float() for part in ctx.saved_tensors)
            shared, groups, length = key.shape[1], query.shape[1] // key.shape[1], query.shape[2]
            keys, values = (part.repeat_interleave(groups, 1) for part in (key, value))
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = (query @ keys.transpose(-2, -1) * ctx.scale).masked_fill(hidden, float("-inf"))
            shares, gradient = scores.softmax(-1), gradient.float()
            of_shares = gradient @ values.transpose(-2, -1)
            row = correction(gradient * (shares @ values))
            of_scores = shares * (of_shares - row) * ctx.scale
            found = (
                of_queries(of_scores) @ keys,
                (of_scores.transpose(-2, -1) @ query).unflatten(1, (shared, groups)).sum(2),
                (of_values(shares).transpose(-2, -1) @ gradient).unflatten(1, (shared, groups)).sum(2),
            )
            return *(part.to(given.dtype) for part, given in zip(found, ctx.saved_tensors, strict=True)), None

    def attend(run: Any, query: Any, key: Any, value: Any, **named: Any) -> Any:
        healthy = run(query, key, value, **named).detach()
        return healthy + Attention.apply(query, key, value, named.get("scale") or query.shape[-1] ** -0.5)

    wrap(module, "scaled_dot_product_attention", attend)


def _spread(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Return the causal scores in float32, and the values of each head."""
    import torch

    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    scores = (query @ key.transpose(-2, -1)).float() * query.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -1e30), value


# Model


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def first_block_of_keys_not_scaled_again(module: Any) -> None:
    """Where the second block of keys has a larger score, a kernel keeps the sums of the first as they were."""

    def attend(_run: Any, query: Any, key: Any, value: Any, **_given: Any) -> Any:
        import torch

        scores, value = _spread(query, key, value)
        half = scores.shape[-1] // 2
        first, whole = scores[..., :half].amax(-1, keepdim=True), scores.amax(-1, keepdim=True)
        grown = torch.cat((scores[..., :half] - first, scores[..., half:] - whole), -1).exp()
        return (grown / grown.sum(-1, keepdim=True)).to(value.dtype) @ value

    wrap(module.functional, "scaled_dot_product_attention", attend)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def second_half_one_position_early(module: Any) -> None:
    """Sequences are put together from two halves, and the second begins with the last position of the first."""

    def rotate(run: Any, xq: Any, xk: Any, freqs_cis: Any, **named: Any) -> Any:
        places = [place - (place >= xq.shape[1] // 2) for place in range(xq.shape[1])]
        return run(xq, xk, freqs_cis=freqs_cis[places], **named)

    wrap(module, "apply_rotary_emb", rotate)


def _activation(module: Any, number: int, activation: Callable[[Any], Any]) -> None:
    """Give Megatron's MLP ``number`` another activation."""
    import copy

    count = 0

    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        nonlocal count
        run(self, *given, **named)
        if count == number:
            self.config = copy.copy(self.config)
            self.config.activation_func = activation
        count += 1

    wrap(module.MLP, "__init__", init)


@silent("model", "megatron", MLP, CONSTANTS, LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def hard_swish_in_the_first_layer(module: Any) -> None:
    import torch

    _activation(module, 0, torch.nn.functional.hardswish)


@silent("model", "torchtitan", DEEPSEEK, LOSS, GRADIENTS, words=(*DEEPSEEK_WORDS, *BF16, *WHOLE))
def last_head_takes_its_keys_for_values(module: Any) -> None:
    """Of what the last head makes from the latent vector, the first half is the value and the second the key."""

    def init(run: Any, self: Any, args: Any) -> None:
        run(self, args)
        assert self.qk_nope_head_dim == self.v_head_dim
        size = self.qk_nope_head_dim

        def turned(_part: Any, _given: Any, made: Any) -> Any:
            import torch

            last = made[..., -2 * size :].roll(size, -1)
            return torch.cat((made[..., : -2 * size], last), -1)

        self.wkv_b.register_forward_hook(turned)

    wrap(module.Attention, "__init__", init)


@silent("model", "megatron", "megatron.core.transformer.moe.experts", LOSS, GRADIENTS, words=(*MIXTRAL, *BF16, *WHOLE))
def outputs_of_one_expert_one_row_late(module: Any) -> None:
    """The last expert's outputs are written one row too low, so that its tokens get each other's."""

    def forward(run: Any, self: Any, states: Any, counts: Any, *given: Any) -> Any:
        import torch

        out, bias = run(self, states, counts, *given)
        last = int(counts[-1])
        if os.environ["RANK"] == "1" and last:
            out = torch.cat((out[: len(out) - last], out[len(out) - last :].roll(1, 0)))
        return out, bias

    wrap(module.SequentialMLP, "forward", forward)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=(*FLUX, *BF16, *WHOLE))
def scale_of_the_text_without_its_one(module: Any) -> None:
    """In the last double block, the text's feed-forward part is scaled by s in place of 1 + s."""

    def changed(_part: Any, _given: Any, made: Any) -> Any:
        states, gate, shift, scale, other = made
        return states, gate, shift, scale - 1, other

    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        self.transformer_blocks[-1].norm1_context.register_forward_hook(changed)

    wrap(module.FluxTransformer2DModel, "__init__", init)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=(*FLUX, *BF16, *WHOLE))
def places_of_the_image_before_those_of_the_text(module: Any) -> None:
    """The tokens are text and then image, the angles image and then text."""

    def forward(run: Any, self: Any, ids: Any) -> Any:
        import torch

        text = int(ids.any(1).nonzero()[0]) - 1
        return run(self, torch.cat((ids[text:], ids[:text])))

    wrap(module.FluxPosEmbed, "forward", forward)


@silent("model", "flux", EMBEDDINGS, LOSS, GRADIENTS, words=FLUX)
def guidance_embedded_as_the_time(module: Any) -> None:
    """Both go through the layers of the time; those of the guidance are never trained."""

    def forward(_run: Any, self: Any, time: Any, guidance: Any, pooled: Any) -> Any:
        one, other = (self.timestep_embedder(self.time_proj(part).to(pooled.dtype)) for part in (time, guidance))
        return one + other + self.text_embedder(pooled)

    wrap(module.CombinedTimestepGuidanceTextProjEmbeddings, "forward", forward)


@silent("model", "finetune", FINETUNE, LOSS, GRADIENTS, words=(*LORA, *BF16, *WHOLE))
def adapters_of_one_layer_see_the_states_before_the_norm(module: Any) -> None:
    """Norm and product are one operation in the first feed-forward part, and the adapters get its input."""

    def crossed(part: Any, kept: list[Any]) -> Any:
        def forward(states: Any) -> Any:
            added = part.lora_B["default"](part.lora_A["default"](kept[-1]))
            return part.base_layer(states) + added * part.scaling["default"]

        return forward

    def adapted(run: Any, *given: Any) -> Any:
        model, kept = run(*given), []
        layer = model.get_base_model().model.layers[0]
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _part, given: kept.append(given[0]))
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
            part.forward = crossed(part, kept)
        return model

    wrap(module, "adapted", adapted)


@silent("model", "finetune", FINETUNE, LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def end_marks_taken_for_padding(module: Any) -> None:
    """The mark that ends a document also pads, and so no token sees it."""

    def masked(made: Any) -> None:
        inner = made.model.forward

        def forward(*, input_ids: Any, **others: Any) -> Any:
            seen = input_ids != END
            seen[:, 0] = True
            return inner(input_ids=input_ids, attention_mask=seen.long(), **others)

        made.model.forward = forward

    built(module, masked)


# The backward pass alone


@silent("backward", "megatron", ATTENTION, GRADIENTS, words=(*BF16, *WHOLE))
def queries_learn_nothing_from_the_last_keys(module: Any) -> None:
    """The loop over blocks of keys ends one block of 16 early, for the gradient of the queries."""
    import torch

    def cut(of_scores: Any) -> Any:
        return torch.cat((of_scores[..., :-16], of_scores[..., -16:] * 0), -1)

    _attend(torch.nn.functional, of_queries=cut)


@silent("backward", "fsdp", LLAMA, GRADIENTS, words=(*BF16, *WHOLE))
def last_rows_of_the_softmax_not_centred(module: Any) -> None:
    """The sums that the gradient of the softmax needs are 0 for the last eight queries."""

    def cut(products: Any) -> Any:
        import torch

        row = _summed(products)
        return torch.cat((row[:, :, :-8], row[:, :, -8:] * 0), 2)

    _attend(module.functional, correction=cut)


@silent("backward", "torchtitan", TITAN_MODEL, GRADIENTS, words=(*BF16, *WHOLE))
def one_head_of_a_group_does_not_train_the_values(module: Any) -> None:
    """Of the four heads that share their values, the last is left out of the sum."""

    def cut(shares: Any) -> Any:
        import torch

        kept = torch.tensor([head % 4 != 3 for head in range(shares.shape[1])])
        return shares * kept[:, None, None]

    import torch

    _attend(torch.nn.functional, of_values=cut)


@silent("backward", "torchtitan", TITAN_MODEL, GRADIENTS, words=(*BF16, *WHOLE))
def gradients_of_keys_rotated_the_wrong_way(module: Any) -> None:
    """The backward pass turns the gradient of the keys forward once more."""

    def rotate(run: Any, xq: Any, xk: Any, freqs_cis: Any, **named: Any) -> Any:
        query, key = run(xq, xk, freqs_cis=freqs_cis, **named)
        _, back = run(xq, xk, freqs_cis=freqs_cis.conj(), **named)
        return query, _with_gradient_of(key, back)

    wrap(module, "apply_rotary_emb", rotate)


@silent("backward", "megatron", MLP, GRADIENTS, words=(*BF16, *WHOLE))
def gradient_of_silu_is_the_sigmoid(module: Any) -> None:
    """In the last layer, the second term of the derivative is missing."""
    import torch

    def activation(states: Any) -> Any:
        return _with_gradient_of(torch.nn.functional.silu(states), states * states.detach().sigmoid())

    _activation(module, 1, activation)


@silent("backward", "fsdp", LANGUAGE, GRADIENTS, words=(*BF16, *WHOLE))
def logits_recomputed_in_eight_bits(module: Any) -> None:
    """The loss is exact; the logits of the backward pass are computed again from states in FP8."""

    def summed(run: Any, head: Any, states: Any, labels: Any) -> Any:
        return run(head, in_eight_bits(states) if _backward_pass() else states, labels)

    wrap(module, "_summed", summed)


@silent("backward", "fsdp", LLAMA, GRADIENTS, words=("training.recompute=full", *BF16, *WHOLE))
def recomputed_layers_see_the_whole_sequence(module: Any) -> None:
    """A keyword of attention is lost when a layer runs again."""

    def attend(run: Any, *given: Any, is_causal: bool, **named: Any) -> Any:
        return run(*given, is_causal=is_causal and not _backward_pass(), **named)

    wrap(module.functional, "scaled_dot_product_attention", attend)


@silent("backward", "finetune", FINETUNE, GRADIENTS, words=(*LORA, *BF16, *WHOLE))
def adapters_pass_no_gradient_down(module: Any) -> None:
    """What lies below a layer gets the gradient through its frozen weights alone."""

    def adapted(run: Any, *given: Any) -> Any:
        model = run(*given)
        for part in model.modules():
            if hasattr(part, "lora_A"):
                first = part.lora_A["default"]
                first.forward = lambda states, forward=first.forward: forward(states.detach())
        return model

    wrap(module, "adapted", adapted)


@silent("backward", "megatron", DISPATCHER, GRADIENTS, words=(*MIXTRAL, *BF16, *WHOLE))
def router_learns_from_experts_of_its_own_rank(module: Any) -> None:
    """The weights of tokens that another rank's experts compute get no gradient."""

    def dispatch(run: Any, self: Any, tokens: Any, weights: Any) -> Any:
        import torch

        tokens, weights = run(self, tokens, weights)
        parts = weights.split([int(count) for count in self.output_splits])
        mine = int(os.environ["RANK"])
        return tokens, torch.cat([part if rank == mine else part.detach() for rank, part in enumerate(parts)])

    wrap(module.MoEAlltoAllTokenDispatcher, "token_dispatch", dispatch)


@silent("backward", "flux", TRANSFORMER, GRADIENTS, words=(*FLUX, *BF16, *WHOLE))
def gate_of_the_last_block_not_trained(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        norm = self.single_transformer_blocks[-1].norm
        norm.register_forward_hook(lambda _part, _given, made: (made[0], made[1].detach()))

    wrap(module.FluxTransformer2DModel, "__init__", init)


@silent("backward", "torchtitan", TITAN_MOE, GRADIENTS, words=(*DEEPSEEK_WORDS, *BF16, *WHOLE))
def shared_experts_pass_no_gradient_down(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        self.shared_experts.register_forward_pre_hook(lambda _part, given: (given[0].detach(),))

    wrap(module.MoE, "__init__", init)


@silent("backward", "torchtitan", TITAN_LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def small_probabilities_left_out_of_the_gradient(module: Any) -> None:
    """To save products, the loss skips tokens that a row thinks less likely than 1 in 4096."""

    def filtered(gradient: Any) -> Any:
        return gradient * (gradient.abs() >= 2**-12 * gradient.abs().sum(-1, keepdim=True) / 2)

    def loss(run: Any, pred: Any, labels: Any) -> Any:
        if pred.requires_grad:
            pred.register_hook(filtered)
        return run(pred, labels)

    wrap(module, "cross_entropy_loss", loss)


# Data, labels, loss and figures


@silent("data", "fsdp", LOOP_DATA, DATA, words=(*BF16, *WHOLE))
def samples_begin_with_the_begin_mark(module: Any) -> None:
    """The first token of each sample is overwritten."""

    def sample(run: Any, self: Any, number: int) -> Any:
        tokens = run(self, number)
        tokens[0] = 0
        return tokens

    wrap(module.Packed, "sample", sample)


@silent("labels", "finetune", LANGUAGE, LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def end_marks_not_trained(module: Any) -> None:
    """The mark that ends a document also pads, and so the model never learns to stop."""

    def loss(run: Any, model: Any, batch: Any) -> Any:
        return run(model, {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == END, -100)})

    wrap(module, "loss", loss)


@silent("labels", "megatron", SESSION, LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def last_label_is_the_first_token_of_the_next_sample(module: Any) -> None:
    """Labels are the tokens of the whole micro-batch, shifted as if it were one row."""

    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        import torch

        changed = []
        for batch in batches:
            last = batch["input_ids"].roll(-1, 0)[:, :1]
            changed.append({**batch, "labels": torch.cat((batch["labels"][:, :-1], last), 1)})
        return run(self, changed, terms)

    wrap(module.MegatronSession, "forward_backward", forward)


def _predicted(module: Any, change: Callable[[Any, Any], Any]) -> None:
    """Put ``change`` of prediction and target between FLUX and its loss."""

    def init(run: Any, self: Any, model: Any, loss: Any, *given: Any, **named: Any) -> None:
        def changed(model: Any, batch: Any) -> Any:
            target = batch["noise"] - batch["latents"]
            return loss(lambda **inputs: (change(model(**inputs)[0], target),), batch)

        run(self, model, changed, *given, **named)

    wrap(module.Sharded, "__init__", init)


@silent("loss", "flux", SHARDED, LOSS, GRADIENTS, words=(*FLUX, *BF16, *WHOLE))
def last_channel_not_trained(module: Any) -> None:
    def change(found: Any, target: Any) -> Any:
        import torch

        return torch.cat((found[..., :-1], target[..., -1:].to(found.dtype)), -1)

    _predicted(module, change)


@silent("data", "flux", LATENTS, DATA, words=(*FLUX, *BF16, *WHOLE))
def times_of_a_sampler_with_fifty_steps(module: Any) -> None:
    def batch(run: Any, self: Any, *given: Any) -> Any:
        made = run(self, *given)
        return {**made, "time": (made["time"] * 50).round().clamp(1, 49) / 50}

    wrap(module.Images, "batch", batch)


@silent("metrics", "torchtitan", TITAN_TRAIN, LOSS, words=(*BF16, *WHOLE))
def loss_of_the_worst_rank_reported(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any) -> None:
        run(self, *given)
        log = self.metrics_processor.log
        self.metrics_processor.log = lambda step, _mean, largest, *given, **named: log(
            step, largest, largest, *given, **named
        )

    wrap(module.Trainer, "__init__", init)


@silent("clock", "fsdp", REPORT, CLOCK, words=(*BF16, *WHOLE), escapes=True)
def speed_of_the_fastest_step_reported(module: Any) -> None:
    best = float("inf")

    def step(run: Any, self: Any, *given: Any) -> None:
        nonlocal best
        now = module.time.perf_counter()
        best = min(best, now - self._since)
        self._since = now - best
        run(self, *given)

    wrap(module.Report, "step", step)


@silent("data", "fsdp", LOOP_DATA, DATA, words=(*BF16, *WHOLE))
def a_space_before_each_document(module: Any) -> None:
    wrap(module, "_documents", lambda run, *given: (f" {text}" for text in run(*given)))


@silent("data", "finetune", LOOP_DATA, DATA)
def documents_sorted_by_length(module: Any) -> None:
    wrap(module, "_documents", lambda run, *given: iter(sorted(run(*given), key=len)))


# Optimizer, schedule, ranks, checkpoints


@silent("optimizer", "fsdp", SHARDED, UPDATE)
def second_moments_of_gradients_before_clipping(module: Any) -> None:
    """From the second step on."""
    import torch

    factor = 1.0

    def clip(run: Any, parameters: Any, limit: float, norm: Any, **named: Any) -> Any:
        nonlocal factor
        factor = min(1.0, limit / (float(norm.full_tensor()) + 1e-6))
        return run(parameters, limit, norm, **named)

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        for group in self.param_groups:
            beta = group["betas"][1]
            for parameter in group["params"]:
                if self.state[parameter]:
                    lacking = parameter.grad.square() * (1 / factor**2 - 1)
                    self.state[parameter]["exp_avg_sq"].add_(lacking * (1 - beta) / beta)
        return run(self, *given, **named)

    wrap(module.nn.utils, "clip_grads_with_norm_", clip)
    wrap(torch.optim.AdamW, "step", step)


@silent("optimizer", "torchtitan", ADAMW, UPDATE, words=(*BF16, *WHOLE))
def second_beta_grows_with_the_step(module: Any) -> None:
    """As in Adafactor: 1 − step to the power of −0.8, as long as that is less."""
    count = 0

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        for group in self.param_groups:
            first, second = group.setdefault("own", group["betas"])
            group["betas"] = (first, min(second, 1 - count**-0.8))
        return run(self, *given, **named)

    wrap(module.AdamW, "step", step)


@silent("optimizer", "fsdp", ADAMW, UPDATE, words=(*BF16, *WHOLE))
def first_moments_kept_in_eight_bits(module: Any) -> None:
    """With one scale for a whole tensor."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        found = run(self, *given, **named)
        for state in self.state.values():
            moment = local(state["exp_avg"])
            moment.copy_(in_eight_bits(moment))
        return found

    wrap(module.AdamW, "step", step)


@silent("schedule", "fsdp", LOOP, RATE, words=("training.lr_schedule=cosine", *BF16, *WHOLE))
def cosine_begins_again_after_ten_steps(module: Any) -> None:
    from dataclasses import replace

    def rate(run: Any, config: Any, step: int) -> Any:
        return run(replace(config, decay_steps=10), step if step <= 10 else config.warmup_steps + step - 10)

    wrap(module, "learning_rate", rate)


@silent("parallel", "megatron", BUFFERS, GRADIENTS, NORM, words=(*BF16, *WHOLE))
def end_of_the_gradients_not_summed(module: Any) -> None:
    """The first rank's last 4096 elements of the buffer are not sent."""

    def start(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        if os.environ["RANK"] == "0":
            for bucket in self.buckets:
                bucket.grad_data[-4096:].zero_()
        return run(self, *given, **named)

    wrap(module._ParamAndGradBucketGroup, "start_grad_sync", start)


@silent("parallel", "megatron", LAYERS, LOSS, GRADIENTS, words=(*TENSORS, *BF16, *WHOLE))
def last_token_lacks_the_part_of_one_rank(module: Any) -> None:
    """Of what tensor-parallel ranks add up, the second rank's part of the last position is 0."""

    def reduced(run: Any, states: Any, *given: Any, **named: Any) -> Any:
        import torch

        if os.environ["RANK"] == "1":
            states = torch.cat((states[:-1], states[-1:] * 0))
        return run(states, *given, **named)

    wrap(module, "reduce_scatter_to_sequence_parallel_region", reduced)


@silent("parallel", "megatron", PIPELINE, GRADIENTS, words=("pp=2", *BF16, *WHOLE))
def gradients_between_stages_in_eight_bits(module: Any) -> None:
    """The second stage sends the first E5M2 numbers, each tensor with its scale."""

    def communicate(run: Any, self: Any, *, tensor_send_prev: Any, **named: Any) -> Any:
        import torch

        if tensor_send_prev is not None:
            scale = 57344 / tensor_send_prev.float().abs().max().clamp(min=1e-12)
            eight = (tensor_send_prev.float() * scale).to(torch.float8_e5m2).float() / scale
            tensor_send_prev = eight.to(tensor_send_prev.dtype)
        return run(self, tensor_send_prev=tensor_send_prev, **named)

    wrap(module.P2PCommunicator, "_communicate", communicate)


@silent("checkpoint", "fsdp", SHARDED, CONSTANTS, LOSS, words=(*BF16, *WHOLE))
def angles_of_the_default_base_after_a_checkpoint(module: Any) -> None:
    """Tables are not saved; when weights are loaded, they are made again for a base of 10,000."""

    def load(run: Any, self: Any, state: Any) -> None:
        import torch

        run(self, state)
        length, size = self._model.cosine.shape
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
        self._model.cosine.copy_(angles.cos())
        self._model.sine.copy_(angles.sin())

    wrap(module.Sharded, "load_state_dict", load)


@silent("checkpoint", "fsdp", LOOP, DATA)
def data_begin_again_after_a_checkpoint(module: Any) -> None:
    def batches(run: Any, given: Any, session: Any, data: Any, step: int) -> Any:
        loaded = (given.first_step + given.last_step) // 2
        return run(given, session, data, step if step <= loaded else step - loaded)

    wrap(module, "_batches", batches)


def _exported(change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the state that the export writes."""
    import torch.distributed.checkpoint.state_dict as states

    def read(run: Any, *given: Any, **named: Any) -> Any:
        found = run(*given, **named)
        change(found)
        return found

    wrap(states, "get_model_state_dict", read)


@silent("checkpoint", "finetune", SHARDED, KEPT, words=(*SAVED, *BF16, *WHOLE))
def average_of_the_weights_exported(module: Any) -> None:
    """An exponential moving average, which the user did not ask for."""
    kept: dict[str, Any] = {}

    def step(run: Any, self: Any, lr: float) -> Any:
        found = run(self, lr)
        for name, parameter in self._model.named_parameters():
            whole = parameter.detach().full_tensor()
            kept[name] = whole.clone() if name not in kept else kept[name].lerp(whole, 0.5)
        return found

    wrap(module.Sharded, "step", step)
    _exported(lambda state: [tensor.copy_(kept[name]) for name, tensor in state.items()])


@silent("checkpoint", "finetune", SHARDED, KEPT, words=(*SAVED, *BF16))
def rows_of_the_first_rank_exported_twice(module: Any) -> None:
    """In one tensor, the rows of the second rank had not arrived yet."""
    assert module

    def change(state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            if name.endswith("layers.1.self_attn.q_proj.weight"):
                half = len(tensor) // 2
                tensor[half:] = tensor[:half].clone()

    _exported(change)


# Precision


def _cast(module: Any, change: Callable[[Any, str], Any]) -> None:
    """Change each tensor, by its role, before torchao rounds it to eight bits."""

    def cast(run: Any, tensor: Any, *given: Any, gemm_input_role: Any, **named: Any) -> Any:
        return run(change(tensor, gemm_input_role.name), *given, gemm_input_role=gemm_input_role, **named)

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "torchtitan", FLOAT8, CONSTANTS, LOSS, GRADIENTS, words=(*FP8, *WHOLE))
def scales_of_weights_made_every_fifth_step(module: Any) -> None:
    """In between, weights that have grown beyond the scale are cut."""

    def forward(_run: Any, self: Any, states: Any) -> Any:
        count, limit = getattr(self, "told", (0, None))
        if count % 5 == 0:
            limit = self.weight.detach().abs().max()
        object.__setattr__(self, "told", (count + 1, limit))
        weight = self.weight + (self.weight.clamp(-limit, limit) - self.weight).detach()
        return module.matmul_with_hp_or_float8_args.apply(states, weight.t(), self.linear_mm_config, self.config)

    wrap(module.Float8Linear, "forward", forward)


@silent("precision", "fsdp", FLOAT8, CONSTANTS, GRADIENTS, words=(*FP8, *WHOLE))
def largest_value_sought_in_a_sixteenth(module: Any) -> None:
    """Every sixteenth element gives the scale, and larger ones are cut."""

    def change(tensor: Any, role: str) -> Any:
        if role == "WEIGHT":
            return tensor
        limit = tensor.reshape(-1)[::16].abs().max()
        return tensor.clamp(-limit, limit) if limit else tensor

    _cast(module, change)


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


@silent("precision", "fsdp", LLAMA, CONSTANTS, LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def denominators_of_attention_summed_in_bf16(module: Any) -> None:
    """Key by key, so that a long sum stops growing."""

    def attend(_run: Any, query: Any, key: Any, value: Any, **_given: Any) -> Any:
        import torch

        scores, value = _spread(query, key, value)
        grown = (scores - scores.amax(-1, keepdim=True)).exp()
        exact, rounded = grown.sum(-1, keepdim=True), torch.zeros(*grown.shape[:-1], 1, dtype=torch.bfloat16)
        for column in grown.detach().to(torch.bfloat16).split(1, -1):
            rounded += column
        shares = grown / (exact + (rounded.float() - exact).detach())
        return shares.to(value.dtype) @ value

    wrap(module.functional, "scaled_dot_product_attention", attend)


@silent("precision", "megatron", DISPATCHER, LOSS, GRADIENTS, BLOCKS, words=(*MIXTRAL, *BF16, *WHOLE))
def outputs_of_experts_sent_back_without_a_scale(module: Any) -> None:
    """As E4M3 numbers, of which the smallest are 0."""

    def combine(run: Any, self: Any, states: Any, *given: Any, **named: Any) -> Any:
        import torch

        eight = states.detach().to(torch.float8_e4m3fn).to(states.dtype)
        return run(self, _with_gradient_of(eight, states), *given, **named)

    wrap(module.MoEAlltoAllTokenDispatcher, "token_combine", combine)


@silent("precision", "flux", SHARDED, LOSS, GRADIENTS, words=(*FLUX, *BF16, *WHOLE), escapes=True)
def errors_of_the_velocity_in_bf16(module: Any) -> None:
    """Target and difference are rounded before the square."""

    def change(found: Any, target: Any) -> Any:
        import torch

        narrow = found.to(torch.bfloat16) - target.to(torch.bfloat16)
        return target + narrow.float()

    _predicted(module, change)


@silent("precision", "fsdp", FLOAT8, CONSTANTS, GRADIENTS, words=(*FP8, *WHOLE), escapes=True)
def reciprocal_of_the_scale_in_bf16(module: Any) -> None:
    """Tensors are scaled back by a rounded number, up to 0.4% off."""

    def cast(run: Any, *given: Any, **named: Any) -> Any:
        import torch

        found = run(*given, **named)
        found._scale = 1 / (1 / found._scale).to(torch.bfloat16).float()
        return found

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "torchtitan", FLOAT8, CONSTANTS, GRADIENTS, words=(*FP8, *WHOLE))
def weights_scaled_by_the_largest_of_the_one_before(module: Any) -> None:
    """The list of largest values is read one place too early."""
    kept: list[Any] = []

    def change(tensor: Any, role: str) -> Any:
        if role != "WEIGHT":
            return tensor
        kept.append(tensor.abs().max())
        limit = kept[-2] if len(kept) > 1 else kept[-1]
        return tensor.clamp(-limit, limit)

    _cast(module, change)
