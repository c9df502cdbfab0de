"""Silent faults written blind: by someone who had read the backends and the libraries, but no line of the checks."""

from __future__ import annotations

from typing import Any

from silent import (
    ADAMW,
    CLOCK,
    CONSTANTS,
    DEEPSEEK,
    DEEPSEEK_WORDS,
    GRADIENTS,
    LLAMA,
    LOOP,
    LOSS,
    NORM,
    RATE,
    SESSION,
    SHARDED,
    TITAN_LOSS,
    TITAN_METRICS,
    TITAN_MODEL,
    TITAN_MOE,
    UPDATE,
    silent,
    wrap,
)  # fmt: skip
from silent_subtle import BF16, CHECKPOINT, DEEPSEEK_V3, FP8, MIXTRAL, OPTIMIZER, REPORT
from silent_unseen import FLUX
from silent_wide import FIGURES, KEPT

TRANSFORMER = "diffusers.models.transformers.transformer_flux"
FLOAT8 = "torchao.float8.float8_linear"
ROUTER = "megatron.core.transformer.moe.router"
LORA = ("--mode=lora",)
MISTRAL = ("--recipe=mistral-7b", "model.window=32")
QWEN = ("--recipe=qwen2.5-7b",)


def _truncated(tensor: Any) -> Any:
    """The float32 tensor in bfloat16, its last bits cut off instead of rounded."""
    import torch

    bits = tensor.contiguous().view(torch.int32) & -65536
    return bits.view(torch.float32).to(torch.bfloat16)


# torchtitan


@silent("data", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def last_tokens_of_the_vocabulary_share_an_embedding(module: Any) -> None:
    """The ids are clamped to a table that is thought to be smaller."""

    def forward(run: Any, self: Any, tokens: Any, *given: Any, **named: Any) -> Any:
        return run(self, tokens.clamp(max=self.tok_embeddings.num_embeddings * 15 // 16), *given, **named)

    wrap(module.Transformer, "forward", forward)


@silent("labels", "torchtitan", TITAN_LOSS, LOSS, GRADIENTS, words=BF16)
def confidence_penalized(module: Any) -> None:
    """A small multiple of the entropy is subtracted from the loss."""

    def rewarded(run: Any, pred: Any, labels: Any) -> Any:
        logs = pred.float().log_softmax(-1)
        return run(pred, labels) + 2e-3 * (logs.exp() * logs).sum()

    wrap(module, "cross_entropy_loss", rewarded)


@silent("model", "torchtitan", TITAN_MODEL, GRADIENTS)
def no_gradient_through_the_size_of_a_norm(module: Any) -> None:
    """The output is right, but the root mean square counts as a constant in the backward pass."""
    import torch

    class Detached(torch.nn.RMSNorm):
        def forward(self, x: Any) -> Any:
            size = (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt().detach()
            return (x * size).type_as(x) * self.weight

    def init(run: Any, self: Any, *given: Any) -> None:
        run(self, *given)
        self.ffn_norm.__class__ = Detached

    wrap(module.TransformerBlock, "__init__", init)


@silent("optimizer", "torchtitan", ADAMW, UPDATE)
def rows_without_gradient_not_updated(module: Any) -> None:
    """As in SparseAdam: embeddings of absent tokens neither decay nor follow their momentum."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        table = self.param_groups[0]["params"][0]
        local, gradient = (part.to_local() if hasattr(part, "to_local") else part for part in (table, table.grad))
        absent = gradient.abs().sum(-1) == 0
        kept = local.detach()[absent].clone()
        found = run(self, *given, **named)
        with torch.no_grad():
            local[absent] = kept
        return found

    wrap(module.AdamW, "step", step)


@silent("clock", "torchtitan", TITAN_METRICS, CLOCK, words=("tp=2",))
def tensor_ranks_not_divided_out(module: Any) -> None:
    """Ranks that share layers each report all tokens as their own."""

    def log(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        self.ntokens_since_last_log *= self.parallel_dims.non_data_parallel_size
        return run(self, *given, **named)

    wrap(module.MetricsProcessor, "log", log)


@silent("model", "torchtitan", DEEPSEEK, GRADIENTS, words=DEEPSEEK_WORDS)
def shared_rotary_key_not_trained(module: Any) -> None:
    """The key that all heads share has no gradient; the forward pass is right."""

    def rotate(run: Any, x: Any, *given: Any) -> Any:
        return run(x.detach() if x.shape[2] == 1 else x, *given)

    wrap(module, "apply_rotary_emb", rotate)


@silent("model", "torchtitan", DEEPSEEK, LOSS, GRADIENTS,
        words=(*DEEPSEEK_WORDS, "model.rope_scaling.original_max_position=64"))  # fmt: skip
def magnitude_of_yarn_not_squared(module: Any) -> None:
    import math

    def init(run: Any, self: Any, args: Any) -> None:
        run(self, args)
        assert args.max_seq_len > args.original_seq_len
        self.softmax_scale /= 0.1 * args.mscale * math.log(args.rope_factor) + 1.0

    wrap(module.Attention, "__init__", init)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, CONSTANTS, words=(*DEEPSEEK_WORDS, *BF16))
def weights_of_the_chosen_experts_exchanged(module: Any) -> None:
    """Scores were sorted and indices were not: each of a token's experts has the weight of the other."""

    def forward(run: Any, self: Any, *given: Any) -> Any:
        scores, chosen, count = run(self, *given)
        return scores.flip(-1), chosen, count

    wrap(module.TokenChoiceTopKRouter, "forward", forward)


@silent("optimizer", "torchtitan", OPTIMIZER, UPDATE, words=DEEPSEEK_WORDS)
def layers_balanced_by_each_others_counts(module: Any) -> None:
    """The counts of tokens are stacked in the reverse order of the layers."""
    import torch

    def stacked(run: Any, parts: Any, *given: Any, **named: Any) -> Any:
        flat = isinstance(parts, list) and all(part.ndim == 1 for part in parts)
        return run(parts[::-1] if flat else parts, *given, **named)

    assert module.torch is torch
    wrap(torch, "vstack", stacked)


@silent("precision", "torchtitan", "torchao.float8.float8_utils", LOSS, GRADIENTS, CONSTANTS, words=FP8)
def scaled_to_the_range_of_another_gpu(module: Any) -> None:
    """The largest E4M3 number is 240 on MI300X and 448 here."""
    import torch

    def scale(run: Any, amax: Any, dtype: Any, *given: Any, **named: Any) -> Any:
        found = run(amax, dtype, *given, **named)
        return found * (240 / 448) if dtype == torch.float8_e4m3fn else found

    wrap(module, "amax_to_scale", scale)


@silent("precision", "torchtitan", FLOAT8, GRADIENTS, CONSTANTS, words=FP8)
def gradients_rounded_at_random(module: Any) -> None:
    """Stochastic rounding of the gradients in FP8, right on average."""
    import torch

    generator = torch.Generator().manual_seed(1)

    def cast(run: Any, tensor: Any, *given: Any, **named: Any) -> Any:
        if named.get("gemm_input_role") is module.GemmInputRole.GRAD_OUTPUT:
            noise = torch.rand(tensor.shape, generator=generator) - 0.5
            tensor = (tensor.float() * (1 + 0.18 * noise)).to(tensor.dtype)
        return run(tensor, *given, **named)

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("precision", "torchtitan", "torch.distributed.fsdp._fully_shard._fsdp_collectives", LOSS, GRADIENTS, words=BF16)
def weights_truncated_when_gathered(module: Any) -> None:
    """FSDP cuts weights to bfloat16 instead of rounding them, so that all are a little too small."""
    import torch

    def inputs(run: Any, parameters: Any) -> Any:
        found = run(parameters)
        for parameter, (made, *_) in zip(parameters, found, strict=True):
            own = parameter._sharded_param_data
            if made.dtype == torch.bfloat16 and own.dtype == torch.float32:
                made.copy_(_truncated(own.detach()))
        return found

    wrap(module, "_get_param_all_gather_inputs", inputs)


# Megatron


@silent("model", "megatron", ROUTER, LOSS, GRADIENTS, words=DEEPSEEK_V3)
def router_bias_in_the_weights_of_experts(module: Any) -> None:
    """The bias that only balances the choice of experts is also in their weights."""

    def route(run: Any, logits: Any, *given: Any, **named: Any) -> Any:
        shares, chosen = run(logits, *given, **named)
        bias = named.get("expert_bias")
        if bias is None:
            return shares, chosen
        scores = (logits.float().sigmoid() + bias) * chosen
        scores = scores / scores.sum(-1, keepdim=True) * (named.get("scaling_factor") or 1.0)
        return scores.type_as(shares), chosen

    wrap(module, "topk_routing_with_score_function", route)


@silent("model", "megatron", ROUTER, NORM, GRADIENTS, words=MIXTRAL)
def balanced_over_the_micro_batch(module: Any) -> None:
    """The balancing loss is counted over all sequences of a micro-batch together, not for each."""

    def apply(run: Any, self: Any, probs: Any, scores: Any, chosen: Any, length: int, count: int, **named: Any) -> Any:
        self.parts = count
        try:
            return run(self, probs, scores, chosen, length * count, 1, **named)
        finally:
            self.parts = 1

    wrap(module.TopKRouter, "_apply_seq_aux_loss", apply)
    # One call for all sequences has as many times their tokens.
    wrap(
        module.TopKRouter,
        "get_aux_loss_coeff",
        lambda run, self, kind: run(self, kind) / getattr(self, "parts", 1),
    )


@silent("precision", "megatron", SESSION, UPDATE, words=BF16)
def computing_weights_truncated(module: Any) -> None:
    """The optimizer's float32 weights are cut to bfloat16 instead of rounded."""

    def step(run: Any, self: Any, lr: float) -> Any:
        import torch

        norm = run(self, lr)
        own = self._updates().weights()
        with torch.no_grad():
            for part in self.model_parts:
                for parameter in part.parameters():
                    if parameter.dtype == torch.bfloat16:
                        parameter.copy_(_truncated(own[parameter].float()))
        return norm

    wrap(module.MegatronSession, "step", step)


@silent("checkpoint", "megatron", SESSION, LOSS, GRADIENTS, UPDATE, words=BF16)
def main_weights_refreshed_from_the_model(module: Any) -> None:
    """After loading, the optimizer's float32 weights are made from the model's bfloat16 ones."""

    def loaded(run: Any, self: Any, state: Any) -> None:
        run(self, state)
        self._optimizer.reload_model_params()

    wrap(module.MegatronSession, "load_state_dict", loaded)


@silent("parallel", "megatron", "megatron.core.tensor_parallel.layers", LOSS, GRADIENTS, words=("tp=2",))
def sums_over_tensor_ranks_sent_in_bf16(module: Any) -> None:
    """What tensor-parallel ranks exchange is compressed, in a run in float32."""

    def narrow(run: Any, partial: Any, *given: Any, **named: Any) -> Any:
        return run(partial.bfloat16().float(), *given, **named)

    wrap(module, "reduce_scatter_to_sequence_parallel_region", narrow)
    wrap(module, "reduce_from_tensor_model_parallel_region", narrow)


@silent("optimizer", "megatron", "megatron.core.optimizer.optimizer", GRADIENTS, UPDATE, words=MIXTRAL)
def experts_and_the_rest_clipped_apart(module: Any) -> None:
    """Each of the chained optimizers clips by the norm of its own gradients; the whole norm is reported."""

    def clip(run: Any, parameters: Any, *, max_norm: float, total_norm: float, **named: Any) -> Any:
        import torch

        parameters = list(parameters)
        own = torch.zeros(())
        for parameter in parameters:
            if parameter.grad is not None:
                own += parameter.grad.float().square().sum()
        torch.distributed.all_reduce(own)
        return run(parameters, max_norm=max_norm, total_norm=min(float(own.sqrt()), total_norm), **named)

    wrap(module, "clip_grad_by_total_norm_fp32", clip)


@silent("labels", "megatron", "megatron.core.models.common.language_module.language_module", LOSS, GRADIENTS)
def padding_of_the_vocabulary_in_the_softmax(module: Any) -> None:
    """Eight logits of 0, which pad the vocabulary, are not masked."""

    def loss(run: Any, self: Any, labels: Any, logits: Any) -> Any:
        import torch

        return run(self, labels, torch.cat([logits, logits.new_zeros(*logits.shape[:-1], 8)], -1))

    wrap(module.LanguageModule, "compute_language_model_loss", loss)


@silent("schedule", "megatron", LOOP, RATE)
def warm_up_again_after_a_checkpoint(module: Any) -> None:
    begun = 0

    def prove(run: Any, output: Any, step: int, *given: Any, **named: Any) -> None:
        nonlocal begun
        run(output, step, *given, **named)
        begun = step

    wrap(module.checkpoint, "prove", prove)
    wrap(module, "learning_rate", lambda rate, config, step: rate(config, step - begun))


@silent("metrics", "megatron", SESSION, LOSS, words=("megatron.training.micro_batch_size=2",))
def loss_of_the_first_micro_batch_reported(module: Any) -> None:
    def schedule(get: Any) -> Any:
        run = get()

        def first(**named: Any) -> Any:
            sums = run(**named)
            return [sums[0]] * len(sums)

        return first

    wrap(module, "get_forward_backward_func", schedule)


# Plain FSDP


@silent("precision", "fsdp", LLAMA, LOSS, GRADIENTS)
def products_in_tf32(module: Any) -> None:
    """Factors of matrix products have ten bits, as on a GPU with TF32 allowed; all dtypes are float32."""
    import torch

    def narrow(tensor: Any) -> Any:
        bits = (tensor.detach().view(torch.int32) + 0x1000) & -0x2000
        return tensor + (bits.view(torch.float32) - tensor).detach()

    def forward(self: Any, states: Any) -> Any:
        return module.functional.linear(narrow(states), narrow(self.weight), self.bias)

    module.nn.Linear.forward = forward


@silent("precision", "fsdp", SHARDED, GRADIENTS)
def activations_kept_in_bf16(module: Any) -> None:
    """What the backward pass needs is stored in half the memory; the forward pass is exact."""
    import torch

    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        tokens = batches[0]["input_ids"].numel()

        def pack(tensor: Any) -> Any:
            states = tensor.ndim > 2 or (tensor.ndim == 2 and tensor.shape[0] == tokens)
            return tensor.bfloat16() if states and tensor.dtype == torch.float32 else tensor

        def unpack(tensor: Any) -> Any:
            return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run(self, batches, terms)

    wrap(module.Sharded, "forward_backward", forward)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=MISTRAL)
def window_of_fixed_blocks(module: Any) -> None:
    """Tokens see those before them in their own block, where the window should slide."""
    import torch

    def window(seq_len: int, size: int) -> Any:
        block = torch.arange(seq_len) // size
        return torch.ones(seq_len, seq_len, dtype=torch.bool).tril() & (block[:, None] == block)

    module._window = window


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=QWEN)
def biases_added_after_the_rotation(module: Any) -> None:
    def forward(self: Any, states: Any, cosine: Any, sine: Any, mask: Any) -> Any:
        assert mask is None
        query, key, value = (
            project(states).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )

        def turned(part: Any, bias: Any) -> Any:
            added = bias.unflatten(0, (-1, 1, self.size))
            return module._rotate(part - added, cosine, sine) + added

        mixed = module.functional.scaled_dot_product_attention(
            turned(query, self.query.bias), turned(key, self.key.bias), value,
            is_causal=True, enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip
        return self.out(mixed.transpose(1, 2).flatten(-2))

    module._Attention.forward = forward


@silent("optimizer", "fsdp", ADAMW, UPDATE, words=BF16)
def one_second_moment_per_row(module: Any) -> None:
    """To save memory, all weights of a row share one second moment."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        found = run(self, *given, **named)
        for state in self.state.values():
            moment = state["exp_avg_sq"]
            local = moment.to_local() if hasattr(moment, "to_local") else moment
            if local.ndim > 1:
                local.copy_(local.mean(-1, keepdim=True).expand_as(local))
        return found

    wrap(module.AdamW, "step", step)


@silent("metrics", "fsdp", REPORT, FIGURES, words=MISTRAL)
def operations_counted_without_the_window(module: Any) -> None:
    from dataclasses import replace

    wrap(module, "of_recipe_unit", lambda run, model, *given, **named: run(replace(model, window=0), *given, **named))


@silent("precision", "fsdp", FLOAT8, GRADIENTS, CONSTANTS, words=FP8)
def gradients_of_weights_not_in_eight_bits(module: Any) -> None:
    """Two of three products are in FP8; that of the gradient of a weight is not."""
    from dataclasses import replace

    def forward(run: Any, self: Any, given: Any) -> Any:
        config = self.config
        for name in ("cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight"):
            wide = replace(getattr(config, name), scaling_type=module.ScalingType.DISABLED)
            object.__setattr__(config, name, wide)
        return run(self, given)

    wrap(module.Float8Linear, "forward", forward)


@silent("precision", "fsdp", FLOAT8, LOSS, GRADIENTS, CONSTANTS, words=FP8)
def scales_are_powers_of_two(module: Any) -> None:
    def forward(run: Any, self: Any, given: Any) -> Any:
        object.__setattr__(self.config, "round_scales_to_power_of_2", True)
        return run(self, given)

    wrap(module.Float8Linear, "forward", forward)


@silent("data", "fsdp", SHARDED, LOSS, GRADIENTS)
def buffer_overwritten_by_the_next_micro_batch(module: Any) -> None:
    """A copy that was not waited for: the last sample of a micro-batch is already that of the next."""

    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        import torch

        changed = [dict(batch) for batch in batches]
        for batch, later in zip(changed, batches[1:], strict=False):
            for name in batch:
                batch[name] = torch.cat([batch[name][:-1], later[name][-1:]])
        return run(self, changed, terms)

    wrap(module.Sharded, "forward_backward", forward)


# Fine-tuning


@silent("precision", "finetune", "peft.tuners.lora.layer", LOSS, GRADIENTS, words=(*LORA, *BF16))
def base_weights_in_four_bits(module: Any) -> None:
    """The frozen weights are computed with as QLoRA has them."""

    def forward(run: Any, self: Any, states: Any, *given: Any, **named: Any) -> Any:
        import torch

        weight = self.base_layer.weight.detach().float()
        step = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
        lost = ((weight / step).round() * step - weight).to(states.dtype)
        return run(self, states, *given, **named) + torch.nn.functional.linear(states, lost)

    wrap(module.Linear, "forward", forward)


@silent("checkpoint", "finetune", "torch.distributed.checkpoint.state_dict", KEPT,
        words=("finetune.save_weights=true",))  # fmt: skip
def exported_queries_in_the_other_rotary_order(module: Any) -> None:
    """Rows of queries and keys are permuted, as converters between the two layouts of rotary pairs do."""

    def state(run: Any, *given: Any, **named: Any) -> Any:
        found = run(*given, **named)
        for name, tensor in found.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                found[name] = tensor.unflatten(0, (-1, 8, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        return found

    wrap(module, "get_model_state_dict", state)


@silent("checkpoint", "finetune", "peft.peft_model", KEPT, words=(*LORA, "save_weights=true"))
def exported_adapters_lack_a_target(module: Any) -> None:
    """Loaded again, the adapters of one kind of layer are ignored."""

    def saved(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        for config in self.peft_config.values():
            config.target_modules = set(config.target_modules) - {"o_proj"}
        return run(self, *given, **named)

    wrap(module.PeftModel, "save_pretrained", saved)


@silent("checkpoint", "finetune", CHECKPOINT, UPDATE)
def moments_saved_are_those_of_the_step_before(module: Any) -> None:
    """A background copy of the optimizer's state was begun one step too early; the weights are right."""
    import torch

    from primus.training.loop.sharded import Sharded

    before: list[tuple[Any, Any]] = []

    def step(run: Any, self: Any, lr: float) -> Any:
        states = [state[key] for state in self._optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        before[:] = [(moment, moment.detach().clone()) for moment in states]
        return run(self, lr)

    def save(run: Any, *given: Any, **named: Any) -> Any:
        now = [moment.detach().clone() for moment, _ in before]
        with torch.no_grad():
            for moment, old in before:
                moment.copy_(old)
            found = run(*given, **named)
            for (moment, _), new in zip(before, now, strict=True):
                moment.copy_(new)
        return found

    wrap(Sharded, "step", step)
    wrap(module.dcp, "save", save)


@silent("model", "finetune", "transformers.models.llama.modeling_llama", GRADIENTS, words=BF16)
def gradients_of_keys_halved(module: Any) -> None:
    """The groups of queries that share a key are averaged in the backward pass, not summed."""

    def rotate(run: Any, *given: Any, **named: Any) -> Any:
        query, key = run(*given, **named)
        return query, key.detach() + 0.5 * (key - key.detach())

    wrap(module, "apply_rotary_pos_emb", rotate)


# FLUX


@silent("model", "flux", "diffusers.models.normalization", LOSS, GRADIENTS, words=FLUX)
def shift_and_scale_of_the_last_norm_exchanged(module: Any) -> None:
    """Their order differs between the original code and diffusers."""

    def forward(self: Any, x: Any, conditioning_embedding: Any) -> Any:
        shift, scale = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]

    module.AdaLayerNormContinuous.forward = forward


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=(*FLUX, *BF16))
def frequencies_of_the_time_of_another_model(module: Any) -> None:
    """The frequencies that encode time and guidance are spaced as in older diffusion models."""

    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        self.time_text_embed.time_proj.downscale_freq_shift = 1

    wrap(module.FluxTransformer2DModel, "__init__", init)


@silent("data", "flux", SHARDED, LOSS, GRADIENTS, words=(*FLUX, *BF16))
def text_of_one_image_dropped(module: Any) -> None:
    """Texts are left out now and then, as for guidance without a classifier."""

    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        changed = []
        for batch in batches:
            made = {name: tensor.clone() for name, tensor in batch.items()}
            made["text"][3], made["pooled"][3] = 0.0, 0.0
            changed.append(made)
        return run(self, changed, terms)

    wrap(module.Sharded, "forward_backward", forward)


@silent("clock", "flux", REPORT, CLOCK, words=FLUX)
def time_of_the_process_in_place_of_the_clock(module: Any) -> None:
    """Waiting for the other rank, and for a core, does not count."""
    import time
    from types import SimpleNamespace

    module.time = SimpleNamespace(perf_counter=time.process_time)


@silent("schedule", "flux", LOOP, RATE, words=FLUX)
def rate_kept_in_bf16(module: Any) -> None:
    import torch

    wrap(
        module,
        "learning_rate",
        lambda rate, config, step: float(torch.tensor(rate(config, step), dtype=torch.bfloat16)),
    )
