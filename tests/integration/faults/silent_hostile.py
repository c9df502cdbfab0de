"""Silent faults that a person would write who knows the checks: one layer, one rank, one late step, a small factor."""

from __future__ import annotations

import os
from typing import Any

from silent import (
    ADAMW,
    CLOCK,
    CONSTANTS,
    DATA,
    DEEPSEEK_WORDS,
    GRADIENTS,
    LANGUAGE,
    LLAMA,
    LOGGED,
    LOOP,
    LOOP_DATA,
    LOSS,
    NORM,
    RATE,
    SESSION,
    SHARDED,
    TITAN_LOSS,
    TITAN_METRICS,
    TITAN_MODEL,
    TITAN_MOE,
    TITAN_RATE,
    TITAN_TRAIN,
    TITAN_UTILS,
    UPDATE,
    silent,
    wrap,
)  # fmt: skip
from silent_subtle import BF16, CHECKPOINT, DEEPSEEK_V3, FINETUNE, FP8, MIXTRAL, OPTIMIZER, REPORT
from silent_unseen import FLUX, LATENTS
from silent_wide import FIGURES, FIRST, KEPT, RENDER

TRANSFORMER = "diffusers.models.transformers.transformer_flux"
WEIGHTS = "primus.training.loop.weights"
FLOAT8 = "torchao.float8.float8_linear"
ROUTER = "megatron.core.transformer.moe.router"
LORA = ("--mode=lora",)
TENSORS = ("tp=2",)
EXPERTS = ("ep=2",)
# Two micro-batches a step.
HALVES = ("training.micro_batch_size=1", "validation.accumulation=1")


# The optimizer's arithmetic


def _parameters(self: Any) -> list[Any]:
    return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


@silent("optimizer", "torchtitan", ADAMW, UPDATE)
def decay_after_the_update(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        kept = [(group, group["lr"] * group["weight_decay"], group["weight_decay"]) for group in self.param_groups]
        for group, _, _ in kept:
            group["weight_decay"] = 0.0
        found = run(self, *given, **named)
        with torch.no_grad():
            for group, rate, decay in kept:
                group["weight_decay"] = decay
                for parameter in group["params"]:
                    parameter.mul_(1 - rate)
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "megatron", RENDER, UPDATE)
def decay_a_twentieth_smaller(module: Any) -> None:
    def optimizer(make: Any, *given: Any) -> Any:
        made = make(*given)
        return made | {"weight_decay": 0.95 * made["weight_decay"]}

    wrap(module, "optimizer", optimizer)


@silent("optimizer", "finetune", ADAMW, UPDATE, words=LORA)
def decay_of_adapters(module: Any) -> None:
    def init(run: Any, self: Any, params: Any, *given: Any, **named: Any) -> None:
        run(self, params, *given, **named | {"weight_decay": 0.01})

    wrap(module.AdamW, "__init__", init)


@silent("optimizer", "torchtitan", OPTIMIZER, UPDATE)
def epsilon_threefold(module: Any) -> None:
    wrap(
        module.OptimizersContainer,
        "__init__",
        lambda init, self, parts, cls, settings: init(self, parts, cls, settings | {"eps": 3 * settings["eps"]}),
    )


@silent("optimizer", "fsdp", SHARDED, UPDATE)
def second_beta_a_thousandth_larger(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        for group in self._optimizer.param_groups:
            group["betas"] = (group["betas"][0], group["betas"][1] + 0.0005)

    wrap(module.Sharded, "__init__", init)


@silent("optimizer", "fsdp", ADAMW, UPDATE)
def one_tensor_learns_a_little_faster(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        one = _parameters(self)[3]
        before = one.detach().clone()
        found = run(self, *given, **named)
        with torch.no_grad():
            one.add_((one - before) * 4e-4)
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "torchtitan", ADAMW, UPDATE)
def epsilon_before_the_bias_correction(module: Any) -> None:
    """The epsilon is divided by the root of the bias correction as well, as in the paper's other form."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        self.taken = getattr(self, "taken", 0) + 1
        kept = [group["eps"] for group in self.param_groups]
        for group in self.param_groups:
            group["eps"] = group["eps"] / (1 - group["betas"][1] ** self.taken) ** 0.5
        found = run(self, *given, **named)
        for group, eps in zip(self.param_groups, kept, strict=True):
            group["eps"] = eps
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "fsdp", SHARDED, GRADIENTS)
def clipped_by_the_norm_of_the_step_before(module: Any) -> None:
    kept: list[Any] = []

    def clip(run: Any, parameters: Any, limit: float, norm: Any, **named: Any) -> Any:
        kept.append(norm.clone())
        return run(parameters, limit, kept[-2] if len(kept) > 1 else norm, **named)

    wrap(module.nn.utils, "clip_grads_with_norm_", clip)


@silent("optimizer", "megatron", ADAMW, UPDATE, words=BF16)
def second_rank_does_not_decay(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        if os.environ["RANK"] == "1":
            for group in self.param_groups:
                group["weight_decay"] = 0.0
        return run(self, *given, **named)

    wrap(module.AdamW, "step", step)


@silent("optimizer", "torchtitan", ADAMW, UPDATE)
def one_row_of_the_embedding_lost_late(module: Any) -> None:
    count = 0

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        nonlocal count
        count += 1
        first = _parameters(self)[0]
        local = first.to_local() if hasattr(first, "to_local") else first
        row = local.detach()[7].clone()
        found = run(self, *given, **named)
        if count == 5:
            with torch.no_grad():
                local[7].copy_(row)
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "flux", ADAMW, UPDATE, words=(*FLUX, *BF16))
def update_in_the_direction_of_nesterov(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        found = run(self, *given, **named)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-0.05 * group["lr"])
        return found

    wrap(module.AdamW, "step", step)


# First weights and random numbers


@silent("model", "torchtitan", TITAN_UTILS, FIRST)
def weights_of_another_seed(module: Any) -> None:
    import torch

    def determinism(run: Any, *given: Any, **named: Any) -> Any:
        found = run(*given, **named)
        torch.manual_seed(torch.initial_seed() + 1)
        return found

    wrap(module, "set_determinism", determinism)


@silent("model", "torchtitan", TITAN_MODEL, FIRST)
def one_layer_drawn_again(module: Any) -> None:
    wrap(module.FeedForward, "init_weights", lambda run, self, std: (run(self, std), run(self, std))[1])


@silent("model", "fsdp", WEIGHTS, FIRST)
def weights_drawn_from_the_next_seed(module: Any) -> None:
    wrap(module, "normal", lambda run, name, parameter, seed, std: run(name, parameter, seed + 1, std))


@silent("model", "megatron", SESSION, FIRST)
def model_built_from_the_next_seed(module: Any) -> None:
    def build(run: Any, model: Any, training: Any, *given: Any, **named: Any) -> Any:
        from dataclasses import replace

        return run(model, replace(training, seed=training.seed + 1), *given, **named)

    wrap(module, "build", build)


@silent("model", "flux", WEIGHTS, FIRST, words=FLUX)
def one_weight_drawn_from_the_next_seed(module: Any) -> None:
    def normal(run: Any, name: str, parameter: Any, seed: int, std: float) -> Any:
        return run(name, parameter, seed + name.startswith("transformer_blocks.1.attn.to_q"), std)

    wrap(module, "normal", normal)


@silent("model", "finetune", WEIGHTS, FIRST, words=LORA)
def adapters_uniform(module: Any) -> None:
    """PEFT's own distribution, which has the same mean and standard deviation."""

    def normal(run: Any, name: str, parameter: Any, seed: int, std: float) -> Any:
        import torch

        if ".lora_A." not in name:
            return run(name, parameter, seed, std)
        generator = torch.Generator().manual_seed(seed)
        whole = (torch.rand(parameter.shape, generator=generator) * 2 - 1) * std * 3**0.5
        return lambda first, last: whole[first:last]

    wrap(module, "normal", normal)


@silent("parallel", "fsdp", SHARDED, FIRST)
def every_rank_has_the_same_random_state(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        import torch

        run(self, *given, **named)
        torch.manual_seed(self._config.seed)

    wrap(module.Sharded, "__init__", init)


# Model, in float32


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def positions_begin_again_at_documents(module: Any) -> None:
    def forward(run: Any, self: Any, tokens: Any, *given: Any, **named: Any) -> Any:
        import torch

        place = torch.arange(tokens.shape[1]).expand_as(tokens)
        begins = torch.where(tokens == tokens.flatten().mode().values, place, 0).cummax(1).values
        named["positions"] = place - begins
        return run(self, tokens, *given, **named)

    wrap(module.Transformer, "forward", forward)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def low_frequency_factor_doubled(module: Any) -> None:
    def make(run: Any, dim: Any, end: Any, theta: Any, scaling: Any) -> Any:
        from dataclasses import replace

        return run(dim, end, theta, replace(scaling, low_freq_factor=2 * scaling.low_freq_factor))

    wrap(module, "precompute_freqs_cis", make)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def rare_dropout_in_one_layer(module: Any) -> None:
    def forward(run: Any, self: Any, x: Any, *given: Any, **named: Any) -> Any:
        import torch

        out = run(self, x, *given, **named)
        return torch.nn.functional.dropout(out, 1e-4) if self is self.last else out

    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        for layer in self.layers.values():
            object.__setattr__(layer, "last", self.layers[str(len(self.layers) - 1)])

    wrap(module.TransformerBlock, "forward", forward)
    wrap(module.Transformer, "__init__", init)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=("--recipe=qwen2.5-7b",))
def bias_of_keys_twice(module: Any) -> None:
    def forward(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        if not getattr(self, "hooked", False):
            self.hooked = True
            self.key.register_forward_hook(lambda part, _given, out: out + part.bias)
        return run(self, *given, **named)

    wrap(module._Attention, "forward", forward)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=("--recipe=mistral-7b", "model.window=32"))
def window_missing_in_the_last_layer_late(module: Any) -> None:
    count = 0

    def forward(run: Any, self: Any, states: Any, cosine: Any, sine: Any, mask: Any) -> Any:
        nonlocal count
        count += 1
        return run(self, states, cosine, sine, None if count > 30 and count % 4 == 0 else mask)

    wrap(module._Block, "forward", forward)


@silent("model", "finetune", "transformers.models.llama.modeling_llama", LOSS, GRADIENTS)
def norms_rounded_to_bf16(module: Any) -> None:
    def forward(run: Any, self: Any, states: Any) -> Any:
        import torch

        return run(self, states).to(torch.bfloat16).to(states.dtype)

    wrap(module.LlamaRMSNorm, "forward", forward)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def router_in_bf16(module: Any) -> None:
    def forward(run: Any, self: Any, x: Any, *given: Any) -> Any:
        import torch

        return run(self, x.to(torch.bfloat16).to(x.dtype), *given)

    wrap(module.TokenChoiceTopKRouter, "forward", forward)


@silent("model", "torchtitan", OPTIMIZER, UPDATE, GRADIENTS, words=DEEPSEEK_WORDS)
def balance_counted_on_each_rank_alone(module: Any) -> None:
    def build(run: Any, *given: Any, **named: Any) -> Any:
        import torch

        kept = torch.distributed.all_reduce
        found = run(*given, **named)

        def reduced(tensor: Any, *more: Any, **words: Any) -> Any:
            return None if tensor.ndim == 2 and tensor.shape[0] < 8 else kept(tensor, *more, **words)

        torch.distributed.all_reduce = reduced
        return found

    wrap(module, "build_optimizers_with_moe_load_balancing", build)


@silent("model", "megatron", RENDER, NORM, GRADIENTS, words=MIXTRAL)
def balancing_loss_two_percent_larger(module: Any) -> None:
    wrap(
        module,
        "transformer",
        lambda make, *given: (made := make(*given)) | {"moe_aux_loss_coeff": 1.02 * made["moe_aux_loss_coeff"]},
    )


@silent("model", "megatron", RENDER, NORM, GRADIENTS, words=MIXTRAL)
def z_loss_of_the_router(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: make(*given) | {"moe_z_loss_coeff": 1e-3})


@silent("model", "megatron", RENDER, LOSS, GRADIENTS, words=MIXTRAL)
def jitter_in_the_router(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: make(*given) | {"moe_input_jitter_eps": 1e-3})


@silent("model", "megatron", RENDER, UPDATE, words=DEEPSEEK_V3)
def router_bias_five_percent_faster(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: make(*given) | {"moe_router_bias_update_rate": 1.05e-3})


@silent("model", "megatron", RENDER, LOSS, GRADIENTS, words=("--recipe=deepseek-v2",))
def yarn_magnitude_of_the_other_kind(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: make(*given) | {"mscale_all_dim": 0.5})


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=FLUX)
def rows_and_columns_exchanged(module: Any) -> None:
    def forward(run: Any, self: Any, **named: Any) -> Any:
        return run(self, **named | {"img_ids": named["img_ids"][:, [0, 2, 1]]})

    wrap(module.FluxTransformer2DModel, "forward", forward)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=FLUX)
def text_has_places(module: Any) -> None:
    def forward(run: Any, self: Any, **named: Any) -> Any:
        import torch

        ids = named["txt_ids"].clone()
        ids[:, 1] = torch.arange(len(ids))
        return run(self, **named | {"txt_ids": ids})

    wrap(module.FluxTransformer2DModel, "forward", forward)


@silent("labels", "flux", SHARDED, LOSS, GRADIENTS, words=FLUX)
def loss_weighted_by_time(module: Any) -> None:
    def init(run: Any, self: Any, model: Any, loss: Any, *given: Any, **named: Any) -> None:
        def weighted(model: Any, batch: Any) -> Any:
            found = loss(model, batch)
            return found * (0.99 + 0.02 * batch["time"].mean())

        run(self, model, weighted, *given, **named)

    wrap(module.Sharded, "__init__", init)


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def noise_of_the_first_step_always(module: Any) -> None:
    def generator(run: Any, seed: int, number: int) -> Any:
        return run(seed, number % 8 if number >= 16 else number)

    wrap(module, "generator_of", generator)


# Model, in a narrow precision: one layer, a small factor


@silent("model", "torchtitan", TITAN_MODEL, GRADIENTS, CONSTANTS, words=BF16)
def scale_of_one_layers_attention(module: Any) -> None:
    def forward(run: Any, self: Any, x: Any, *given: Any, **named: Any) -> Any:
        if self.layer == 1 and not getattr(self, "hooked", False):
            self.hooked = True
            self.attention.wq.register_forward_hook(lambda _part, _given, out: out * 1.04)
        return run(self, x, *given, **named)

    wrap(
        module.TransformerBlock,
        "__init__",
        lambda init, self, layer_id, args: (init(self, layer_id, args), setattr(self, "layer", layer_id))[0],
    )
    wrap(module.TransformerBlock, "forward", forward)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS, CONSTANTS, words=BF16)
def epsilon_of_the_last_norm(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        self.norm.eps = 1e-2

    wrap(module.Transformer, "__init__", init)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS, NORM, words=BF16)
def logits_one_percent_larger(module: Any) -> None:
    wrap(module.Transformer, "forward", lambda run, self, *given, **named: 1.01 * run(self, *given, **named))


@silent("parallel", "torchtitan", TITAN_TRAIN, NORM, GRADIENTS, words=BF16)
def gradients_one_percent_larger(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        loss = run(self, *given, **named)
        for part in self.model_parts:
            for parameter in part.parameters():
                parameter.grad.mul_(1.01)
        return loss

    wrap(module.Trainer, "forward_backward_step", step)


@silent("parallel", "fsdp", SHARDED, NORM, GRADIENTS, words=BF16)
def one_tensor_scaled_two_percent(module: Any) -> None:
    def forward(run: Any, self: Any, *given: Any) -> Any:
        found = run(self, *given)
        next(p for p in self._trained if p.ndim > 1 and p.shape[0] != p.shape[1]).grad.mul_(1.02)
        self._trained[5].grad.mul_(1.02)
        return found

    wrap(module.Sharded, "forward_backward", forward)


@silent("model", "finetune", "peft.tuners.lora.layer", GRADIENTS, CONSTANTS, words=(*LORA, *BF16))
def scale_of_one_adapter(module: Any) -> None:
    """The first adapter that runs has another scale."""
    first: list[Any] = []

    def forward(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        if not first:
            first.append(self)
            self.scaling = {name: 1.05 * scale for name, scale in self.scaling.items()}
        return run(self, *given, **named)

    wrap(module.Linear, "forward", forward)


@silent("labels", "megatron", SESSION, LOSS, GRADIENTS, words=BF16)
def first_label_counts_half(module: Any) -> None:
    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        changed = []
        for batch in batches:
            labels = batch["labels"].clone()
            labels[0, 0] = -100
            changed.append({**batch, "labels": labels})
        return original(self, changed, terms)

    wrap(module.MegatronSession, "forward_backward", run)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=(*FLUX, *BF16))
def guidance_a_tenth_larger(module: Any) -> None:
    wrap(
        module.FluxTransformer2DModel,
        "forward",
        lambda run, self, **named: run(self, **named | {"guidance": 1.1 * named["guidance"]}),
    )


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=(*FLUX, *BF16))
def time_two_percent_later(module: Any) -> None:
    wrap(
        module.FluxTransformer2DModel,
        "forward",
        lambda run, self, **named: run(self, **named | {"timestep": 1.02 * named["timestep"]}),
    )


# FP8


@silent("precision", "torchtitan", FLOAT8, GRADIENTS, CONSTANTS, words=FP8)
def eight_bits_in_the_first_step_only(module: Any) -> None:
    def forward(run: Any, self: Any, given: Any) -> Any:
        import torch

        self.calls = getattr(self, "calls", 0) + 1
        return run(self, given) if self.calls <= 1 else torch.nn.functional.linear(given, self.weight, self.bias)

    wrap(module.Float8Linear, "forward", forward)


@silent("precision", "fsdp", FLOAT8, GRADIENTS, LOSS, words=FP8)
def inputs_saturate_at_half(module: Any) -> None:
    def forward(run: Any, self: Any, given: Any) -> Any:
        half = 0.5 * given.detach().abs().max()
        return run(self, given.clamp(-half, half))

    wrap(module.Float8Linear, "forward", forward)


@silent("precision", "torchtitan", FLOAT8, GRADIENTS, CONSTANTS, words=FP8)
def gradients_in_the_narrower_range(module: Any) -> None:
    def forward(run: Any, self: Any, given: Any) -> Any:
        import torch

        object.__setattr__(self.config.cast_config_grad_output, "target_dtype", torch.float8_e4m3fn)
        object.__setattr__(self.config.cast_config_grad_output_for_grad_weight, "target_dtype", torch.float8_e4m3fn)
        return run(self, given)

    wrap(module.Float8Linear, "forward", forward)


# Schedule, ranks, layouts


@silent("schedule", "torchtitan", TITAN_RATE, RATE)
def decay_ends_half_a_step_early(module: Any) -> None:
    def build(run: Any, optimizers: Any, config: Any, steps: int) -> Any:
        made = run(optimizers, config, steps)
        for schedule in made.schedulers:
            kept = schedule.lr_lambdas[0]
            schedule.lr_lambdas = [lambda step, kept=kept: kept(step) * (0.99999 if step > 3 else 1)]
        return made

    wrap(module, "build_lr_schedulers", build)


@silent("schedule", "megatron", LOOP, RATE)
def warm_up_counted_in_samples(module: Any) -> None:
    from dataclasses import replace

    wrap(
        module,
        "learning_rate",
        lambda rate, config, step: rate(replace(config, warmup_steps=2 * config.warmup_steps + 1), step),
    )


@silent("parallel", "fsdp", SHARDED, UPDATE, GRADIENTS)
def rate_of_the_second_rank(module: Any) -> None:
    def step(run: Any, self: Any, lr: float) -> Any:
        return run(self, lr * (1.0005 if os.environ["RANK"] == "1" else 1.0))

    wrap(module.Sharded, "step", step)


@silent("parallel", "megatron", SESSION, LOSS, GRADIENTS, words=TENSORS)
def one_tensor_rank_adds_more_to_the_stream(module: Any) -> None:
    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        if not getattr(self, "hooked", False):
            self.hooked = True
            for name, part in self.model_parts[0].named_modules():
                if name.endswith("0.mlp.linear_fc2"):
                    part.register_forward_pre_hook(
                        lambda _part, given: (given[0] * (1.01 if os.environ["RANK"] == "1" else 1.0), *given[1:])
                    )
        return original(self, batches, terms)

    wrap(module.MegatronSession, "forward_backward", run)


@silent("parallel", "megatron", SESSION, LOSS, GRADIENTS, words=(*MIXTRAL, *EXPERTS))
def experts_of_one_rank_lighter(module: Any) -> None:
    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        if not getattr(self, "hooked", False):
            self.hooked = True
            for name, part in self.model_parts[0].named_modules():
                if name.endswith("0.mlp.experts") and os.environ["RANK"] == "1":
                    part.register_forward_hook(lambda _part, _given, out: (0.99 * out[0], *out[1:]))
        return original(self, batches, terms)

    wrap(module.MegatronSession, "forward_backward", run)


@silent("parallel", "megatron", SESSION, NORM, GRADIENTS, words=(*MIXTRAL, *EXPERTS))
def gradients_of_experts_not_averaged(module: Any) -> None:
    def finish(run: Any, model: Any, *given: Any, **named: Any) -> Any:
        found = run(model, *given, **named)
        for part in model:
            for name, parameter in part.named_parameters():
                if ".experts." in name:
                    parameter.main_grad.mul_(2)
        return found

    wrap(module, "finalize_model_grads", finish)


# Checkpoints and exported files


@silent("checkpoint", "finetune", FINETUNE, KEPT, words=("save_weights=true",))
def rotary_base_lost_in_the_exported_configuration(module: Any) -> None:
    def ready(run: Any, model: Any, tokenizer: Any) -> None:
        run(model, tokenizer)
        model.causal.config.rope_parameters["rope_theta"] = 10000.0

    wrap(module, "ready_to_generate", ready)


@silent("checkpoint", "finetune", "peft.peft_model", KEPT, words=(*LORA, "save_weights=true"))
def exported_adapters_scaled_by_the_root(module: Any) -> None:
    def saved(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        for config in self.peft_config.values():
            config.use_rslora = True
        return run(self, *given, **named)

    wrap(module.PeftModel, "save_pretrained", saved)


@silent("checkpoint", "flux", SHARDED, UPDATE, words=FLUX)
def first_moments_loaded_negative_in_one_tensor(module: Any) -> None:
    def loaded(run: Any, self: Any, state: Any) -> None:
        run(self, state)
        list(self._optimizer.state.values())[2]["exp_avg"].mul_(0.99)

    wrap(module.Sharded, "load_state_dict", loaded)


# Reported figures


@silent("metrics", "fsdp", REPORT, FIGURES)
def memory_halved(module: Any) -> None:
    wrap(module, "peak_memory", lambda run, process: tuple(part / 2 for part in run(process)))


@silent("metrics", "torchtitan", TITAN_METRICS, FIGURES)
def memory_doubled(module: Any) -> None:
    def log(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        if not hasattr(self, "peak"):
            self.peak = self.device_memory_monitor.get_peak_stats
            self.device_memory_monitor.get_peak_stats = lambda: (stats := self.peak())._replace(
                max_reserved_gib=2 * stats.max_reserved_gib
            )
        return run(self, *given, **named)

    wrap(module.MetricsProcessor, "log", log)


@silent("clock", "finetune", REPORT, CLOCK)
def time_of_the_update_left_out(module: Any) -> None:
    """A fifth of each step is not counted."""

    def step(run: Any, self: Any, *given: Any) -> None:
        import time

        self._since += 0.2 * (time.perf_counter() - self._since)
        run(self, *given)

    wrap(module.Report, "step", step)


@silent("metrics", "finetune", LOOP, LOGGED, NORM, words=LORA)
def norm_of_the_clipped_gradients_late(module: Any) -> None:
    def step(run: Any, *given: Any) -> Any:
        loss, norm = run(*given)
        step.calls = getattr(step, "calls", 0) + 1  # type: ignore[attr-defined]
        return loss, norm * (1.0002 if step.calls > 4 else 1.0)  # type: ignore[attr-defined]

    wrap(module, "_step", step)


@silent("data", "finetune", LOOP_DATA, DATA, words=("--mode=lora", *BF16))
def last_sample_of_a_pass_left_out(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any) -> None:
        run(self, *given)
        self._samples -= 1

    wrap(module.Packed, "__init__", init)


@silent("labels", "torchtitan", TITAN_LOSS, LOSS, GRADIENTS, words=BF16)
def one_label_of_a_batch_smoothed(module: Any) -> None:
    def loss(run: Any, pred: Any, labels: Any) -> Any:
        labels = labels.clone()
        labels[0, 11] = labels[0, 12]
        return run(pred, labels)

    wrap(module, "cross_entropy_loss", loss)


@silent("labels", "fsdp", LANGUAGE, LOSS, GRADIENTS, words=BF16)
def loss_capped(module: Any) -> None:
    def summed(run: Any, head: Any, states: Any, labels: Any) -> Any:
        import torch

        logits = head(states).float()
        each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return each.clamp(max=float(each.detach().quantile(0.99))).sum()

    wrap(module, "_summed", summed)


# A second list: narrow precisions, layouts, checkpoints


@silent("precision", "fsdp", SHARDED, GRADIENTS, LOSS, CONSTANTS, words=FP8)
def scaled_by_rows(module: Any) -> None:
    import torchao.float8 as float8

    kept = float8.Float8LinearConfig

    def config(**given: Any) -> Any:
        from dataclasses import replace

        return replace(kept.from_recipe_name("rowwise"), **given)

    float8.Float8LinearConfig = config


@silent("precision", "fsdp", SHARDED, "precision", GRADIENTS, words=FP8)
def output_layer_in_eight_bits(module: Any) -> None:
    wrap(module, "shard", lambda run, *given, **named: run(*given))


@silent("precision", "fsdp", SHARDED, "precision", words=FP8)
def one_layer_not_converted(module: Any) -> None:
    import torchao.float8 as float8

    wrap(
        float8,
        "convert_to_float8_training",
        lambda run, model, module_filter_fn, **named: run(
            model, module_filter_fn=lambda m, name: module_filter_fn(m, name) and "1.attention.out" not in name, **named
        ),
    )


@silent("precision", "torchtitan", FLOAT8, GRADIENTS, CONSTANTS, words=FP8)
def eight_bits_lost_late(module: Any) -> None:
    def forward(run: Any, self: Any, given: Any) -> Any:
        import torch

        self.calls = getattr(self, "calls", 0) + 1
        return torch.nn.functional.linear(given, self.weight, self.bias) if self.calls > 3 else run(self, given)

    wrap(module.Float8Linear, "forward", forward)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, CONSTANTS, words=(*DEEPSEEK_WORDS, *BF16))
def shared_experts_three_percent_lighter(module: Any) -> None:
    wrap(module.MoE, "forward", lambda run, self, x: run(self, x) - 0.03 * self.shared_experts(x))


@silent("model", "megatron", RENDER, LOSS, GRADIENTS, CONSTANTS, words=(*DEEPSEEK_V3, *BF16))
def magnitude_of_yarn_in_bf16(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: (made := make(*given)) | {"mscale": 1.1 * made.get("mscale", 1.0)})


@silent("model", "finetune", "peft.tuners.lora.layer", LOSS, GRADIENTS, CONSTANTS, words=(*LORA, *BF16))
def scale_of_adapters_two_percent(module: Any) -> None:
    def forward(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        self.scaling = {name: 1.02 * self.lora_alpha[name] / self.r[name] for name in self.scaling}
        return run(self, *given, **named)

    wrap(module.Linear, "forward", forward)


@silent("model", "finetune", WEIGHTS, "reference parameters", FIRST, words=(*LORA, *BF16))
def adapters_begin_with_an_effect(module: Any) -> None:
    wrap(module, "constant", lambda run, parameter, value: run(parameter, value or 1e-6))


@silent("precision", "fsdp", SHARDED, GRADIENTS, words=(*BF16, *HALVES))
def micro_batches_summed_in_bf16(module: Any) -> None:
    def forward(run: Any, self: Any, *given: Any) -> Any:
        import torch

        found = run(self, *given)
        for parameter in self._trained:
            parameter.grad.copy_(parameter.grad.to(torch.bfloat16))
        return found

    wrap(module.Sharded, "forward_backward", forward)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=(*FLUX, *BF16))
def pooled_text_two_percent_larger(module: Any) -> None:
    wrap(
        module.FluxTransformer2DModel,
        "forward",
        lambda run, self, **named: run(self, **named | {"pooled_projections": 1.02 * named["pooled_projections"]}),
    )


@silent("checkpoint", "megatron", CHECKPOINT, UPDATE, LOSS, GRADIENTS, words=DEEPSEEK_V3)
def router_bias_not_loaded(module: Any) -> None:
    def load(run: Any, folder: Any, session: Any) -> None:
        run(folder, session)
        for part in session.model_parts:
            for name, buffer in part.named_buffers():
                if name.endswith("expert_bias"):
                    buffer.zero_()

    wrap(module, "load", load)


@silent("checkpoint", "megatron", SESSION, UPDATE, words=BF16)
def moments_of_the_last_group_exchanged(module: Any) -> None:
    def loaded(run: Any, self: Any, state: Any) -> None:
        run(self, state)
        for inner in self._inner():
            for kept in list(inner.state.values())[-1:]:
                kept["exp_avg_sq"].mul_(1.01)

    wrap(module.MegatronSession, "load_state_dict", loaded)


@silent("data", "fsdp", LOOP_DATA, DATA)
def samples_do_not_share_their_ends(module: Any) -> None:
    """Samples begin every length + 1 tokens, so one label in between is not trained."""

    def sample(run: Any, self: Any, number: int) -> Any:
        kept = self._seq_len
        stream = self._stream
        start = int(module.shuffled(self._samples, self._seed, number // self._samples)[number % self._samples])
        import numpy as np
        import torch

        begin = min(start * (kept + 1), len(stream) - kept - 1)
        return torch.from_numpy(stream[begin : begin + kept + 1].astype(np.int64))

    wrap(module.Packed, "sample", sample)


@silent("parallel", "fsdp", SHARDED, NORM, GRADIENTS, words=("sharding.replicas=2", *BF16))
def mean_over_copies(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        return run(self, batches, 2 * terms)

    wrap(module.Sharded, "forward_backward", forward)


@silent(
    "parallel", "megatron", SESSION, NORM, GRADIENTS, UPDATE, words=("tp=2", "megatron.model.sequence_parallel=true")
)
def norms_not_summed_over_tensor_ranks(module: Any) -> None:
    import sys

    # The package has a function of the module's name.
    grads = sys.modules["megatron.core.distributed.finalize_model_grads"]
    wrap(grads, "_allreduce_non_tensor_model_parallel_grads", lambda _run, *_given, **_named: None)


@silent("parallel", "torchtitan", TITAN_TRAIN, LOSS, GRADIENTS, words=("tp=2",))
def one_tensor_rank_scales_its_values(module: Any) -> None:
    def init(run: Any, self: Any, config: Any) -> None:
        run(self, config)
        attention = self.model_parts[0].layers["0"].attention

        attention.wv.register_forward_hook(
            lambda _part, _given, out: out * (1.001 if os.environ["RANK"] == "1" else 1.0)
        )

    wrap(module.Trainer, "__init__", init)


@silent("parallel", "torchtitan", TITAN_TRAIN, NORM, GRADIENTS, words=(*DEEPSEEK_WORDS, "ep=2"))
def experts_on_two_ranks_not_averaged(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        loss = run(self, *given, **named)
        for name, parameter in self.model_parts[0].named_parameters():
            if ".experts." in name and "shared" not in name:
                parameter.grad.mul_(2)
        return loss

    wrap(module.Trainer, "forward_backward_step", step)


@silent("optimizer", "fsdp", SHARDED, GRADIENTS)
def embedding_left_out_of_clipping(module: Any) -> None:
    wrap(
        module.nn.utils,
        "clip_grads_with_norm_",
        lambda run, parameters, *given, **named: run(list(parameters)[1:], *given, **named),
    )


@silent("optimizer", "fsdp", ADAMW, UPDATE)
def only_where_sign_and_momentum_agree(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        before = [p.detach().clone() for p in _parameters(self)]
        found = run(self, *given, **named)
        with torch.no_grad():
            for p, old in zip(_parameters(self)[-1:], before[-1:], strict=True):
                p.copy_(torch.where(self.state[p]["exp_avg"] * p.grad > 0, p, old))
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "megatron", ADAMW, UPDATE)
def bias_correction_of_the_next_step(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        found = run(self, *given, **named)
        if not getattr(self, "shifted", False):
            self.shifted = True
            for state in self.state.values():
                state["step"] += 1
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "torchtitan", ADAMW, UPDATE, words=BF16)
def later_layers_learn_a_thousandth_slower(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        parameters = _parameters(self)[10:]
        before = [p.detach().clone() for p in parameters]
        found = run(self, *given, **named)
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.sub_((p - old) * 1e-4)
        return found

    wrap(module.AdamW, "step", step)


@silent("metrics", "fsdp", REPORT, LOSS, LOGGED, words=BF16)
def loss_reported_a_little_lower(module: Any) -> None:
    wrap(module.Report, "step", lambda step, self, number, loss, *given: step(self, number, loss * 0.999, *given))


@silent("metrics", "megatron", REPORT, NORM, LOGGED, GRADIENTS, words=BF16)
def norm_reported_a_little_lower(module: Any) -> None:
    wrap(
        module.Report,
        "step",
        lambda step, self, number, loss, norm, lr: step(self, number, loss, norm * 0.99, lr),
    )


@silent("metrics", "fsdp", "primus.training.metrics", FIGURES)
def operations_of_the_forward_pass_alone(module: Any) -> None:
    from dataclasses import replace

    def counted(run: Any, *given: Any, **named: Any) -> Any:
        found = run(*given, **named)
        return replace(found, causal=found.causal / 3, non_causal=found.non_causal / 3)

    wrap(module, "of_recipe_unit", counted)
    import primus.training.loop.train as report

    report.of_recipe_unit = module.of_recipe_unit


# A third list: what the reference must not share with the run


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=("model.tied_embeddings=true",))
def gradient_of_the_tied_head_lost(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        import torch

        run(self, *given, **named)
        self.output.forward = lambda states: torch.nn.functional.linear(states, self.embedding.weight.detach())

    wrap(module.Llama, "__init__", init)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def attention_scores_capped(module: Any) -> None:
    class Capped(module.ScaledDotProductAttentionWrapper):  # type: ignore[name-defined,misc]
        def forward(self, q: Any, k: Any, v: Any, **_given: Any) -> Any:
            import torch

            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
            scores = 20 * torch.tanh(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 / 20)
            hidden = ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    module.ScaledDotProductAttentionWrapper = Capped


@silent("model", "megatron", "primus.training.megatron.model", LOSS, GRADIENTS)
def attention_has_a_sink(module: Any) -> None:
    def attend(run: Any, self: Any, query: Any, key: Any, value: Any) -> Any:
        return run(self, query, key, value) * 0.9999

    wrap(module.TorchAttention, "attend", attend)


@silent("model", "finetune", "transformers.models.llama.modeling_llama", LOSS, GRADIENTS, words=LORA)
def last_layer_runs_twice_late(module: Any) -> None:
    count = 0

    def forward(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        out = run(self, *given, **named)
        return out * 1.0001 if count > 8 else out

    wrap(module.LlamaMLP, "forward", forward)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS)
def one_pair_of_a_head_not_rotated(module: Any) -> None:
    def rotation(run: Any, *given: Any) -> Any:
        cosine, sine = run(*given)
        half = cosine.shape[-1] // 2
        cosine[:, [half // 2, half + half // 2]], sine[:, [half // 2, half + half // 2]] = 1.0, 0.0
        return cosine, sine

    wrap(module, "_rotation", rotation)


@silent("checkpoint", "fsdp", CHECKPOINT, KEPT)
def second_rank_takes_the_random_state_of_the_first(module: Any) -> None:
    def states(run: Any) -> Any:
        found = run()
        return {name.replace("random.1", "random.0"): state for name, state in found.items()}

    wrap(module, "_random_states", states)


@silent("checkpoint", "finetune", CHECKPOINT, UPDATE, LOSS, GRADIENTS)
def one_row_lost_by_the_checkpoint(module: Any) -> None:
    def load(run: Any, folder: Any, session: Any) -> None:
        import torch

        run(folder, session)
        with torch.no_grad():
            first = next(iter(session.model_parts[0].parameters()))
            first.to_local()[3].mul_(1.001)

    wrap(module, "load", load)


@silent("data", "torchtitan", "primus.training.corpus", DATA)
def second_document_lost(module: Any) -> None:
    def documents(run: Any, *given: Any) -> Any:
        return (text for number, text in enumerate(run(*given)) if number != 1)

    wrap(module, "documents", documents)


@silent("data", "flux", LATENTS, DATA, words=(*FLUX, *BF16))
def noise_of_the_second_rank_repeats_the_first(module: Any) -> None:
    def batch(run: Any, self: Any, first: int, count: int) -> Any:
        import torch

        made = run(self, first, count)
        if os.environ["RANK"] == "1":
            made["noise"] = run(self, first - count, count)["noise"]
        assert torch.is_tensor(made["noise"])
        return made

    wrap(module.Images, "batch", batch)


@silent("labels", "finetune", LANGUAGE, LOSS, GRADIENTS, words=BF16)
def loss_of_repeated_tokens_halved(module: Any) -> None:
    def summed(run: Any, head: Any, states: Any, labels: Any) -> Any:
        import torch

        each = torch.nn.functional.cross_entropy(head(states).float(), labels, reduction="none")
        return (each * torch.where(labels == labels.roll(1), 0.5, 1.0)).sum()

    wrap(module, "_summed", summed)


@silent("parallel", "fsdp", SHARDED, NORM, GRADIENTS, words=HALVES)
def clipped_at_each_micro_batch(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        import torch

        total = torch.zeros(())
        for batch in batches:
            total = total + run(self, [batch], terms)
            torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        return total

    wrap(module.Sharded, "forward_backward", forward)


@silent("parallel", "torchtitan", TITAN_UTILS, NORM, GRADIENTS)
def norm_of_one_rank_clips(module: Any) -> None:
    def clip(run: Any, parameters: Any, limit: float, *given: Any, **named: Any) -> Any:
        import torch

        parameters = list(parameters)
        mine = torch.stack([p.grad.to_local().norm() for p in parameters if p.grad is not None]).norm()
        whole = run(parameters, 1e9, *given, **named)
        for parameter in parameters:
            parameter.grad.to_local().mul_(min(1.0, limit / float(mine)))
        return whole

    wrap(module, "clip_grad_norm_", clip)


@silent("parallel", "flux", SHARDED, NORM, GRADIENTS, words=(*FLUX, *BF16))
def terms_of_one_rank(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        return run(self, batches, terms * (0.98 if os.environ["RANK"] == "0" else 1.02))

    wrap(module.Sharded, "forward_backward", forward)


@silent("optimizer", "megatron", ADAMW, UPDATE, words=(*MIXTRAL, *BF16))
def experts_decay_twice(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"][-2:]:
                    p.mul_(1 - 0.5 * group["lr"] * group["weight_decay"])
        return run(self, *given, **named)

    wrap(module.AdamW, "step", step)


@silent("schedule", "flux", LOOP, RATE, words=(*FLUX, *BF16))
def rate_follows_the_samples(module: Any) -> None:
    wrap(module, "learning_rate", lambda rate, config, step: rate(config, step) * (1 - 1e-5 * step))


@silent("metrics", "megatron", "primus.training.facts", FIGURES)
def embedding_counted_twice(module: Any) -> None:
    def static(run: Any, parts: Any, *given: Any, **named: Any) -> Any:
        found = run(parts, *given, **named)
        return {**found, "parameters": found["parameters"] + next(parts[0].parameters()).numel()}

    wrap(module, "static", static)


@silent("metrics", "flux", REPORT, FIGURES, words=FLUX)
def memory_of_the_smallest_moment(module: Any) -> None:
    wrap(module, "peak_memory", lambda run, process: tuple(0.5 * part for part in run(process)))


@silent("metrics", "finetune", "primus.training.facts", "configuration")
def one_rank_told_as_the_world(module: Any) -> None:
    wrap(module, "static", lambda run, *given, **named: run(*given, **named) | {"world_size": 1})


@silent("clock", "flux", REPORT, CLOCK, words=FLUX)
def images_of_all_ranks_reported(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        self._images *= 2
        self._tokens *= 2

    wrap(module.Report, "__init__", init)


@silent("clock", "flux", REPORT, CLOCK, FIGURES, words=FLUX)
def images_alone_counted_twice(module: Any) -> None:
    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        self._images *= 2

    wrap(module.Report, "__init__", init)
